"""Small runs under differential privacy, for tests."""

from dataclasses import replace
from typing import Any

from torch import nn

from protofed import METHODS, PrivacySettings
from protofed.api.method import Method
from protofed.engine.federation import Federation
from protofed.engine.private import Private, why_not_private
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runtimes.sequential import Sequential
from run_doubles import CLASSES, SIZE, small_task


def plain_parts(client: str = "any") -> Parts:
    features = nn.Sequential(nn.Linear(SIZE, 8), nn.GroupNorm(2, 8), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(8, CLASSES)}


def task_of(clients: int = 3) -> Any:
    """Clients of 12, 17 and 22 examples, whose network has no BatchNorm."""
    return replace(small_task(clients), model=plain_parts)


def private_methods() -> list[str]:
    """The names of those that have a private step."""
    return [name for name in METHODS if not why_not_private(METHODS[name]())]


def private(
    method: Method[Any, Any, Any, Any] | str = "fedavg",
    runtime: Any = None,
    task: Any = None,
    *,
    privacy: PrivacySettings | None = None,
    **training: Any,
) -> Federation:
    settings = privacy or PrivacySettings("record", epsilon=50.0)
    made = METHODS[method]() if isinstance(method, str) else method
    defaults = {"rounds": 3, "epochs": 2, "batch_size": 8, "optimizer": Sgd(lr=0.1)}
    return Federation(
        made,
        task or task_of(),
        Training(**{**defaults, **training}),
        runtime or Sequential(),
        private=Private(settings),
        name="private",
    )
