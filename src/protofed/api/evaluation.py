"""How a client's model is judged where its data are: what it is tested on, and the counts that travel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.roles import Count
from protofed.data.batches import Data
from protofed.metrics import formulas
from protofed.metrics.registry import PersonalJudgement, measured
from protofed.tree import Params, Tree, record

NO_AREA = -1.0
"""Stands for an area under the ROC curve that has no meaning."""


@record
class Outcomes:
    """What a model says of each example."""

    predicted: Tensor  # (B,), int64
    margin: Tensor  # (B,), float64: how much higher class 1 scores than class 0; 0 unless there are two classes


@record
class Evaluation:
    """How one model did. Counts and scores travel, never models or examples."""

    confusion: Annotated[Tensor, Count(of_examples=False)]  # (T, C, C), on each domain's test set, in the task's order
    area: Tensor  # (T,), under the ROC curve; NO_AREA where it has no meaning
    scores: dict[str, Tensor]  # (), the personal metrics, if the client has a test set of its own


@dataclass(frozen=True)
class TestSets:
    """What a client's model is tested on. The sets of the domains are at the client in simulation only."""

    pooled: Data | None = None
    """All test sets of the domains, one after another."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How many examples of `pooled` each domain has, in their order."""
    own_rows: Tensor | None = None
    """Positions in `pooled` that make up the client's own test set."""
    own: Data | None = None
    """The client's own test set, if it is not a part of `pooled`."""
    train_counts: Tensor | None = None
    """(C,), the client's training examples of each class, on the CPU; only if it has a test set of its own."""
    __test__ = False  # pytest takes the name for a test's

    @cached_property
    def labels(self) -> Tensor:
        """Of `pooled`, on the CPU: brought there once for all clients."""
        assert self.pooled is not None
        return self.pooled.labels.cpu()

    @property
    def has_own(self) -> bool:
        return self.own_rows is not None or self.own is not None


@dataclass(frozen=True)
class Reading:
    """A model for everyone that a paper may have meant, made of what clients have."""

    params: Params
    outcomes: Callable[..., Outcomes]
    """Of the model, a batch and the context."""
    context: tuple[Tree, ...] = ()


def outcomes_of(scores: Tensor) -> Outcomes:
    """The outcomes of scores (B, C)."""
    if scores.shape[-1] != 2:
        return Outcomes(scores.argmax(-1), torch.zeros(len(scores), dtype=torch.float64, device=scores.device))
    low, high = scores.double().unbind(-1)
    # Two classes that are both ruled out, at −∞, are equal; their difference would not be a number.
    return Outcomes(scores.argmax(-1), torch.where(low == high, 0.0, high - low))


def confusion_of(predicted: Tensor, labels: Tensor, num_classes: int) -> NDArray[np.int64]:
    """How often class i was taken for class j, (C, C). Both tensors are on the CPU."""
    return _confusion(predicted.numpy(), labels.numpy(), num_classes)


def evaluation_of(outcomes: Outcomes | None, own: Outcomes | None, tests: TestSets, num_classes: int) -> Evaluation:
    """The counts and scores of one model, from its outcomes on the pooled test sets and on the client's own. All is on
    the CPU."""
    domains = len(tests.sizes)
    confusion, area = np.zeros((domains, num_classes, num_classes), dtype=np.int64), np.full(domains, NO_AREA)
    matrix = np.zeros((num_classes, num_classes), dtype=np.int64)
    if outcomes is not None and tests.pooled is not None:
        predicted, labels = outcomes.predicted.numpy(), tests.labels.numpy()
        ends = np.cumsum(list(tests.sizes.values()))
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            confusion[i] = _confusion(predicted[begin:end], labels[begin:end], num_classes)
            area[i] = _area(outcomes.margin[begin:end], tests.labels[begin:end], num_classes)
        if tests.own_rows is not None:
            rows = tests.own_rows.cpu().numpy()
            matrix += _confusion(predicted[rows], labels[rows], num_classes)
    if own is not None and tests.own is not None:
        matrix += confusion_of(own.predicted, tests.own.labels.cpu(), num_classes)
    scores: dict[str, float] = {}
    if tests.train_counts is not None:
        pooled = confusion.sum(0) if len(confusion) else matrix
        scores = measured("personal", PersonalJudgement(pooled, matrix, tests.train_counts.numpy()))
    named = {name: torch.from_numpy(np.array(score)) for name, score in scores.items()}
    return Evaluation(torch.from_numpy(confusion), torch.from_numpy(area), named)


def _confusion(predicted: NDArray[np.int64], labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    pairs = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return pairs.reshape(num_classes, num_classes)


def evaluation_spec(tests: TestSets, num_classes: int) -> Evaluation:
    """An evaluation with the names and shapes that one on these test sets has."""
    square = torch.zeros(len(tests.sizes), num_classes, num_classes, dtype=torch.int64)
    one = np.eye(num_classes)
    names = measured("personal", PersonalJudgement(one, one, np.ones(num_classes))) if tests.has_own else {}
    zero = torch.zeros((), dtype=torch.float64)
    return Evaluation(square, torch.zeros(len(tests.sizes), dtype=torch.float64), dict.fromkeys(names, zero))


def _area(margin: Tensor, labels: Tensor, num_classes: int) -> float:
    found = formulas.area(margin, labels) if num_classes == 2 else None
    return NO_AREA if found is None else found
