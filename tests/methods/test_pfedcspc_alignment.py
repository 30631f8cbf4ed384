"""Features held to the shape of prototypes: Eq. (5) to (7) of pFedCSPC."""

from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor, nn

from protofed.methods._shared.models import own_statistics
from protofed.methods.pfedcspc.alignment import Alignment, shape_of
from protofed.nn.networks import Networks
from protofed.prototypes.class_means import Prototypes


def prototypes(*rows: list[float] | None) -> Prototypes:
    mean = [[0.0, 0.0] if row is None else row for row in rows]
    return Prototypes(torch.tensor(mean), torch.tensor([0.0 if row is None else 3.0 for row in rows]))


def angle_loss(z: Tensor, y: Tensor, weight: Tensor, known: Prototypes) -> Tensor:
    return Alignment(node=False, edge=False).loss(z, y, weight, shape_of(known))


def edge_loss(z: Tensor, y: Tensor, weight: Tensor, known: Prototypes) -> Tensor:
    return Alignment(node=False, angle=False).loss(z, y, weight, shape_of(known))


def node_loss(z: Tensor, y: Tensor, known: Prototypes, temperature: float) -> Tensor:
    """Of each example."""
    alone = Alignment(angle=False, edge=False, temperature=temperature)
    return torch.stack([alone.loss(z[i : i + 1], y[i : i + 1], torch.ones(1), shape_of(known)) for i in range(len(y))])


CORNER = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
LINE = prototypes([0.0, 0.0], [1.0, 0.0], [3.0, 0.0])
EACH = torch.arange(3)


# ---- by hand


def test_the_node_loss_by_hand() -> None:
    known = prototypes([2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], None)
    z = torch.tensor([[5.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    found = node_loss(z, torch.tensor([0, 2, 3]), known, 0.5)
    # Cosines 1, 0 and −1 over τ = 0.5; the fourth class has no prototype and is in no sum.
    everything = exp(2) + 1 + exp(-2)
    assert found.tolist() == pytest.approx([-log(exp(2) / everything), -log(exp(-2) / everything), 0.0], abs=1e-6)


def test_the_angle_loss_of_three_points_by_hand() -> None:
    # Corners of the features: a right angle at (0, 0), cos 0, and 45 degrees at the other two, cos 1/√2.
    # Prototypes on a line: at its ends cos 1, in its middle, (1, 0), cos −1.
    # |0 − 1| = 1, |1/√2 + 1| and |1/√2 − 1| = 1 − 1/√2: they add up to 3, so the mean is 1.
    assert angle_loss(CORNER, EACH, torch.ones(3), LINE).item() == pytest.approx(1.0, abs=1e-6)


def test_the_edge_loss_of_three_points_by_hand() -> None:
    # Features: 1, 1 and √2, mean (2 + √2) / 3. Prototypes: 1 (0 to 1), 3 (0 to 2), 2 (1 to 2), mean 2.
    # A smooth L1 of a difference below 1 is half its square.
    mean = (2 + sqrt(2)) / 3
    differences = [1 / mean - 1 / 2, 1 / mean - 3 / 2, sqrt(2) / mean - 2 / 2]
    expected = sum(d * d / 2 for d in differences) / 3
    assert edge_loss(CORNER, EACH, torch.ones(3), LINE).item() == pytest.approx(expected, abs=1e-6)


def test_features_of_the_same_shape_cost_nothing_wherever_they_lie() -> None:
    turned = 7.0 * LINE.mean @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]) + 5.0
    assert angle_loss(turned, EACH, torch.ones(3), LINE).item() == pytest.approx(0.0, abs=1e-5)
    assert edge_loss(turned, EACH, torch.ones(3), LINE).item() == pytest.approx(0.0, abs=1e-5)


# ---- against slow references


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Prototypes]:
    """Ten examples of five classes, some at weight 0; class 3 has no prototype."""
    draws = torch.Generator().manual_seed(seed)
    z, y = torch.randn(10, 6, generator=draws), torch.randint(0, 5, (10,), generator=draws)
    weight = torch.ones(10)
    weight[-2:] = 0
    known = Prototypes(3 * torch.randn(5, 6, generator=draws), torch.tensor([1.0, 2.0, 1.0, 0.0, 9.0]))
    return z, y, weight, known


def slow_angle(z: Tensor, y: list[int], rows: list[int], u: Tensor) -> float:
    def cosine(points: Tensor, a: int, b: int, c: int) -> float:
        left, right = points[a] - points[b], points[c] - points[b]
        return float(left @ right / (left.norm() * right.norm()))

    z, u = z.double(), u.double()[y]
    found = [
        abs(cosine(z, a, b, c) - cosine(u, a, b, c))
        for a in rows
        for b in rows
        for c in rows
        if len({y[a], y[b], y[c]}) == 3
    ]
    return sum(found) / len(found)


def slow_edge(z: Tensor, y: list[int], rows: list[int], u: Tensor) -> float:
    z, u = z.double(), u.double()[y]
    pairs = [(a, b) for a in rows for b in rows if y[a] != y[b]]
    of_z = [float((z[a] - z[b]).norm()) for a, b in pairs]
    of_u = [float((u[a] - u[b]).norm()) for a, b in pairs]
    mean_z, mean_u = sum(of_z) / len(pairs), sum(of_u) / len(pairs)
    gaps = [abs(a / mean_z - b / mean_u) for a, b in zip(of_z, of_u, strict=True)]
    return sum(g * g / 2 if g < 1 else g - 0.5 for g in gaps) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_with_fillers_and_an_unknown_class(seed: int) -> None:
    z, y, weight, known = random_batch(seed)
    rows = [i for i in range(8) if y[i] != 3]
    assert angle_loss(z, y, weight, known).item() == pytest.approx(
        slow_angle(z, y.tolist(), rows, known.mean), rel=1e-4
    )
    assert edge_loss(z, y, weight, known).item() == pytest.approx(slow_edge(z, y.tolist(), rows, known.mean), rel=1e-4)


# ---- gradients and degenerate batches


def test_all_together_are_the_sum() -> None:
    z, y, weight, known = random_batch(0)
    node = Alignment(angle=False, edge=False).loss(z, y, weight, shape_of(known))
    together = angle_loss(z, y, weight, known) + edge_loss(z, y, weight, known) + node
    torch.testing.assert_close(Alignment().loss(z, y, weight, shape_of(known)), together)
    torch.testing.assert_close(node, (node_loss(z, y, known, 0.5) * weight).sum() / weight.sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)], ids=["node", "angle", "edge", "all"])
def test_the_gradient_is_that_of_finite_differences(seed: int, parts: tuple[int, int, int]) -> None:
    z, y, weight, known = random_batch(seed)
    alignment, shape = Alignment(*map(bool, parts)), shape_of(Prototypes(known.mean.double(), known.count))
    assert torch.autograd.gradcheck(
        lambda z: alignment.loss(z, y, weight.double(), shape), z.double().requires_grad_(), atol=1e-6
    )


def test_gradients_of_several_batches_under_vmap() -> None:
    batches = [random_batch(seed) for seed in range(3)]
    z, y, weight = (torch.stack(parts) for parts in list(zip(*batches, strict=True))[:3])
    shape = shape_of(batches[0][3])
    found = torch.vmap(torch.func.grad(Alignment().loss), in_dims=(0, 0, 0, None))(z, y, weight, shape)
    for k in range(3):
        point = z[k].clone().requires_grad_()
        (expected,) = torch.autograd.grad(Alignment().loss(point, y[k], weight[k], shape), point)
        torch.testing.assert_close(found[k], expected)


def gradients(z: Tensor, y: Tensor, known: Prototypes) -> Tensor:
    z = z.clone().requires_grad_()
    weight = torch.ones(len(z))
    known = Prototypes(known.mean.clone().requires_grad_(), known.count)
    loss = angle_loss(z, y, weight, known) + edge_loss(z, y, weight, known) + node_loss(z, y, known, 0.5).mean()
    gradient, other = torch.autograd.grad(loss, [z, known.mean], allow_unused=True)
    assert other is None, "a gradient reaches prototypes"
    return gradient


def test_no_gradient_reaches_prototypes() -> None:
    z, y, _, known = random_batch(0)
    assert gradients(z, y, known).abs().sum() > 0


def test_coinciding_features_and_prototypes_have_small_gradients() -> None:
    z = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 2.0], [3.0, 1.0]])
    known = prototypes([1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [2.0, 2.0])
    gradient = gradients(z, torch.arange(4), known)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() < 10


@pytest.mark.parametrize("y", [[1, 1, 1], [0, 1, 1]])
def test_a_batch_without_three_classes_has_no_angles(y: list[int]) -> None:
    assert angle_loss(CORNER, torch.tensor(y), torch.ones(3), LINE).item() == 0.0
    assert torch.isfinite(gradients(CORNER, torch.tensor(y), LINE)).all()


def test_a_batch_of_one_class_has_no_edges() -> None:
    assert edge_loss(CORNER, torch.tensor([1, 1, 1]), torch.ones(3), LINE).item() == 0.0


def test_without_prototypes_nothing_is_aligned() -> None:
    nothing = prototypes(None, None, None)
    assert angle_loss(CORNER, EACH, torch.ones(3), nothing).item() == 0.0
    assert edge_loss(CORNER, EACH, torch.ones(3), nothing).item() == 0.0
    assert node_loss(CORNER, EACH, nothing, 0.5).tolist() == [0.0] * 3
    assert gradients(CORNER, EACH, nothing).abs().max() == 0


def test_a_model_with_its_own_statistics_leaves_those_of_the_original() -> None:
    networks = Networks(lambda: {"features": nn.BatchNorm1d(2), "classifier": nn.Linear(2, 2)})
    params = networks.init(0)
    before = {name: leaf.clone() for name, leaf in params.items()}
    model = networks.model(params, training=True)
    again = own_statistics(model).features(CORNER)
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert torch.equal(again, model.features(CORNER))
    assert not torch.equal(params["features.running_mean"], before["features.running_mean"])
