"""`protofed.run`: a run from Python, also with a method and a task of the user's own."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from protofed.api.method import Method, Weighting
from protofed.api.task import Task
from protofed.engine.norm_statistics import NormStatistics
from protofed.engine.optimizer_state import OptimizerState
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.one_run import only_run
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.optim.schedules import ConstantRate, Schedule
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.config import Config, checked
from protofed.runs.config.messages import refuse
from protofed.runs.config.renames import renamed
from protofed.runs.config.schema import chosen
from protofed.runs.config.sections import EvaluationSettings, SavingSettings
from protofed.runs.config.user_code import code_digest, model_code
from protofed.runs.observers import LoggingSettings, Observer, Progress, is_watched, observer_of
from protofed.runs.results import Result
from protofed.runs.runner import execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store.folder import RunFolder
from protofed.tasks import TASKS
from protofed.transforms.chain import UploadSettings
from protofed.transforms.robust_stage import RobustSettings


def run(
    method: Method[Any, Any, Any, Any] | str,
    task: Task | str = "minidigits",
    *,
    rounds: int = 20,
    epochs: int = 5,
    batch_size: int = 64,
    optimizer: Optimizer = Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5),  # noqa: B008, immutable
    optimizer_state: OptimizerState = "fresh",
    schedule: Schedule = ConstantRate(),  # noqa: B008, immutable
    fraction: float = 1.0,
    full_last_round: bool = False,
    slow_share: float = 0.0,
    held_out_clients: int = 0,
    minimum_replies: int = 1,
    weighting: Weighting = "examples",
    norm_statistics: NormStatistics = "averaged",
    over_selection: float = 1.0,
    deadline: float = 0.0,
    attempts: int = 3,
    max_norm: float = 1e12,
    quarantine: int = 3,
    on_divergence: Literal["stop", "skip", "retry_half_lr"] = "stop",
    seed: int = 0,
    evaluate_every: int = 1,
    evaluate_clients_every: int = 0,
    fine_tune: int = 0,
    global_models: bool = False,
    patience: int = 0,
    uploads: UploadSettings = UploadSettings(),  # noqa: B008, immutable
    robust: RobustSettings = RobustSettings(),  # noqa: B008, immutable
    secure: SecureSettings = SecureSettings(),  # noqa: B008, immutable
    privacy: PrivacySettings = PrivacySettings(),  # noqa: B008, immutable
    runtime: RuntimeSettings | str = "auto",
    folder: Path | str | None = None,
    resume: bool = False,
    allowed_changes: Collection[str] = (),
    steal_lock: bool = False,
    on_save_error: Literal["stop", "warn"] = "stop",
    keep: Collection[int] = (),
    logging: LoggingSettings = LoggingSettings(),  # noqa: B008, immutable
    observer: Observer | Sequence[Observer] | None = None,
    progress: bool | None = None,
) -> Result:
    """Runs a method on a task. Returns the metrics of every round and the final state.

    With a `folder`, the state is saved there after every round, and `resume` continues a run that was stopped. `keep`
    names rounds whose states stay there, to be looked at with `load`. Each `observer` is told how the run goes;
    `progress` shows it in one line, by default in a terminal and in a notebook. For the
    meaning of the other arguments see `Training`, `EvaluationSettings`, `UploadSettings`, `RobustSettings`,
    `SecureSettings`, `PrivacySettings`, `RuntimeSettings`, `LoggingSettings` and `execute`.
    """
    training = Training(
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        fraction=fraction,
        full_last_round=full_last_round,
        slow_share=slow_share,
        held_out_clients=held_out_clients,
        minimum_replies=minimum_replies,
        seed=seed,
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        schedule=schedule,
        weighting=weighting,
        norm_statistics=norm_statistics,
        over_selection=over_selection,
        deadline=deadline,
        attempts=attempts,
        max_norm=max_norm,
        quarantine=quarantine,
        on_divergence=on_divergence,
    )
    refuse([*renamed({"task": {"name": task}, "training": {"on_divergence": on_divergence}})])
    config = Config(
        task=chosen(TASKS, task, "task")() if isinstance(task, str) else task,
        method=checked(chosen(METHODS, method, "method")() if isinstance(method, str) else method),
        training=checked(training),
        runtime=checked(RuntimeSettings(name=runtime) if isinstance(runtime, str) else runtime),  # type: ignore[arg-type]
        evaluation=checked(
            EvaluationSettings(evaluate_every, evaluate_clients_every, fine_tune, global_models, patience)
        ),
        saving=checked(SavingSettings(on_save_error, list(keep))),
        uploads=checked(uploads),
        robust=checked(robust),
        secure=checked(secure),
        privacy=checked(privacy),
        logging=checked(logging),
        user_code=code_digest(_own_code(method, task)),
    )
    run_folder = RunFolder(Path(folder).absolute()) if folder is not None else None
    with only_run():  # building a task and its networks draws too
        result = execute(
            config.experiment(),
            run_folder,
            resume=resume,
            allowed_changes=allowed_changes,
            steal_lock=steal_lock,
            observer=_shown(observer, progress),
        )
    return replace(result, config=config)


def _own_code(method: Method[Any, Any, Any, Any] | str, task: Task | str) -> list[Any]:
    """What may be the user's own: the method, those that it goes around, and what builds the networks."""
    found: list[Any] = model_code(task.model) if isinstance(task, Task) else []
    while isinstance(method, Method):
        found.append(type(method))
        method = getattr(method, "base", "")
    return found


def continue_from(
    result: Result,
    rounds: int = 10,
    *,
    folder: Path | str | None = None,
    observer: Observer | Sequence[Observer] | None = None,
    progress: bool | None = None,
) -> Result:
    """The run with more rounds, from where it ended.

    A run with a folder goes on there, unless another one is given; then it is as it was. What the method does after its
    last round has been done, and is done again in the end. A schedule of the learning rate is that of the longer run.
    """
    if result.config is None:
        raise BadInput("only a result of protofed.run or protofed.load can go on: its settings are not known")
    if rounds < 1:
        raise BadInput(f"rounds is {rounds}: at least one more is needed")
    training = replace(result.config.training, rounds=result.state.round + rounds)
    config = replace(result.config, training=checked(training))
    stays = folder is None and result.folder is not None
    where = result.folder if folder is None else Path(folder).absolute()
    run_folder = None if where is None else RunFolder(where)
    if stays and run_folder is not None and run_folder.rounds_saved != result.state.round:
        raise BadInput(
            f"{where} has {run_folder.rounds_saved} rounds, and this result is of round {result.state.round}: give "
            "another folder to go on from there"
        )
    with only_run():
        done = execute(
            config.experiment(),
            run_folder,
            resume=stays,
            allowed_changes=("training.rounds",) if stays else (),
            observer=_shown(observer, progress),
            start=None if stays else result,
        )
    return replace(done, config=config)


def _shown(observer: Observer | Sequence[Observer] | None, progress: bool | None) -> Observer:
    is_shown = is_watched() and observer is None if progress is None else progress
    return observer_of(observer, [Progress()] if is_shown else [])
