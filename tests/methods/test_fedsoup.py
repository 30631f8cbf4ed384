"""FedSoup: which global models a client selects, what it averages, and that it is FedAvg before its time."""

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
    labels_of,
    loaded,
    mean_cross_entropy,
    reply_of,
    small_task,
    trained_by_hand,
    usual,
)
from protofed.api.method import Method
from protofed.methods import fedsoup
from protofed.methods._shared.mixing import weighted_mean
from protofed.methods._shared.validation import held_out
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedsoup import FedSoup, Soup, selected
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params

EARLY = FedSoup(start=0.0)


@pytest.mark.parametrize("method", [FedSoup(), EARLY], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: FedSoup) -> None:
    check(method)


def test_before_its_time_it_is_fedavg() -> None:
    method = FedSoup(start=1.0)
    for rounds in (1, 2, 3):
        assert_same(usual(method, rounds).server, usual(FedAvg(), rounds).server, f"round {rounds}")
        for client, memory in usual(method, rounds).memories.items():
            assert memory.count == 0
            upload = reply_of(federation(FedAvg()), usual(FedAvg(), rounds - 1), client).upload
            assert_same(method.local_weights(usual(method, rounds).server, memory), upload.params, client)
    assert fingerprint(usual(EARLY, 3).server) != fingerprint(usual(FedAvg(), 3).server)


def test_souping_starts_after_three_quarters_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def noted(local: Any, trained: Soup, received: Params, validation: Any) -> Soup:
        asked.append(local.round + 1)
        return trained

    monkeypatch.setattr(fedsoup, "selected", noted)
    after(8, federation(FedSoup(), rounds=8, epochs=1))
    # Of 8 rounds the first 6 are three quarters.
    assert sorted(set(asked)) == [7, 8]
    assert len(asked) == 2 * len(SIZES)


def right(params: Params, client: str) -> int:
    """How many unvaried examples are right, by plain torch."""
    data, parts = TASK.clients[client], loaded(params, training=False)
    with torch.no_grad():
        scores = parts["classifier"](parts["features"](TASK.transform.clean(data.x)))
    return int((scores.argmax(-1) == data.y).sum())


def mixed(*models: tuple[Params, float]) -> Params:
    """A weighted mean in float64."""
    total = sum(weight for _, weight in models)
    return {n: (sum(w * m[n].double() for m, w in models) / total).float() for n in models[0][0]}


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_client_takes_the_better_of_both_soups(rounds: int) -> None:
    """The whole rule, slowly, with what plain torch trains."""
    state = usual(EARLY, rounds)
    of, received = federation(EARLY), state.server.params
    for client in SIZES:
        reply = reply_of(of, state, client)
        memory = of.client_state(state, client, state.server)
        trained, _ = trained_by_hand(received, client, mean_cross_entropy, round=rounds)
        n = int(memory.count)
        plain, joint = mixed((trained, 1), (memory.pool, n)), mixed((trained, 1), (received, 1), (memory.pool, n))
        if right(joint, client) > right(plain, client):
            pool, count, params = mixed((received, 1), (memory.pool, n)), n + 1, joint
        else:
            pool, count, params = memory.pool, n, plain
        assert int(reply.memory.count) == count
        assert_close(reply.memory.pool, pool, f"the pool of {client}", within=1e-5)
        assert_close(reply.upload.params, params, f"the soup of {client}", within=1e-5)
        assert_same(reply.memory.params, reply.upload.params, "what is kept is what is sent")


def test_both_outcomes_occur_in_the_small_task() -> None:
    """Or the test above would check one branch only."""
    counts = {int(memory.count) for memory in usual(EARLY, 3).memories.values()}
    assert len(counts) > 1


def choice(rights: list[int], count: int = 2) -> Soup:
    """What `selected` ends with when the two soups get so many right: first the one with the received model."""
    numbers = {"trained": 8.0, "received": 2.0, "pool": 4.0}
    params = {name: {"w": torch.tensor([value])} for name, value in numbers.items()}
    answers = iter(rights)

    class Deciding:
        async def total(self, statistic: Any, params: Params, data: Any) -> torch.Tensor:
            return torch.tensor(next(answers))

    soup = Soup(params["trained"], params["pool"], torch.tensor(count))
    return Sequential()._drive(selected(Deciding(), soup, params["received"], None))


def test_the_received_model_joins_the_pool_if_it_helps() -> None:
    # Trained 8, received 2, a pool of two with mean 4: (8 + 2 + 2 · 4) / 4 = 4.5; the pool (2 + 2 · 4) / 3 = 10/3.
    found = choice([5, 4])
    assert (found.params["w"].item(), found.count.item()) == (4.5, 3)
    assert found.pool["w"].item() == pytest.approx(10 / 3, abs=1e-6)


@pytest.mark.parametrize("rights", [[4, 4], [3, 4]])
def test_a_tie_keeps_it_out(rights: list[int]) -> None:
    # (8 + 2 · 4) / 3 = 16/3.
    found = choice(rights)
    assert found.params["w"].item() == pytest.approx(16 / 3, abs=1e-6)
    assert (found.pool["w"].item(), found.count.item()) == (4.0, 2)


def test_an_empty_pool_counts_nothing() -> None:
    assert choice([0, 1], count=0).params["w"].item() == 8.0
    assert choice([1, 0], count=0).params["w"].item() == 5.0


def test_models_count_as_often_as_they_are_said_to() -> None:
    assert weighted_mean([({"w": torch.tensor(1.0)}, 3), ({"w": torch.tensor(5.0)}, 1)])["w"].item() == 2.0


def test_a_client_selects_on_examples_that_it_does_not_train_on() -> None:
    task = small_task({"ann": labels_of(120, 0).tolist(), "bob": labels_of(20, 1).tolist()})
    of, seen = federation(EARLY, task), []

    async def noted(local: Any, trained: Soup, received: Params, validation: Any) -> Soup:
        seen.append((local.data.index.tolist(), validation.index.tolist()))
        return trained

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsoup, "selected", noted)
        reply = reply_of(of, of.start(), "ann")
    own, validation = held_out(of.client_context("ann", 0))
    assert seen == [(own.index.tolist(), validation.index.tolist())]
    assert reply.upload.num_examples.item() == len(own) == 108
