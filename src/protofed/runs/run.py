"""`protofed.run`: a run from Python, also with a method and a task of the user's own."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from protofed.api.method import Method, Weighting
from protofed.api.task import Task
from protofed.engine.norm_statistics import NormStatistics
from protofed.engine.optimizer_state import OptimizerState
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.one_run import only_run
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.optim.schedules import ConstantRate, Schedule
from protofed.runs.config.config import Config, checked
from protofed.runs.config.messages import refuse
from protofed.runs.config.renames import renamed
from protofed.runs.config.schema import chosen
from protofed.runs.config.sections import EvaluationSettings, SavingSettings
from protofed.runs.results import Result
from protofed.runs.runner import Observer, execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store.folder import RunFolder
from protofed.tasks import TASKS
from protofed.transforms.chain import UploadSettings


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
    runtime: RuntimeSettings | str = "auto",
    folder: Path | str | None = None,
    resume: bool = False,
    allowed_changes: Collection[str] = (),
    steal_lock: bool = False,
    on_save_error: Literal["stop", "warn"] = "stop",
    keep: Collection[int] = (),
    observer: Observer | None = None,
) -> Result:
    """Runs a method on a task. Returns the metrics of every round and the final state.

    With a `folder`, the state is saved there after every round, and `resume` continues a run that was stopped. `keep`
    names rounds whose states stay there, to be looked at with `load`. For the
    meaning of the other arguments see `Training`, `EvaluationSettings`, `UploadSettings`, `RuntimeSettings` and
    `execute`.
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
    )
    run_folder = RunFolder(Path(folder).absolute()) if folder is not None else None
    with only_run():  # building a task and its networks draws too
        return execute(
            config.experiment(),
            run_folder,
            resume=resume,
            allowed_changes=allowed_changes,
            steal_lock=steal_lock,
            observer=observer,
        )
