"""Federated learning on the small task in plain torch: its batches, a loop of gradient descent, and means of weights.

Only data, the draws of batches and initial weights are protofed's: no method, no family, no runtime, no engine.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch, Data, batch_at, training_plan
from protofed.data.transforms import Transform
from protofed.nn.networks import Networks
from protofed.seeds import derive_seed
from protofed.testing.federations import CLASSES, FEATURES, TASK, TRAINING, small_network

__all__ = ["CLASSES", "FEATURES", "TASK", "TRAINING"]

State = dict[str, Tensor]
Modules = Mapping[str, nn.Module]
"""The parts of a network. Names in a state begin with that of the part."""
Loss = Callable[[Any, Batch], Tensor]
"""Of the parts and a batch."""
Local = Callable[[str, int, State], State]
"""What a client makes in a round of the weights that it receives."""

CLIENTS = tuple(sorted(TASK.clients))
SIZE = {client: len(TASK.clients[client]) for client in CLIENTS}
EQUAL = dict.fromkeys(CLIENTS, 1)
ROUNDS, EPOCHS = TRAINING.rounds, TRAINING.epochs
SGD = {
    "lr": TRAINING.optimizer.lr,
    "momentum": TRAINING.optimizer.momentum,
    "weight_decay": TRAINING.optimizer.weight_decay,
}
COUNTER = "num_batches_tracked"


# ---- data


def batches(
    client: str,
    round: int,
    fit: int = 0,
    epochs: int = EPOCHS,
    data: Data | None = None,
    transform: Transform = TASK.transform,
) -> list[Batch]:
    """Those of the training that is the request of this number in a client's round. Rows of weight 0 fill a batch:
    layers see them, losses do not."""
    data = TASK.clients[client] if data is None else data
    seed = derive_seed(step_seed(client, round), "request", fit)
    return planned(data, seed, epochs, TRAINING.batch_size, transform)


def step_seed(client: str, round: int) -> int:
    return derive_seed(TRAINING.seed, "step", client, round, "round", 1)


def server_batches(
    x: Tensor, y: Tensor, round: int, fit: int = 0, *, epochs: int, size: int, phase: str = "round"
) -> list[Batch]:
    """Those of a training at the server."""
    seed = derive_seed(derive_seed(TRAINING.seed, phase, round), "server fit", fit)
    return planned(Data.of(x, y), seed, epochs, size, Transform())


def planned(data: Data, seed: int, epochs: int, size: int, transform: Transform) -> list[Batch]:
    plan = training_plan(data, size, epochs, transform, torch.Generator().manual_seed(seed))
    return [batch_at(data, plan, k, transform) for k in range(len(plan.index))]


def counted_batches(
    client: str, round: int, fit: int = 0, epochs: int = EPOCHS, data: Data | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The same as inputs, labels, and which rows count."""
    return [(batch.x, batch.y, batch.weight > 0) for batch in batches(client, round, fit, epochs, data)]


def examples(client: str, data: Data | None = None) -> tuple[Tensor, Tensor]:
    """The unvaried examples of a client, and their classes."""
    data = TASK.clients[client] if data is None else data
    return TASK.transform.clean(data.x[data.index]), data.labels


def counted(batch: Batch) -> list[int]:
    """The rows of a batch that count."""
    return batch.weight.nonzero().flatten().tolist()


# ---- networks


def initial() -> State:
    """The weights that all begin with."""
    return Networks(small_network).init(derive_seed(TRAINING.seed, "weights"))


def network(state: State | None = None, build: Callable[[], Modules] = small_network) -> nn.ModuleDict:
    """A network with these weights, or those that all begin with, in training mode."""
    model = nn.ModuleDict(build())
    load(model, initial() if state is None else state)
    return model


def load(modules: Modules, state: State, training: bool = True) -> None:
    """Puts weights and statistics into the parts, which have no others."""
    for part, module in modules.items():
        own = {name.removeprefix(f"{part}."): leaf for name, leaf in state.items() if name.startswith(f"{part}.")}
        report = module.load_state_dict(own, strict=False)
        assert not report.unexpected_keys
        assert all(name.endswith(COUNTER) for name in report.missing_keys)
        module.train(training)
    assert all(name.partition(".")[0] in modules for name in state)


def state_of(modules: Modules) -> State:
    return {
        f"{part}.{name}": leaf.detach().clone()
        for part, module in modules.items()
        for name, leaf in module.state_dict().items()
        if not name.endswith(COUNTER)
    }


def largest_difference(found: State, expected: State) -> float:
    """Between weights of the same names; counters of batches, which protofed has not, are left out."""
    kept = {name: leaf for name, leaf in expected.items() if not name.endswith(COUNTER)}
    assert found.keys() == kept.keys(), found.keys() ^ kept.keys()
    return max((found[name].double() - kept[name].double()).abs().max().item() for name in found)


def parameters(state: State) -> list[str]:
    """The names of all but statistics."""
    return [name for name in state if "running" not in name]


def part(state: State, *starts: str) -> State:
    return {name: leaf for name, leaf in state.items() if name.startswith(starts)}


def scores(model: Modules, x: Tensor) -> Tensor:
    z = model["features"](x)
    return model["classifier"](model["projection"](z) if "projection" in model else z)


@torch.no_grad()
def features(state: State, x: Tensor, build: Callable[[], Modules] = small_network) -> Tensor:
    """In evaluation mode."""
    return network(state, build).eval()["features"](x)


@torch.no_grad()
def judged(state: State, x: Tensor) -> Tensor:
    """Scores in evaluation mode."""
    return scores(network(state).eval(), x)


def class_means(z: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {c: torch.stack([z[i] for i in range(len(y)) if y[i] == c]).mean(0) for c in sorted(set(y.tolist()))}


def mean_over_owners(of_clients: Iterable[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Of each class, over the clients that have it, who count alike."""
    of_clients = list(of_clients)
    return {
        c: torch.stack([own[c] for own in of_clients if c in own]).mean(0)
        for c in range(CLASSES)
        if any(c in own for own in of_clients)
    }


# ---- training


def cross_entropy(model: Modules, batch: Batch) -> Tensor:
    rows = counted(batch)
    return F.cross_entropy(scores(model, batch.x)[rows], batch.y[rows])


def train(
    modules: Modules,
    of_batches: Iterable[Batch],
    loss: Loss = cross_entropy,
    only: tuple[str, ...] = ("",),
    sgd: dict[str, float] = SGD,
    before_step: Callable[[Any], None] | None = None,
) -> None:
    """Torch's own gradient descent, of the parts whose names start so."""
    weights = [p for part, module in modules.items() if part.startswith(only) for p in module.parameters()]
    optimizer = torch.optim.SGD(weights, **sgd)
    for batch in of_batches:
        for module in modules.values():
            module.zero_grad()
        loss(modules, batch).backward()
        if before_step is not None:
            before_step(modules)
        optimizer.step()


def distance(model: nn.ModuleDict, state: State) -> Tensor:
    """The squared one of the parameters from these weights."""
    return sum(((p - state[name]) ** 2).sum() for name, p in model.named_parameters())


def mean(states: Mapping[str, State], weights: Mapping[str, float] = SIZE) -> State:
    total = sum(weights[client] for client in states)
    return {
        name: sum(weights[client] / total * own[name].double() for client, own in states.items()).float()
        for name in next(iter(states.values()))
    }


def averaged(start: State, local: Local, weights: Mapping[str, float] = SIZE) -> State:
    """FedAvg with this step at the clients."""
    for t in range(ROUNDS):
        start = mean({client: local(client, t, start) for client in CLIENTS}, weights)
    return start
