"""A run from Python, with a user's own method and task if they wish."""

from pathlib import Path
from typing import Any

from protofed.experiments.config import Config, EvaluationSettings, checked
from protofed.experiments.folder import RunFolder
from protofed.experiments.run import Observer, Result, execute
from protofed.experiments.sections import chosen
from protofed.method import Method, Task
from protofed.methods import METHODS
from protofed.optim import Optimizer, Sgd
from protofed.runtimes.federation import Training
from protofed.runtimes.settings import RuntimeSettings
from protofed.tasks import TASKS


def run(
    method: Method[Any, Any, Any, Any] | str,
    task: Task | str = "minidigits",
    *,
    rounds: int = 20,
    epochs: int = 5,
    batch_size: int = 64,
    optimizer: Optimizer = Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5),  # noqa: B008, immutable
    fraction: float = 1.0,
    minimum_replies: int = 1,
    seed: int = 0,
    evaluate_every: int = 1,
    evaluate_clients_every: int = 0,
    runtime: RuntimeSettings | str = "auto",
    folder: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Runs a method on a task; returns the metrics of every round and the final state.

    With a `folder`, the state is saved there after every round, and `resume` continues where a run was stopped.
    """
    config = Config(
        task=chosen(TASKS, task, "task")() if isinstance(task, str) else task,
        method=checked(chosen(METHODS, method, "method")() if isinstance(method, str) else method),
        training=checked(Training(rounds, epochs, batch_size, fraction, minimum_replies, seed, optimizer)),
        runtime=checked(RuntimeSettings(name=runtime) if isinstance(runtime, str) else runtime),  # type: ignore[arg-type]
        evaluation=checked(EvaluationSettings(every=evaluate_every, clients=evaluate_clients_every)),
    )
    place = RunFolder(Path(folder)) if folder is not None else None
    return execute(config.experiment(), place, resume=resume, observer=observer)
