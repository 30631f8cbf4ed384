"""GA: how weights follow the gaps, how gaps are measured, and that it is its base without a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    labels_of,
    loaded,
    reply_of,
    scripted,
    small_task,
    usual,
)
from protofed.api.method import Method, Weighting
from protofed.engine.federation import Federation
from protofed.engine.round import RoundClients
from protofed.methods._shared.validation import held_out
from protofed.methods.ditto import Ditto
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedavg_ft import FedAvgFT
from protofed.methods.ga import GA, adjusted
from protofed.methods.moon import Moon
from protofed.tree import Mean, Params

SETTINGS = [GA(), GA(base=Moon(weighting="uniform")), GA(measure="error", centred=False)]


@pytest.mark.parametrize("method", SETTINGS, ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: GA) -> None:
    check(method)


def shares(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def found(share: dict[str, torch.Tensor], gaps: dict[str, float], size: float, centred: bool = True) -> list[float]:
    return [own.item() for own in adjusted(share, gaps, size, centred).values()]


# ---- the weights


def test_who_loses_more_than_the_mean_gains_weight() -> None:
    # Gaps 4, 1, 1: the mean is 2, the differences 2, −1, −1; relative to the largest 1, −½, −½. Steps of 0.1:
    # ½ + 0.1, ¼ − 0.05, ¼ − 0.05, which are 1 together.
    start = shares(ann=0.5, bob=0.25, cyd=0.25)
    assert found(start, {"ann": 4.0, "bob": 1.0, "cyd": 1.0}, 0.1) == pytest.approx([0.6, 0.2, 0.2])


def test_without_centring_all_may_gain_and_the_sum_is_made_1() -> None:
    # Gaps 4, 2, 0 relative to the largest: 1, ½, 0. Steps of 0.2: 0.7, 0.35, 0.25, which are 1.3 together.
    start = shares(ann=0.5, bob=0.25, cyd=0.25)
    expected = [0.7 / 1.3, 0.35 / 1.3, 0.25 / 1.3]
    assert found(start, {"ann": 4.0, "bob": 2.0, "cyd": 0.0}, 0.2, centred=False) == pytest.approx(expected)


def test_a_weight_does_not_fall_below_0() -> None:
    # Gaps −1, 1: steps of 0.2 give 0.1 − 0.2 → 0 and 0.9 + 0.2 → 1.
    assert found(shares(ann=0.1, bob=0.9), {"ann": -1.0, "bob": 1.0}, 0.2) == pytest.approx([0.0, 1.0])


def test_who_is_not_there_keeps_the_weight_but_for_the_normalisation() -> None:
    # Not centred: ann 0.4 + 0.1, the others 0.3 + 0 and 0.3; the sum is 1.1.
    start = shares(ann=0.4, bob=0.3, cyd=0.3)
    expected = [0.5 / 1.1, 0.3 / 1.1, 0.3 / 1.1]
    assert found(start, {"ann": 5.0}, 0.1, centred=False) == pytest.approx(expected)


@pytest.mark.parametrize("gaps", [{"ann": 0.1, "bob": 0.1, "cyd": 0.1}, {"bob": -3.0}, {}], ids=str)
def test_gaps_that_are_all_the_same_change_nothing(gaps: dict[str, float]) -> None:
    start = shares(ann=0.4, bob=0.35, cyd=0.25)
    assert found(start, gaps, 0.1) == [0.4, 0.35, 0.25]


@pytest.mark.parametrize("method", SETTINGS, ids=repr)
def test_weights_stay_on_the_simplex(method: GA) -> None:
    for rounds in (0, 1, 2, 3):
        share = torch.stack(list(usual(method, rounds).server.share.values()))
        assert (share >= 0).all()
        assert share.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert fingerprint(usual(method, 3).server.share) != fingerprint(usual(method, 0).server.share)


def test_the_simplex_holds_under_the_largest_steps() -> None:
    draws = torch.Generator().manual_seed(0)
    share = shares(**dict.fromkeys(SIZES, 0.2))
    for _ in range(200):
        gaps = dict(zip(SIZES, torch.randn(5, generator=draws).tolist(), strict=True))
        share = adjusted(share, gaps, 0.99 / 5, False)
        values = torch.stack(list(share.values()))
        assert (values >= 0).all()
        assert values.sum().item() == pytest.approx(1.0, abs=1e-12)


# ---- the server


@pytest.mark.parametrize("base", [FedAvg(), Moon(), FedASAM(averaging=True, averaging_start=0.0)], ids=repr)
def test_without_a_step_from_sample_weights_it_is_its_base(base: Any) -> None:
    method = GA(base=base, step=0.0)
    for rounds in (1, 2, 3):
        state, expected = usual(method, rounds), usual(base, rounds)
        assert_same(state.server.base, expected.server, f"round {rounds}")
        assert_same(state.memories, expected.memories, f"memories of round {rounds}")
        assert_same(method.public(state.server)[0], base.public(expected.server)[0], "the public model")
    assert fingerprint(usual(GA(), 3).server.base) != fingerprint(usual(FedAvg(), 3).server)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_weights_start_as_the_base_says_and_count_in_place_of_numbers_of_examples(weighting: Weighting) -> None:
    method = GA(base=FedAvg(weighting=weighting))
    state, mean = usual(method, 0), Mean()
    expected = {client: 0.2 if weighting == "uniform" else size / 38 for client, size in SIZES.items()}
    assert {client: own.item() for client, own in state.server.share.items()} == pytest.approx(expected)
    for client in SIZES:
        mean.add(reply_of(federation(method), state, client).upload.base.params, expected[client])
    assert_close(usual(method, 1).server.base.params, mean.value(), "the weighted mean", within=1e-6)


def test_the_second_mean_is_weighted_by_what_the_first_gaps_made() -> None:
    state, mean = usual(GA(), 1), Mean()
    for client, share in state.server.share.items():
        mean.add(reply_of(federation(GA()), state, client).upload.base.params, share.item())
    assert_close(usual(GA(), 2).server.base.params, mean.value(), "the weighted mean", within=1e-6)


def test_only_clients_of_weight_0_still_have_a_mean() -> None:
    of, state = federation(GA()), usual(GA(), 1)
    nobody = {client: torch.zeros_like(own) for client, own in state.server.share.items()}
    upload = reply_of(of, state, "ann").upload
    server = GA().aggregate(
        type(state.server)(state.server.base, nobody), [("ann", upload)], of.server_context(1, "round")
    )
    assert_close(server.base.params, upload.base.params, "ann's weights", within=1e-6)


# ---- the gaps


def mean_loss(params: Params, client: str) -> float:
    """The mean cross-entropy on the unvaried examples, by plain torch."""
    data, parts = TASK.clients[client], loaded(params, training=False)
    with torch.no_grad():
        return F.cross_entropy(parts["classifier"](parts["features"](TASK.transform.clean(data.x))), data.y).item()


def test_a_round_moves_weights_by_the_losses_before_and_after_the_mean() -> None:
    of, state, ended = federation(GA()), usual(GA(), 1), usual(GA(), 2)
    after = ended.server.base.params
    gaps = {c: mean_loss(after, c) - mean_loss(reply_of(of, state, c).upload.base.params, c) for c in SIZES}
    # Of three rounds this is the second: a step of 0.2 / 5 · (1 − 1/3).
    centre = sum(gaps.values()) / 5
    moves = {
        c: 0.2 / 5 * 2 / 3 * (gap - centre) / max(abs(g - centre) for g in gaps.values()) for c, gap in gaps.items()
    }
    for client, share in ended.server.share.items():
        assert share.item() == pytest.approx(state.server.share[client].item() + moves[client], abs=1e-6)
        reply = reply_of(of, state, client)
        assert reply.upload.loss.item() == pytest.approx(mean_loss(reply.upload.base.params, client), abs=1e-5)


def test_the_weights_that_a_client_has_just_trained_are_those_that_it_sent() -> None:
    reply = reply_of(federation(GA()), usual(GA(), 1), "ann")
    found = GA().trained_weights(reply.upload, reply.memory)
    assert_same(found, reply.upload.base.params, "ann's weights")


def test_errors_are_counted_in_place_of_losses() -> None:
    method = GA(measure="error", centred=False)
    state = usual(method, 1)
    for client in SIZES:
        reply, data = reply_of(federation(method), state, client), TASK.clients[client]
        parts = loaded(reply.upload.base.params, training=False)
        with torch.no_grad():
            scores = parts["classifier"](parts["features"](TASK.transform.clean(data.x)))
        wrong = (scores.argmax(-1) != data.y).double().mean().item()
        assert reply.upload.loss.item() == pytest.approx(wrong, abs=1e-6)


def test_a_client_that_did_not_train_well_has_no_say_in_the_weights() -> None:
    """Its weights are not in the mean."""
    of, state = federation(GA()), usual(GA(), 1)

    class Deaf(RoundClients):
        def run(self, step: Any, message_for: Any, like: Any, group: Any = None) -> Any:
            uploads = super().run(step, message_for, like, group)
            return ((c, u) for c, u in uploads if step != self._federation.method.train or c != "cyd")

    everyone = Deaf(of, state, of.ids, "round")
    found = of.method.round(state.server, everyone).share
    others = tuple(c for c in of.ids if c != "cyd")
    expected = scripted(GA(), lambda t: others).advance(state).server.share
    assert_same(found, expected, "the weights without cyd")


def test_the_message_of_the_second_exchange_is_the_new_mean() -> None:
    seen: list[tuple[str, Any]] = []

    class Watching(RoundClients):
        def run(self, step: Any, message_for: Any, like: Any, group: Any = None) -> Any:
            seen.append((step.__name__, message_for("ann").params))
            return super().run(step, message_for, like, group)

    of, state = federation(GA()), usual(GA(), 1)
    server = of.method.round(state.server, Watching(of, state, of.ids, "round"))
    assert [name for name, _ in seen] == ["train", "judge"]
    assert_same(seen[0][1], state.server.base.params, "the first message")
    assert_same(seen[1][1], server.base.params, "the second message")


# ---- the split


def big_task() -> Any:
    return small_task({"ann": labels_of(120, 0).tolist(), "bob": labels_of(99, 1).tolist()})


def test_a_tenth_of_a_large_clients_examples_is_held_out() -> None:
    of = federation(GA(), big_task())
    own, validation = held_out(of.client_context("ann", 0))
    assert (len(own), len(validation)) == (108, 12)
    assert sorted(own.index.tolist() + validation.index.tolist()) == list(range(120))
    again = held_out(of.client_context("ann", 5))
    assert again[1].index.tolist() == validation.index.tolist()
    other = held_out(federation(GA(), big_task(), seed=99).client_context("ann", 0))
    assert other[1].index.tolist() != validation.index.tolist()
    local = of.client_context("bob", 0)
    assert held_out(local) == (local.data, local.data)


def test_a_client_is_not_trained_on_what_it_is_judged_on() -> None:
    task = big_task()
    of = federation(GA(), task)
    own, validation = held_out(of.client_context("ann", 0))
    reply = reply_of(of, of.start(), "ann")
    assert reply.upload.base.num_examples.item() == 108
    spoilt = task.clients["ann"].x.clone()
    spoilt[validation.index] = 0
    dark = type(own)(spoilt, task.clients["ann"].y, task.clients["ann"].index)
    other = Federation(GA(), dataclasses.replace(task, clients={**task.clients, "ann": dark}), of.training)
    found = reply_of(other, other.start(), "ann")
    assert_same(found.upload.base, reply.upload.base, "ann's weights")
    assert found.upload.loss != reply.upload.loss


@pytest.mark.parametrize("base", [FedAvgFT(), Ditto(), FedAvg()])
def test_the_loss_before_is_that_of_the_weights_that_are_sent(base: Any) -> None:
    """And not that of a model that the client keeps for itself."""
    own = federation(GA(base=base))
    state = own.start()
    upload = reply_of(own, state, "ann").upload
    _, validation = held_out(own.client_context("ann", 0))
    model = own.networks_of("ann").model(upload.base.params)
    with torch.no_grad():
        expected = F.cross_entropy(
            model.logits(own.task.transform.clean(validation.inputs(validation.index))), validation.labels
        )
    torch.testing.assert_close(upload.loss, expected)
