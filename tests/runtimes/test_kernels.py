"""The kernels of many clients' layers: the same values and gradients as torch's own.

Without a GPU, Triton's interpreter runs them on the CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.transforms import Draws, Transform
from protofed.optim.optimizers import Adam

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from protofed.runtimes.cohort import convolution, kernels  # noqa: E402
from protofed.runtimes.cohort.layers import StackedLayers  # noqa: E402

CLIENTS = 2


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def is_close(found: Tensor, expected: Tensor) -> None:
    """Relative to the largest number, as sums of many terms are rounded."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- layer by layer

SHAPES = {
    # (batch, inputs, outputs, height, width, kernel, stride, padding); the width of the output decides how many of its
    # pixels are computed together.
    "four pixels together": (3, 3, 6, 12, 12, (5, 5), (1, 1), (0, 0)),
    "two": (3, 4, 5, 9, 10, (3, 5), (1, 1), (0, 0)),
    "one": (3, 3, 6, 12, 11, (5, 5), (1, 1), (0, 0)),
    "padding": (2, 6, 16, 9, 9, (5, 3), (1, 1), (2, 1)),
    "a stride": (2, 4, 5, 13, 13, (3, 3), (2, 2), (1, 1)),
    "two strides and more outputs than a tile": (2, 4, 70, 9, 8, (3, 3), (2, 1), (0, 2)),
    "pixels that no window reaches": (2, 3, 4, 10, 12, (2, 2), (3, 3), (0, 0)),
    "more places than a part": (40, 2, 3, 9, 9, (3, 3), (1, 1), (1, 1)),
    "a deep window": (1, 30, 4, 6, 6, (3, 3), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_convolutions_and_their_gradients_are_those_of_torch(shape: tuple[Any, ...]) -> None:
    batch, inputs, outputs, height, width, kernel, stride, padding = shape
    x, weight = draws(0, CLIENTS, batch, inputs, height, width), draws(1, CLIENTS, outputs, inputs, *kernel)
    bias = draws(2, CLIENTS, outputs)
    out = convolution.convolution(x, weight, bias, stride, padding)
    grad = draws(3, *out.shape)
    of_x = convolution.input_gradient(grad, weight, (height, width), stride, padding)
    of_weight, of_bias = convolution.weight_gradient(x, grad, kernel, stride, padding)
    for k in range(CLIENTS):
        leaves = [leaf[k].double().requires_grad_() for leaf in (x, weight, bias)]
        expected = F.conv2d(*leaves, stride, padding)
        is_close(out[k], expected)
        of_leaves = torch.autograd.grad(expected, leaves, grad[k].double())
        for found, wanted in zip((of_x[k], of_weight[k], of_bias[k]), of_leaves, strict=True):
            is_close(found, wanted)


def test_images_that_all_clients_share_are_read_in_place() -> None:
    x, weight = draws(0, 3, 2, 8, 8).expand(CLIENTS, 3, 2, 8, 8), draws(1, CLIENTS, 4, 2, 3, 3)
    found = convolution.convolution(x, weight, None, (1, 1), (1, 1))
    for k in range(CLIENTS):
        is_close(found[k], F.conv2d(x[k].double(), weight[k].double(), padding=1))


@pytest.mark.parametrize("kernel", [(2, 2), (3, 2)])
def test_max_pooling_and_its_gradient_are_those_of_torch(kernel: tuple[int, int]) -> None:
    x = draws(0, 2, 3, 5, 7, 9)
    x[0, 0, 0, 0, 0] = torch.nan
    x[0, 1] = 1.0  # the first of equal numbers counts
    out, place = kernels.max_pool(x, kernel)
    leaf = x.flatten(0, 1).requires_grad_()
    expected = F.max_pool2d(leaf, kernel)
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)
    grad = draws(1, *out.shape)
    (wanted,) = torch.autograd.grad(expected, leaf, grad.flatten(0, 1))
    assert torch.equal(kernels.max_pool_gradient(grad, place, (7, 9), kernel).flatten(0, 1), wanted)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_cross_entropy_and_its_gradient_are_those_of_torch(classes: int) -> None:
    logits = 30 * draws(0, 2, 7, classes)
    y = torch.randint(classes, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss, slope = kernels.cross_entropy(logits, y)
    leaf = logits.flatten(0, 1).requires_grad_()
    expected = F.cross_entropy(leaf, y.flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected, rtol=1e-5, atol=1e-5)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(slope.flatten(0, 1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_a_loss_that_is_not_finite_stays_so() -> None:
    logits, y = torch.full((1, 3), torch.nan, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert kernels.cross_entropy(logits, y)[0].isnan().all()


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_batches_are_fetched_as_the_transform_makes_them(pad: int, flip: bool) -> None:
    transform = Transform(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), pad=pad, flip=flip)
    own = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (50, 3, 8, 6), dtype=torch.uint8, generator=own).to(DEVICE)
    row = torch.randint(0, 50, (CLIENTS, 5, 4), generator=own).to(DEVICE)
    plan = transform.draw(own, CLIENTS * 5, 4)
    offset, mirrored = (
        None if d is None else d.view(CLIENTS, 5, 4, *d.shape[2:]).to(DEVICE) for d in (plan.offset, plan.flip)
    )
    table, step = transform.table(torch.device(DEVICE)), torch.tensor([3], device=DEVICE)
    found = kernels.fetched(x, row, offset, mirrored, step, table, pad)
    now = Draws(*(None if d is None else d[:, 3].flatten(0, 1) for d in (offset, mirrored)), angle=None)
    expected = transform.looked_up(transform.vary(x[row[:, 3].flatten()], now))
    assert torch.equal(found.flatten(0, 1), expected)


def test_a_step_of_a_plan_is_read_for_all_clients() -> None:
    own = torch.Generator().manual_seed(0)
    label, index = (torch.randint(0, 50, (CLIENTS, 5, 3), generator=own).to(DEVICE) for _ in range(2))
    weight, number = draws(0, CLIENTS, 5, 3), torch.randint(0, 2**62, (CLIENTS, 5), generator=own).to(DEVICE)
    is_last = torch.tensor([[False, False, False, True, True], [False, True, True, False, True]], device=DEVICE)
    fields = [label, weight, index, is_last, number]
    for step in range(5):
        found = kernels.planned(fields, torch.tensor([step], device=DEVICE))
        assert all(torch.equal(one, field[:, step]) for one, field in zip(found, fields, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_of_many_clients_is_that_of_torch_though_they_have_taken_different_numbers_of_steps(decay: float) -> None:
    optimizer = Adam(lr=0.01, beta1=0.8, eps=1e-3, weight_decay=decay)
    shapes = {"long": (2100,), "matrix": (3, 5)}  # one longer than what a program changes
    weights = {name: draws(k, CLIENTS, *shape) for k, (name, shape) in enumerate(shapes.items())}
    starts = {name: leaf.double() for name, leaf in weights.items()}
    first, second = (tuple(torch.zeros_like(leaf) for leaf in weights.values()) for _ in range(2))
    steps = torch.zeros(CLIENTS, dtype=torch.int64, device=DEVICE)
    grads = [{name: draws(10 * n + k, *leaf.shape) for k, (name, leaf) in enumerate(weights.items())} for n in (1, 2)]
    for grad in grads:
        optimizer.step_in_place(lambda params, grad=grad: grad, weights, (first, second, steps))
    for k in range(CLIENTS):
        leaves = {name: leaf[k].clone().requires_grad_() for name, leaf in starts.items()}
        theirs = torch.optim.Adam(leaves.values(), lr=0.01, betas=(0.8, 0.999), eps=1e-3, weight_decay=decay)
        for grad in grads:
            for name, leaf in leaves.items():
                leaf.grad = grad[name][k].double()
            theirs.step()
        for name, leaf in leaves.items():
            is_close(weights[name][k], leaf.detach())
    steps[0] = 7  # client 0 goes on as if it had taken more steps than client 1
    before = {name: leaf.double() for name, leaf in weights.items()}
    moments = [[leaf.double() for leaf in moment] for moment in (first, second)]
    optimizer.step_in_place(lambda params: grads[0], weights, (first, second, steps))
    for k, taken in enumerate((8, 3)):
        for place, name in enumerate(shapes):
            grad = grads[0][name][k].double() + decay * before[name][k]
            mean = 0.8 * moments[0][place][k] + 0.2 * grad
            square = 0.999 * moments[1][place][k] + 0.001 * grad.square()
            move = mean / (1 - 0.8**taken) / ((square / (1 - 0.999**taken)).sqrt() + 1e-3)
            is_close(weights[name][k], before[name][k] - 0.01 * move)


# ---- under vmap


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the kernels' functions is called."""
    counts: Counter[str] = Counter()

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counted)

    for name in ("convolution", "input_gradient", "weight_gradient"):
        watch(convolution, name)
    for name in ("max_pool", "max_pool_gradient", "cross_entropy"):
        watch(kernels, name)
    return counts


def network(options: dict[str, Any] | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Its weights, stacked for all clients."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 3, 3, **(options or {})), nn.ReLU()),
        *(nn.Flatten(), nn.LazyLinear(5)),
    ).to(DEVICE)
    layers(torch.zeros(1, 2, 14, 14, device=DEVICE))
    weights = {name: draws(k, CLIENTS, *leaf.shape) / 3 for k, (name, leaf) in enumerate(layers.named_parameters())}
    return layers, weights


def gradients(layers: nn.Module, weights: dict[str, Tensor], stacked: bool) -> dict[str, Tensor]:
    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(layers, weights, (x,))
        return F.cross_entropy(logits, y, reduction="none").mean()

    x = draws(100, CLIENTS, 3, 2, 14, 14)
    y = torch.tensor([[0, 1, 4], [3, 3, 2]], device=DEVICE)
    mapped = torch.vmap(torch.func.grad(loss))
    if not stacked:
        return mapped(weights, x, y)
    with StackedLayers():
        return mapped(weights, x, y)


def test_gradients_of_many_clients_are_those_of_torch(calls: Counter[str]) -> None:
    layers, weights = network()
    found, expected = gradients(layers, weights, stacked=True), gradients(layers, weights, stacked=False)
    for name in expected:
        is_close(found[name], expected[name])
    assert calls == {
        "convolution": 2,
        "input_gradient": 1,
        "weight_gradient": 2,
        "max_pool": 1,
        "max_pool_gradient": 1,
        "cross_entropy": 1,
    }


@pytest.mark.parametrize("options", [{"dilation": 2}, {"padding": "same"}, {"padding": 3}], ids=str)
def test_other_convolutions_are_left_to_torch(options: dict[str, Any], calls: Counter[str]) -> None:
    layers, weights = network(options)
    found, expected = gradients(layers, weights, stacked=True), gradients(layers, weights, stacked=False)
    for name in expected:
        is_close(found[name], expected[name])
    assert calls["convolution"] == 1


def test_other_poolings_and_losses_are_left_to_torch(calls: Counter[str]) -> None:
    x, y = draws(0, CLIENTS, 2, 3, 8, 8), torch.zeros(CLIENTS, 8, dtype=torch.int64, device=DEVICE)

    def values(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pooled = [F.max_pool2d(x, 3, stride=2), F.max_pool2d(x, 2, padding=1), F.max_pool2d(x, 3, ceil_mode=True)]
        losses = [F.cross_entropy(x[0, 0], y), F.cross_entropy(x[0, 0], y, reduction="none", label_smoothing=0.1)]
        return *pooled, *losses

    expected = torch.vmap(values)(x, y)
    with StackedLayers():
        found = torch.vmap(values)(x, y)
    assert all(map(torch.equal, found, expected))
    assert not calls
