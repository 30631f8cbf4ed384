"""The metrics of the papers, as functions of confusion matrices and label counts. Shares in [0, 1], in float64.

A confusion matrix (C, C) has a row for each true class and a column for each predicted one. `counts` (C,) are a
client's training examples of each class. Both are small, so the arithmetic is numpy's: a call takes microseconds, and
hundreds of clients are judged in a round.

FedPC (GM, PM(V), PM(L)) judges models on one test set for all, and takes the plain mean over the clients that took
part: GM is `accuracy` of the server's model, PM(V) the mean of `owned_accuracy`, PM(L) that of `proportional_accuracy`.
pFedCSPC judges clients on test sets of their own: `local_index`, whose mean is combined with the global model's
accuracy by `harmonic_mean`.
"""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import BadInput

Counts: TypeAlias = NDArray[np.int64] | NDArray[np.float64] | Tensor
"""Whole numbers, as an array or as a tensor on the CPU."""


def weighted_accuracy(confusion: Counts, weight: Counts) -> float:
    """Σ_c w_c correct_c / Σ_c w_c total_c, for a weight of each class (C,)."""
    correct, total = _correct(confusion), _numbers(confusion).sum(1)
    judged = (_numbers(weight) * total).sum()
    if judged == 0:
        raise BadInput("no accuracy: no class that counts has an example in the test set")
    return float((_numbers(weight) * correct).sum() / judged)


def accuracy(confusion: Counts) -> float:
    """The share of examples that were classified right; GM of FedPC, ACC_global and Acc of pFedCSPC."""
    return weighted_accuracy(confusion, np.ones(len(confusion)))


def owned_accuracy(confusion: Counts, counts: Counts) -> float:
    """PM(V) of one client: accuracy on the classes that it has, whatever their numbers."""
    return weighted_accuracy(confusion, (_numbers(counts) > 0).astype(np.float64))


def proportional_accuracy(confusion: Counts, counts: Counts) -> float:
    """PM(L) of one client: accuracy with every class at the weight that it has in the client's data."""
    return weighted_accuracy(confusion, _numbers(counts) / _numbers(counts).sum())


def macro_f1(confusion: Counts) -> float:
    """The unweighted mean of F1 over the classes that the test set has; a class that is never found right has 0."""
    truth, predicted = _numbers(confusion).sum(1), _numbers(confusion).sum(0)
    is_present = truth > 0
    if not is_present.any():
        raise BadInput("no F1: the test set has no examples")
    return float((2 * _correct(confusion)[is_present] / (truth + predicted)[is_present]).mean())


def balanced_accuracy(confusion: Counts) -> float:
    """The unweighted mean of each class's accuracy, over the classes that the test set has."""
    truth = _numbers(confusion).sum(1)
    is_present = truth > 0
    if not is_present.any():
        raise BadInput("no balanced accuracy: the test set has no examples")
    return float((_correct(confusion)[is_present] / truth[is_present]).mean())


def sensitivities(confusion: Counts) -> NDArray[np.float64]:
    """(C,), the share of each class's examples that was found; NaN for a class that the test set does not have."""
    truth = _numbers(confusion).sum(1)
    found = np.full(len(truth), np.nan)
    np.divide(_correct(confusion), truth, out=found, where=truth > 0)
    return found


def majority_rate(confusion: Counts) -> float:
    """The share of the most frequent class: the accuracy of predicting nothing else."""
    truth = _numbers(confusion).sum(1)
    return float(truth.max() / truth.sum())


def _numbers(counts: Counts) -> NDArray[np.float64]:
    return np.asarray(counts, dtype=np.float64)


def _correct(confusion: Counts) -> NDArray[np.float64]:
    """(C,), how many examples of each class were classified right."""
    return _numbers(confusion).diagonal()


def harmonic_mean(a: float, b: float) -> float:
    """2ab / (a + b), and 0 where both are 0; HM of pFedCSPC for ACC_global and I_local."""
    return 2 * a * b / (a + b) if a + b else 0.0


def local_index(confusion: Counts) -> float:
    """I_local of one client, Eq. (20) of pFedCSPC: the harmonic mean of accuracy and macro-F1 on its own test set."""
    return harmonic_mean(accuracy(confusion), macro_f1(confusion))


def rounds_to_target(rounds: Iterable[float | None], target: float) -> int | None:
    """The first round, counted from 1, whose accuracy is at least the target; None if there is none.

    `rounds` has an entry for every round, None for one that was not evaluated.
    """
    reached = (t for t, value in enumerate(rounds, 1) if value is not None and value >= target)
    return next(reached, None)


def area(scores: Tensor, labels: Tensor) -> float | None:
    """The area under the ROC curve for scores (N,) and labels 0 and 1 (N,); None where it has no meaning.

    It is the chance that an example of class 1 has a higher score than one of class 0, ties counted half.
    """
    positive, negative = scores[labels == 1].double(), scores[labels == 0].double()
    if not len(positive) or not len(negative) or scores.isnan().any():
        return None
    negative = negative.sort().values
    below = torch.searchsorted(negative, positive)  # (P,), negatives with a lower score
    up_to = torch.searchsorted(negative, positive, right=True)
    wins = (below + up_to).sum().item() / 2
    return wins / (len(positive) * len(negative))
