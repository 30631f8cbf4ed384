"""Every wrapper goes around every method that has a public model."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import protofed.methods
from methods.conformance import (
    assert_close,
    assert_finite,
    assert_same,
    check_records_survive_the_wire,
    check_resuming_changes_nothing,
    check_same_seed_same_result,
    federation,
    usual,
    whole,
)
from protofed import tree
from protofed.api.method import Method
from protofed.errors import BadInput
from protofed.methods import METHODS, bases_of
from protofed.methods._shared.wrappers import Wrapper
from protofed.methods.averaging import Averaging
from protofed.methods.ccvr import CCVR
from protofed.methods.fedasam import FedASAM
from protofed.methods.feddecorr import FedDecorr
from protofed.methods.feddyn import FedDyn
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.fedsgd import FedSGD
from protofed.methods.fedsr import FedSR
from protofed.methods.fpl import FPL
from protofed.methods.ga import GA
from protofed.methods.local import LocalOnly
from protofed.methods.moon import Moon
from protofed.methods.pfedcspc import PFedCSPC


def all_classes() -> list[type[Method]]:
    """The classes that the modules of the package define."""
    names = [module.name for module in pkgutil.iter_modules(protofed.methods.__path__)]
    modules = [importlib.import_module(f"protofed.methods.{name}") for name in names]
    found = [own for module in modules for own in vars(module).values() if inspect.isclass(own)]
    return [own for own in dict.fromkeys(found) if issubclass(own, Method)]


WRAPPERS = [own for own in all_classes() if "wrapper" in own.tags]
BASES = [METHODS[name] for name in bases_of(METHODS["feddecorr"])]
METHODS_BY_CLASS = {cls: name for name, cls in METHODS.items()}
QUICK: dict[str, dict[str, Any]] = {"PFedCSPC": {"calibration_epochs": 4}, "CCVR": {"epochs": 2}}
"""Settings that make a wrapper quick and take no other path."""
REPRESENTATIVE = (Moon, FedASAM, FPL)
"""Bases whose clients keep something, whose server knows more than it sends, and whose uploads hold prototypes."""


def check_it_runs_to_the_end(method: Method) -> None:
    of, state = federation(method), usual(method, 3)
    end = of.finish(state)
    assert not end.failures, f"clients failed: {end.failures}"
    assert_finite(whole(end), "after the finish")
    assert method.public(end.server) is not None, "a wrapper around a global model has one"
    assert_same(whole(of.finish(state)), whole(end), "two ends of one run")


ESSENTIAL = [
    check_it_runs_to_the_end,
    check_same_seed_same_result,
    check_records_survive_the_wire,
    check_resuming_changes_nothing,
]


def pairs() -> list[Any]:
    """All of them; those that add little are slow."""
    return [
        pytest.param(
            wrapper,
            base,
            id=f"{wrapper.__name__} on {base.__name__}",
            marks=() if base in REPRESENTATIVE else pytest.mark.slow,
        )
        for wrapper in WRAPPERS
        for base in (METHODS[name] for name in bases_of(wrapper))
    ]


def wrapped(wrapper: type[Method], base: type[Method]) -> Method:
    by_sums = {"contrast_with": "global", "consistent_with": "global"} if (wrapper, base) == (FedSGD, FPL) else {}
    return wrapper(base=base(**by_sums), **QUICK.get(wrapper.__name__, {}))


@pytest.mark.parametrize("wrapper", [CCVR, PFedCSPC])
def test_a_classifier_that_reads_no_features_is_not_retrained_on_them(wrapper: type[Method]) -> None:
    assert "fedsr" in bases_of(METHODS["ga"])
    assert "fedsr" not in bases_of(wrapper)
    with pytest.raises(BadInput, match="retrains a classifier on features, and that of FedSR reads others"):
        federation(wrapper(base=FedSR())).start()


def test_ga_weights_the_mean_of_a_base_that_counts_clients_equally() -> None:
    equal = usual(GA(base=FedDyn(weighting="uniform"), step=0.0), 2)
    assert len({share.item() for share in equal.server.share.values()}) == 1
    moved = usual(GA(base=FedDyn(weighting="uniform"), step=0.9), 2)
    assert not all(map(torch.equal, tree.leaves(moved.server.base), tree.leaves(equal.server.base)))


@pytest.mark.parametrize(("wrapper", "base"), pairs())
@pytest.mark.parametrize("check", ESSENTIAL, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_wrapper_goes_around_a_base(
    check: Callable[[Method], None], wrapper: type[Method], base: type[Method]
) -> None:
    check(wrapped(wrapper, base))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_has_a_base_and_says_so(wrapper: type[Method]) -> None:
    assert any(isinstance(wrapper().base, METHODS[name]) for name in bases_of(wrapper))


def test_the_matrix_has_every_wrapper() -> None:
    """A final class on top of Wrapper has the tag; a family, which has no settings, has not."""
    final = {own for own in all_classes() if issubclass(own, Wrapper) and "__dataclass_fields__" in vars(own)}
    assert final <= set(WRAPPERS)
    assert {"GA", "Averaging", "CCVR", "PFedCSPC"} <= {own.__name__ for own in WRAPPERS}
    assert set(REPRESENTATIVE) <= set(BASES)
    prototypes = {"fpl", "fedproc", "fedmlp", "fedproto_avg", "fednh", "fedetf"}
    assert all(prototypes <= set(bases_of(wrapper)) for wrapper in WRAPPERS if wrapper is not FedSGD)
    assert {*bases_of(FedSGD)} == {"fedavg", "fednh", "fedproc", "fedproto_avg", "fpl"}
    assert {"fedproto", "local", "fedpc", "fedper", "ifca"}.isdisjoint(bases_of(FedDecorr))


def with_public_model() -> list[Any]:
    return [pytest.param(base, marks=() if base in REPRESENTATIVE else pytest.mark.slow) for base in BASES]


@pytest.mark.parametrize("base", with_public_model())
def test_a_wrapper_that_does_nothing_is_its_base(base: type[Method]) -> None:
    """FedDecorr without its penalty; Averaging and CCVR at what the server knows of the base."""
    alone = whole(usual(base(), 3))
    assert_same(whole(usual(FedDecorr(base=base(), decorrelation_weight=0.0), 3)), alone, "FedDecorr of weight 0")
    for wrapper in (Averaging, CCVR):
        if METHODS_BY_CLASS[base] in bases_of(wrapper):
            state = usual(wrapper(base=base()), 3)
            assert_same({"server": state.server.base, "memories": whole(state)["memories"]}, alone, wrapper.__name__)


@pytest.mark.parametrize("base", with_public_model())
def test_ga_with_weights_by_examples_that_never_move_is_its_base(base: type[Method]) -> None:
    """On clients too small to hold examples out. Weights are parts of 1 first, so that the last bits may differ."""
    alone, around = (usual(m, 2) for m in (base(), GA(base=base(), step=0.0)))
    assert_close(around.server.base, alone.server, "what the server knows", within=1e-4)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_base_without_a_public_model_is_refused(wrapper: type[Method]) -> None:
    with pytest.raises(BadInput, match=r"method.base: .* public model, and LocalOnly has none"):
        federation(wrapper(base=LocalOnly()))
    with pytest.raises(BadInput, match=r"method.base: .* is a wrapper itself"):
        federation(wrapper(base=FedDecorr()))


def test_a_base_whose_settings_leave_no_public_model_is_refused() -> None:
    with pytest.raises(BadInput, match="FedSeProto has no public model with these settings"):
        federation(Averaging(base=FedSeProto(shares="prototypes"))).start()
