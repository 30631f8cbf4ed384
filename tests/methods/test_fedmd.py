"""FedMD: the consensus, the steps of a round and their order, and tasks without public examples."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    SIZES,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    batch_of,
    examples,
    federation,
    fingerprint,
    identity_model,
    labels_of,
    loaded,
    mean_cross_entropy,
    small_network,
    trained_by_hand,
    usual,
)
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Uploads
from protofed.api.requests import Fit, Map
from protofed.data.batches import Data, batch_at, training_plan
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.errors import BadInput
from protofed.methods.fedmd import Consensus, FedMD, OwnModel, Scores, digest_loss, drawn
from protofed.methods.local import LocalOnly
from protofed.nn.networks import Parts
from protofed.tree import Params

STORE = examples(labels_of(30, 9), 9)
PUBLIC = STORE.rows(torch.arange(29, 3, -1))
"""26 rows of a store of 30, last first: positions in the set are not rows of the store."""
PUBLIC_TASK = dataclasses.replace(TASK, public=PUBLIC)


@dataclass(frozen=True)
class OnPublic(FedMD):
    """The method on a task with public examples, which the task of the conformance suite lacks."""

    def init_server(self, central: ServerContext) -> Consensus:
        return super().init_server(shared(central))

    def aggregate(self, server: Consensus, uploads: Uploads[Scores], central: ServerContext) -> Consensus:
        return super().aggregate(server, uploads, shared(central))

    async def train(self, local: ClientContext, message: Consensus, memory: OwnModel) -> Reply[Scores, OwnModel]:
        return await super().train(dataclasses.replace(local, public=PUBLIC), message, memory)


def shared(central: ServerContext) -> ServerContext:
    return dataclasses.replace(central, spec=dataclasses.replace(central.spec, public=PUBLIC))


SHORT = OnPublic(alignment_size=10, first_epochs=2)


@pytest.mark.parametrize("method", [OnPublic(), SHORT, OnPublic(first_epochs=0, digest_epochs=2)], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedMD) -> None:
    check(method)


def test_the_double_is_the_method_on_a_task_with_public_examples() -> None:
    method = FedMD(alignment_size=10, first_epochs=2)
    state = after(2, federation(method, PUBLIC_TASK))
    assert_same(state.server, usual(SHORT, 2).server, "the server")
    assert_same(state.memories, usual(SHORT, 2).memories, "the memories")


def test_a_task_without_public_examples_is_refused() -> None:
    with pytest.raises(BadInput, match="FedMD needs public examples, and the task small has none"):
        federation(FedMD(), dataclasses.replace(TASK, public=None)).start()


# ---- the server


def test_the_consensus_is_the_plain_mean_of_the_scores() -> None:
    before = usual(SHORT, 1).server
    uploads = [(name, Scores(torch.full((10, CLASSES), value))) for name, value in (("ann", 1.0), ("bob", 4.0))]
    central = federation(SHORT).server_context(1, "round")
    server = SHORT.aggregate(before, iter(uploads), central)
    # (1 + 4) / 2, although ann has more examples.
    assert (server.scores == 2.5).all()
    assert torch.equal(server.index, before.wanted)
    assert server.exists == 1


def test_examples_are_drawn_anew_for_every_round_without_repetition() -> None:
    states = [usual(SHORT, rounds).server for rounds in (0, 1, 2, 3)]
    for server in states:
        assert len(set(server.wanted.tolist())) == 10
        assert 0 <= min(server.wanted) <= max(server.wanted) < len(PUBLIC)
    assert len({tuple(server.wanted.tolist()) for server in states}) == 4
    for before, server in pairwise(states):
        assert torch.equal(server.index, before.wanted)
    assert states[0].exists == 0


def test_a_small_public_set_is_used_as_a_whole() -> None:
    server = usual(OnPublic(), 1).server
    assert server.wanted.tolist() == list(range(26))
    assert server.scores.shape == (26, CLASSES)


def test_draws_reach_every_example() -> None:
    central = shared(federation(SHORT).server_context(0, "round"))
    seen = {i for _ in range(60) for i in drawn(central, 5).tolist()}
    assert seen == set(range(26))


# ---- the client


def test_the_digest_is_the_mean_absolute_difference_of_scores() -> None:
    # Scores are the inputs. Row 0 of the store has the second entry of the consensus, (0, 1); row 1 the first, (4, 4).
    # |2 − 0|, |5 − 1|: mean 3. |4 − 4|, |1 − 4|: mean 1.5. Together 2.25; the third row only fills the batch.
    model = identity_model([[1.0, 0.0], [0.0, 1.0]])
    batch = batch_of([[2.0, 5.0], [4.0, 1.0], [9.0, 9.0]], [0, 0, 0], [1, 1, 0])
    found = digest_loss(model, batch, torch.tensor([[4.0, 4.0], [0.0, 1.0]]), torch.tensor([1, 0, 0]))
    assert found.item() == pytest.approx(2.25)


def requests_of(method: FedMD, rounds: int, client: str = "ann") -> list[Any]:
    """What a client asks of the runtime in the next round."""
    of, state = federation(method), usual(method, rounds)
    step = method.train(of.client_context(client, rounds), state.server, of.client_state(state, client, state.server))
    seen, answer = [], None
    while True:
        try:
            seen.append(step.send(answer))
        except StopIteration:
            return seen
        answer = of.runtime.answer(seen[-1])


def test_the_first_round_is_training_alone_and_later_ones_digest_before_they_revisit() -> None:
    first, later = requests_of(SHORT, 0), requests_of(SHORT, 1)
    assert [type(r) for r in first] == [Fit, Fit, Map]
    assert [r.epochs for r in first[:2]] == [2, TRAINING.epochs]
    assert all(r.data is TASK.clients["ann"] for r in first[:2])
    digest, revisit, score = later
    assert (type(digest), type(revisit), type(score)) == (Fit, Fit, Map)
    known = usual(SHORT, 1).server
    assert digest.data.index.tolist() == PUBLIC.index[known.index].tolist()
    assert (digest.objectives[0].loss, digest.epochs) == (digest_loss, 1)
    assert digest.transform == Transform()
    assert revisit.data is TASK.clients["ann"]
    assert revisit.transform == TASK.transform
    assert score.data.index.tolist() == PUBLIC.index[known.wanted].tolist()


def test_a_newcomer_trains_first_and_then_digests() -> None:
    of, state = federation(SHORT), usual(SHORT, 2)
    step = SHORT.train(
        of.client_context("bob", 2), state.server, SHORT.init_memory(of.client_context("bob", 2), state.server)
    )
    first = step.send(None)
    assert first.data is TASK.clients["bob"]
    digest = step.send(of.runtime.answer(first))
    assert digest.objectives[0].loss is digest_loss
    step.close()


def digested_by_hand(params: Params, known: Consensus, seed: int) -> Params:
    """One epoch of L1 regression on the consensus, by a plain torch loop."""
    parts = loaded(params, training=True)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    sgd = TRAINING.optimizer
    optimizer = torch.optim.SGD(named.values(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    data = Data(STORE.x, STORE.y, PUBLIC.index[known.index])
    target = {row: known.scores[k] for k, row in enumerate(data.index.tolist())}
    plan = training_plan(data, TRAINING.batch_size, 1, Transform(), torch.Generator().manual_seed(seed))
    for step in range(len(plan.index)):
        batch = batch_at(data, plan, step, Transform())
        rows = batch.weight > 0
        wanted = torch.stack([target[row] for row in batch.index.tolist()])
        optimizer.zero_grad()
        F.l1_loss(parts["classifier"](parts["features"](batch.x))[rows], wanted[rows]).backward()
        optimizer.step()
    state: dict[str, Tensor] = {f"{part}.{n}": leaf for part, m in parts.items() for n, leaf in m.state_dict().items()}
    return {name: state[name].detach() for name in params}


def test_a_round_is_digest_revisit_and_scores() -> None:
    state = usual(SHORT, 1)
    digest, _, _ = requests_of(SHORT, 1)
    params = digested_by_hand(state.memories["ann"].params, state.server, digest.seed)
    params, _ = trained_by_hand(params, "ann", mean_cross_entropy, round=1, fit=1)
    ended = usual(SHORT, 2)
    assert_close(ended.memories["ann"].params, params, "ann's model", within=2e-5)
    total = torch.zeros(10, CLASSES, dtype=torch.float64)
    x = TASK.transform.clean(STORE.x[PUBLIC.index[state.server.wanted]])
    for client in SIZES:
        parts = loaded(ended.memories[client].params, training=False)
        with torch.no_grad():
            total += parts["classifier"](parts["features"](x)).double()
    assert_close(ended.server.scores, (total / 5).float(), "the consensus", within=1e-5)


def test_every_public_example_is_held_to_its_own_scores() -> None:
    """With a consensus so uneven that the signs of the differences tell its rows apart."""
    of, state = federation(SHORT), usual(SHORT, 1)
    uneven = torch.randn(10, CLASSES, generator=torch.Generator().manual_seed(5))
    server, memory = dataclasses.replace(state.server, scores=uneven), state.memories["ann"]
    digest = SHORT.train(of.client_context("ann", 1), server, memory).send(None)
    expected = digested_by_hand(memory.params, server, digest.seed)
    assert_close(of.runtime.answer(digest).params, expected, "after the digest", within=1e-5)


def test_without_first_epochs_the_first_round_is_local_training() -> None:
    method = OnPublic(first_epochs=0)
    found = {c: m.params for c, m in usual(method, 1).memories.items()}
    alone = {c: m.params for c, m in usual(LocalOnly(), 1).memories.items()}
    assert_same(found, alone, "the models after one round")
    assert all(memory.has_trained == 1 for memory in usual(method, 1).memories.values())
    assert fingerprint(usual(method, 2).memories["ann"].params) != fingerprint(usual(LocalOnly(), 2).memories["ann"])


def wider_for_bob(client: str) -> Parts:
    if client != "bob":
        return small_network(client)
    return {
        "features": nn.Sequential(nn.Flatten(), nn.Linear(192, 20), nn.ReLU()),
        "classifier": nn.Linear(20, CLASSES),
    }


def test_networks_may_differ_altogether() -> None:
    method = FedMD(alignment_size=10, first_epochs=0)
    task = dataclasses.replace(PUBLIC_TASK, model=wider_for_bob)
    state = after(3, Federation(method, task, TRAINING))
    assert not state.failures
    assert state.memories["bob"].params.keys() != state.memories["ann"].params.keys()


def test_labels_of_public_examples_are_not_used() -> None:
    spoilt = Data(STORE.x, torch.zeros_like(STORE.y), PUBLIC.index)
    method = FedMD(alignment_size=10, first_epochs=0)
    states = [after(2, federation(method, dataclasses.replace(TASK, public=public))) for public in (PUBLIC, spoilt)]
    assert_same(states[1].memories, states[0].memories, "the models")
