"""FedADMM: three rounds against the paper's algorithm, the message on numbers, and FedAvg and FedDyn in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    reply_of,
    scripted,
    small_network,
    usual,
    whole,
)
from protofed import tree
from protofed.api.method import Method
from protofed.methods.families import Weights, WeightUpload
from protofed.methods.fedadmm import FedADMM
from protofed.methods.feddyn import FedDyn
from references import fedadmm
from references.plain import largest_difference

METHOD = FedADMM(penalty_weight=0.2)
OF_AUTHORS = FedADMM(penalty_weight=0.2, server_lr=1.0, measured_from="received")
PRESENT = [("ann", "bob", "cyd", "dan", "eve"), ("bob", "eve"), ("ann", "bob", "dan")]
"""Who takes part in three rounds."""
TRAINABLE = federation(METHOD).networks_of("ann").trainable


@pytest.mark.parametrize("method", [OF_AUTHORS, FedADMM(starts_from="own"), FedADMM(penalty_weight=0.0)], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedADMM) -> None:
    check(method)


@pytest.mark.parametrize("step", [0.0, 0.7])
def test_three_rounds_are_those_of_the_paper(step: float) -> None:
    """The largest difference of a weight was 3.6e-7."""
    of = scripted(FedADMM(penalty_weight=0.2, server_lr=step), lambda t: PRESENT[t])
    expected = fedadmm.rounds(small_network(), of.start().server.params, PRESENT, 0.2, step)
    assert largest_difference(after(3, of).server.params, expected) < 5e-6


def test_the_change_is_that_of_weights_and_scaled_multiplier() -> None:
    state, of = usual(METHOD, 2), federation(METHOD)
    before, received, reply = state.memories["ann"], state.server.params, reply_of(of, state, "ann")
    trained = METHOD.trained_weights(reply.upload, reply.memory)
    for name in TRAINABLE:
        multiplier = before.multiplier[name] + trained[name] - received[name]  # y/ρ after y ← y + ρ (w − θ)
        change = trained[name] - before.params[name] + multiplier - before.multiplier[name]
        torch.testing.assert_close(reply.upload.params[name], received[name] + change, rtol=0, atol=1e-6)
        torch.testing.assert_close(reply.memory.multiplier[name], multiplier)
        assert torch.equal(reply.memory.params[name], trained[name])


def test_in_the_authors_code_the_message_is_twice_the_way_from_the_received_weights() -> None:
    state, of = usual(OF_AUTHORS, 2), federation(OF_AUTHORS)
    received, reply = state.server.params, reply_of(of, state, "ann")
    for name, trained in reply.memory.params.items():
        expected = received[name] + 2 * (trained - received[name])
        torch.testing.assert_close(reply.upload.params[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("server_lr", "parameters"),
    # Of 4 examples of 38 clients sent 6 (3 examples) and 2 (1): their mean is 5, and the share is 4/38.
    [(0.0, 5 * 4 / 38), (0.5, 2.5), (1.0, 5.0)],
)
def test_the_servers_step_on_numbers(server_lr: float, parameters: float) -> None:
    central = federation(METHOD).server_context(0, "round")
    start = tree.map(torch.zeros_like, central.initial_params())
    assert sum(SIZES.values()) == 38
    uploads = [
        (client, WeightUpload({n: torch.full_like(leaf, value) for n, leaf in start.items()}, torch.tensor(count)))
        for client, value, count in (("ann", 6.0, 3), ("bob", 2.0, 1))
    ]
    found = FedADMM(server_lr=server_lr).aggregate(Weights(start), uploads, central).params
    for name, leaf in found.items():
        expected = parameters if name in TRAINABLE else 5.0  # statistics are averaged
        torch.testing.assert_close(leaf, torch.full_like(leaf, expected))


def test_where_training_begins() -> None:
    """From the own weights and the received statistics, or from all that is received."""
    own = FedADMM(penalty_weight=0.2, starts_from="own")
    assert_same(usual(own, 1).server, usual(METHOD, 1).server, "the first round, with equal weights")
    assert fingerprint(usual(own, 2).server) != fingerprint(usual(METHOD, 2).server)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_when_all_clients_take_part_it_is_feddyn(weighting: Any) -> None:
    """Both are ADMM then: FedDyn's drift is the scaled multiplier, and its server adds the mean of all."""
    found = after(3, federation(FedADMM(penalty_weight=0.2, weighting=weighting)))
    other = after(3, federation(FedDyn(penalty_weight=0.2, weighting=weighting)))
    assert_close(found.server.params, other.server.params, "three rounds", within=1e-5)


def test_the_global_weights_stay_the_mean_of_weights_plus_multiplier_over_all_clients() -> None:
    """Also when few take part, from the first round on; with uniform weighting, whatever was received."""
    method = FedADMM(penalty_weight=0.2, weighting="uniform")
    of = scripted(method, lambda t: PRESENT[1:][t])
    state = of.advance(of.advance(of.start()))
    initial = of.server_context(0, "round").initial_params()
    for name in TRAINABLE:
        kept = [state.memories[c] for c in TASK.clients if c in state.memories]
        absent = [initial[name]] * (len(TASK.clients) - len(kept))
        mean = torch.stack([m.params[name] + m.multiplier[name] for m in kept] + absent).mean(0)
        torch.testing.assert_close(state.server.params[name], mean, rtol=0, atol=1e-5)


def test_a_client_that_was_away_keeps_its_weights_and_multiplier() -> None:
    of = scripted(METHOD, lambda t: PRESENT[t])
    first = of.advance(of.start())
    second = of.advance(first)
    assert_same(whole(second)["memories"]["cyd"], whole(first)["memories"]["cyd"], "cyd, who was away")
