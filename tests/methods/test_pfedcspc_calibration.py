"""Prototypes as a training set: augmentation, contrasts, exemplars (Eq. 4 and 10 to 16 of pFedCSPC)."""

from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods.pfedcspc.calibration import (
    STRENGTHS,
    Partners,
    Pool,
    augmented,
    augmented_contrast,
    class_centres,
    drawn_partners,
    embedded,
    knowledge,
    mixing_weights,
    pooled,
    schedule,
    weighted_contrast,
)
from protofed.methods.pfedcspc.sampling import Slots
from protofed.nn.networks import Networks
from protofed.prototypes.class_means import Prototypes, no_prototypes


def pool_of(label: list[int], client: list[int], mean: Tensor | None = None) -> Pool:
    mean = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(0)) if mean is None else mean
    return Pool(mean, torch.tensor(label), torch.tensor(client))


def test_the_pool_holds_the_slots_that_are_filled() -> None:
    # Two classes of two slots each: class 0 is slots 0 and 1, class 1 is slots 2 and 3.
    first = Slots(torch.tensor([[1.0], [0.0], [3.0], [4.0]]), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    second = Slots(torch.tensor([[5.0], [6.0], [0.0], [0.0]]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    pool = pooled([first, second], 2)
    assert pool.mean.squeeze(1).tolist() == [1, 3, 4, 5, 6]
    assert pool.label.tolist() == [0, 1, 1, 0, 0]
    assert pool.client.tolist() == [0, 0, 0, 1, 1]


# ---- augmentation, Eq. (10) and (11)


def test_augmentation_by_hand() -> None:
    pool = pool_of([0, 0, 1], [0, 0, 0], torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]))
    partners = Partners(torch.tensor([[1, 1, 2, 2]] * 3), torch.tensor([[-0.5, -0.1, 0.5, 0.1]] * 3))
    positive, negative = augmented(pool.mean[:1], torch.tensor([0]), pool, partners).chunk(2, 1)
    # u + λ (u − same) = (1, 2) + λ (1, 2) and u + λ (other − u) = (1, 2) + λ (2, 2), for λ = 0.5 and 0.1.
    torch.testing.assert_close(positive, torch.tensor([[[1.5, 3.0], [1.1, 2.2]]]))
    torch.testing.assert_close(negative, torch.tensor([[[2.0, 3.0], [1.2, 2.2]]]))


def test_partners_come_from_the_same_client() -> None:
    label, client = [0, 0, 0, 1, 1, 2, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    pool = pool_of(label, client)
    partners = drawn_partners(pool, 50, torch.Generator().manual_seed(1))
    for i in range(len(label)):
        same = {j for j in range(len(label)) if label[j] == label[i] and client[j] == client[i] and j != i} or {i}
        other = {j for j in range(len(label)) if label[j] != label[i] and client[j] == client[i]}
        assert set(partners.same[i].tolist()) == same
        assert set(partners.other[i].tolist()) == other
    assert {round(s, 3) for s in partners.strength.flatten().tolist()} == set(STRENGTHS)


def test_a_prototype_that_is_alone_in_its_class_is_its_own_positive() -> None:
    pool = pool_of([0, 1, 1], [0, 0, 0])
    partners = drawn_partners(pool, 4, torch.Generator())
    assert partners.same[0].tolist() == [0] * 4
    u = pool.mean[:1]
    positive, _ = augmented(u, torch.tensor([0]), pool, partners).chunk(2, 1)
    assert torch.equal(positive, u[:, None].expand(-1, 4, -1))


def test_a_client_of_one_class_takes_negatives_from_other_clients() -> None:
    pool = pool_of([0, 0, 0, 1, 2], [0, 0, 1, 1, 1])
    partners = drawn_partners(pool, 50, torch.Generator().manual_seed(1))
    assert set(partners.other[0].tolist()) == {3, 4}
    assert set(partners.same[0].tolist()) == {1}
    assert set(partners.other[2].tolist()) == {3, 4}


def test_where_there_is_one_class_everyone_is_alone() -> None:
    partners = drawn_partners(pool_of([1, 1, 1], [0, 0, 1]), 3, torch.Generator())
    assert partners.other.tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert partners.same.tolist() == [[1] * 3, [0] * 3, [2] * 3]


def test_the_hinge_by_hand() -> None:
    z = torch.zeros(1, 2)
    positive = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    negative = torch.tensor([[[1.0, 1.0], [0.0, 1.0]]])
    # Squared distances: 1 − 2 + 1.5 = 0.5 and 4 − 1 + 1.5 = 4.5; their mean is 2.5.
    assert augmented_contrast(z, positive, negative, 1.5).tolist() == pytest.approx([2.5])


def test_the_hinge_is_zero_when_negatives_are_beyond_the_margin() -> None:
    z = torch.zeros(1, 2, requires_grad=True)
    positive, negative = torch.tensor([[[0.5, 0.0]]]), torch.tensor([[[0.0, 1.2]]])
    # 0.25 − 1.44 + 1 < 0, though with unsquared distances it would be 0.5 − 1.2 + 1 > 0.
    loss = augmented_contrast(z, positive, negative, 1.0)
    assert loss.tolist() == [0.0]
    assert torch.autograd.grad(loss.sum(), z)[0].abs().max() == 0


@pytest.mark.parametrize("layers", [[nn.ReLU()], [nn.BatchNorm1d(5)]], ids=["row by row", "rows mixed"])
def test_pairs_are_embedded_as_on_their_own(layers: list[nn.Module]) -> None:
    parts = {"features": nn.Identity(), "projection": nn.Sequential(nn.Linear(3, 5), *layers)}
    networks = Networks(lambda: {**parts, "classifier": nn.Linear(5, 2)})
    u, pairs = torch.randn(2, 4, 6, 3, generator=torch.Generator().manual_seed(0)).unbind()
    u = u[:, 0]
    z, others = embedded(networks.model(networks.init(0), training=True), u, pairs)
    model = networks.model(networks.init(0), training=True)
    torch.testing.assert_close(z, model.embedding(u))
    torch.testing.assert_close(others, model.embedding(pairs.flatten(0, 1)).view(4, 6, 5))


# ---- the contrast across clients, Eq. (12)


def test_the_weighted_contrast_by_hand() -> None:
    # z along x, x, y: row 0 is class 0 at client 0, row 1 class 0 at client 1, row 2 class 1 at client 1. τ = 0.5.
    z = torch.tensor([[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]])
    y, client = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    found = weighted_contrast(z, y, client, torch.ones(3), 0.5, 0.25)
    # Row 0: the positive, row 1, is another client's (σ = 1, cos 1); row 2 is another class elsewhere (0.25, cos 0).
    # Row 1: its positive has σ = 1; row 2 is another class at the same client (σ = 1). Row 2 has no positive.
    expected = [-log(exp(2) / (exp(2) + 0.25)), -log(exp(2) / (exp(2) + 1)), 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def slow_contrast(z: Tensor, y: list[int], client: list[int], temperature: float, easy: float) -> list[float]:
    """Eq. (12), one pair at a time, with plain exp in float64."""
    unit = [row / row.norm() for row in z.double()]
    rows, losses = range(len(y)), []

    def term(i: int, j: int) -> float:
        hard = (y[i] == y[j] and client[i] != client[j]) or (y[i] != y[j] and client[i] == client[j])
        return (1.0 if hard else easy) * exp(float(unit[i] @ unit[j]) / temperature)

    for i in rows:
        everything = sum(term(i, s) for s in rows if s != i)
        positives = [j for j in rows if j != i and y[j] == y[i]]
        losses.append(-sum(log(term(i, j) / everything) for j in positives) / max(1, len(positives)))
    return losses


def random_prototypes(seed: int, count: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    z = torch.randn(count, 5, generator=draws)
    return z, torch.randint(0, 4, (count,), generator=draws), torch.randint(0, 3, (count,), generator=draws)


@pytest.mark.parametrize("easy", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_contrast_is_equation_12(seed: int, easy: float) -> None:
    z, y, client = random_prototypes(seed)
    found = weighted_contrast(z, y, client, torch.ones(14), 0.5, easy)
    assert found.tolist() == pytest.approx(slow_contrast(z, y.tolist(), client.tolist(), 0.5, easy), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_with_equal_weights_it_is_the_supervised_contrast_without_self(seed: int) -> None:
    z, y, client = random_prototypes(seed)
    unit = F.normalize(z.double(), dim=-1)
    similarity = unit @ unit.T / 0.5
    similarity.fill_diagonal_(-torch.inf)
    logs = similarity.log_softmax(-1)
    expected = [
        -sum(logs[i, j].item() for j in range(14) if j != i and y[j] == y[i]) / max(1, int((y == y[i]).sum()) - 1)
        for i in range(14)
    ]
    found = weighted_contrast(z, y, client, torch.ones(14), 0.5, 1.0)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_rows_that_only_fill_the_batch_are_in_no_sum() -> None:
    z, y, client = random_prototypes(0)
    weight = torch.ones(14)
    weight[10:] = 0
    found = weighted_contrast(z, y, client, weight, 0.5, 0.5)[:10]
    assert torch.allclose(found, weighted_contrast(z[:10], y[:10], client[:10], torch.ones(10), 0.5, 0.5))


def test_small_temperatures_and_equal_prototypes_train() -> None:
    z, y, client = random_prototypes(0)
    z[3] = z[2]
    z = z.requires_grad_()
    loss = weighted_contrast(z, y, client, torch.ones(14), 0.005, 0.5)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), z)[0]).all()


# ---- the rest


def test_cross_entropy_is_among_the_classes_that_there_are() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0]], requires_grad=True)
    loss = known_cross_entropy(logits, torch.tensor([0]), torch.tensor([True, True, False]))
    assert loss.tolist() == pytest.approx([log(1 + exp(1))])  # −log(e / (e + e²))
    assert torch.autograd.grad(loss.sum(), logits)[0][0, 2] == 0
    z, y, _ = random_prototypes(1)
    every = known_cross_entropy(z, y, torch.ones(5, dtype=torch.bool))
    assert torch.equal(every, F.cross_entropy(z, y, reduction="none"))


def test_a_centre_is_the_mean_over_owners_of_their_means() -> None:
    # Class 0: client 0 has 1, 3 and 5 (mean 3), client 1 has 9: (3 + 9) / 2 = 6, where the mean of all four is 4.5.
    # Class 1: client 1 alone has it, 7. Class 2: nobody, so it stays.
    values = torch.tensor([[1.0], [3.0], [5.0], [9.0], [7.0]])
    pool = pool_of([0, 0, 0, 0, 1], [0, 0, 0, 1, 1], values)
    previous = Prototypes(torch.tensor([[0.0], [0.0], [-4.0]]), torch.tensor([0.0, 0.0, 2.0]))
    found = class_centres(values, pool, previous)
    assert found.mean.tolist() == [[6.0], [7.0], [-4.0]]
    assert found.count.tolist() == [2.0, 1.0, 2.0]


def test_equal_losses_give_uniform_weights() -> None:
    assert mixing_weights(torch.full((4, 4), 3.7), 0.5).tolist() == [[0.25] * 4] * 4


def test_mixing_weights_by_hand() -> None:
    # τ = 0.5: e^0 and e^(−log 3) give 1 : 1/3; adding the same to a row changes nothing, however large.
    losses = torch.tensor([[0.0, 0.5 * log(3)], [1000.0, 1000.0 - 0.5 * log(3)]], dtype=torch.float64)
    weights = mixing_weights(losses, 0.5)
    assert weights[0].tolist() == pytest.approx([0.75, 0.25])
    assert weights[1].tolist() == pytest.approx([0.25, 0.75])


def test_knowledge_by_hand() -> None:
    exemplars = Prototypes(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 4.0, 0.0]))
    found = knowledge(torch.tensor([[3.0, 0.0]]), exemplars, 0.5)
    # Cosines 1 and 0 over 0.5; the third class has no exemplar.
    assert found[0].tolist() == pytest.approx([exp(2) / (exp(2) + 1), 1 / (exp(2) + 1), 0.0])


def test_without_exemplars_knowledge_prefers_no_class() -> None:
    assert knowledge(torch.ones(1, 2), no_prototypes(4, 2), 0.5).tolist() == [[0.25] * 4]


@pytest.mark.parametrize(("round", "start"), [(0, 0.1), (5, 0.1), (6, 0.01), (40, 0.01), (41, 0.001)])
def test_the_schedule_drops_with_rounds_and_epochs(round: int, start: float) -> None:
    steps = schedule(100, 0.1, round)
    assert [epochs for epochs, _ in steps] == [30, 30, 30, 10]
    assert [rate for _, rate in steps] == pytest.approx([start, start / 10, start / 100, start / 1000])


def test_a_short_calibration_is_one_fit() -> None:
    assert schedule(4, 0.2, 0) == [(4, 0.2)]
