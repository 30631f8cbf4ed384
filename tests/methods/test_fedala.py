"""FedALA: how the mixing is learnt, what a client starts from, and FedAvg where nothing is mixed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    loaded,
    mean_cross_entropy,
    reply_of,
    usual,
)
from protofed import tree
from protofed.api.contexts import ClientContext
from protofed.api.method import Method
from protofed.api.requests import Fit
from protofed.data.batches import Batch, batch_at, training_plan
from protofed.methods.families import Weights
from protofed.methods.fedala import Bounded, FedALA, Mixing, drawn, is_steady, last_layers, mixture
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed
from protofed.tree import Params

METHOD = FedALA()
ALL = FedALA(mixed="all")
TWO = FedALA(mixed_layers=2)


@pytest.mark.parametrize("method", [METHOD, ALL, TWO], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedALA) -> None:
    check(method)


def asked(step: Any) -> list[tuple[Fit, Params]]:
    """Each fit that a step asks for, with the answer."""
    fits, answer = [], None
    while True:
        try:
            request = step.send(answer)
        except StopIteration:
            return fits
        answer = Sequential().answer(request)
        if isinstance(request, Fit):
            fits.append((request, answer.params))


def in_round(method: FedALA, rounds: int, client: str = "ann") -> tuple[ClientContext, Weights, Mixing]:
    """What a client's step is given after so many rounds."""
    state = usual(method, rounds)
    return (
        federation(method).client_context(client, rounds),
        method.message_for(state.server, client),
        state.memories[client],
    )


# ---- the mixing


def test_shares_descend_and_stay_between_0_and_1() -> None:
    shares = {"w": torch.tensor([0.5, 0.1, 0.9])}
    slope = {"w": torch.tensor([0.1, 0.2, -0.2])}
    found, _ = Bounded(2.0).step(lambda params: slope, shares, Bounded(2.0).init(shares))
    # 0.5 − 0.2, 0.1 − 0.4 cut to 0, 0.9 + 0.4 cut to 1
    torch.testing.assert_close(found["w"], torch.tensor([0.3, 0.0, 1.0]))


def test_the_mixture_is_local_plus_the_share_of_the_way_to_the_global() -> None:
    own, received = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([3.0, 3.0, 0.7])
    memory = Mixing({"w": own, "b": own}, {}, torch.tensor(1))
    # 1 + 0.25 · 2; a share of 0 is the own weight and one of 1 the global one, to the last bit.
    found = mixture(Weights({"w": received, "b": received}), memory, {"w": torch.tensor([0.25, 0.0, 1.0])})
    assert found.keys() == {"w"}
    assert found["w"].tolist() == [1.5, 1.0, received[2].item()]


@pytest.mark.parametrize(("method", "mixed"), [(METHOD, "classifier"), (ALL, "")], ids=["classifier", "all"])
def test_one_pass_moves_shares_by_the_gradient_at_the_mixture_times_global_minus_local(
    method: FedALA, mixed: str
) -> None:
    local, message, memory = in_round(method, 2)
    data = drawn(local, 0.8)
    found = Sequential()._drive(method.one_pass(local, message, memory, data)).shares
    # By hand: W ← clip(W − η ∇L ⊙ (global − local)), ∇L by plain torch at local + (global − local) ⊙ W.
    own, received, shares = memory.params, message.params, dict(memory.shares)
    seed = derive_seed(derive_seed(TRAINING.seed, "step", "ann", 2, "round", 1), "request", 0)
    plan = training_plan(data, TRAINING.batch_size, 1, TASK.transform, torch.Generator().manual_seed(seed))
    for step in range(len(plan.index)):
        batch = batch_at(data, plan, step, TASK.transform)
        blend = {n: own[n] + (received[n] - own[n]) * share for n, share in shares.items()}
        parts = loaded({**received, **blend}, training=True)
        mean_cross_entropy(parts, parts["features"](batch.x), batch).backward()
        slopes = {f"{part}.{n}": p.grad for part, module in parts.items() for n, p in module.named_parameters()}
        for name in shares:
            shares[name] = (shares[name] - 1.0 * slopes[name] * (received[name] - own[name])).clamp(0, 1)
    assert all(name.startswith(mixed) for name in shares)
    assert_close(found, shares, "shares after one pass", within=1e-5)
    assert fingerprint(found) != fingerprint(memory.shares)


def test_the_mixing_is_learnt_until_steady_at_first_and_for_one_pass_afterwards() -> None:
    """Eleven losses are the least that can be steady; after the passes comes the training itself."""
    loose, never = FedALA(threshold=1e9), FedALA(threshold=0.0)
    assert [len(asked(loose.train(*in_round(loose, t)))) for t in (1, 2)] == [11 + 1, 1 + 1]
    assert len(asked(never.train(*in_round(never, 1)))) == 100 + 1


def test_losses_are_steady_when_the_last_ten_hardly_differ() -> None:
    # 5 and then ten losses that are 1 and 2 in turn: standard deviation 0.5.
    losses = [5.0] + [1.0, 2.0] * 5
    assert is_steady(losses, 0.51)
    assert not is_steady(losses, 0.5)
    assert not is_steady(losses[1:], 0.51)  # ten are not enough


def test_the_mixing_is_learnt_from_a_part_of_the_examples_drawn_anew() -> None:
    local, later = federation(METHOD).client_context("ann", 1), federation(METHOD).client_context("ann", 2)
    rows = drawn(local, 0.8).index.tolist()
    assert len(rows) == len(set(rows)) == 8  # ⌊0.8 · 11⌋
    assert set(rows) <= set(TASK.clients["ann"].index.tolist())
    assert rows != drawn(later, 0.8).index.tolist()
    assert rows == drawn(local, 0.8).index.tolist()
    assert len(drawn(local, 0.01)) == 1


def test_the_drawn_examples_are_those_that_passes_see() -> None:
    fits = asked(METHOD.train(*in_round(METHOD, 2)))
    assert [len(fit.data) for fit, _ in fits] == [8, 11]


# ---- the step


@pytest.mark.parametrize("method", [METHOD, ALL], ids=repr)
def test_training_starts_from_the_mixture_and_the_global_rest(method: FedALA) -> None:
    local, message, memory = in_round(method, 2)
    *passes, (last, trained) = asked(method.train(local, message, memory))
    shares = tree.select(passes[-1][1], list(memory.shares))
    expected = {**message.params, **mixture(message, memory, shares)}
    assert_same(last.params, expected, "where training starts")
    statistics = ["features.1.running_mean", "features.1.running_var"]
    assert_same(tree.select(last.params, statistics), tree.select(message.params, statistics), "the statistics")
    reply = reply_of(federation(method), usual(method, 2), "ann")
    assert_same(reply.upload.params, trained, "what is sent")
    assert_same(reply.memory.params, trained, "what is kept")
    assert_same(reply.memory.shares, shares, "the shares that are kept")
    assert reply.memory.num_trained.item() == 3


def test_shares_cover_the_classifier_or_all_parameters_start_at_1_and_stay_in_range() -> None:
    classifier = {"classifier.weight", "classifier.bias"}
    trainable = set(federation(ALL).networks_of("ann").trainable)
    for method, names in ((METHOD, classifier), (ALL, trainable)):
        local, message, memory = in_round(method, 3)
        assert memory.shares.keys() == names
        assert all((share >= 0).all() and (share <= 1).all() for share in memory.shares.values())
        assert any((share < 1).any() for share in memory.shares.values())
        first = method.init_memory(local, message)
        assert all((share == 1).all() for share in first.shares.values())


def test_layers_are_counted_from_the_top_and_have_all_their_parameters() -> None:
    names = ("features.0.weight", "features.0.bias", "features.1.weight", "classifier.weight", "classifier.bias")
    with_projection = (*names, "projection.0.weight", "projection.2.weight")  # built last, but below the classifier
    assert last_layers(names, 1) == names[3:]
    assert last_layers(names, 2) == names[2:]
    assert last_layers(names, 3) == last_layers(names, 9) == names
    assert last_layers(with_projection, 2) == (*names[3:], "projection.2.weight")
    assert last_layers(with_projection, 4) == (*names[2:], *with_projection[5:])


def test_so_many_of_the_last_layers_are_mixed() -> None:
    """The small network has a convolution, a BatchNorm and a classifier."""
    batch_norm = {"features.1.weight", "features.1.bias"}
    local, message, memory = in_round(TWO, 2)
    assert memory.shares.keys() == {"classifier.weight", "classifier.bias"} | batch_norm
    *_, (last, _) = asked(TWO.train(local, message, memory))
    mixed = {name for name in memory.shares if not torch.equal(last.params[name], message.params[name])}
    assert mixed & batch_norm
    body = [name for name in message.params if name.startswith("features.0")]
    assert_same(tree.select(last.params, body), tree.select(message.params, body), "what is not mixed")


@pytest.mark.parametrize(("count", "same"), [(1, METHOD), (3, ALL), (9, ALL)])
def test_the_classifier_and_all_layers_can_be_counted_too(count: int, same: FedALA) -> None:
    found = after(3, federation(FedALA(mixed_layers=count)))
    assert_same(found.server, usual(same, 3).server, "three rounds")


def test_added_terms_do_not_see_shares_in_the_place_of_weights() -> None:
    def term(model: Model, batch: Batch) -> Tensor:
        return model.params["classifier.weight"].sum()

    local, message, memory = in_round(METHOD, 2)
    fits = asked(METHOD.train(local.with_loss_term(term), message, memory))
    assert [len(fit.context) for fit, _ in fits] == [2, 3]  # the term's own context comes last


def test_the_client_is_what_it_trained_last() -> None:
    _, message, memory = in_round(METHOD, 2)
    assert METHOD.local_weights(message, memory) is memory.params
    reply = reply_of(federation(METHOD), usual(METHOD, 2), "ann")
    assert_same(METHOD.trained_weights(reply.upload, reply.memory), reply.upload.params, "right after training")


# ---- identities


def test_with_shares_fixed_at_1_it_is_fedavg() -> None:
    fixed, fedavg = after(3, federation(FedALA(mixing_rate=0.0))), after(3, federation(FedAvg()))
    assert_same(fixed.server, fedavg.server, "three rounds")


def test_the_first_round_is_that_of_fedavg_and_the_next_is_not() -> None:
    assert_same(usual(METHOD, 1).server, usual(FedAvg(), 1).server, "one round")
    assert fingerprint(usual(METHOD, 2).server) != fingerprint(usual(FedAvg(), 2).server)
