"""What prototypes say of few records, and of classes that few clients have."""

from dataclasses import dataclass
from functools import partial

import torch

from protofed import tree
from protofed.api.roles import Prototype, counted_by, roles
from protofed.api.task import ClientId
from protofed.audit.replay import Replay, Sent
from protofed.engine.test_sets import label_counts
from protofed.transforms.by_class import ClassRows, class_rows, owned, with_paths
from protofed.tree import Tree

FEW = 5


@dataclass(frozen=True)
class Records:
    """How many training examples are behind each prototype that was sent."""

    behind: tuple[int, ...]
    """One number for each; of several prototypes of one class the most that there can be."""
    are_bounds: bool
    """Whether some of these numbers are only the most that there can be."""

    @property
    def of_one(self) -> int:
        return sum(count == 1 for count in self.behind)

    @property
    def of_few(self) -> int:
        return sum(count < FEW for count in self.behind)


def records(replay: Replay) -> Records:
    """Of all prototypes that were sent in the replay, the setup's too."""
    behind, are_bounds, task = list[int](), False, replay.federation.task
    for sent in replay.sent:
        leaves, role_of = tree.named_leaves(sent.upload), roles(sent.upload)
        counts = label_counts(task.clients[sent.client], task.num_classes).cpu()
        for path, role in role_of.items():
            if not isinstance(role, Prototype):
                continue
            by = leaves.get(counted_by(path, role))
            rows = leaves[path].flatten(0, -2).abs().sum(-1) if by is None else by.flatten()
            known = (rows != 0).reshape(task.num_classes, -1).cpu()  # (C, S)
            for c, own in enumerate(known.sum(1).tolist()):
                behind += [int(counts[c]) - own + 1] * own
                are_bounds |= own > 1
    return Records(tuple(behind), are_bounds)


@dataclass(frozen=True)
class Told:
    """A class with few owners, and who learns of it."""

    label: int
    owners: tuple[ClientId, ...]
    others: int
    """How many clients that do not have the class receive something that depends on the owners' prototypes of it."""


def broadcast(replay: Replay, min_owners: int) -> list[Told]:
    """The classes that fewer clients own, of those that took part in the round. Whether others are told of them is
    tried: the round's uploads are added up again with these prototypes changed, and the next messages compared."""
    federation = replay.federation
    owners = _owners(replay)
    few = {c: own for c, own in sorted(owners.items()) if len(own) < min_owners}
    if not few:
        return []
    before = _messages(replay, replay.server_after())
    told = []
    for c, own in few.items():
        after = _messages(replay, replay.server_after(partial(_turned, c, federation.task.num_classes)))
        others = [client for client in federation.ids if client not in own and _differ(before[client], after[client])]
        told.append(Told(c, tuple(own), len(others)))
    return told


def _owners(replay: Replay) -> dict[int, list[ClientId]]:
    found: dict[int, list[ClientId]] = {}
    for call in replay.uploads.values():
        for client, sent in call.items():
            for c in sorted({c for rows in _of_classes(sent.upload) for c in _classes(sent.upload, rows, replay)}):
                found.setdefault(c, []).append(client)
    return {c: [*dict.fromkeys(own)] for c, own in found.items()}


def _classes(upload: Tree, rows: ClassRows, replay: Replay) -> list[int]:
    is_owned = owned(tree.named_leaves(upload), rows, replay.federation.task.num_classes)
    found: list[int] = is_owned.nonzero().flatten().tolist()
    return found


def _of_classes(upload: Tree) -> list[ClassRows]:
    return [rows for rows in class_rows(upload) if rows.prototypes]


def _turned(c: int, num_classes: int, sent: Sent) -> Tree:
    """The upload with the prototypes of a class turned around."""
    leaves = tree.named_leaves(sent.upload)
    new = {}
    for rows in _of_classes(sent.upload):
        for path in rows.prototypes:
            leaf = leaves[path].reshape(num_classes, -1).clone()
            leaf[c] = -leaf[c]
            new[path] = leaf.reshape(leaves[path].shape)
    return with_paths(sent.upload, new)


def _messages(replay: Replay, server: Tree) -> dict[ClientId, dict[str, torch.Tensor]]:
    federation = replay.federation
    return {client: tree.named_leaves(federation.method.message_for(server, client)) for client in federation.ids}


def _differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() != b.keys() or any(not torch.equal(a[path], b[path]) for path in a)
