"""IFCA: clients choose the model of the lowest loss, and each model is the mean over those who chose it."""

from collections.abc import Callable, Iterator
from math import log
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
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.methods._shared.losses import summed_cross_entropy
from protofed.methods._shared.mixing import entry, stacked
from protofed.methods.families import Weights
from protofed.methods.ifca import IFCA, Choice, ClusterUpload, LowestLoss
from protofed.runtimes.jobs import Failure, Reason
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params

METHOD = IFCA()
BY_EXAMPLES = IFCA(num_clusters=2, weighting="examples")


RESTARTED = IFCA(num_clusters=2, restarts=3)


@pytest.mark.parametrize("method", [METHOD, BY_EXAMPLES, RESTARTED], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: IFCA) -> None:
    check(method)


def loss_by_hand(params: Params, client: str) -> float:
    """Mean cross-entropy on the client's unvaried examples, in evaluation mode."""
    parts, data = loaded(params, training=False), TASK.clients[client]
    with torch.no_grad():
        scores = parts["classifier"](parts["features"](TASK.transform.clean(data.x[data.index])))
    return F.cross_entropy(scores, data.labels).item()


def test_a_client_chooses_the_model_of_the_lowest_loss_and_trains_it() -> None:
    state, of = usual(METHOD, 1), federation(METHOD)
    chosen = {}
    for client in TASK.clients:
        models = [entry(state.server.params, k) for k in range(4)]
        losses = [loss_by_hand(params, client) for params in models]
        chosen[client] = losses.index(min(losses))
        reply = reply_of(of, state, client)
        assert reply.memory.cluster.item() == chosen[client]
        assert reply.upload.count.tolist() == [SIZES[client] if k == chosen[client] else 0 for k in range(4)]
        expected, _ = trained_by_hand(models[chosen[client]], client, mean_cross_entropy, round=1, fit=4)
        assert_close(reply.upload.params, expected, f"what {client} trained", within=1e-5)
    assert len(set(chosen.values())) > 1  # or the choice would not be tested


def uploads() -> list[tuple[str, ClusterUpload]]:
    """Two clients at model 0, one at model 2, none at model 1."""
    sent = {"ann": (1.0, [3, 0, 0]), "bob": (5.0, [1, 0, 0]), "cyd": (8.0, [0, 0, 7])}
    return [(c, ClusterUpload({"w": torch.tensor([w])}, torch.tensor(count))) for c, (w, count) in sent.items()]


@pytest.mark.parametrize(
    ("weighting", "first"),
    [("uniform", 3.0), ("examples", 2.0)],  # (1 + 5) / 2, and (3 · 1 + 1 · 5) / 4
)
def test_each_model_is_the_mean_over_its_clients_and_stays_without_any(weighting: str, first: float) -> None:
    server = Weights({"w": torch.tensor([[10.0], [20.0], [30.0]])})
    method = IFCA(num_clusters=3, weighting=weighting)
    found = method.aggregate(server, uploads(), federation(METHOD).server_context(0, "round"))
    assert found.params["w"].tolist() == [[first], [20.0], [8.0]]


def test_models_start_apart_and_the_first_from_the_common_weights() -> None:
    central = federation(METHOD).server_context(0, "round")
    server = METHOD.init_server(central)
    assert_same(entry(server.params, 0), central.initial_params(), "the first model")
    starts = {fingerprint(server.params["features.0.weight"][k].clone())[""] for k in range(4)}
    assert len(starts) == 4
    again = METHOD.init_server(federation(METHOD).server_context(0, "setup"))
    assert_same(server, again, "the models of one seed")


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("seed", [3, 4, 5, 6])
def test_of_several_starts_the_one_of_the_lowest_mean_loss_is_kept(seed: int, weighting: Any) -> None:
    """Against plain torch: every client's lowest loss in each set, and their mean."""
    of = federation(IFCA(num_clusters=2, restarts=4, weighting=weighting), seed=seed)
    central, start = of.server_context(0, "setup"), of.start()
    sets = [of.method.initial(central, restart).params for restart in range(4)]
    counts = dict.fromkeys(SIZES, 1) if weighting == "uniform" else SIZES
    means = []
    for models in sets:
        lowest = {c: min(loss_by_hand(entry(models, k), c) for k in range(2)) for c in SIZES}
        means.append(sum(counts[c] * lowest[c] for c in SIZES) / sum(counts.values()))
    assert_same(start.server.params, sets[means.index(min(means))], "the models that are kept")
    assert len({fingerprint(models["features.0.weight"])[""] for models in sets}) == 4


def test_the_kept_start_is_not_always_the_first() -> None:
    """Or the test above could not fail."""
    kept = set()
    for seed in (3, 4, 5, 6):
        of = federation(IFCA(num_clusters=2, restarts=4), seed=seed)
        start, central = fingerprint(of.start().server), of.server_context(0, "setup")
        kept |= {r for r in range(4) if fingerprint(of.method.initial(central, r)) == start}
    assert len(kept) > 1


def test_means_of_losses_on_numbers() -> None:
    replies = [LowestLoss(torch.tensor(loss), torch.tensor(n)) for loss, n in ((1.0, 3), (5.0, 1))]
    # (1 + 5) / 2, and (3 · 1 + 1 · 5) / 4
    assert IFCA(weighting="uniform").mean_loss(replies) == 3.0
    assert IFCA(weighting="examples").mean_loss(replies) == 2.0


def test_with_one_start_nobody_is_asked_before_the_first_round() -> None:
    state = federation(IFCA(restarts=1)).start()
    assert state.receipts == {}
    assert federation(RESTARTED).start().receipts.keys() == TASK.clients.keys()


def test_starts_are_compared_by_the_clients_that_replied_to_all() -> None:
    """A client that fails while the second set is tried is left out of the means of both."""

    class Failing(Sequential):
        def run(self, jobs: Any) -> Iterator[Any]:
            for job in jobs:
                if job.client == "ann" and job.ticket.call == 2:
                    yield "ann", Failure("ann", Reason.CLIENT_ERROR, "told to")
                else:
                    yield from super().run([job])

    of = federation(IFCA(num_clusters=2, restarts=2, weighting="uniform"), runtime=Failing())
    start, central = of.start(), of.server_context(0, "setup")
    assert [failure.client for failure in start.failures] == ["ann"]
    sets, others = [of.method.initial(central, r).params for r in range(2)], [c for c in SIZES if c != "ann"]
    means = [sum(min(loss_by_hand(entry(m, k), c) for k in range(2)) for c in others) for m in sets]
    assert_same(start.server.params, sets[means.index(min(means))], "the models that are kept")


def test_a_client_has_the_newest_version_of_its_model() -> None:
    state = usual(METHOD, 2)
    message, memory = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    own = METHOD.local_weights(message, memory)
    assert_same(own, entry(state.server.params, memory.cluster.item()), "ann's model")
    newcomer = METHOD.init_memory(federation(METHOD).client_context("ann", 2), message)
    assert_same(METHOD.local_weights(message, newcomer), entry(state.server.params, 0), "a newcomer's model")
    assert METHOD.public(state.server) is None


def test_right_after_training_a_client_has_what_it_trained() -> None:
    reply = reply_of(federation(METHOD), usual(METHOD, 1), "ann")
    assert METHOD.trained_weights(reply.upload, reply.memory) is reply.upload.params


def test_after_the_last_round_every_client_chooses_among_the_final_models() -> None:
    of = federation(METHOD, fraction=0.2)
    last = after(3, of)
    state = of.finish(last)
    assert state.memories.keys() == TASK.clients.keys()
    assert_same(state.server, last.server, "the models")
    for client in TASK.clients:
        losses = [loss_by_hand(entry(state.server.params, k), client) for k in range(4)]
        assert state.memories[client].cluster.item() == losses.index(min(losses))


def test_a_model_whose_loss_is_not_a_number_is_not_chosen() -> None:
    of, server = federation(BY_EXAMPLES), usual(BY_EXAMPLES, 1).server
    broken = {name: torch.full_like(leaf[0], torch.nan) for name, leaf in server.params.items()}
    models = stacked([broken, entry(server.params, 1)])
    step = BY_EXAMPLES.choose(of.client_context("ann", 1), Weights(models), Choice(torch.tensor(0)))
    assert Sequential()._drive(step).memory.cluster.item() == 1


def test_losses_are_sums_so_that_batches_count_by_their_examples() -> None:
    batch = batch_of([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 1, 1], [1, 1, 0])
    # All scores are 0: log 2 for each of the two rows that count.
    assert summed_cross_entropy(identity_model([[0.0, 0.0], [0.0, 0.0]]), batch).item() == pytest.approx(
        2 * log(2), abs=1e-6
    )


def test_models_are_stacked_and_taken_apart() -> None:
    models = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}]
    assert stacked(models)["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert entry(stacked(models), 1)["w"].tolist() == [3.0, 4.0]
