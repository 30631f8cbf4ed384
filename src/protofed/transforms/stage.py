"""What stands between the check of uploads and the method: it sees all uploads of a round, and may drop or change some.

Rules for bad uploads belong here and not inside a mean: a method may average in several places, and by weights that a
client reports itself. Unless it says otherwise, a stage holds all uploads of a round in memory.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import Weights, roles
from protofed.api.task import ClientId
from protofed.transforms.by_class import class_rows, owned, without_classes
from protofed.tree import Params, Tree

Uploads = Iterable[tuple[ClientId, Tree]]


@dataclass(frozen=True)
class Exchange:
    """What a stage knows of one time that clients are asked."""

    message_for: Callable[[ClientId], Tree]
    num_classes: int
    group: Callable[[ClientId, Tree], Hashable] = lambda client, upload: 0
    """Which uploads are averaged with each other."""
    where: str = ""
    """For warnings."""


class Stage(Protocol):
    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        """Why uploads like this one, of clients that were sent such a message, are not for this stage; None if they
        are."""

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        """The uploads that the method reads, in the same order; as many or fewer."""


class ClipToMedian:
    """A client's weights go no further from those that it received than the median client's of the round."""

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        if not has_weights(like):
            return 'uploads.clip = "median" is for methods that send weights: set it to "none"'
        if not sent_weights(like, message):
            return 'uploads.clip = "median" is for methods whose clients receive one model: set it to "none"'
        return None

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        accepted = list(uploads)
        if not any(has_weights(upload) for _, upload in accepted):
            yield from accepted  # nothing to clip, as in an exchange of losses
            return
        received = [exchange.message_for(client) for client, _ in accepted]
        lengths = [length(upload, start) for (_, upload), start in zip(accepted, received, strict=True)]
        limit = median(lengths)
        for (client, upload), start, far in zip(accepted, received, lengths, strict=True):
            yield client, upload if far <= limit else _scaled(upload, start, limit / far)


@dataclass(frozen=True)
class MinimumOwners:
    """What is said of a class counts only if enough clients, of one group, have that class."""

    minimum: int

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        return None

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        accepted = list(uploads)
        groups = [exchange.group(client, upload) for client, upload in accepted]
        shared = [[rows for rows in class_rows(upload) if rows.is_shared] for _, upload in accepted]
        owners: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
        for (_, upload), group, records in zip(accepted, groups, shared, strict=True):
            for rows in records:
                classes = owned(tree.named_leaves(upload), rows, exchange.num_classes)
                owners[group, rows.count].update(classes.nonzero().flatten().tolist())
        for (client, upload), group, records in zip(accepted, groups, shared, strict=True):
            for rows in records:
                counted = owners[group, rows.count]
                rare = [counted[c] < self.minimum for c in range(exchange.num_classes)]  # guard: classes-of-few-owners
                upload = without_classes(upload, rows, torch.tensor(rare, device="cpu"))
            yield client, upload


def has_weights(upload: Tree) -> bool:
    return any(isinstance(role, Weights) for role in roles(upload).values())


def length(upload: Tree, message: Tree) -> float:
    """How far the weights of an upload are from those that its client received."""
    received = _received(message)
    squares = [
        (leaf.double() - received[path.rpartition("/")[2]].double()).square().sum()
        for path, leaf in sent_weights(upload, message).items()
    ]
    return torch.stack(squares).sum().sqrt().item()


def sent_weights(upload: Tree, message: Tree) -> dict[str, Tensor]:
    """By path, the weights of an upload that the client was sent before."""
    leaves, role_of, received = tree.named_leaves(upload), roles(upload), _received(message)
    return {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(role_of.get(path), Weights)
        and leaf.is_floating_point()
        and (start := received.get(path.rpartition("/")[2])) is not None
        and start.shape == leaf.shape
    }


def _received(message: Tree) -> Params:
    """What a message has by the name of a weight."""
    return {path.rpartition("/")[2]: leaf for path, leaf in tree.named_leaves(message).items()}


def _scaled(upload: Tree, message: Tree, share: float) -> Tree:
    """The upload with this share of the way from the received weights."""
    weights, received = sent_weights(upload, message), _received(message)

    def moved(path: str, leaf: Tensor) -> Tensor:
        return torch.lerp(received[path.rpartition("/")[2]], leaf, share) if path in weights else leaf

    leaves: Sequence[Tensor] = [moved(path, leaf) for path, leaf in tree.named_leaves(upload).items()]
    return tree.with_leaves(upload, leaves)
