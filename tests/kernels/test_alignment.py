"""The GPU's kernels of the alignment: the same losses and gradients as Eq. (5) to (7) of pFedCSPC in float64.

Without a GPU, Triton's interpreter runs them on the CPU."""

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.methods.pfedcspc import alignment as by_torch
from protofed.methods.pfedcspc.alignment import Alignment, Shape, shape_of
from protofed.prototypes.class_means import Prototypes

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from protofed.kernels import alignment as by_kernels  # noqa: E402

EACH_PART = {"node": (True, False, False), "angle": (False, True, False), "edge": (False, False, True)}


def plain_loss(alignment: Alignment, z: Tensor, y: Tensor, weight: Tensor, known: Prototypes) -> Tensor:
    """As in the paper, of one client's batch in float64."""
    u, is_known = known.mean.double(), known.is_known
    rows = [i for i in range(len(y)) if weight[i] > 0 and is_known[y[i]]]
    loss = 0 * z.sum()
    if alignment.node and rows:
        cosine = F.normalize(z[rows], dim=-1) @ F.normalize(u[is_known], dim=-1).T
        own = (is_known.cumsum(0) - 1)[y[rows]]  # the place of a class among those that are known
        each = F.cross_entropy(cosine / alignment.temperature, own, reduction="none")
        loss = loss + (each * weight[rows]).sum() / weight.sum()
    if alignment.angle:
        triples = [
            (a, b, c)
            for a, b, c in permutations(rows, 3)
            if len({int(y[a]), int(y[b]), int(y[c])}) == 3
            and all(min((z[a] - z[i]).norm(), (u[y[a]] - u[y[i]]).norm()) > 1e-6 for i in (b, c))
        ]
        if triples:
            corner, left, right = (list(ends) for ends in zip(*triples, strict=True))
            of_z, of_u = (
                F.cosine_similarity(points[left] - points[corner], points[right] - points[corner])
                for points in (z, u[y])
            )
            loss = loss + (of_z - of_u).abs().mean()
    if alignment.edge:
        pairs = [(a, b) for a, b in permutations(rows, 2) if y[a] != y[b]]
        if pairs:
            left, right = (list(ends) for ends in zip(*pairs, strict=True))
            of_z, of_u = (torch.linalg.vector_norm(points[left] - points[right], dim=-1) for points in (z, u[y]))
            loss = loss + F.smooth_l1_loss(of_z / of_z.mean(), of_u / of_u.mean())
    return loss


Batches = tuple[Tensor, Tensor, Tensor, list[Prototypes]]


def drawn(clients: int, batch: int, dim: int, classes: int) -> Batches:
    """Batches whose last row only fills them, and prototypes of which the second is missing."""
    draws = torch.Generator().manual_seed(clients + batch + dim + classes)
    z = torch.randn(clients, batch, dim, generator=draws)
    y = torch.randint(0, classes, (clients, batch), generator=draws)
    weight = torch.ones(clients, batch)
    weight[:, -1] = 0
    known = [Prototypes(3 * torch.randn(classes, dim, generator=draws), torch.ones(classes)) for _ in range(clients)]
    for prototypes in known:
        prototypes.count[1] = 0
    return z, y, weight, known


def coinciding() -> Batches:
    """Points and prototypes that coincide, of different classes and of one."""
    z, _, weight, known = drawn(1, 7, 3, 5)
    z[0, 1], z[0, 3], known[0].mean[3] = z[0, 0], z[0, 2], known[0].mean[2]
    return z, torch.tensor([[0, 2, 3, 3, 2, 4, 0]]), weight, known


def far_from_zero() -> Batches:
    z, y, weight, known = drawn(1, 6, 4, 4)
    return z + 100, y, weight, known


def of_one_class() -> Batches:
    z, y, weight, known = drawn(1, 3, 4, 4)
    return z, 0 * y, weight, known


def unknown() -> Batches:
    z, y, weight, known = drawn(1, 3, 4, 4)
    return z, y, weight, [Prototypes(prototypes.mean, 0 * prototypes.count) for prototypes in known]


CASES = {
    "two clients": drawn(2, 7, 5, 4),
    "more classes than examples, and several parts of a feature": drawn(1, 5, 40, 20),
    "several tiles": drawn(1, 20, 3, 5),
    "points that coincide": coinciding(),
    "far from zero": far_from_zero(),
    "one class": of_one_class(),
    "no prototypes": unknown(),
}


def stacked(shapes: list[Shape]) -> Shape:
    parts = zip(*((shape.unit, shape.is_known, shape.distance, shape.cosine) for shape in shapes), strict=True)
    return Shape(*(torch.stack(leaves).to(DEVICE) for leaves in parts))


def is_right(alignment: Alignment, batches: Batches) -> None:
    z, y, weight, known = batches
    losses, slopes = by_kernels.with_slopes(
        alignment,
        z.to(DEVICE),
        y.to(DEVICE),
        weight.to(DEVICE),
        stacked([shape_of(prototypes) for prototypes in known]),
    )
    for k in range(len(z)):
        leaf = z[k].double().requires_grad_()
        expected = plain_loss(alignment, leaf, y[k], weight[k].double(), known[k])
        (slope,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(losses[k].cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes[k].cpu().double(), slope, rtol=0, atol=2e-5 * max(0.1, slope.abs().max()))
        loss, slope = alignment.with_slope(z[k], y[k], weight[k], shape_of(known[k]))
        torch.testing.assert_close(losses[k].cpu(), loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(slopes[k].cpu(), slope, rtol=0, atol=1e-4 * max(0.1, slope.abs().max()))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_losses_and_gradients_are_those_of_the_paper(case: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_kernels, "BLOCK", 16)
    is_right(Alignment(temperature=0.4), case)


@pytest.mark.parametrize("parts", EACH_PART.values(), ids=list(EACH_PART))
def test_each_part_stands_alone(parts: tuple[bool, bool, bool]) -> None:
    is_right(Alignment(*parts), drawn(1, 6, 4, 5))


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_a_loss_that_is_not_finite_stays_so() -> None:
    z, y, weight, known = drawn(1, 4, 3, 4)
    z[0, 0, 0] = torch.nan
    y[0] = torch.tensor([0, 2, 3, 0])
    for parts in EACH_PART.values():
        shape = stacked([shape_of(known[0])])
        inputs = z.to(DEVICE), y.to(DEVICE), weight.to(DEVICE), shape
        assert by_kernels.with_slopes(Alignment(*parts), *inputs)[0].isnan().all(), parts


# ---- where they are used


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the features that kernels are called for; they are used on the CPU too."""
    shapes: list[torch.Size] = []
    original = by_kernels.with_slopes

    def counted(alignment: Alignment, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        shapes.append(z.shape)
        return original(alignment, z, *rest)

    monkeypatch.setattr(by_kernels, "with_slopes", counted)
    monkeypatch.setattr(by_torch, "_has_kernels", lambda z, shape: True)
    return shapes


def scaled_loss(z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return 3 * Alignment().loss(z, y, weight, shape)


def expected_gradient(z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return 3 * Alignment().with_slope(z, y, weight, shape)[1]


def test_clients_under_vmap_are_one_call(calls: list[torch.Size]) -> None:
    z, y, weight, known = drawn(2, 5, 4, 4)
    shape = shape_of(known[0])  # which both clients share
    placed = Shape(*(part[0] for part in vars(stacked([shape])).values()))
    inputs = z.movedim(0, 2).to(DEVICE), y.to(DEVICE), weight.to(DEVICE), placed
    found = torch.vmap(torch.func.grad(scaled_loss), in_dims=(2, 0, 0, None))(*inputs)
    assert calls == [(2, 5, 4)]
    for k in range(2):
        wanted = expected_gradient(z[k], y[k], weight[k], shape)
        torch.testing.assert_close(found[k].cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_one_client_without_vmap_and_gradients_around_vmap(calls: list[torch.Size]) -> None:
    z, y, weight, known = drawn(2, 5, 4, 4)
    shape = stacked([shape_of(prototypes) for prototypes in known])
    y, weight = y.to(DEVICE), weight.to(DEVICE)
    leaf = z.to(DEVICE).requires_grad_()
    (around,) = torch.autograd.grad(torch.vmap(scaled_loss)(leaf, y, weight, shape).sum(), leaf)
    first = Shape(*(part[0] for part in vars(shape).values()))
    (alone,) = torch.autograd.grad(scaled_loss(leaf[0], y[0], weight[0], first), leaf)
    assert calls == [(2, 5, 4), (1, 5, 4)]
    for k in range(2):
        wanted = expected_gradient(z[k], y[k].cpu(), weight[k].cpu(), shape_of(known[k]))
        torch.testing.assert_close(around[k].cpu(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone[0], around[0], rtol=1e-5, atol=1e-6)
