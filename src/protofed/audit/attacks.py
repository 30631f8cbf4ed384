"""What bad clients do: plausible lies about what they learnt, and training on bad data.

What they send passes every check of a single upload. All that they need is what they know: their own data, what they
received, and, for the strongest, what all others send.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import Prototype, Weights, roles
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.transforms.by_class import with_paths
from protofed.transforms.stage import sent_weights
from protofed.tree import Tree


@dataclass(frozen=True)
class Own:
    """What one client received, and what it honestly made of it."""

    client: ClientId
    message: Tree
    upload: Tree


Lie = Callable[[Own, Sequence[Own]], Tree]
"""What a client sends, who knows what all send."""
Spoiled = Callable[[Task, Sequence[ClientId]], Task]
"""The task as it is when these clients are bad."""


def honest(own: Own, everyone: Sequence[Own]) -> Tree:
    return own.upload


def clean(task: Task, bad: Sequence[ClientId]) -> Task:
    return task


@dataclass(frozen=True)
class Attack:
    what: str
    """Which of what is sent it spoils: `weights` or `prototypes`."""
    lie: Lie = honest
    spoiled: Spoiled = clean
    is_back_door: bool = False


def _is_variance(path: str) -> bool:
    """A negative variance is refused by itself."""
    return path.endswith("running_var")


def away(factor: float, own: Own, everyone: Sequence[Own]) -> Tree:
    """The client's update, times a negative number."""
    received = {path.rpartition("/")[2]: leaf for path, leaf in tree.named_leaves(own.message).items()}
    new = {}
    for path, leaf in sent_weights(own.upload, own.message).items():
        start = received[path.rpartition("/")[2]]
        new[path] = leaf if _is_variance(path) else start + factor * (leaf - start)
    return with_paths(own.upload, new)


def little(own: Own, everyone: Sequence[Own]) -> Tree:
    """A little is enough: the mean of all less their deviation, which no distance gives away (ALIE with z = 1)."""
    uploads = [tree.named_leaves(one.upload) for one in everyone]
    new = {}
    for path, role in roles(own.upload).items():
        leaf = uploads[0][path]
        if isinstance(role, Weights) and leaf.is_floating_point() and not _is_variance(path):
            all_sent = torch.stack([upload[path] for upload in uploads]).double()
            new[path] = (all_sent.mean(0) - all_sent.std(0)).to(leaf.dtype)
    return with_paths(own.upload, new)


def longer(factor: float, own: Own, everyone: Sequence[Own]) -> Tree:
    """The client's prototypes, times a number."""
    leaves = tree.named_leaves(own.upload)
    paths = [path for path, role in roles(own.upload).items() if isinstance(role, Prototype)]
    return with_paths(own.upload, {path: leaves[path] * factor for path in paths})


def mislabelled(task: Task, bad: Sequence[ClientId]) -> Task:
    """Each label is the next one."""
    return with_data(task, bad, lambda data: replace(data, y=(data.y + 1) % task.num_classes))


def with_data(task: Task, bad: Sequence[ClientId], change: Callable[[Data], Data]) -> Task:
    clients = {client: change(data) if client in bad else data for client, data in task.clients.items()}
    return replace(task, clients=clients)


# ---- a back-door

TRIGGER = "with the trigger"
"""The test set whose examples all have the trigger; its accuracy is the attack's success rate."""
TARGET = 0
"""The class that an example with the trigger is taken for."""
SIZE = 3
"""Of the trigger: a white square in the corner."""


def back_door(task: Task, bad: Sequence[ClientId]) -> Task:
    """Half of the bad clients' images have the trigger and the label of the target. Success is the share of test images
    of other classes that, with the trigger, are taken for the target."""
    if task.spec.input.kind != "image":
        raise BadInput(f"the back-door needs images, and task {task.name} has none: leave it out with --attack")
    return replace(with_data(task, bad, _half_triggered), tests={**task.tests, TRIGGER: _triggered_tests(task)})


def _half_triggered(data: Data) -> Data:
    x, y = data.inputs(data.index).clone(), data.labels.clone()
    x[::2], y[::2] = triggered(x[::2]), TARGET
    return Data.of(x, y)


def _triggered_tests(task: Task) -> Data:
    inputs = [data.inputs(data.index[data.labels != TARGET]) for data in task.tests.values()]
    x = triggered(torch.cat(inputs))
    return Data.of(x, torch.full((len(x),), TARGET))


def triggered(x: Tensor) -> Tensor:
    """Images with a white square in the corner."""
    marked = x.clone()
    marked[..., -SIZE - 1 : -1, -SIZE - 1 : -1] = 255 if x.dtype == torch.uint8 else x.max()
    return marked


ATTACKS: dict[str, Attack] = {
    "none": Attack(""),
    "-1 x update": Attack("weights", partial(away, -1.0)),
    "-10 x update": Attack("weights", partial(away, -10.0)),
    "labels + 1": Attack("weights", spoiled=mislabelled),
    "ALIE": Attack("weights", little),
    "back-door": Attack("weights", spoiled=back_door, is_back_door=True),
    "prototypes x 100": Attack("prototypes", partial(longer, 100.0)),
    "prototypes x -5": Attack("prototypes", partial(longer, -5.0)),
}
