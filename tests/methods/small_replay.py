"""The small task as plain torch sees it: for references that know nothing of the library."""

from typing import Any

import torch
from torch import Tensor, nn

from methods.conformance import TASK, TRAINING, after, federation, small_network
from protofed.api.method import Method
from protofed.data.batches import Data, batch_at, training_plan
from protofed.engine.state import State
from protofed.methods.fedavg import FedAvg
from protofed.seeds import derive_seed

LR = TRAINING.optimizer.lr
SGD: dict[str, Any] = {
    "lr": LR,
    "momentum": TRAINING.optimizer.momentum,
    "weight_decay": TRAINING.optimizer.weight_decay,
}
"""The arguments of torch's SGD that say what the small task trains with."""
EXAMPLES = {client: len(data) for client, data in TASK.clients.items()}


def network() -> nn.ModuleDict:
    """The network of the small task with the weights that all begin with; its names are those of the library."""
    modules = nn.ModuleDict(small_network())
    missing = modules.load_state_dict(federation(FedAvg()).start().server.params, strict=False)
    assert not missing.unexpected_keys
    return modules


def batches(
    client: str, round: int, fit: int = 0, epochs: int = TRAINING.epochs, data: Data | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, labels and which rows count, batch by batch, of one request of one round. Rows that do not count fill a
    batch: layers see them, losses do not."""
    data = TASK.clients[client] if data is None else data
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    draws = torch.Generator().manual_seed(derive_seed(step, "request", fit))
    plan = training_plan(data, TRAINING.batch_size, epochs, TASK.transform, draws)
    found = (batch_at(data, plan, k, TASK.transform) for k in range(len(plan.index)))
    return [(batch.x, batch.y, batch.weight > 0) for batch in found]


def after_three_rounds(method: Method[Any, Any, Any, Any]) -> State:
    """Of plain rounds, without what happens after the last one."""
    return after(3, federation(method))


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Between weights of the same names. Counters of batches, which the library drops, are left out."""
    kept = {name: leaf for name, leaf in expected.items() if not name.endswith("num_batches_tracked")}
    assert found.keys() == kept.keys(), found.keys() ^ kept.keys()
    return max((found[name].double() - kept[name].double()).abs().max().item() for name in found)
