"""A client under differential privacy: what it may use, what that costs, and what of it may leave."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.private_runs import private, private_methods, task_of
from protofed import METHODS, PrivacySettings, Sam, Sgd, tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.private import BudgetSpent, NoisySums, NotPrivate, PrivateClient, Unreleased
from protofed.api.requests import Objective
from protofed.data.batches import Batch, Data
from protofed.engine.federation import Federation
from protofed.errors import RunFailed
from protofed.nn.networks import Model
from protofed.optim.optimizers import Asam
from protofed.privacy.class_sums import ABSTAIN
from protofed.privacy.client import RecordLevel, gradient_calls
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params

SETTINGS = PrivacySettings("record", epsilon=20.0)


def cross_entropy(model: Model, batch: Batch, *context: Any) -> Tensor:
    return batch.cross_entropy(model.logits(batch.x))


def client_of(
    of: Federation, round: int = 1, data: Data | None = None, **terms: Any
) -> tuple[RecordLevel, ClientContext]:
    context = of.client_context("c0", round)
    assert context.privacy is not None
    context = replace(context, data=data or context.data, privacy=replace(context.privacy, **terms))
    return RecordLevel(context, context.privacy, 5), context


def answered(step: Any) -> Any:
    """What a step gives, with the reference runtime."""
    return Sequential()._drive(step)


def test_a_pass_over_the_data_is_one_release_for_each_gradient_of_a_step_and_each_objective() -> None:
    for optimizer, calls in ((Sgd(lr=0.1), 1), (Sam(Sgd(lr=0.1)), 2), (Asam(Sgd(lr=0.1)), 2)):
        assert gradient_calls(optimizer) == calls
        client, context = client_of(private(optimizer=optimizer))
        objectives = [Objective(cross_entropy, ("features.*",)), Objective(cross_entropy, ("classifier.*",))]
        answered(client.fit(*objectives, params=client.initial_params(), epochs=3))
        (charge,) = context.charges
        assert (charge.kind, charge.releases) == ("gradients", 3 * calls * 2)
        assert charge.cost == pytest.approx(charge.releases / client._terms.gradient_multiplier**2)


def test_what_cannot_be_paid_for_does_not_come_about() -> None:
    client, context = client_of(private(privacy=SETTINGS))
    cost = 2 / client._terms.gradient_multiplier**2
    client, context = client_of(private(privacy=SETTINGS), left=1.5 * cost)
    params = answered(client.fit(Objective(cross_entropy), params=client.initial_params()))
    with pytest.raises(BudgetSpent, match="2 releases of gradients"):
        answered(client.fit(Objective(cross_entropy), params=params))
    assert len(context.charges) == 1


def test_only_what_is_released_can_be_used() -> None:
    client, context = client_of(private("fpl"))
    params = client.initial_params()
    raw = {name: leaf.clone() for name, leaf in params.items()}
    fit = client.fit(Objective(cross_entropy), params=params, context=({"x": context.data.x[:2]},))
    for step in (
        lambda: client.post(lambda one: one, raw),
        lambda: answered(client.fit(Objective(cross_entropy), params=raw)),
        lambda: answered(client.class_sums(raw)),
        lambda: answered(fit),
    ):
        with pytest.raises(Unreleased, match="not made of released ones"):
            step()
    doubled = client.post(lambda one: {name: 2 * leaf for name, leaf in one.items()}, params)
    answered(client.class_sums(doubled))


def test_there_are_no_examples_on_a_private_client() -> None:
    reachable = {name for name in dir(PrivateClient) if not name.startswith("_")}
    assert reachable | {*PrivateClient.__annotations__} == {
        *("num_steps", "optimizer", "networks"),
        *("id", "round", "num_rounds", "num_classes", "num_examples", "initial_params"),
        *("fit", "class_sums", "prototypes", "post", "releases_class_sums"),
    }


@pytest.mark.parametrize("name", private_methods())
def test_an_upload_with_any_leaf_that_is_not_released_is_refused(name: str) -> None:
    """T9."""

    def leaky(place: int) -> Any:
        class Leaky(METHODS[name]):  # type: ignore[misc]
            async def train_privately(self, client: PrivateClient, message: Any, memory: Any) -> Reply[Any, Any]:
                reply = await super().train_privately(client, message, memory)
                leaves = tree.leaves(reply.upload)
                leaves[place] = leaves[place].clone()
                return Reply(tree.with_leaves(reply.upload, leaves), reply.memory)

        return Leaky()

    of = private(name, epochs=1)
    state = of.start()
    like = of.method.upload_spec(state.server, of.server_context(0, "load"))
    for place in {0, len(tree.leaves(like)) // 2, len(tree.leaves(like)) - 1}:
        of = private(leaky(place), epochs=1, attempts=1)
        with pytest.raises(RunFailed, match="UNRELEASED: the upload holds"):
            of.advance(of.start())


def test_what_a_client_keeps_must_be_released_too() -> None:
    class Keeping(METHODS["moon"]):  # type: ignore[misc]
        async def train_privately(self, client: PrivateClient, message: Any, memory: Any) -> Reply[Any, Any]:
            reply = await super().train_privately(client, message, memory)
            return Reply(reply.upload, replace(reply.memory, exists=reply.memory.exists + 1))

    of = private(Keeping(), attempts=1)
    with pytest.raises(RunFailed, match="UNRELEASED: the memory holds exists"):
        of.advance(of.start())


def test_the_first_memory_is_not_made_of_examples() -> None:
    class Counting(METHODS["moon"]):  # type: ignore[misc]
        def init_memory(self, client: ClientContext, message: Any) -> Any:
            client.data.labels.bincount()
            return super().init_memory(client, message)

    of = private(Counting(), attempts=1)
    with pytest.raises((RunFailed, NotPrivate), match="made of its examples"):
        of.advance(of.start())


# ---- class sums


def adversarial(count: int) -> Data:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, generator=draws) * torch.logspace(-2, 6, count)[:, None]
    return Data.of(x, torch.randint(0, 3, (count,), generator=draws))


class NoNoise:
    def whole(self, count: int, scale: float) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)


def sums_without_noise(data: Data, params: Params) -> tuple[NoisySums, RecordLevel]:
    client, _ = client_of(private("fpl", privacy=PrivacySettings("record", epsilon=20.0, clip_features=2.0)), data=data)
    client._noise = NoNoise()  # type: ignore[assignment]
    client._know(params)
    return answered(client.class_sums(params)), client


def test_one_record_moves_class_sums_by_no_more_than_their_noise_is_made_for() -> None:
    """T1: in units of the noise of each number, at most 1/m; and some record does so."""
    data, params = adversarial(120), private("fpl").networks_of("c0").init(1)
    whole, client = sums_without_noise(data, params)
    sums, counts = client._queries(8, None)
    m = client._terms.class_sum_multiplier
    shifts = []
    for k in range(120):
        without, _ = sums_without_noise(data.rows(torch.cat([torch.arange(k), torch.arange(k + 1, 120)])), params)
        moved = (whole.total - without.total).norm() / (sums.scale * sums.grid)
        counted = (whole.mass - without.mass).norm() / (counts.scale * counts.grid)
        shifts.append(float((moved.square() + counted.square()).sqrt()))
    assert max(shifts) <= (1 + 1e-4) / m
    assert max(shifts) > 0.99 / m


def test_absent_classes_are_as_noisy_as_present_ones() -> None:
    """T2: of 40 classes, 39 of which nobody has."""
    totals, masses = [], []
    data = Data.of(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    for seed in range(40):
        client, _ = client_of(private("fpl", privacy=SETTINGS), data=data)
        client.num_classes, client._noise = 40, type(client._noise)(seed)
        noisy = answered(client.class_sums(client.initial_params()))
        totals.append(noisy.total[1:])
        masses.append(noisy.mass[1:])
    sums, counts = client._queries(8, None)
    assert torch.stack(totals).std() == pytest.approx(sums.scale * sums.grid, rel=0.02)
    assert torch.stack(masses).std() == pytest.approx(counts.scale * counts.grid, rel=0.06)
    assert (torch.stack(totals) != 0).all()


def test_prototypes_are_made_of_noisy_sums_alone() -> None:
    client, _ = client_of(private("fpl"))
    params = client.initial_params()
    query, _ = client._queries(2, None)
    needed = query.multiplier * query.most * 2**0.5 / (ABSTAIN * 4.0)

    async def sums(*_: Any) -> NoisySums:
        total = torch.tensor([[3.0, -1.0], [50.0, 0.0], [1.0, 1.0]]) * needed
        noisy = NoisySums(total, torch.tensor([1.01, 2.0, 0.99]) * needed)
        client._know(noisy)
        return noisy

    client.class_sums = sums  # type: ignore[method-assign]
    client._client = replace(client._client, data=Data.of(torch.zeros(1000, 6), torch.zeros(1000, dtype=torch.int64)))
    made = answered(client.prototypes(params))
    assert made.mean[0].tolist() == pytest.approx([3 / 1.01, 0.0]), "features end in a ReLU, so nothing is negative"
    assert made.mean[1].tolist() == pytest.approx([4.0, 0.0]), "no longer than R"
    assert made.mean[2].tolist() == [0.0, 0.0], "where noise may be longer than a quarter of R"
    assert made.count.tolist() == [round(1.01 * needed), round(2 * needed), 0.0]
    client.check("the upload", made)


def test_there_are_no_prototypes_in_rounds_without_a_release() -> None:
    of = private("fpl", rounds=7, privacy=PrivacySettings("record", releases=2))
    assert of.terms is not None
    assert of.terms.release_rounds == (1, 4)
    client, context = client_of(of, round=0)
    made = answered(client.prototypes(client.initial_params()))
    assert made.mean.shape == (3, 8)
    assert not made.count.any()
    assert not context.charges


def test_a_step_that_is_not_training_is_refused() -> None:
    of = private("fedavg")
    with pytest.raises(NotPrivate, match="more than training"):
        asyncio.run(of.method.stepped(of.method.base.evaluate, of.client_context("c0", 0), None, None))


def test_the_clients_task_has_no_batch_norm() -> None:
    assert not private().networks_of("c0").statistics
    assert task_of().clients.keys() == {"c0", "c1", "c2"}
