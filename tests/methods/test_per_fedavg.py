"""Per-FedAvg: both gradients against exact ones, and three rounds against a plain torch loop."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.conformance import CHECKS, TASK, TRAINING, after, assert_same, batch_of, federation, small_task, usual
from protofed.api.method import Method
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.methods.per_fedavg import PerFedAvg, parted
from protofed.nn.networks import Networks, Parts
from protofed.seeds import derive_seed, generator
from references import per_fedavg
from references.plain import SGD, SIZE, counted_batches, largest_difference, network

FIRST_ORDER = PerFedAvg(adaptation_lr=0.1, adaptation_steps=2)
HESSIAN_FREE = PerFedAvg(adaptation_lr=0.1, hessian="by differences")


def adaptation_batch(client: str, round: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    data = TASK.clients[client]
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    order = torch.randperm(len(data), generator=generator(step, "adaptation"))
    return counted_batches(client, round, 1, 1, data.rows(order[: TRAINING.batch_size]))


@pytest.mark.parametrize("method", [PerFedAvg(adaptation_lr=0.1), HESSIAN_FREE], ids=["FO", "HF"])
def test_three_rounds_are_those_of_the_reference(method: PerFedAvg) -> None:
    """The largest difference of a weight is 3.0e-8 without the Hessian and 1.2e-7 with it."""
    delta = None if method is not HESSIAN_FREE else method.difference
    expected, own = per_fedavg.rounds(
        network(), SIZE, counted_batches, adaptation_batch, 3, SGD, method.adaptation_lr, delta, 1
    )
    found = usual(method, 3)
    assert largest_difference(found.server.params, expected) < 5e-6
    for client, adapted in own.items():
        assert largest_difference(found.memories[client].params, adapted) < 5e-6


WEIGHT = torch.tensor([[0.4, -0.3], [0.1, 0.8], [-0.5, 0.2]], dtype=torch.float64)
X = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.5, -2.0], [2.0, 1.0], [0.0, 1.5], [-1.5, -1.0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 2, 1, 0])


def step_of(method: PerFedAvg) -> Tensor:
    """The gradient that a client descends, at WEIGHT."""
    networks = Networks(lambda: {"features": nn.Identity(), "classifier": nn.Linear(2, 3, bias=False)})
    weight = WEIGHT.clone().requires_grad_()
    model = networks.model({"classifier.weight": weight}, training=True)
    batch = batch_of(X, Y)
    batch = type(batch)(X, Y, batch.weight, batch.index, batch.is_last_epoch, batch.number)
    (found,) = torch.autograd.grad(method.loss(model, batch, None, None), weight)
    return found


def loss_at(weight: Tensor, part: int, num_parts: int) -> Tensor:
    return F.cross_entropy(X[part::num_parts] @ weight.T, Y[part::num_parts])


def exact(num_parts: int, with_hessian: bool, alpha: float) -> Tensor:
    """(I − α ∇²f(w; D'')) ∇f(w − α ∇f(w; D); D'), the Hessian by autograd."""
    (slope,) = torch.autograd.grad(loss_at(w := WEIGHT.clone().requires_grad_(), 0, num_parts), w)
    (found,) = torch.autograd.grad(loss_at(w := (WEIGHT - alpha * slope).requires_grad_(), 1, num_parts), w)
    if not with_hessian:
        return found
    _, product = torch.autograd.functional.hvp(lambda w: loss_at(w, 2, num_parts), WEIGHT, found)
    return found - alpha * product


def test_the_first_order_step_is_the_gradient_after_the_trial_step_on_other_rows() -> None:
    torch.testing.assert_close(step_of(PerFedAvg(adaptation_lr=0.5)), exact(2, False, 0.5))


def test_the_hessian_free_step_comes_to_the_product_with_the_hessian_of_a_third_batch() -> None:
    method = PerFedAvg(adaptation_lr=0.5, hessian="by differences", difference=1e-4)
    torch.testing.assert_close(step_of(method), exact(3, True, 0.5), rtol=1e-6, atol=1e-8)
    assert (exact(3, True, 0.5) - exact(3, False, 0.5)).abs().max() > 0.01


def test_the_value_of_the_loss_is_that_after_the_trial_step() -> None:
    """The term that has the product with the Hessian for its gradient is worth nothing."""
    networks = Networks(lambda: {"features": nn.Identity(), "classifier": nn.Linear(2, 3, bias=False)})
    weight = WEIGHT.float().requires_grad_()
    model, batch = networks.model({"classifier.weight": weight}, training=True), batch_of(X, Y)
    found = PerFedAvg(adaptation_lr=0.5, hessian="by differences").loss(model, batch, None, None)
    slope = torch.autograd.grad(loss_at(w := WEIGHT.clone().requires_grad_(), 0, 3), w)[0]
    assert found.item() == pytest.approx(loss_at(WEIGHT - 0.5 * slope, 1, 3).item(), abs=1e-6)


def test_parts_are_of_every_so_many_rows_and_none_is_empty() -> None:
    parts = parted(batch_of([[k] for k in range(5)], [0, 1, 2, 3, 4], [1, 1, 1, 0, 1]), 3)
    assert [part.y.tolist() for part in parts] == [[0, 3], [1, 4], [2]]
    assert [part.weight.tolist() for part in parts] == [[1, 0], [1, 1], [1]]
    lone = parted(batch_of([[5.0]] * 4, [2] * 4, [1, 0, 0, 0]), 2)
    assert [part.weight.tolist() for part in lone] == [[1, 0], [1, 1]]


def test_a_client_adapts_what_it_received_and_sends_what_it_trained() -> None:
    one, two = usual(PerFedAvg(adaptation_lr=0.1), 2), usual(FIRST_ORDER, 2)
    assert_same(one.server, two.server, "what the number of steps of adaptation does not change")
    received, own = usual(FIRST_ORDER, 1).server.params, two.memories["ann"].params
    assert not torch.equal(own["classifier.weight"], received["classifier.weight"])
    assert not torch.equal(own["classifier.weight"], one.memories["ann"].params["classifier.weight"])


def test_after_the_last_round_all_clients_adapt_the_final_model() -> None:
    of = federation(FIRST_ORDER)
    before = after(1, of)
    ended = of.finish(before)
    assert_same(ended.server, before.server, "the public model")
    for client in TASK.clients:
        assert not torch.equal(
            ended.memories[client].params["classifier.weight"], before.memories[client].params["classifier.weight"]
        )


def test_batches_that_cannot_be_divided_are_refused() -> None:
    for method, size in ((FIRST_ORDER, 1), (HESSIAN_FREE, 2)):
        with pytest.raises(BadInput, match=r"training\.batch_size"):
            federation(method, batch_size=size).start()
    federation(HESSIAN_FREE, batch_size=3).start()


def flat_network(client: str) -> Parts:
    return {"features": nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)), "classifier": nn.Linear(4, 4)}


def test_parts_of_one_row_are_refused_where_batchnorm_needs_two() -> None:
    """A client of four examples has batches of four rows, whose thirds have one."""
    x, y = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    task = Task({"ann": Data.of(x, y)}, {"same": Data.of(x, y)}, 4, flat_network)
    with pytest.raises(BadInput, match="BatchNorm"):
        federation(HESSIAN_FREE, task).start()
    after(1, federation(FIRST_ORDER, task))


def test_a_client_of_one_example_takes_part() -> None:
    state = after(1, federation(FIRST_ORDER, small_task({"ann": [0], "bob": [0, 1, 2, 3, 3]})))
    assert not state.failures


@pytest.mark.parametrize("check", CHECKS)
def test_the_other_version_conforms(check: Callable[[Method], None]) -> None:
    check(HESSIAN_FREE)
