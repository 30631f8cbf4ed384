"""The papers' metrics, against scikit-learn and against numbers worked out by hand."""

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score
from torch import Tensor

from protofed.errors import BadInput
from protofed.metrics.formulas import (
    accuracy,
    harmonic_mean,
    local_index,
    macro_f1,
    owned_accuracy,
    proportional_accuracy,
    rounds_to_target,
    weighted_accuracy,
)

# Truth: 10 of class 0, 5 of class 1, 4 of class 2; class 3 is not in the test set but is predicted twice.
CONFUSION = torch.tensor([[8, 1, 0, 1], [2, 3, 0, 0], [0, 3, 0, 1], [0, 0, 0, 0]], dtype=torch.float64)


def drawn(seed: int, classes: int = 5, per_class: int | None = None) -> tuple[list[int], list[int], Tensor]:
    """Truth, predictions that are right about half of the time, and their confusion matrix."""
    draws = torch.Generator().manual_seed(seed)
    if per_class is None:
        truth = torch.randint(0, classes, (60,), generator=draws)
    else:
        truth = torch.arange(classes).repeat(per_class)
    guess = torch.randint(0, classes, truth.shape, generator=draws)
    predicted = torch.where(torch.rand(truth.shape, generator=draws) < 0.5, truth, guess)
    matrix = confusion_matrix(truth.numpy(), predicted.numpy(), labels=range(classes))
    return truth.tolist(), predicted.tolist(), torch.from_numpy(matrix)


def class_accuracies(confusion: Tensor) -> list[float]:
    return [confusion[c, c].item() / confusion[c].sum().item() for c in range(len(confusion))]


# ---- accuracies


def test_weighted_accuracy_weighs_what_is_right_and_what_there_is() -> None:
    # (2·8 + 0·3 + 5·0) / (2·10 + 0·5 + 5·4) = 16/40.
    assert weighted_accuracy(CONFUSION, torch.tensor([2, 0, 5, 7])) == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_accuracy_is_scikit_learns_with_a_weight_for_each_example(seed: int) -> None:
    truth, predicted, confusion = drawn(seed)
    weight = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = accuracy_score(truth, predicted, sample_weight=weight[truth].numpy())
    assert weighted_accuracy(confusion, weight) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_top1_is_scikit_learns_accuracy(seed: int) -> None:
    truth, predicted, confusion = drawn(seed)
    assert accuracy(confusion) == accuracy_score(truth, predicted)


def test_owned_accuracy_looks_at_owned_classes_and_not_at_their_numbers() -> None:
    # Classes 0 and 2 are owned: (8 + 0) / (10 + 4).
    assert owned_accuracy(CONFUSION, torch.tensor([1, 0, 900, 0])) == pytest.approx(8 / 14)


def test_proportional_accuracy_weighs_classes_by_the_clients_shares() -> None:
    # Shares 1/4 and 3/4 of classes 0 and 1: (8/4 + 3·3/4) / (10/4 + 3·5/4) = 4.25/6.25.
    assert proportional_accuracy(CONFUSION, torch.tensor([1, 3, 0, 0])) == pytest.approx(4.25 / 6.25)


@pytest.mark.parametrize("seed", range(5))
def test_on_classes_of_one_size_proportional_accuracy_is_the_mean_of_class_accuracies_by_share(seed: int) -> None:
    _, _, confusion = drawn(seed, per_class=12)
    counts = torch.tensor([30, 0, 1, 7, 2])
    expected = sum(n / 40 * a for n, a in zip(counts.tolist(), class_accuracies(confusion), strict=True))
    assert proportional_accuracy(confusion, counts) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_on_classes_of_one_size_owned_accuracy_is_the_plain_mean_over_owned_classes(seed: int) -> None:
    _, _, confusion = drawn(seed, per_class=12)
    accuracies = class_accuracies(confusion)
    expected = (accuracies[0] + accuracies[2] + accuracies[3] + accuracies[4]) / 4
    assert owned_accuracy(confusion, torch.tensor([30, 0, 1, 7, 2])) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_a_client_that_has_all_classes_alike_is_judged_as_the_global_model_is(seed: int) -> None:
    _, _, confusion = drawn(seed)
    same = torch.full((5,), 4)
    assert owned_accuracy(confusion, same) == accuracy(confusion)
    assert proportional_accuracy(confusion, same) == pytest.approx(accuracy(confusion), rel=1e-14)


def test_sums_are_in_float64_whatever_the_matrix_is_made_of() -> None:
    # 2²⁴ + 1 is not a float32, so a sum there would lose the one that is wrong, and the share would be 1.
    confusion = torch.tensor([[2**24, 1], [0, 0]], dtype=torch.float32)
    assert accuracy(confusion) == 2**24 / (2**24 + 1)
    assert macro_f1(confusion) == pytest.approx(2 * 2**24 / (2**25 + 1), rel=1e-15)


def test_there_is_no_accuracy_where_no_class_that_counts_was_tested() -> None:
    with pytest.raises(BadInput, match="no class that counts"):
        owned_accuracy(CONFUSION, torch.tensor([0, 0, 0, 5]))
    with pytest.raises(BadInput, match="no class that counts"):
        accuracy(torch.zeros(3, 3))


# ---- F1 and the indices of pFedCSPC


def test_macro_f1_is_the_mean_over_the_classes_of_the_test_set() -> None:
    # F1 is 2·correct / (truth + predicted): 16/20, 6/12, and 0/4. Class 3, which is predicted but not there, is left
    # out of the mean. (0.8 + 0.5 + 0) / 3.
    assert macro_f1(CONFUSION) == pytest.approx(1.3 / 3)


@pytest.mark.parametrize("missing", [(), (1,), (0, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_macro_f1_is_scikit_learns_over_the_classes_present(seed: int, missing: tuple[int, ...]) -> None:
    truth, predicted, _ = drawn(seed)
    pairs = [(t, p) for t, p in zip(truth, predicted, strict=True) if t not in missing]
    truth, predicted = [t for t, _ in pairs], [p for _, p in pairs]
    confusion = torch.from_numpy(confusion_matrix(truth, predicted, labels=range(5)))
    expected = f1_score(truth, predicted, labels=sorted(set(truth)), average="macro", zero_division=0)
    assert macro_f1(confusion) == pytest.approx(expected, rel=1e-14)


def test_there_is_no_f1_without_examples() -> None:
    with pytest.raises(BadInput, match="no examples"):
        macro_f1(torch.zeros(3, 3))


def test_harmonic_mean_by_hand() -> None:
    assert harmonic_mean(0.5, 1.0) == pytest.approx(2 / 3)  # 2·0.5 / 1.5
    assert harmonic_mean(0.3, 0.3) == pytest.approx(0.3)
    assert harmonic_mean(0.0, 0.7) == 0.0
    assert harmonic_mean(0.0, 0.0) == 0.0


def test_harmonic_mean_gives_the_printed_hm_of_pfedcspc() -> None:
    # Table II, CIFAR-10: pFedCSPC 70.81 and 69.81 give 70.31; FedAvg 66.78 and 64.13 give 65.43.
    assert round(100 * harmonic_mean(0.7081, 0.6981), 2) == 70.31
    assert round(100 * harmonic_mean(0.6678, 0.6413), 2) == 65.43


def test_local_index_is_the_harmonic_mean_of_accuracy_and_macro_f1() -> None:
    # Accuracy 11/19, macro-F1 1.3/3.
    accuracy, f1 = 11 / 19, 1.3 / 3
    assert local_index(CONFUSION) == pytest.approx(2 * accuracy * f1 / (accuracy + f1))


def test_local_index_of_a_model_that_is_always_wrong_is_zero_and_of_one_that_never_is_one() -> None:
    assert local_index(torch.tensor([[0, 3], [2, 0]])) == 0.0
    assert local_index(torch.diag(torch.tensor([3, 2, 0]))) == 1.0


# ---- rounds


def test_rounds_to_target_is_the_first_round_that_reaches_it() -> None:
    accuracies = [0.2, 0.5, 0.4, 0.6, 0.5]
    assert rounds_to_target(accuracies, 0.5) == 2
    assert rounds_to_target(accuracies, 0.51) == 4
    assert rounds_to_target(accuracies, 0.1) == 1
    assert rounds_to_target(accuracies, 0.7) is None
    assert rounds_to_target([0.0], 0.0) == 1
    assert rounds_to_target([], 0.0) is None


def test_rounds_that_were_not_evaluated_count_as_rounds() -> None:
    assert rounds_to_target([None, None, 0.3, None, None, 0.6], 0.5) == 6
