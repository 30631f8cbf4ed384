"""Label leakage: what a client's update says of which classes it has, and how many examples of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import Count, Weights, roles
from protofed.api.task import ClientId
from protofed.audit.replay import Replay, Sent
from protofed.audit.statistics import Pair, Scores, correlation, over_clients, pooled_auc
from protofed.engine.test_sets import label_counts
from protofed.metrics.bootstrap import Interval


@dataclass(frozen=True)
class Reading:
    """What is read of one client: a number for each class, and the true counts."""

    client: ClientId
    read: Scores
    true: Scores

    @property
    def correlation(self) -> float | None:
        return correlation(self.read, self.true)

    @property
    def pair(self) -> Pair:
        """The numbers of classes that it has, and of those that it lacks."""
        scaled = (self.read - self.read.mean()) / (self.read.std() or 1.0)
        return scaled[self.true > 0], scaled[self.true == 0]


@dataclass(frozen=True)
class Labels:
    """Over all clients whose update could be read."""

    readings: tuple[Reading, ...]
    counts_are_sent: bool
    """Whether uploads hold the counts of each class as they are."""

    @property
    def correlation(self) -> float | None:
        """Between what is read and true counts, the mean over clients that do not have as many of each class."""
        return _mean(self.readings)

    @property
    def interval(self) -> Interval | None:
        return over_clients(_mean, [one for one in self.readings if one.correlation is not None])

    @property
    def presence(self) -> float | None:
        """How well what is read tells the classes of a client from those that it lacks: an AUC."""
        return _presence(self.readings)

    @property
    def presence_interval(self) -> Interval | None:
        return over_clients(_presence, self.readings)


def _mean(readings: Sequence[Reading]) -> float | None:
    found = [one.correlation for one in readings]
    values = [value for value in found if value is not None]
    return float(np.mean(values)) if values else None


def _presence(readings: Sequence[Reading]) -> float | None:
    pairs = [one.pair for one in readings]
    if not any(len(own) for own, _ in pairs) or not any(len(lacking) for _, lacking in pairs):
        return None
    return pooled_auc(pairs)


def labels(replay: Replay) -> Labels:
    task, readings, told = replay.federation.task, list[Reading](), False
    for call in replay.uploads.values():
        for client, sent in call.items():
            true = label_counts(task.clients[client], task.num_classes)
            told |= tells_counts(sent, true)
            read = classifier_update(sent, task.num_classes)
            if read is not None:
                readings.append(Reading(client, read.numpy(), true.cpu().double().numpy()))
    return Labels(tuple(readings), told)


def classifier_update(sent: Sent, num_classes: int) -> Tensor | None:
    """How far each class's score was moved, (C,): the change of the classifier's bias, or the sums of its rows'
    changes if it has none. Training raises the score of a class that is there more often than it is predicted."""
    leaves, received = tree.named_leaves(sent.upload), tree.named_leaves(sent.message)
    moved: dict[int, Tensor] = {}
    for path, role in roles(sent.upload).items():
        leaf, start = leaves[path], received.get(path)
        is_last = isinstance(role, Weights) and path.rpartition("/")[2].startswith("classifier.")
        if is_last and start is not None and start.shape == leaf.shape and leaf.shape[:1] == (num_classes,):
            moved.setdefault(leaf.dim(), (leaf.double() - start.double()).reshape(num_classes, -1).sum(1).cpu())
    found = moved[min(moved)] if moved else None
    return None if found is None or not torch.any(found) else found


def tells_counts(sent: Sent, true: Tensor) -> bool:
    """Whether a field of counts holds the client's class counts as they are."""
    leaves = tree.named_leaves(sent.upload)
    counts = [leaves[path] for path, role in roles(sent.upload).items() if isinstance(role, Count)]
    return any(leaf.shape == true.shape and torch.equal(leaf.double(), true.double()) for leaf in counts)
