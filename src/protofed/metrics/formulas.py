"""The metrics of the papers, as functions of confusion matrices and label counts. Shares in [0, 1], in float64.

A confusion matrix (C, C) has a row for each true class and a column for each predicted one. `counts` (C,) are a
client's training examples of each class.

FedPC (GM, PM(V), PM(L)) judges models on one test set for all, and takes the plain mean over the clients that took
part: GM is `accuracy` of the server's model, PM(V) the mean of `owned_accuracy`, PM(L) that of `proportional_accuracy`.
pFedCSPC judges clients on test sets of their own: `local_index`, whose mean is combined with the global model's
accuracy by `harmonic_mean`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from protofed.errors import BadInput


def weighted_accuracy(confusion: Tensor, weight: Tensor) -> float:
    """Σ_c w_c correct_c / Σ_c w_c total_c, for a weight of each class (C,)."""
    correct, total = confusion.diagonal().double(), confusion.double().sum(-1)  # (C,), (C,)
    weight = weight.to(total)
    judged = (weight * total).sum()
    if judged == 0:
        raise BadInput("no accuracy: no class that counts has an example in the test set")
    return ((weight * correct).sum() / judged).item()


def accuracy(confusion: Tensor) -> float:
    """The share of examples that were classified right; GM of FedPC, ACC_global and Acc of pFedCSPC."""
    return weighted_accuracy(confusion, torch.ones(len(confusion)))


def owned_accuracy(confusion: Tensor, counts: Tensor) -> float:
    """PM(V) of one client: accuracy on the classes that it has, whatever their numbers."""
    return weighted_accuracy(confusion, counts > 0)


def proportional_accuracy(confusion: Tensor, counts: Tensor) -> float:
    """PM(L) of one client: accuracy with every class at the weight that it has in the client's data."""
    return weighted_accuracy(confusion, counts.double() / counts.double().sum())


def macro_f1(confusion: Tensor) -> float:
    """The unweighted mean of F1 over the classes that the test set has; a class that is never found right has 0."""
    correct = confusion.diagonal().double()
    truth, predicted = confusion.double().sum(1), confusion.double().sum(0)
    is_present = truth > 0
    if not is_present.any():
        raise BadInput("no F1: the test set has no examples")
    return (2 * correct / (truth + predicted))[is_present].mean().item()


def balanced_accuracy(confusion: Tensor) -> float:
    """The unweighted mean of each class's accuracy, over the classes that the test set has."""
    correct, truth = confusion.diagonal().double(), confusion.double().sum(1)
    is_present = truth > 0
    if not is_present.any():
        raise BadInput("no balanced accuracy: the test set has no examples")
    return (correct[is_present] / truth[is_present]).mean().item()


def majority_rate(confusion: Tensor) -> float:
    """The share of the most frequent class: the accuracy of predicting nothing else."""
    truth = confusion.double().sum(1)
    return (truth.max() / truth.sum()).item()


def harmonic_mean(a: float, b: float) -> float:
    """2ab / (a + b), and 0 where both are 0; HM of pFedCSPC for ACC_global and I_local."""
    return 2 * a * b / (a + b) if a + b else 0.0


def local_index(confusion: Tensor) -> float:
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
