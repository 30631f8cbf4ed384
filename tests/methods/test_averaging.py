"""Averaging: which global models it averages, around which base, and what is left without."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from methods.conformance import CHECKS, assert_close, assert_same, federation, fingerprint, usual, whole
from protofed.api.method import Method
from protofed.methods._shared.mixing import running_average
from protofed.methods.averaging import Averaging
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.moon import Moon

SETTINGS = [Averaging(), Averaging(start=0.0), Averaging(base=Moon(), start=0.0)]


@pytest.mark.parametrize("method", SETTINGS, ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: Averaging) -> None:
    check(method)


def test_around_fedasam_without_its_own_it_is_fedasam_with_it() -> None:
    for start in (0.0, 0.75):
        found = Averaging(base=FedASAM(averaging=False), start=start)
        expected = FedASAM(averaging=True, averaging_start=start)
        for rounds in (1, 2, 3):
            one, other = usual(found, rounds), usual(expected, rounds)
            assert_same(one.server.base.params, other.server.params, f"round {rounds}")
            assert_same(one.server.average, other.server.average, f"the average of round {rounds}")
            assert_same(one.server.count, other.server.count, f"the models in the average of round {rounds}")
            assert_same(found.public(one.server)[0], expected.public(other.server)[0], "the public model")


def test_training_goes_on_from_the_weights_and_not_from_the_average() -> None:
    method = Averaging(base=Moon(), start=0.0)
    found, base = usual(method, 3), usual(Moon(), 3)
    assert_same(found.server.base, base.server, "the base's server")
    assert_same(found.memories, base.memories, "the memories")
    assert_same(method.message_for(found.server, "ann"), base.server, "the message")
    assert fingerprint(method.public(found.server)[0]) != fingerprint(found.server.base.params)


def test_the_average_starts_after_three_quarters_of_the_rounds() -> None:
    # Of 8 rounds the first 6 are three quarters: the models of rounds 7 and 8 are averaged.
    of = federation(Averaging(), rounds=8)
    states = [of.start()]
    for _ in range(8):
        states.append(of.advance(states[-1]))
    assert [int(state.server.count) for state in states] == [0, 0, 0, 0, 0, 0, 0, 1, 2]
    for state in states[:8]:
        assert_same(state.server.average, state.server.base.params, "the average of at most one model")
    last, server = states[7].server.base.params, states[8].server
    expected = {name: ((last[name].double() + server.base.params[name].double()) / 2).float() for name in last}
    assert_close(server.average, expected, "the average of two models", within=1e-6)


def test_at_the_end_of_the_rounds_it_is_its_base() -> None:
    method = Averaging(start=1.0)
    assert_same(method.public(usual(method, 3).server)[0], usual(FedAvg(), 3).server.params, "the public model")


def test_one_more_model_counts_as_much_as_each_before() -> None:
    # Three models whose mean is 2 and one of 6: (3 · 2 + 6) / 4 = 3.
    mean, count = running_average({"w": torch.tensor([2.0])}, torch.tensor(3), {"w": torch.tensor([6.0])}, True)
    assert (mean["w"].tolist(), count.item()) == ([3.0], 4)
    # Before its time the average is the last model, and counts nothing.
    mean, count = running_average({"w": torch.tensor([2.0])}, torch.tensor(0), {"w": torch.tensor([6.0])}, False)
    assert (mean["w"].tolist(), count.item()) == ([6.0], 0)


def test_statistics_of_batchnorm_are_averaged() -> None:
    states = [usual(Averaging(start=0.0), rounds).server for rounds in (1, 2, 3)]
    name = "features.1.running_var"
    expected = sum(state.base.params[name].double() for state in states) / 3
    torch.testing.assert_close(states[-1].average[name].double(), expected, rtol=0, atol=1e-6)
    assert not torch.equal(states[-1].average[name], states[0].average[name])


def test_the_end_of_a_run_changes_nothing() -> None:
    of, state = federation(Averaging(start=0.0)), usual(Averaging(start=0.0), 3)
    assert_same(whole(of.finish(state)), whole(state), "after the finish")


def test_a_method_is_its_settings() -> None:
    assert {f.name: getattr(Averaging(), f.name) for f in dataclasses.fields(Averaging)} == {
        "base": FedAvg(),
        "start": 0.75,
    }
