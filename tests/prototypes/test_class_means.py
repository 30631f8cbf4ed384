"""Class means by hand, and those of a client that trains."""

import copy
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, bits, job_of, sum_of
from protofed.api.contexts import ClientContext
from protofed.api.requests import Objective
from protofed.api.task import Task
from protofed.data.batches import Batch, batch_at, training_plan
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.families import PrototypeUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto_avg import FedProtoAvg
from protofed.nn.networks import Model, Networks, Parts
from protofed.optim.optimizers import Optimizer, Sam, Sgd
from protofed.prototypes.class_means import (
    ClassSums,
    PrototypeMode,
    Prototypes,
    class_sums,
    fit_with_prototypes,
    mean_of,
    no_prototypes,
    of_owner,
)
from protofed.runtimes.jobs import Answer
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed

T = TypeVar("T")

Z = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [7.0, 7.0]])
Y = torch.tensor([0, 0, 2, 2])
WEIGHT = torch.tensor([1.0, 1.0, 1.0, 0.0])


def test_sums_and_means_by_hand() -> None:
    sums = class_sums(Z, Y, WEIGHT, 4)
    assert sums.total.tolist() == [[4, 6], [0, 0], [10, 20], [0, 0]]
    assert sums.count.tolist() == [2, 0, 1, 0]
    prototypes = sums.prototypes()
    assert prototypes.mean.tolist() == [[2, 3], [0, 0], [10, 20], [0, 0]]
    assert prototypes.is_known.tolist() == [True, False, True, False]
    assert not no_prototypes(4, 2).is_known.any()


def by_class(z: Tensor, y: Tensor) -> Prototypes:
    rows = [z[y == c].double() for c in range(CLASSES)]
    means = torch.stack([r.mean(0) if len(r) else torch.zeros(FEATURES) for r in rows])
    return Prototypes(means.float(), torch.tensor([float(len(r)) for r in rows]))


@pytest.mark.parametrize("mode", ["running", "recomputed"])
def test_prototypes_of_a_client(tiny_task: Task, mode: PrototypeMode) -> None:
    """With a learning rate of 0 the weights stay, so the features of both modes can be had directly."""
    training = Training(epochs=3, batch_size=4, optimizer=Sgd(lr=0.0), seed=5)
    federation = Federation(FedProtoAvg(prototype_mode=mode), tiny_task, training)
    message, local = federation.start().server, federation.client_context("c01", 0)
    assert len(local.data) % 4  # so that there is filler, which must not count
    ((_, reply),) = federation.runtime.run([job_of(federation, "c01", message)])
    assert isinstance(reply, Answer)
    upload: PrototypeUpload = reply.upload

    if mode == "recomputed":  # evaluation mode, with the statistics that training left
        model = local.networks.model(upload.params)
        expected = by_class(model.features(local.data.x[local.data.index]), local.data.labels)
    else:  # training mode, over the rows of the last epoch
        draws = torch.Generator().manual_seed(derive_seed(local.step_seed, "request", 0))
        plan = training_plan(local.data, 4, 3, local.transform, draws)
        z, y = [], []
        for step in plan.is_last_epoch.nonzero()[:, 0].tolist():
            batch = batch_at(local.data, plan, step, local.transform)
            model = local.networks.model(local.networks.init(derive_seed(5, "weights")), training=True)
            z.append(model.features(batch.x)[batch.weight > 0])
            y.append(batch.y[batch.weight > 0])
        expected = by_class(torch.cat(z), torch.cat(y))
    torch.testing.assert_close(upload.prototypes.mean, expected.mean.detach(), atol=1e-6, rtol=1e-5)
    assert upload.prototypes.count.tolist() == (expected.count > 0).tolist()  # not how many
    assert upload.prototypes.count[1] == 0  # c01 lacks class 1
    assert not any(name.startswith("recorder") for name in upload.params)


class RecordingPart(nn.Module):
    """The sums of a fit's last epoch in buffers, written by the loss itself: another way to the same numbers."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(CLASSES, FEATURES))
        self.register_buffer("count", torch.zeros(CLASSES))

    def forward(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        sums = class_sums(z.detach(), y, weight, CLASSES)
        self.total.add_(sums.total)
        self.count.add_(sums.count)
        return z


def pulled(model: Model, batch: Batch, scale: Tensor) -> Tensor:
    z = model.features(batch.x)
    if "recording" in model.networks.parts:
        model.recording(z, batch.y, batch.weight * batch.is_last_epoch)
    return batch.cross_entropy(model.scores(z)) + scale * batch.mean(z.square().sum(-1))


def term(model: Model, batch: Batch, scale: Tensor) -> Tensor:
    return scale * model.logits(batch.x).square().mean()


def client_of(task: Task, parts: Parts, optimizer: Optimizer) -> ClientContext:
    """A client whose networks have these parts besides those of the task."""
    federation = Federation(FedAvg(), task, Training(epochs=3, batch_size=4, optimizer=optimizer))
    networks = Networks(lambda: {**task.model("c01"), **copy.deepcopy(parts)})
    return replace(federation.client_context("c01", 0), networks=networks)


def run(step: Coroutine[Any, Any, T]) -> T:
    """The outcome of a step whose requests the reference runtime answers."""
    return Sequential()._drive(step)


@pytest.mark.parametrize("has_term", [False, True])
@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1, momentum=0.9), Sam(Sgd(lr=0.1), rho=0.1)], ids=["sgd", "sam"])
def test_running_prototypes_are_those_that_the_loss_could_have_recorded(
    tiny_task: Task, optimizer: Optimizer, has_term: bool
) -> None:
    recorder = client_of(tiny_task, {"recording": RecordingPart()}, optimizer)
    plain = client_of(tiny_task, {}, optimizer)
    if has_term:
        recorder, plain = (client.with_loss_term(term, torch.tensor(0.1)) for client in (recorder, plain))
    context = (torch.tensor(0.01),)
    expected = run(recorder.fit(Objective(pulled), params=recorder.initial_params(), context=context))
    params, found = run(fit_with_prototypes(plain, Objective(pulled), plain.initial_params(), context, mode="running"))
    sums = ClassSums(expected.pop("recording.total"), expected.pop("recording.count"))
    assert bits(found) == bits(sums.prototypes())
    assert bits(params) == bits(expected)
    assert sums.count.sum() == len(plain.data)


def test_recomputed_prototypes_are_those_of_the_trained_model(tiny_task: Task) -> None:
    client, context = client_of(tiny_task, {}, Sgd(lr=0.1)), (torch.tensor(0.01),)
    params, found = run(
        fit_with_prototypes(client, Objective(pulled), client.initial_params(), context, mode="recomputed")
    )
    z = client.networks.model(params).features(client.data.x[client.data.index])
    expected = by_class(z, client.data.labels)
    torch.testing.assert_close(found.mean, expected.mean.detach(), atol=1e-6, rtol=1e-5)
    assert found.count.tolist() == expected.count.tolist()


def test_the_mean_over_owners_by_hand() -> None:
    one = Prototypes(torch.tensor([[1.0], [5.0], [0.0]]), torch.tensor([10.0, 2.0, 0.0]))
    two = Prototypes(torch.tensor([[4.0], [77.0], [0.0]]), torch.tensor([1.0, 0.0, 0.0]))
    previous = Prototypes(torch.tensor([[9.0], [9.0], [9.0]]), torch.tensor([3.0, 3.0, 3.0]))
    mean = mean_of(sum_of(map(of_owner, [one, two])), previous)
    assert mean.mean.tolist() == [[2.5], [5.0], [9.0]]  # unweighted; the last class is nobody's, and stays
    assert mean.count.tolist() == [2, 1, 3]  # owners
    assert mean.mean.dtype == mean.count.dtype == torch.float32
    nobody = of_owner(no_prototypes(3, 1))
    assert bits(mean_of(nobody, previous)) == bits(previous)
    assert bits(mean_of(sum_of(map(of_owner, [two, one])), previous)) == bits(mean)


def test_owners_are_those_with_a_count_above_zero() -> None:
    absent = replace(no_prototypes(2, 1), mean=torch.tensor([[8.0], [8.0]]))
    assert mean_of(of_owner(absent), no_prototypes(2, 1)).mean.tolist() == [[0], [0]]


def test_class_sums_are_float32_whatever_the_networks_work_in() -> None:
    draws = torch.Generator().manual_seed(0)
    z, y = torch.rand(64, 8, generator=draws), torch.randint(0, 4, (64,), generator=draws)
    with torch.autocast("cpu", torch.bfloat16):
        sums = class_sums(z, y, torch.ones(64), 4)
    expected = torch.stack([z[y == c].double().sum(0) for c in range(4)])
    torch.testing.assert_close(sums.total.double(), expected, rtol=1e-6, atol=1e-6)
