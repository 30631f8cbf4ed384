"""The optimisers take the steps that torch's take, and change nothing in place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from doubles import bits
from protofed import tree
from protofed.optim.optimizers import (
    PLAIN,
    Adam,
    AdamW,
    Asam,
    Gradient,
    HasRate,
    Optimizer,
    Plain,
    RmsProp,
    Sam,
    Sgd,
    halved,
    in_place_step,
    rate_of,
)
from protofed.tree import Params

STEPS = 50
TOLERANCE = {"atol": 1e-6, "rtol": 0.0}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    shapes = range(STEPS)
    return [(torch.randn(8, 6, generator=draws), torch.randint(0, 3, (8,), generator=draws)) for _ in shapes]


def start() -> Params:
    return {name: leaf.detach().clone() for name, leaf in network().named_parameters()}


def gradient_on(x: Tensor, y: Tensor) -> Gradient:
    module = network()

    def gradient(params: Params) -> Params:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        loss = F.cross_entropy(functional_call(module, leaves, (x,)), y)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    return gradient


def descended(optimizer: Optimizer) -> Params:
    params = start()
    state = optimizer.init(params)
    for x, y in batches():
        params, state = optimizer.step(gradient_on(x, y), params, state)
    return params


Climb = Callable[[list[nn.Parameter]], list[Tensor]]


def descended_by_torch(
    make: Callable[..., torch.optim.Optimizer], clip: float = 0, climb: Climb | None = None
) -> Params:
    """The loop that everyone writes; with `climb`, the in-place loop of SAM: move, take the gradient, move back."""
    module = network()
    weights = list(module.parameters())
    optimizer = make(weights)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if climb is not None:
            before = [w.detach().clone() for w in weights]
            with torch.no_grad():
                for w, move in zip(weights, climb(weights), strict=True):
                    w.add_(move)
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            with torch.no_grad():
                for w, old in zip(weights, before, strict=True):
                    w.copy_(old)
        if clip:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in module.named_parameters()}


CLIP = 0.2
SLOPE = {"lr": 0.1}
MOMENTUM = {**SLOPE, "momentum": 0.9}
SGDS = {
    "plain": SLOPE,
    "momentum": MOMENTUM,
    "weight decay": {**SLOPE, "weight_decay": 0.05},
    "nesterov": {**MOMENTUM, "nesterov": True},
    "all": {**MOMENTUM, "nesterov": True, "weight_decay": 0.05},
}
ADAMS = {
    "plain": {"lr": 0.01},
    "weight decay": {"lr": 0.01, "weight_decay": 0.05},
    "betas": {"lr": 0.01, "beta1": 0.5, "beta2": 0.9},
    "no momentum": {"lr": 0.01, "beta1": 0.0},
    "eps": {"lr": 0.01, "eps": 0.1},
}
RMSPROPS = {
    "plain": {"lr": 0.01},
    "weight decay": {"lr": 0.01, "weight_decay": 0.05},
    "alpha": {"lr": 0.01, "alpha": 0.5},
    "momentum": {"lr": 0.01, "momentum": 0.5},
    "centred": {"lr": 0.01, "centered": True},
    "all": {"lr": 0.01, "alpha": 0.9, "eps": 0.1, "weight_decay": 0.05, "momentum": 0.5, "centered": True},
}


def torch_adam(
    weights: list[nn.Parameter], kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: float
) -> torch.optim.Optimizer:
    betas = options.pop("beta1", 0.9), options.pop("beta2", 0.999)
    return kind(weights, betas=betas, **options)


@pytest.mark.parametrize("clip", [0.0, CLIP, 1e3], ids=["unclipped", "clipped", "barely"])
@pytest.mark.parametrize("options", SGDS.values(), ids=SGDS)
def test_sgd_steps_as_torch_does(options: dict[str, float], clip: float) -> None:
    expected = descended_by_torch(lambda weights: torch.optim.SGD(weights, **options), clip)
    torch.testing.assert_close(descended(Sgd(**options, clip_norm=clip)), expected, **TOLERANCE)


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_adam_steps_as_torch_does(options: dict[str, float], clip: float) -> None:
    expected = descended_by_torch(lambda weights: torch_adam(weights, **options), clip)
    torch.testing.assert_close(descended(Adam(**options, clip_norm=clip)), expected, **TOLERANCE)


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_adamw_steps_as_torch_does(options: dict[str, float], clip: float) -> None:
    expected = descended_by_torch(lambda weights: torch_adam(weights, torch.optim.AdamW, **options), clip)
    torch.testing.assert_close(descended(AdamW(**options, clip_norm=clip)), expected, **TOLERANCE)


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("options", RMSPROPS.values(), ids=RMSPROPS)
def test_rmsprop_steps_as_torch_does(options: dict[str, float], clip: float) -> None:
    expected = descended_by_torch(lambda weights: torch.optim.RMSprop(weights, **options), clip)
    torch.testing.assert_close(descended(RmsProp(**options, clip_norm=clip)), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "torch_kind"),
    [
        (Sgd, lambda weights: torch.optim.SGD(weights, lr=0.01)),
        (Adam, torch.optim.Adam),
        (AdamW, torch.optim.AdamW),
        (RmsProp, torch.optim.RMSprop),
    ],
    ids=PLAIN,
)
def test_defaults_are_those_of_torch(kind: type[Plain], torch_kind: Callable[..., torch.optim.Optimizer]) -> None:
    torch.testing.assert_close(descended(kind()), descended_by_torch(torch_kind), **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=["plain", "weight decay"])
@pytest.mark.parametrize("kind", PLAIN.values(), ids=PLAIN)
def test_a_rate_in_a_tensor_is_the_same_rate(kind: type[Plain], options: dict[str, float]) -> None:
    optimizer = kind(lr=0.03, **options)
    held = descended(optimizer.with_lr(torch.tensor(0.03)))
    torch.testing.assert_close(held, descended(optimizer), **TOLERANCE)


def test_the_clip_of_these_tests_matters() -> None:
    x, y = batches()[0]
    assert torch.cat([g.flatten() for g in gradient_on(x, y)(start()).values()]).norm() > 2 * CLIP


def torch_sgd_of_round_7(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1 * 0.9**7)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_learning_rate_decays_by_round(wrapped: bool) -> None:
    base = Sgd(lr=0.1, lr_decay=0.9)
    optimizer: Optimizer = Sam(base, rho=0.0) if wrapped else base
    torch.testing.assert_close(descended(optimizer.for_round(7)), descended_by_torch(torch_sgd_of_round_7), **TOLERANCE)
    for kind in (Adam, AdamW, RmsProp):
        assert kind(lr=0.1, lr_decay=0.5).for_round(2) == kind(lr=0.025, lr_decay=0.5)
    assert base.for_round(0) == base


def sam_climb(weights: list[nn.Parameter], rho: float = 0.05) -> list[Tensor]:
    norm = torch.sqrt(sum((w.grad**2).sum() for w in weights))
    return [rho * w.grad / norm for w in weights]


def asam_climb(weights: list[nn.Parameter], rho: float = 0.5, eta: float = 0.2) -> list[Tensor]:
    # biases, the tensors of one dimension here, are not scaled
    scales = [w.detach().abs() + eta if w.dim() > 1 else torch.ones_like(w) for w in weights]
    norm = torch.sqrt(sum(((s * w.grad) ** 2).sum() for s, w in zip(scales, weights, strict=True)))
    return [rho * s**2 * w.grad / norm for s, w in zip(scales, weights, strict=True)]


BASES = {
    "sgd": (Sgd(**MOMENTUM), lambda weights: torch.optim.SGD(weights, **MOMENTUM)),
    "adam": (Adam(lr=0.01), lambda weights: torch_adam(weights, lr=0.01)),
    "adamw": (AdamW(lr=0.01), lambda weights: torch_adam(weights, torch.optim.AdamW, lr=0.01)),
    "rmsprop": (RmsProp(lr=0.01, momentum=0.5), lambda weights: torch.optim.RMSprop(weights, lr=0.01, momentum=0.5)),
}


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("base", "torch_base"), BASES.values(), ids=BASES)
@pytest.mark.parametrize(("kind", "climb"), [(Sam, sam_climb), (Asam, asam_climb)], ids=["sam", "asam"])
def test_sharpness_aware_steps_are_those_of_the_in_place_loop(
    kind: type[Sam | Asam],
    climb: Climb,
    base: Plain,
    torch_base: Callable[..., torch.optim.Optimizer],
    clip: float,
) -> None:
    expected = descended_by_torch(torch_base, clip, climb)
    torch.testing.assert_close(descended(kind(replace(base, clip_norm=clip))), expected, **TOLERANCE)


@pytest.mark.parametrize("base", [base for base, _ in BASES.values()], ids=BASES)
@pytest.mark.parametrize("kind", [Sam, Asam])
def test_no_neighbourhood_leaves_the_base_bit_for_bit(kind: type[Sam | Asam], base: Plain) -> None:
    assert bits(descended(kind(base, rho=0.0))) == bits(descended(base))
    assert bits(descended(kind(base))) != bits(descended(base))


@pytest.mark.parametrize("kind", [Sam, Asam])
def test_a_gradient_of_zero_moves_nothing(kind: type[Sam | Asam]) -> None:
    params = start()
    still, _ = kind(Sgd(lr=1.0)).step(lambda p: {n: torch.zeros_like(w) for n, w in p.items()}, params, ())
    assert bits(still) == bits(params)


@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip_norm=0.1),
        Adam(weight_decay=0.1),
        AdamW(weight_decay=0.1),
        RmsProp(momentum=0.9, weight_decay=0.1, centered=True),
        Sam(),
        Asam(),
    ],
    ids=lambda o: type(o).__name__,
)
def test_a_step_modifies_none_of_its_inputs(optimizer: Optimizer) -> None:
    params = start()
    x, y = batches()[0]
    slopes = gradient_on(x, y)(params)
    _, state = optimizer.step(gradient_on(x, y), params, optimizer.init(params))
    before = bits((params, state, slopes))
    moved, _ = optimizer.step(lambda _: slopes, params, state)
    assert bits((params, state, slopes)) == before
    assert list(moved) == list(params)
    assert bits(moved) != bits(params)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(Sgd(0.1), Sgd(0.1, 0.9), Sgd(0.1, 0.9, 0.01, nesterov=True), Sgd(0.1, 0.9, 0.01, clip_norm=0.3)),
        *(Adam(0.1), Adam(0.1, 0.8, 0.9, weight_decay=0.1), Adam(0.1, clip_norm=0.3)),
    ],
    ids=["plain", "momentum", "nesterov", "clipped", "Adam", "decay", "clipped Adam"],
)
def test_a_step_in_place_is_the_same_step_whatever_the_layout_in_memory(optimizer: Sgd | Adam) -> None:
    draws = torch.Generator().manual_seed(0)
    params = {"conv": torch.randn(4, 3, 5, 5, generator=draws), "bias": torch.randn(4, generator=draws)}
    slopes = [{name: torch.randn(leaf.shape, generator=draws) for name, leaf in params.items()} for _ in range(3)]
    own = {name: leaf.clone() for name, leaf in params.items()}
    own["conv"] = own["conv"].to(memory_format=torch.channels_last)
    places = {name: leaf.data_ptr() for name, leaf in own.items()}
    state: Any = optimizer.init(params)
    own_state: Any = tree.map(torch.clone, optimizer.init(own))
    for slope in slopes:
        params, state = optimizer.step(lambda _, slope=slope: slope, params, state)
        own, own_state = optimizer.step_in_place(lambda _, slope=slope: slope, own, own_state)
    torch.testing.assert_close(own, params)
    torch.testing.assert_close(own_state, state)
    assert {name: leaf.data_ptr() for name, leaf in own.items()} == places


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("optimizer", [Sgd(0.1, 0.9, 0.01), Adam(0.1, weight_decay=0.1), AdamW(0.1)], ids=repr)
def test_stacked_clients_take_the_steps_of_each(optimizer: Sgd | Adam, in_place: bool) -> None:
    """Also if they have taken different numbers of steps before."""
    if in_place and in_place_step(optimizer) is None:
        pytest.skip("it has no step in place")
    draws = torch.Generator().manual_seed(0)
    slopes = {"weight": torch.randn(2, 3, 4, generator=draws), "scale": torch.randn(2, generator=draws)}
    clients: list[tuple[Params, Any]] = []
    for k, steps in enumerate((1, 5)):
        params: Params = {name: 1 + leaf[k] for name, leaf in slopes.items()}
        state: Any = optimizer.init(params)
        for _ in range(steps):
            params, state = optimizer.step(lambda at: at, params, state)
        clients.append((params, state))
    stacked: Any = tree.map(lambda *leaves: torch.stack(leaves), *clients)
    assert optimizer.is_elementwise
    step = optimizer.step_in_place if in_place else optimizer.step
    found = step(lambda _: slopes, *stacked)
    for k, (params, state) in enumerate(clients):
        expected = optimizer.step(lambda _, k=k: {name: leaf[k] for name, leaf in slopes.items()}, params, state)
        torch.testing.assert_close(tree.map(lambda leaf, k=k: leaf[k], found), expected)


@pytest.mark.parametrize(
    "optimizer",
    [Sgd(lr=0.4), Adam(lr=0.4), AdamW(lr=0.4), RmsProp(lr=0.4), Sam(Sgd(lr=0.4), rho=0.3), Asam(Adam(lr=0.4))],
    ids=lambda o: type(o).__name__,
)
def test_an_optimiser_knows_its_rate(optimizer: HasRate) -> None:
    assert isinstance(optimizer, HasRate)
    assert rate_of(optimizer) == optimizer.lr == 0.4
    other = optimizer.with_lr(0.1)
    assert halved(optimizer, 2) == other
    assert other.lr == 0.1
    assert other.with_lr(0.4) == optimizer


class Still:
    """An optimiser of one's own, without a rate."""

    def for_round(self, round: int) -> "Still":
        return self

    def init(self, params: Params) -> tuple[()]:
        return ()

    def step(self, gradient: Gradient, params: Params, state: tuple[()]) -> tuple[Params, tuple[()]]:
        return params, state


def test_an_optimiser_need_not_have_a_rate() -> None:
    assert isinstance(Still(), Optimizer)
    assert rate_of(Still()) is None
    assert in_place_step(Still()) is None


class Renamed(Sgd):
    """Takes the step of its base."""


class Scaled(Sgd):
    def step(self, gradient: Gradient, params: Params, state: tuple[Tensor, ...]) -> tuple[Params, tuple[Tensor, ...]]:
        return {name: leaf / 2 for name, leaf in params.items()}, state


class ScaledInPlace(Scaled):
    def step_in_place(
        self, gradient: Gradient, params: Params, state: tuple[Tensor, ...]
    ) -> tuple[Params, tuple[Tensor, ...]]:
        return {name: leaf.div_(2) for name, leaf in params.items()}, state


def test_a_step_in_place_is_not_inherited_by_those_who_take_another_step() -> None:
    kinds = [Sgd, Renamed, Scaled, ScaledInPlace, type("More", (ScaledInPlace,), {}), Adam, AdamW, RmsProp, Sam]
    has_step = {kind.__name__: in_place_step(kind()) is not None for kind in kinds}
    assert [name for name, has in has_step.items() if has] == ["Sgd", "Renamed", "ScaledInPlace", "More", "Adam"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sgd(lr=0.1, momentum=0.9, clip_norm=0.5), None),
        (Adam(lr=0.1), torch.optim.Adam),
        (AdamW(lr=0.1), torch.optim.AdamW),
        (RmsProp(lr=0.1), torch.optim.RMSprop),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_parameter_that_is_a_single_number_stays_what_it_is(ours: Optimizer, theirs: Any) -> None:
    """As the scale of FedNH is. A product of two numbers of different types has the wider type."""
    params: Params = {"scale": torch.tensor(3.0), "weight": torch.tensor([1.0, -2.0])}
    leaves = [leaf.clone().requires_grad_() for leaf in params.values()]
    state, reference = ours.init(params), theirs(leaves, lr=0.1) if theirs else None
    for _ in range(5):
        params, state = ours.step(lambda at: {name: 2 * leaf for name, leaf in at.items()}, params, state)
        if reference is not None:
            for leaf in leaves:
                leaf.grad = 2 * leaf.detach()
            reference.step()
    assert {leaf.dtype for leaf in params.values()} == {torch.float32}
    if reference is not None:
        torch.testing.assert_close(list(params.values()), [leaf.detach() for leaf in leaves])
