"""FedFomo: what a model is worth, what is mixed of it, who is sent which, and what the server remembers."""

from collections.abc import Callable
from dataclasses import replace
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
    small_task,
    usual,
)
from protofed.api.method import Method
from protofed.api.requests import Fit
from protofed.data.batches import Data
from protofed.methods._shared.mixing import entry
from protofed.methods._shared.validation import stratified_split
from protofed.methods.fedfomo import FedFomo, Models, WorthUpload, explored, mixing_weights, worths
from protofed.runtimes.sequential import Sequential
from protofed.seeds import generator
from protofed.tree import Params

METHOD = FedFomo()
FEW = FedFomo(num_models=2)


@pytest.mark.parametrize("method", [METHOD, FEW], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedFomo) -> None:
    check(method)


# ---- mixing


def test_a_model_is_worth_what_it_lowers_the_loss_by_its_distance() -> None:
    found = worths(torch.tensor(2.0), torch.tensor([1.0, 3.0, 2.0, torch.nan]), torch.tensor([4.0, 0.5, 0.0, 1.0]))
    # (2 − 1) / 4, (2 − 3) / 0.5, 0 / 1e-5; what is not a number is worth nothing.
    torch.testing.assert_close(found, torch.tensor([0.25, -2.0, 0.0, 0.0]), rtol=1e-4, atol=1e-6)
    same_place = worths(torch.tensor(2.0), torch.tensor([1.0]), torch.tensor([0.0]))
    assert same_place.item() == pytest.approx(1e5, rel=1e-4)


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
    assert explored(worth, client=0, size=2, chance=0.0, draws=generator(0)).tolist() == [3, 4]
    assert explored(worth, client=3, size=2, chance=0.0, draws=generator(0)).tolist() == [0, 4]
    assert explored(torch.zeros(1), client=0, size=1, chance=0.0, draws=generator(0)).tolist() == [0]  # alone


def test_chance_replaces_the_last_places_and_decides_among_equals() -> None:
    worth, seen = torch.tensor([9.0, 3.0, -1.0, 5.0, 4.0]), set()
    for seed in range(40):
        found = explored(worth, client=0, size=3, chance=1.0, draws=generator(seed)).tolist()
        assert len(set(found)) == 3
        assert 0 not in found
        seen |= set(found)
    assert seen == {1, 2, 3, 4}
    partly = [explored(worth, client=0, size=2, chance=0.5, draws=generator(seed)).tolist() for seed in range(40)]
    assert any(found[0] == 3 and found[1] != 4 for found in partly)
    equal = {explored(torch.zeros(5), client=0, size=1, chance=0.0, draws=generator(seed)).item() for seed in range(40)}
    assert equal == {1, 2, 3, 4}


def test_exploration_falls_from_round_to_round() -> None:
    method = FedFomo(num_models=1, exploration=1.0, exploration_decay=0.5)
    affinity = {name: torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]) for name in sorted(SIZES)}
    central = federation(method).server_context(0, "round")
    sent = {t: [method.chosen(affinity, t, central)["ann"].item() for _ in range(30)] for t in (0, 1, 2)}
    assert set(sent[2]) == {4}
    assert set(sent[0]) == {1, 2, 3, 4}
    assert 0 < sum(k != 4 for k in sent[1]) < sum(k != 4 for k in sent[0])


def test_the_first_choice_is_of_round_0_and_each_round_chooses_for_the_next() -> None:
    """Exploring in round 0 only: the first choice is by chance, the one for round 1 by worth."""
    method = FedFomo(num_models=1, exploration=1.0, exploration_decay=1.0)
    names = sorted(SIZES)
    worth = {name: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) for name in names}
    server = replace(usual(method, 0).server, affinity=worth)
    for seed in range(5):
        found = method.aggregate(server, [], federation(method, seed=seed).server_context(0, "round")).sent
        assert [found[name].item() for name in names] == [4, 4, 4, 4, 3]
    first = [federation(method, seed=seed).start().server.sent["ann"].item() for seed in range(20)]
    assert set(first) == {1, 2, 3, 4}


def test_a_client_is_sent_as_many_models_as_set_but_no_more_than_there_are_others() -> None:
    for method, size in ((METHOD, 4), (FEW, 2)):
        server = usual(method, 1).server
        message = method.message_for(server, "ann")
        assert {len(leaf) for leaf in message.params.values()} == {size}
        names = sorted(server.models)
        for k, place in enumerate(server.sent["ann"].tolist()):
            assert_same(entry(message.params, k), server.models[names[place]], f"model {k} of the message")


def test_alone_a_client_trains_on_from_its_own_model() -> None:
    of = federation(METHOD, small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]}))
    state = after(2, of)
    assert not state.failures
    assert state.server.affinity["ann"].tolist() == [0.0]


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


@pytest.mark.parametrize("client", ["ann", "eve"])
def test_a_step_mixes_by_validation_loss_and_distance_and_trains_on_the_rest(client: str) -> None:
    state, of = usual(METHOD, 2), federation(METHOD)
    message, own = METHOD.message_for(state.server, client), state.memories[client].params
    training, held = stratified_split(TASK.clients[client], 0.2, generator(3, "validation", client))
    models = [entry(message.params, k) for k in range(4)]
    worth = []
    for params in models:
        trainable = of.networks_of(client).trainable
        distance = sum((params[n] - own[n]).double().square().sum().item() for n in trainable) ** 0.5
        worth.append((loss_by_hand(own, held) - loss_by_hand(params, held)) / (distance + 1e-5))
    upload = reply_of(of, state, client).upload
    torch.testing.assert_close(upload.worth, torch.tensor(worth), rtol=1e-4, atol=1e-5)
    [fit] = fits(METHOD.train(of.client_context(client, 2), message, state.memories[client]))
    weights = [max(w, 0.0) for w in worth]
    if sum(weights):
        own = {n: sum(w * m[n].double() for w, m in zip(weights, models, strict=True)) / sum(weights) for n in own}
    assert_close(fit.params, {n: leaf.float() for n, leaf in own.items()}, "where training starts", within=1e-4)
    assert fit.data.index.tolist() == training.index.tolist()
    assert client != "eve" or any(weights)  # somebody mixes, or the mixing would not be tested


def test_in_the_first_round_nothing_is_mixed() -> None:
    of, state = federation(METHOD), usual(METHOD, 0)
    message = METHOD.message_for(state.server, "ann")
    [fit] = fits(METHOD.train(of.client_context("ann", 0), message, of.client_state(state, "ann", message)))
    assert_same(fit.params, of.server_context(0, "round").initial_params(), "where training starts")
    assert reply_of(of, state, "ann").upload.worth.tolist() == [0.0] * 4


def test_the_client_is_the_model_that_it_trained() -> None:
    state = usual(METHOD, 1)
    message, memory = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    assert METHOD.local_weights(message, memory) is memory.params
    reply = reply_of(federation(METHOD), state, "ann")
    assert METHOD.trained_weights(reply.upload, reply.memory) is reply.memory.params
    assert_same(reply.upload.params, reply.memory.params, "what is sent and kept")
    assert METHOD.public(state.server) is None


# ---- the server


def test_the_server_remembers_models_and_adds_up_what_they_were_worth() -> None:
    names = sorted(SIZES)
    server = Models(
        {name: {"w": torch.tensor([float(k)])} for k, name in enumerate(names)},
        {name: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) for name in names},
        {name: torch.tensor([4, 2]) for name in names},
    )
    uploads = [("bob", WorthUpload({"w": torch.tensor([50.0])}, torch.tensor([0.5, -2.0])))]
    found = FEW.aggregate(server, uploads, federation(FEW).server_context(0, "round"))
    assert [found.models[name]["w"].item() for name in names] == [0, 50, 2, 3, 4]
    assert found.affinity["bob"].tolist() == [1.0, 2.0, 1.0, 4.0, 5.5]
    assert found.affinity["ann"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert server.affinity["bob"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
