"""What stands between the check of uploads and the method: it sees all uploads of a round, and may drop or change some.

Rules for bad uploads belong here and not inside a mean: a method may average in several places, and by weights that a
client reports itself. A stage holds all uploads of a round in memory.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import Weights, roles
from protofed.api.task import ClientId
from protofed.tree import Params, Tree

Accepted = list[tuple[ClientId, Tree]]


class Stage(Protocol):
    def refusal(self, like: Tree) -> str | None:
        """Why uploads like this one are not for this stage; None if they are."""

    def cleaned(self, uploads: Accepted, message_for: Callable[[ClientId], Tree]) -> Accepted:
        """The uploads that the method reads, in the same order; as many or fewer."""


class ClipToMedian:
    """A client's weights go no further from those that it received than the median client's of the round."""

    def refusal(self, like: Tree) -> str | None:
        has_weights = any(isinstance(role, Weights) for role in roles(like).values())
        return None if has_weights else 'uploads.clip = "median" is for methods that send weights: set it to "none"'

    def cleaned(self, uploads: Accepted, message_for: Callable[[ClientId], Tree]) -> Accepted:
        if not any(isinstance(role, Weights) for _, upload in uploads for role in roles(upload).values()):
            return uploads  # nothing to clip, as in an exchange of losses
        received = [_params(message_for(client)) for client, _ in uploads]
        lengths = [_length(upload, start) for (_, upload), start in zip(uploads, received, strict=True)]
        limit = median(lengths) if lengths else 0.0
        return [
            (client, upload if length <= limit else _scaled(upload, start, limit / length))
            for (client, upload), start, length in zip(uploads, received, lengths, strict=True)
        ]


def _params(message: Tree) -> Params:
    """What a message has by the name of a weight."""
    return {path.rpartition("/")[2]: leaf for path, leaf in tree.named_leaves(message).items()}


def _weights(upload: Tree, received: Params) -> dict[str, Tensor]:
    """By path, the weights of an upload that the client was sent before."""
    leaves, role_of = tree.named_leaves(upload), roles(upload)
    return {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(role_of.get(path), Weights) and path.rpartition("/")[2] in received and leaf.is_floating_point()
    }


def _length(upload: Tree, received: Params) -> float:
    """How far the weights of an upload are from those that its client received."""
    squares = [
        (leaf.double() - received[path.rpartition("/")[2]].double()).square().sum()
        for path, leaf in _weights(upload, received).items()
    ]
    return torch.stack(squares).sum().sqrt().item()


def _scaled(upload: Tree, received: Params, share: float) -> Tree:
    """The upload with this share of the way from the received weights."""
    weights = _weights(upload, received)

    def moved(path: str, leaf: Tensor) -> Tensor:
        return torch.lerp(received[path.rpartition("/")[2]], leaf, share) if path in weights else leaf

    leaves: Sequence[Tensor] = [moved(path, leaf) for path, leaf in tree.named_leaves(upload).items()]
    return tree.with_leaves(upload, leaves)
