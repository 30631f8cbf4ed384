"""FedFomo: what a model is worth, what is mixed of it, who is sent which, and what the server remembers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    examples,
    federation,
    loaded,
    reply_of,
    scripted,
    small_task,
    usual,
)
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.requests import Fit
from protofed.data.batches import Data
from protofed.methods._shared.mixing import stacked
from protofed.methods._shared.validation import stratified_split
from protofed.methods.families import Weights
from protofed.methods.fedfomo import (
    FedFomo,
    Models,
    UsedAndTrained,
    Worth,
    explored,
    mixing_weights,
    normalised,
    worths,
)
from protofed.runtimes.sequential import Sequential
from protofed.seeds import generator
from protofed.tree import Nothing, Params

METHOD = FedFomo()
FEW = FedFomo(num_models=2)
TRAINED = FedFomo(baseline="trained", distance="l2")


@pytest.mark.parametrize("method", [METHOD, FEW, TRAINED], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedFomo) -> None:
    check(method)


# ---- mixing


def test_a_model_is_worth_what_it_lowers_the_loss_by_its_distance() -> None:
    found = worths(torch.tensor(2.0), torch.tensor([1.0, 3.0, 2.0, torch.nan]), torch.tensor([4.0, 0.5, 0.0, 1.0]))
    # (2 − 1) / 4 and (2 − 3) / 0.5; 0 / 0 and what is not a number are worth nothing.
    assert found.tolist() == [0.25, -2.0, 0.0, 0.0]
    same_place = worths(torch.tensor(2.0), torch.tensor([1.0]), torch.tensor([0.0]))
    assert same_place.tolist() == [0.0]


def test_distances_are_over_the_named_entries_in_either_norm() -> None:
    baseline = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.0]]), "mean": torch.tensor([9.0])}
    models = [{"a": torch.tensor([4.0, 2.0]), "b": torch.tensor([[-4.0]]), "mean": torch.tensor([0.0])}, baseline]
    # The differences are 3, 0 and −4; the statistics do not count.
    assert METHOD.distances(models, baseline, ("a", "b")).tolist() == [7.0, 0.0]
    assert TRAINED.distances(models, baseline, ("a", "b")).tolist() == [5.0, 0.0]


def test_the_affinity_of_a_round_is_divided_by_the_sum_of_its_sizes() -> None:
    assert normalised(torch.tensor([1.0, -2.0, 1.0])).tolist() == [0.25, -0.5, 0.25]  # by 4
    assert normalised(torch.tensor([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_weights_are_positive_and_sum_to_1_or_all_0() -> None:
    assert mixing_weights(torch.tensor([2.0, -1.0, 6.0])).tolist() == [0.25, 0.0, 0.75]
    assert mixing_weights(torch.tensor([-2.0, 0.0])).tolist() == [0.0, 0.0]
    for seed in range(50):
        worth = torch.randn(4, generator=torch.Generator().manual_seed(seed)) - 1
        weights = mixing_weights(worth)
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(1.0 if (worth > 0).any() else 0.0, abs=1e-12)


# ---- validation examples


def test_validation_examples_are_drawn_class_by_class_and_are_not_trained_on() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 20)[torch.randperm(35, generator=generator(0))]
    data = examples(labels, 0)
    training, held = stratified_split(data, 0.2, generator(1))
    assert sorted([*training.index.tolist(), *held.index.tolist()]) == list(range(35))
    assert torch.bincount(held.labels).tolist() == [2, 1, 4]
    assert held.index.tolist() != stratified_split(data, 0.2, generator(2))[1].index.tolist()


def test_too_few_examples_validate_and_train_at_once() -> None:
    data = Data.of(torch.zeros(1, 2), torch.tensor([0]))
    for seed in range(8):  # by chance the only one would be held, or not
        training, held = stratified_split(data, 0.2, generator(seed))
        assert (len(training), len(held)) == (1, 1)


# ---- who is sent which


def test_the_models_worth_most_are_sent_and_never_the_own_one() -> None:
    worth = torch.tensor([9.0, 3.0, -1.0, 5.0, 4.0])
    assert explored(worth, client=0, size=2, chance=0.0, draws=generator(0)) == [3, 4]
    assert explored(worth, client=3, size=2, chance=0.0, draws=generator(0)) == [0, 4]
    assert explored(torch.zeros(1), client=0, size=1, chance=0.0, draws=generator(0)) == [0]  # alone


def test_chance_decides_for_each_place_and_among_equals() -> None:
    worth, seen = torch.tensor([9.0, 3.0, -1.0, 5.0, 4.0]), set()
    for seed in range(40):
        found = explored(worth, client=0, size=3, chance=1.0, draws=generator(seed))
        assert len(set(found)) == 3
        assert 0 not in found
        seen |= set(found)
    assert seen == {1, 2, 3, 4}
    partly = [explored(worth, client=0, size=2, chance=0.5, draws=generator(seed)) for seed in range(80)]
    assert any(found[0] == 3 and found[1] != 4 for found in partly)  # the first by worth, the second by chance
    assert any(found[0] in (1, 2) and found[1] == 3 for found in partly)  # the first by chance, the second by worth
    equal = {explored(torch.zeros(5), client=0, size=1, chance=0.0, draws=generator(seed))[0] for seed in range(40)}
    assert equal == {1, 2, 3, 4}


def test_exploration_falls_from_round_to_round_beginning_with_the_first() -> None:
    method = FedFomo(num_models=1, exploration=1.0, exploration_decay=0.5)
    affinity = {name: torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]) for name in sorted(SIZES)}
    contexts = {t: federation(method).server_context(t, "round") for t in (0, 1)}
    sent = {t: [method.chosen(affinity, contexts[t])["ann"][0] for _ in range(30)] for t in (0, 1)}
    assert set(sent[1]) == {4}  # 1 − 2 · 0.5: nothing is left to chance
    assert 0 < sum(k != 4 for k in sent[0]) < 30  # by chance every other time, and then not always another


def test_a_client_is_sent_as_many_models_as_set_but_no_more_than_there_are_others() -> None:
    for method, size in ((METHOD, 4), (FEW, 2)):
        found = method.chosen(usual(method, 1).server.affinity, federation(method).server_context(1, "round"))
        assert list(found) == sorted(SIZES)
        for k, places in enumerate(found.values()):
            assert len(set(places)) == size
            assert k not in places


def test_alone_a_client_trains_on_from_its_own_model() -> None:
    of = federation(METHOD, small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]}))
    state = after(2, of)
    assert not state.failures
    memory = state.memories["ann"]
    assert_same(memory.params, memory.trained, "training helped, so what is used is what was trained")


# ---- the step


def fits(step: Any) -> list[Fit]:
    found, answer = [], None
    while True:
        try:
            request = step.send(answer)
        except StopIteration:
            return found
        answer = Sequential().answer(request)
        found += [request] if isinstance(request, Fit) else []


def loss_by_hand(params: Params, data: Data) -> float:
    parts = loaded(params, training=False)
    with torch.no_grad():
        scores = parts["classifier"](parts["features"](TASK.transform.clean(data.x[data.index])))
    return F.cross_entropy(scores, data.labels).item()


def test_a_client_trains_from_the_model_that_it_uses_on_what_it_does_not_validate_with() -> None:
    before, of = usual(METHOD, 1), federation(METHOD)
    training, _ = stratified_split(TASK.clients["eve"], 0.2, generator(3, "validation", "eve"))
    [fit] = fits(METHOD.train(of.client_context("eve", 1), Nothing(), before.memories["eve"]))
    assert_same(fit.params, before.memories["eve"].params, "where training starts")
    assert fit.data.index.tolist() == training.index.tolist()
    reply = reply_of(of, before, "eve")
    assert_same(reply.upload.params, reply.memory.trained, "what is sent and kept")
    assert_same(reply.memory.params, before.memories["eve"].params, "what is used, until it is mixed")


@pytest.mark.parametrize("distance", ["l1", "l2"])
@pytest.mark.parametrize("baseline", ["before_training", "trained"])
def test_a_round_mixes_as_a_slow_reference_does(baseline: Any, distance: Any) -> None:
    """θ ← θ + Σ wₙ (θₙ − θ) / Σ w, by plain torch; everyone is sent all others, in whatever order."""
    method = FedFomo(baseline=baseline, distance=distance)
    before, state = usual(method, 1), usual(method, 2)
    names, num_mixed = sorted(SIZES), 0
    trained = {name: state.memories[name].trained for name in names}
    for k, client in enumerate(names):
        _, held = stratified_split(TASK.clients[client], 0.2, generator(3, "validation", client))
        theta = before.memories[client].params if baseline == "before_training" else trained[client]
        worth = []
        for name in names:
            gaps = [(trained[name][n] - theta[n]).double() for n in federation(method).networks_of(client).trainable]
            l1, l2 = sum(g.abs().sum().item() for g in gaps), sum(g.square().sum().item() for g in gaps) ** 0.5
            saved = loss_by_hand(theta, held) - loss_by_hand(trained[name], held)
            far = l1 if distance == "l1" else l2
            worth.append(saved / far if far else 0.0)
        added = state.server.affinity[client] - before.server.affinity[client]
        expected = torch.tensor([w / sum(map(abs, worth)) for w in worth])
        expected[k] = 0.0  # the own model is always a candidate
        torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)
        weights = [max(w, 0.0) for w in worth]
        mixed = dict(theta)
        if sum(weights):
            for n, leaf in theta.items():
                steps = [
                    w / sum(weights) * (trained[m][n].double() - leaf) for w, m in zip(weights, names, strict=True)
                ]
                mixed[n] = (leaf + sum(steps)).float()
        num_mixed += sum(w > 0 for w in weights) > 1
        assert_close(state.memories[client].params, mixed, f"the mixture of {client}", within=1e-4)
    assert num_mixed  # somebody mixes, or the mixing would not be tested


def step_of(method: FedFomo, client: str, message: Weights, memory: UsedAndTrained) -> Reply[Worth, UsedAndTrained]:
    """What a client replies when it is told to mix."""
    step, answer = method.mix(federation(method).client_context(client, 1), message, memory), None
    while True:
        try:
            answer = Sequential().answer(step.send(answer))
        except StopIteration as stop:
            return stop.value


def test_the_own_trained_model_is_a_candidate_unless_it_is_the_baseline() -> None:
    """Offered only what it started from, a client keeps its training; as the baseline, what it trained stays too."""
    trained = usual(METHOD, 2).memories["ann"].trained
    initial = federation(METHOD).server_context(0, "round").initial_params()
    message, memory = Weights(stacked([initial])), UsedAndTrained(initial, trained)
    reply = step_of(METHOD, "ann", message, memory)
    assert reply.upload.worth[0] > 0
    assert reply.upload.worth[1] == 0
    assert_same(reply.memory.params, trained, "what is used")
    reply = step_of(TRAINED, "ann", message, memory)
    assert reply.upload.worth[0] == 0
    assert reply.upload.worth[1] < 0
    assert_same(reply.memory.params, trained, "what is used, nothing being better")


def test_a_training_that_does_harm_is_undone() -> None:
    """With the baseline before training: nothing is better than it, so it stays; with the trained one the best does."""
    initial, trained = federation(METHOD).server_context(0, "round").initial_params(), usual(METHOD, 2).memories["ann"]
    message, memory = Weights(stacked([initial])), UsedAndTrained(trained.trained, initial)
    assert_same(step_of(METHOD, "ann", message, memory).memory.params, trained.trained, "what is used")
    assert_same(step_of(TRAINED, "ann", message, memory).memory.params, initial, "what is used, all being equal")


def test_a_client_uses_the_mixture_and_is_judged_as_trained_right_after_training() -> None:
    state = usual(METHOD, 2)
    memory = state.memories["ann"]
    assert METHOD.local_weights(Nothing(), memory) is memory.params
    assert METHOD.trained_weights(Weights(memory.trained), memory) is memory.trained
    assert METHOD.public(state.server) is None


# ---- the server


def test_the_server_remembers_the_last_model_of_everyone() -> None:
    names = sorted(SIZES)
    affinity = {name: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) for name in names}
    server = Models({name: {"w": torch.tensor([float(k)])} for k, name in enumerate(names)}, affinity)
    uploads = [("bob", Weights({"w": torch.tensor([50.0])}))]
    found = FEW.aggregate(server, uploads, federation(FEW).server_context(0, "round"))
    assert [found.models[name]["w"].item() for name in names] == [0, 50, 2, 3, 4]
    assert server.models["bob"]["w"].item() == 1


def test_models_are_sent_from_this_round_and_affinities_change_of_those_that_took_part() -> None:
    of = scripted(METHOD, lambda t: ("ann", "bob"))
    state = of.advance(of.start())
    assert_same(state.server.models["ann"], state.memories["ann"].trained, "what the server has of ann")
    initial = of.server_context(0, "round").initial_params()
    assert_same(state.server.models["eve"], initial, "what the server has of eve, which never trained")
    assert state.server.affinity["ann"].any()
    assert not state.server.affinity["eve"].any()
