"""The batches that clients of the small federation train on, and a plain training loop, for references in plain torch.

Only data, seeds and initial weights are taken from protofed: no method, no family, no runtime.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from protofed.data.batches import Batch, batch_at, training_plan
from protofed.seeds import derive_seed
from protofed.testing.federations import TASK, TRAINING

Modules = Mapping[str, nn.Module]
State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, Batch], Tensor]
"""Of the inputs and labels of the rows that count; the whole batch is there for whoever draws noise or knows rows."""

CLIENTS = tuple(sorted(TASK.clients))
SIZE = {client: len(TASK.clients[client]) for client in CLIENTS}


def batches(client: str, round: int, fit: int = 0, epochs: int = TRAINING.epochs) -> Iterator[Batch]:
    """The batches of the fit that is the request of this number in a client's round."""
    data = TASK.clients[client]
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    draws = torch.Generator().manual_seed(derive_seed(step, "request", fit))
    plan = training_plan(data, TRAINING.batch_size, epochs, TASK.transform, draws)
    return (batch_at(data, plan, k, TASK.transform) for k in range(len(plan.index)))


def examples(client: str) -> tuple[Tensor, Tensor]:
    """The unvaried examples of a client, and their classes."""
    data = TASK.clients[client]
    return TASK.transform.clean(data.x[data.index]), data.labels


def train(modules: Modules, of_batches: Iterator[Batch], loss: Loss, frozen: tuple[str, ...] = ()) -> None:
    """Torch's own gradient descent on the rows that count, of all parts but these."""
    weights = [p for part, module in modules.items() if part not in frozen for p in module.parameters()]
    sgd = TRAINING.optimizer
    optimizer = torch.optim.SGD(weights, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    for batch in of_batches:
        optimizer.zero_grad()
        loss(batch.x, batch.y, batch).backward()
        optimizer.step()


def load(modules: Modules, state: State, training: bool = True) -> None:
    """Puts weights and statistics into modules, which have no others."""
    for part, module in modules.items():
        own = {name.removeprefix(f"{part}."): leaf for name, leaf in state.items() if name.startswith(f"{part}.")}
        report = module.load_state_dict(own, strict=False)
        assert not report.unexpected_keys
        assert all(name.endswith("num_batches_tracked") for name in report.missing_keys)
        module.train(training)


def state_of(modules: Modules) -> State:
    return {
        f"{part}.{name}": leaf.detach().clone()
        for part, module in modules.items()
        for name, leaf in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def mean(states: Mapping[str, State]) -> State:
    """By the clients' numbers of examples."""
    total = sum(SIZE[client] for client in states)
    names = next(iter(states.values()))
    return {n: sum((SIZE[c] / total * s[n] for c, s in states.items()), torch.zeros(())) for n in names}


def largest_difference(actual: State, expected: State) -> float:
    assert actual.keys() == expected.keys()
    return max((actual[name] - expected[name]).abs().max().item() for name in actual)
