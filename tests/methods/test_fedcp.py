"""FedCP: three rounds against a plain reference, policy, heads and discrepancy on numbers."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch
from torch import nn

from methods.conformance import (
    CHECKS,
    TASK,
    after,
    assert_same,
    federation,
    fingerprint,
    memories,
    reply_of,
    small_network,
    usual,
)
from protofed.api.method import Method
from protofed.methods.fedcp import BANDWIDTHS, FedCP, both_heads, direction, discrepancy, logistic
from protofed.nn.networks import Model, Networks
from references import fedcp
from references.plain import largest_difference

METHOD = FedCP(discrepancy_weight=5.0)
TEST = TASK.transform.clean(TASK.tests["domain 0"].x)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None]) -> None:
    check(FedCP(discrepancy_weight=0.0))


def test_three_rounds_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight was 5e-7."""
    of = federation(METHOD)
    initial = of.server_context(0, "round").initial_params()
    shared, heads = fedcp.rounds(small_network(), initial, 3, 5.0)
    state = after(3, of)
    assert largest_difference(state.server.params, shared) < 1e-5
    for client, memory in memories(state).items():
        assert largest_difference(memory.params, heads[client]) < 1e-5
        model = of.networks_of(client).model(METHOD.local_weights(state.server, memory))
        expected = fedcp.scores(small_network(), shared, heads[client], TEST)
        torch.testing.assert_close(METHOD.predict(model, TEST, state.server, memory), expected, rtol=0, atol=1e-4)


# ---- on numbers


class Fixed(nn.Module):
    """A policy of log 3 and 0 for a feature that is 1 after its context, of 0 and 0 for one that is 0."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([log(3) * z, torch.zeros_like(z)], -1)


def fixed_model() -> Model:
    def parts() -> dict[str, nn.Module]:
        return {
            "features": nn.Identity(),
            "classifier": nn.Linear(2, 2, bias=False),
            "shared_head": nn.Linear(2, 2, bias=False),
            "policy": Fixed(),
        }

    weights = {"classifier.weight": torch.eye(2), "shared_head.weight": torch.tensor([[0.0, 10.0], [10.0, 0.0]])}
    return Networks(parts).model(weights)


def test_the_policy_divides_each_feature_between_the_heads() -> None:
    # With context (½, 0) the policy reads (1, 0): shares of the own head are 3/4 and 1/2. It has (1.5, 2) of
    # z = (2, 4); the shared head has (0.5, 2), and says (20, 5).
    z, context = torch.tensor([[2.0, 4.0]]), torch.tensor([0.5, 0.0])
    assert both_heads(fixed_model(), z, context)[0].tolist() == pytest.approx([21.5, 7.0], abs=1e-5)
    # Noise of −log 3 makes the shares 1/2 and 1/4: (1, 1) and (1, 3), of which the shared head says (30, 10).
    assert both_heads(fixed_model(), z, context, torch.tensor(-log(3)))[0].tolist() == pytest.approx(
        [31.0, 11.0], abs=1e-5
    )


def test_the_direction_of_a_head_is_the_sum_over_classes_at_length_one() -> None:
    head = {"classifier.weight": torch.tensor([[1.0, 2.0], [2.0, 2.0]]), "classifier.bias": torch.tensor([7.0, 7.0])}
    assert direction(head).tolist() == pytest.approx([0.6, 0.8])
    # Of two layers it is that of their product: (1, 1) · [[1, 2], [2, 2]] · [[0, 1], [1, 0]] = (4, 3).
    layers = {
        "classifier.0.weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        "classifier.2.weight": head["classifier.weight"],
    }
    assert direction(layers).tolist() == pytest.approx([0.8, 0.6])


def test_the_discrepancy_on_numbers() -> None:
    # Of x = {0, 2} and y = {0} twice: means of kernels are (1 + k)/2, 1 and (1 + k)/2, where k = Σ exp(−4/2a), so that
    # the sum over bandwidths is n·½ + ½k + n − n − k = ½ (n − k).
    x, y = torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([[0.0], [0.0], [9.0]])
    k = sum(exp(-2 / a) for a in BANDWIDTHS)
    found = discrepancy(x, y, torch.tensor([1.0, 1.0, 0.0]))
    assert found.item() == pytest.approx((len(BANDWIDTHS) - k) / 2, abs=1e-6)
    assert discrepancy(x, x, torch.ones(3)).item() == pytest.approx(0, abs=1e-6)


def test_noise_is_that_of_the_difference_of_two_gumbel_numbers() -> None:
    """Whose distribution is logistic: below log 3 in three cases of four."""
    draws = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    noise = logistic(draws)
    assert (noise < log(3)).double().mean().item() == pytest.approx(0.75, abs=0.005)
    assert torch.isfinite(logistic(torch.tensor([-6.0, 6.0]))).all()  # as far as a batch's draws go
    uniform = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(1))
    gumbel = -(-uniform.log()).log()
    assert ((gumbel[0] - gumbel[1]) < log(3)).double().mean().item() == pytest.approx(0.75, abs=0.005)


# ---- the step


def test_half_of_the_own_head_is_sent_and_the_shared_head_does_not_train() -> None:
    state, of = usual(METHOD, 1), federation(METHOD)
    reply = reply_of(of, state, "ann")
    for name in ("weight", "bias"):
        own, received = reply.memory.params[f"classifier.{name}"], state.server.params[f"shared_head.{name}"]
        torch.testing.assert_close(reply.upload.params[f"shared_head.{name}"], (own + received) / 2)
    assert {name.partition(".")[0] for name in reply.upload.params} == {"features", "policy", "shared_head"}
    assert {name.partition(".")[0] for name in reply.memory.params} == {"classifier"}


def test_both_heads_begin_alike() -> None:
    initial = federation(METHOD).server_context(0, "round").initial_params()
    assert_same(initial["shared_head.weight"], initial["classifier.weight"], "the heads")


def test_predictions_are_not_random_and_training_is() -> None:
    state, of = usual(METHOD, 1), federation(METHOD)
    model = of.networks_of("ann").model(METHOD.local_weights(state.server, state.memories["ann"]))
    said = [METHOD.predict(model, TEST, state.server, state.memories["ann"]) for _ in range(2)]
    assert_same(said[0], said[1], "two predictions")
    assert fingerprint(after(1, federation(METHOD, seed=4)).server) != fingerprint(state.server)
