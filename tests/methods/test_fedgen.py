"""FedGen: its losses by hand, and three rounds against a plain torch loop."""

from collections.abc import Iterator
from math import exp, log

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CLASSES,
    FEATURES,
    SIZES,
    TASK,
    TRAINING,
    after,
    assert_same,
    batch_of,
    federation,
    usual,
)
from protofed.data.batches import training_plan
from protofed.data.transforms import Transform
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedgen import GENERATOR, NOISE, FedGen, Generator, likeness
from protofed.nn.networks import Networks, matching
from protofed.seeds import derive_seed, normal
from references import fedgen
from references.plain import SGD, counted_batches, largest_difference, network

LABELS = {client: data.labels for client, data in TASK.clients.items()}
METHOD = FedGen(
    hidden=16, generator_steps=6, generator_batch=8, generator_lr=0.01, generated_weight=2.0, agreement_weight=10.0
)
KNOWN = torch.cat(list(LABELS.values())).bincount(minlength=CLASSES) > 0


def client_batches(client: str, round: int) -> Iterator[tuple[Tensor, ...]]:
    """A batch, with the noise that the loss draws from its seed."""
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    draws = torch.Generator().manual_seed(derive_seed(step, "request", 0))
    plan = training_plan(TASK.clients[client], TRAINING.batch_size, TRAINING.epochs, TASK.transform, draws)
    for number, (x, y, counts) in zip(plan.number, counted_batches(client, round), strict=True):
        noise, other, chance = normal(number, len(y), 2 * NOISE + CLASSES).split([NOISE, NOISE, CLASSES], dim=-1)
        yield x, y, counts, noise, torch.where(KNOWN, chance, -torch.inf).argmax(-1), other


def generator_batches(round: int) -> Iterator[tuple[Tensor, Tensor]]:
    server = federation(METHOD).server_context(round, "round")
    data = METHOD.requests(KNOWN, server.generator)
    draws = torch.Generator().manual_seed(derive_seed(server.phase_seed, "server fit", 0))
    for index in training_plan(data, METHOD.generator_batch, 1, Transform(), draws).index:
        yield data.x[index], data.y[index]


def test_three_rounds_are_those_of_the_reference() -> None:
    """The largest difference of a weight is 1.2e-7, and of one of the generator 3.3e-6."""
    generator = Generator(CLASSES, METHOD.hidden, FEATURES)
    initial = matching(federation(METHOD).networks_of("ann").init(derive_seed(TRAINING.seed, "weights")), GENERATOR)
    generator.load_state_dict({n.removeprefix("generator."): leaf for n, leaf in initial.items()}, strict=False)
    settings = {"alpha": 2.0, "beta": 10.0, "eta": 1.0, "decay": 0.98, "lr": 0.01}
    expected, made = fedgen.rounds(
        network(), generator.layers, LABELS, client_batches, generator_batches, 3, SGD, settings
    )
    found = usual(METHOD, 3).server
    assert largest_difference(found.params, expected) < 1e-5
    assert largest_difference(found.generator, {f"generator.layers.{n}": leaf for n, leaf in made.items()}) < 1e-5
    assert largest_difference(found.generator, initial) > 0.01


def test_how_alike_features_are_by_hand() -> None:
    # Two rows: noise (0, 0) and (2, 0), mean square 2; features 1 and 4, 3 apart. Two of four pairs have 2 · 3 = 6.
    found = likeness(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0], [4.0]]))
    assert found.item() == pytest.approx(exp(-3))


class Fixed(nn.Module):
    """A generator that makes ten times the class's unit vector, whatever the noise."""

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        return 10.0 * (torch.arange(2) == y[:, None])


def test_the_generators_loss_weights_each_classifier_by_its_share_of_the_class() -> None:
    networks = Networks(
        lambda: {"features": nn.Identity(), "classifier": nn.Linear(2, 2, bias=False), "generator": Fixed()}
    )
    model = networks.model({"classifier.weight": torch.zeros(2, 2)}, training=True)
    classifiers = {"classifier.weight": torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.1, 0.0], [0.0, 0.3]]])}
    share = torch.tensor([[0.25, 1.0], [0.75, 0.0]])
    loss = FedGen(diversity_weight=0.0).generator_loss(model, batch_of([[0.0], [0.0]], [0, 1]), classifiers, share)
    # Class 0: ¼ log 2 and ¾ log(1 + 1/e), as the second's scores are 1 and 0. Class 1: log 2.
    assert loss.item() == pytest.approx((0.25 * log(2) + 0.75 * log(1 + exp(-1)) + log(2)) / 2, abs=1e-6)


def test_the_clients_terms_by_hand() -> None:
    networks = Networks(
        lambda: {"features": nn.Identity(), "classifier": nn.Linear(2, 2, bias=False), "generator": Fixed()}
    )
    model = networks.model({"classifier.weight": 0.1 * torch.eye(2)}, training=True)
    method, batch = FedGen(generated_weight=3.0, agreement_weight=5.0), batch_of([[0.0, 0.0]], [0])
    loss = method.local_loss(model, batch, torch.tensor([False, True]), torch.tensor(0.5))
    # The example's scores are 0 and 0. Features of class 1 alone are made: scores 0 and 1. Those of class 0, which the
    # example has, get 1 and 0: p = e / (1 + e), and KL((p, 1 − p) ‖ (½, ½)) = log 2 + p log p + (1 − p) log(1 − p).
    p = exp(1) / (1 + exp(1))
    divergence = log(2) + p * log(p) + (1 - p) * log(1 - p)
    assert loss.item() == pytest.approx(log(2) + 0.5 * (3 * log(1 + exp(-1)) + 5 * divergence), abs=1e-6)


def test_the_first_round_is_that_of_fedavg() -> None:
    assert_same(usual(METHOD, 1).server.params, usual(FedAvg(), 1).server.params, "round 1")
    assert not torch.equal(
        usual(METHOD, 2).server.params["classifier.weight"], usual(FedAvg(), 2).server.params["classifier.weight"]
    )


def test_without_both_terms_it_is_fedavg() -> None:
    method = FedGen(generated_weight=0.0, agreement_weight=0.0, hidden=16, generator_steps=1)
    assert_same(after(3, federation(method)).server.params, usual(FedAvg(), 3).server.params, "the weights")


def test_classes_are_drawn_from_those_that_clients_have() -> None:
    drawn = METHOD.requests(torch.tensor([True, False, True, False]), torch.Generator().manual_seed(0))
    assert set(drawn.y.tolist()) == {0, 2}
    assert len(drawn) == METHOD.generator_steps * METHOD.generator_batch


def test_the_upload_has_counts_and_no_generator() -> None:
    upload = METHOD.upload_spec(usual(METHOD, 1).server, federation(METHOD).server_context(1, "round"))
    assert set(upload.params) == set(usual(FedAvg(), 0).server.params)
    assert upload.count.shape == (CLASSES,)
    assert len(SIZES) == len(LABELS)
