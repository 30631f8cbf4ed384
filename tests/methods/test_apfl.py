"""APFL: the mixture and its share by hand, and three rounds against a plain torch loop."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from methods.conformance import TASK, TRAINING, assert_same, federation, reply_of, usual
from protofed.data.batches import Batch
from protofed.methods.apfl import APFL, SHARE, mixed_loss, mixture
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.seeds import derive_seed, generator
from references import apfl
from references.plain import SGD, SIZE, counted_batches, largest_difference, network

METHOD, FIXED = APFL(), APFL(adaptive=False, initial_share=0.25)


def share_batch(client: str, round: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """The one batch on which a client's share takes its step, which is the first request of the round."""
    data = TASK.clients[client]
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    order = torch.randperm(len(data), generator=generator(step, "share"))
    return counted_batches(client, round, 0, 1, data.rows(order[: TRAINING.batch_size]))


@pytest.mark.parametrize("method", [METHOD, FIXED, APFL(share_lr=TRAINING.optimizer.lr)], ids=repr)
def test_three_rounds_are_those_of_the_reference(method: APFL) -> None:
    """The largest difference of a weight is 3.0e-8."""

    def training(client: str, round: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        return counted_batches(client, round, int(method.adaptive))

    expected, own, shares = apfl.rounds(
        network(), SIZE, training, share_batch, 3, SGD, method.initial_share, method.adaptive
    )
    found = usual(method, 3)
    assert largest_difference(found.server.params, expected) < 5e-6
    for client, memory in found.memories.items():
        assert largest_difference(memory.own, own[client]) < 5e-6
        assert memory.share.item() == pytest.approx(shares[client], abs=1e-5)
    assert len({round(share, 4) for share in shares.values()}) == (5 if method.adaptive else 1)


def test_the_mixture_is_linear_in_the_weights() -> None:
    own, received = {"w": torch.tensor([4.0, 0.0])}, {"w": torch.tensor([0.0, 8.0]), "other": torch.tensor(1.0)}
    assert mixture(own, received, torch.tensor(0.25))["w"].tolist() == [1.0, 6.0]


def test_the_gradient_of_the_share_is_the_way_from_global_to_own_along_the_gradient_of_the_mixture() -> None:
    of, state = federation(METHOD), usual(METHOD, 1)
    networks, memory = of.networks_of("ann"), state.memories["ann"]
    data = TASK.clients["ann"]
    index = torch.arange(len(data))
    batch = Batch(
        TASK.transform.clean(data.x), data.y, torch.ones(len(data)), index, torch.tensor(True), torch.tensor(0)
    )
    params = {**state.server.params, **METHOD.kept(memory)}
    share = params[SHARE].clone().requires_grad_()
    copies = {name: leaf.clone() for name, leaf in params.items()}
    (found,) = torch.autograd.grad(mixed_loss(networks.model({**copies, SHARE: share}, training=True), batch), share)
    mixed = {n: leaf.requires_grad_() for n, leaf in mixture(memory.own, params, memory.share).items()}
    plain = {**copies, **memory.statistics, **mixed}
    loss = batch.cross_entropy(networks.model(plain, training=True).logits(batch.x))
    slope = dict(zip(mixed, torch.autograd.grad(loss, [*mixed.values()]), strict=True))
    expected = sum(((memory.own[n] - params[n]) * slope[n]).sum() for n in mixed)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert abs(found.item()) > 1e-4


def test_the_global_model_is_that_of_fedavg() -> None:
    """With a fixed share; otherwise the first request of a round is the share's, and batches are others."""
    assert_same(usual(FIXED, 3).server, usual(FedAvg(), 3).server, "the global weights")


def test_a_client_uses_the_mixture_with_the_newest_global_weights() -> None:
    state = usual(FIXED, 1)
    memory = state.memories["ann"]
    newest = Weights({name: leaf + 1 for name, leaf in state.server.params.items()})
    used = FIXED.local_weights(newest, memory)
    for name, leaf in memory.own.items():
        torch.testing.assert_close(used[name], 0.25 * leaf + 0.75 * newest.params[name])
    assert used["features.1.running_mean"] is memory.statistics["features.1.running_mean"]


def test_the_share_stays_within_0_and_1() -> None:
    method = APFL(share_lr=1e6)
    shares = {memory.share.item() for memory in usual(method, 2).memories.values()}
    assert shares <= {0.0, 1.0}


def test_the_own_model_is_not_sent() -> None:
    upload = reply_of(federation(METHOD), usual(METHOD, 1), "bob").upload
    assert set(upload.params) == set(usual(FedAvg(), 0).server.params)
