"""The GPU's kernels of the server's objective: the same values and gradients as Eq. (11) to (13) and (17) of pFedCSPC
in float64.

Without a GPU, Triton's interpreter runs them on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from protofed.methods.pfedcspc import calibration
from protofed.methods.pfedcspc.calibration import Contrasts

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from protofed.kernels import calibration as by_kernels  # noqa: E402

BOTH = Contrasts(across=True, augmented=True, weight=0.7, temperature=0.4, easy_weight=0.3, margin=1.5)
Inputs = tuple[Tensor, ...]


def drawn(batch: int, dim: int, classes: int, count: int) -> Inputs:
    """Logits, embeddings, pairs, classes, clients, weights, and which classes are known. The last row only fills the
    batch, and the class of the first has no other example."""
    draws = torch.Generator().manual_seed(batch + dim)
    logits = 3 * torch.randn(batch, classes, generator=draws)
    z, pairs = torch.randn(batch, dim, generator=draws), torch.randn(batch, 2 * count, dim, generator=draws)
    y = torch.randint(1, classes - 1, (batch,), generator=draws)
    y[0], weight = 0, torch.ones(batch)
    weight[-1] = 0
    is_known = torch.arange(classes) < classes - 1
    return logits, z, pairs, y, torch.randint(0, 3, (batch,), generator=draws), weight, is_known


def plain_objective(contrasts: Contrasts, logits: Tensor, z: Tensor, pairs: Tensor, *rest: Tensor) -> Tensor:
    """As in the paper, prototype by prototype, in float64."""
    y, client, weight, is_known = rest
    unit, rows, total = F.normalize(z, dim=-1), [i for i in range(len(y)) if weight[i]], 0 * z.sum()
    for i in rows:
        total = total - logits[i, y[i]] + logits[i, is_known].logsumexp(0)
        others = [j for j in rows if j != i]
        hard = [(y[i] == y[j]) != (client[i] == client[j]) for j in others]
        sigma = torch.tensor([1.0 if is_hard else contrasts.easy_weight for is_hard in hard]).double()
        terms = sigma * (unit[others] @ unit[i] / contrasts.temperature).exp()
        positives = torch.tensor([bool(y[j] == y[i]) for j in others])
        if contrasts.across and positives.any():
            total = total - contrasts.weight * (terms / terms.sum()).log()[positives].mean()
        if contrasts.augmented:
            near, far = (z[i] - pairs[i]).square().sum(-1).chunk(2)
            total = total + contrasts.weight * (near - far + contrasts.margin).relu().mean()
    return total / max(1, len(rows))


CASES = {
    "both": (BOTH, drawn(9, 6, 5, 2)),
    "several parts of an embedding": (BOTH, drawn(5, 40, 4, 3)),
    "more rows than a small tile": (BOTH, drawn(19, 3, 20, 1)),
    "across clients": (replace(BOTH, augmented=False), drawn(6, 4, 4, 0)),
    "augmented": (replace(BOTH, across=False), drawn(6, 4, 4, 2)),
    "neither": (replace(BOTH, across=False, augmented=False), drawn(4, 4, 4, 0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_objective_and_its_gradients_are_those_of_the_paper(case: tuple[Contrasts, Inputs]) -> None:
    contrasts, inputs = case
    loss, slopes = by_kernels.with_slopes(contrasts, *(leaf.to(DEVICE) for leaf in inputs))
    leaves = [leaf.double().requires_grad_() for leaf in inputs[:3]]
    expected = plain_objective(contrasts, *leaves, *inputs[3:])
    torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, leaves, materialize_grads=True)
    for found, slope, name in zip(slopes, wanted, ("logits", "z", "pairs"), strict=True):
        if name != "pairs" or contrasts.augmented:
            torch.testing.assert_close(found.cpu().double(), slope, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("part", range(3), ids=["logits", "z", "pairs"])
def test_an_objective_that_is_not_finite_stays_so(part: int) -> None:
    inputs = [leaf.clone().to(DEVICE) for leaf in drawn(4, 3, 4, 1)]
    inputs[part][1] = torch.nan
    assert by_kernels.with_slopes(BOTH, *inputs)[0].isnan()


# ---- where they are used


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the embeddings that kernels are called for; they are used on the CPU too."""
    shapes: list[torch.Size] = []
    original = by_kernels.with_slopes

    def counted(contrasts: Contrasts, logits: Tensor, z: Tensor, *rest: Any) -> Any:
        shapes.append(z.shape)
        return original(contrasts, logits, z, *rest)

    monkeypatch.setattr(by_kernels, "with_slopes", counted)
    return shapes


def gradients(inputs: Inputs, mapped: bool) -> Inputs:
    def loss(leaves: list[Tensor], rest: list[Tensor]) -> Tensor:
        (logits, z, pairs), (y, client, weight, is_known) = leaves, rest
        batch = Batch(z, y, weight, torch.arange(len(y)), torch.tensor(False), torch.tensor(0))
        return 3 * BOTH.objective(logits, z, pairs, client, is_known, batch)

    leaves, rest = list(inputs[:3]), list(inputs[3:])
    if not mapped:
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(loss(leaves, rest), leaves)
    leaves = [torch.stack([leaf, leaf]) for leaf in leaves]
    found: Inputs = tuple(torch.vmap(torch.func.grad(loss), in_dims=(0, None))(leaves, rest))
    assert all(torch.equal(leaf[0], leaf[1]) for leaf in found)
    return tuple(leaf[0] for leaf in found)


@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_are_those_of_torch(mapped: bool, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tuple(leaf.to(DEVICE) for leaf in drawn(5, 4, 4, 2))
    monkeypatch.setattr(calibration, "_has_kernels", lambda z, logits: False)
    expected = gradients(inputs, mapped=False)
    assert not calls
    monkeypatch.setattr(calibration, "_has_kernels", lambda z, logits: True)
    for found, wanted in zip(gradients(inputs, mapped), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert calls == [(5, 4)] * (1 + mapped)
