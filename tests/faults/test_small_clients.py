"""Clients of one class, clients of hardly any examples, and classes that nobody has (rows D5, D6 and D7).

What is promised of classes that a client does not have depends on the method. Cross-entropy over all classes lowers
the scores of absent ones, so that their rows of a trained classifier move: that is what the papers print, and it stays.
What holds for all methods is that no prototype is made up, and that the server's prototypes of classes that no reply
holds stay as they were. FedNH fixes its classifier, and no client changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CLASSES,
    FEATURES,
    after,
    assert_finite,
    assert_same,
    examples,
    federation,
    reply_of,
    small_network,
    small_task,
    whole,
)
from protofed import tree
from protofed.api.task import Task
from protofed.data.batches import Data, training_plan
from protofed.engine.federation import Federation, State
from protofed.methods import METHODS
from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods.ccvr import CCVR
from protofed.methods.fedproto import FedProto
from protofed.methods.fpl import FPL
from protofed.metrics.formulas import accuracy, local_index, macro_f1, owned_accuracy, proportional_accuracy
from protofed.metrics.registry import PersonalJudgement, measured
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Gradient, Sgd
from protofed.prototypes.class_means import no_prototypes
from protofed.prototypes.contrast import nearest
from protofed.prototypes.gaussians import class_gaussians, virtual_features
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params, Tree

# ---- D5: one class

LONE = 1
"""The one class that bob has."""
ONE_CLASS = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 0], "bob": [LONE] * 6, "cyd": [0, 2, 3, 3, 1]})

SENDS_PROTOTYPES = (
    *("fpl", "fedseproto", "fedpc", "pfedcspc", "fedproto_avg", "fedproc", "fedmlp", "fednh", "fedproto", "fedgh"),
    *("feddistill", "fedhkd", "fedpac", "fedpcl", "fedplvm", "fedtgp", "mp_fedcl", "fpl_sums", "fedpc_sums"),
)


@dataclass(frozen=True)
class WatchedSgd(Sgd):
    """Counts its steps, and refuses a gradient that is not finite."""

    steps: list[int] = field(default_factory=list, compare=False)

    def step(self, gradient: Gradient, params: Params, state: Tree) -> tuple[Params, Tree]:
        def watched(at: Params) -> Params:
            slope = gradient(at)
            assert_finite(slope, "the gradient")
            return slope

        self.steps.append(1)
        return super().step(watched, params, state)


@pytest.fixture(scope="module")
def after_one_round() -> Callable[[str], State]:
    known: dict[str, State] = {}

    def made(name: str) -> State:
        if name not in known:
            known[name] = after(1, federation(METHODS[name](), ONE_CLASS, epochs=1))
        return known[name]

    return made


@pytest.mark.parametrize("name", METHODS)
def test_a_client_of_one_class_trains_a_hundred_steps_and_stays_finite(
    name: str, after_one_round: Callable[[str], State]
) -> None:
    """From what a first round taught the server, so that losses that read prototypes have some."""
    optimizer = WatchedSgd(lr=0.05, momentum=0.9, weight_decay=1e-4)
    # Six examples in batches of eight: each epoch is one step.
    of = federation(METHODS[name](), ONE_CLASS, epochs=100, optimizer=optimizer)
    reply = reply_of(of, after_one_round(name), "bob")
    # pFedMe descends with an optimiser of its own, and FedSGD's clients do not descend at all.
    assert len(optimizer.steps) >= 100 or name in ("pfedme", "fedsgd")
    assert_finite(reply, "what a client of one class replies and keeps")


@pytest.mark.parametrize("name", SENDS_PROTOTYPES)
def test_a_client_of_one_class_sends_the_prototypes_of_that_class_only(
    name: str, after_one_round: Callable[[str], State]
) -> None:
    of = federation(METHODS[name](), ONE_CLASS, epochs=2)
    upload = tree.named_leaves(reply_of(of, after_one_round(name), "bob").upload)
    [count] = [leaf for path, leaf in upload.items() if path.split("/")[-1] == "count"]
    [mean] = [leaf for path, leaf in upload.items() if path.split("/")[-1] == "mean"]
    by_class = count.view(CLASSES, -1)  # pFedCSPC has room for several of each class
    assert by_class.sum(-1).nonzero().flatten().tolist() == [LONE]
    absent = torch.arange(CLASSES) != LONE
    assert not mean.view(CLASSES, by_class.shape[-1], -1)[absent].any()


def test_the_list_of_methods_that_send_prototypes_is_complete(after_one_round: Callable[[str], State]) -> None:
    found = []
    for name, method in METHODS.items():
        of = federation(method(), ONE_CLASS)
        like = tree.named_leaves(method().upload_spec(after_one_round(name).server, of.server_context(1, "round")))
        if {"mean", "count"} <= {path.split("/")[-1] for path in like}:
            found.append(name)
    assert sorted(found) == sorted(SENDS_PROTOTYPES)


class OnlyBob(Federation):
    def sampled(self, round: int, *known: Any) -> tuple[str, ...]:
        return ("bob",) if round == 1 else tuple(sorted(self.task.clients))


SERVER_PROTOTYPES = {
    "fpl": "prototypes/consistent/mean",
    "fedseproto": "prototypes/mean",
    "fedpc": "sent/mean",
    "fedproto_avg": "prototypes/mean",
    "fedproc": "prototypes/mean",
    "fedmlp": "prototypes/classes/mean",
    "fedproto": "mean",
    "fednh": "params/classifier.prototypes",
    "fedhkd": "knowledge/mean",
    "fedpac": "centroids/mean",
    "fedpcl": "average/mean",
    "fedplvm": "prototypes/average/mean",
}
"""Where each method's server keeps the prototypes that clients learn against."""


@pytest.mark.parametrize("name", SERVER_PROTOTYPES)
def test_prototypes_of_classes_that_no_reply_of_a_round_holds_stay_as_they_were(
    name: str, after_one_round: Callable[[str], State]
) -> None:
    before = after_one_round(name)
    usual = federation(METHODS[name](), ONE_CLASS, epochs=1)
    state = OnlyBob(usual.method, ONE_CLASS, usual.training, Sequential()).advance(before)
    old, new = (tree.named_leaves(of.server)[SERVER_PROTOTYPES[name]] for of in (before, state))
    assert old.shape[-2] == CLASSES
    changed = (old != new).any(-1).view(-1, CLASSES).any(0)  # FedPC has some for each of its clusters
    assert changed.nonzero().flatten().tolist() == [LONE]


def test_fednh_leaves_the_classifier_that_it_received_alone(after_one_round: Callable[[str], State]) -> None:
    of, state = federation(METHODS["fednh"](), ONE_CLASS, epochs=2), after_one_round("fednh")
    reply = reply_of(of, state, "bob")
    message = of.method.message_for(state.server, "bob")
    trained = of.method.trained_weights(reply.upload, reply.memory)
    assert_same(
        trained["classifier.prototypes"], message.params["classifier.prototypes"], "the classifier of a client of FedNH"
    )


# ---- D6: one example, and a last batch of one

SIZES = {"one": 1, "two": 2, "over": 33, "twice over": 65}
BATCH = 32


def flat_network(client: str) -> Parts:
    features = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 64, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)
    )
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def grouped_network(client: str) -> Parts:
    features = nn.Sequential(
        nn.Conv2d(3, FEATURES, 3, stride=2), nn.GroupNorm(2, FEATURES), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


NORMS = {"BatchNorm1d": flat_network, "BatchNorm2d": small_network, "GroupNorm": grouped_network}


def sized(size: int, model: Callable[[str], Parts]) -> Task:
    """A client of so many examples, and one of eight beside it."""
    clients = {"few": examples(torch.arange(size) % CLASSES, 0), "more": examples(torch.arange(8) % CLASSES, 1)}
    return Task(clients, {"test": examples(torch.arange(CLASSES).repeat(3), 50)}, CLASSES, model)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", SIZES.values(), ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fpl", "fedproto"])
def test_clients_of_hardly_any_examples_train_and_stay_finite(method: str, size: int, norm: str) -> None:
    of = federation(METHODS[method](), sized(size, NORMS[norm]), batch_size=BATCH)
    state = after(2, of)
    assert not state.failures
    assert_finite(whole(state), f"{size} examples with {norm}")


@pytest.mark.parametrize("norm", NORMS)
def test_the_prototype_of_one_example_is_its_feature(norm: str) -> None:
    of = federation(FPL(prototype_mode="recomputed"), sized(1, NORMS[norm]), batch_size=BATCH)
    upload = reply_of(of, of.start(), "few").upload
    data = of.task.clients["few"]
    model = of.networks_of("few").model(upload.params)
    feature = model.features(of.task.transform.clean(data.x)).detach()
    assert upload.prototypes.count.tolist() == [1, 0, 0, 0]
    assert torch.allclose(upload.prototypes.mean[0], feature[0], rtol=0, atol=1e-6)
    assert not upload.prototypes.mean[1:].any()


@pytest.mark.parametrize("size", SIZES.values(), ids=str)
def test_no_batch_has_one_row_and_every_example_counts_once(size: int) -> None:
    """How a last batch of one, which BatchNorm cannot train on, never comes to be."""
    data = Data.of(torch.zeros(size, 3), torch.zeros(size, dtype=torch.int64))
    plan = training_plan(data, BATCH, 1, sized(1, small_network).transform, torch.Generator().manual_seed(0))
    assert len(plan.index) == -(-size // BATCH)
    assert plan.index.shape[1] > 1
    assert sorted(plan.index[plan.weight > 0].tolist()) == [*range(size)]


# ---- D7: a class that nobody has

CONFIGURED, PRESENT = 10, 9
"""The last class is in the configuration, and in no client's data and no test set."""


def nine_of_ten(num_classes: int) -> Task:
    """Vectors around nine centres, for a task of nine or of ten classes."""
    draws = torch.Generator().manual_seed(5)
    centres = 2 * torch.randn(PRESENT, 12, generator=draws)

    def drawn(count: int) -> Data:
        y = torch.arange(count) % PRESENT
        return Data.of(centres[y] + 0.7 * torch.randn(count, 12, generator=draws), y)

    def model(client: str) -> Parts:
        return {"features": nn.Sequential(nn.Linear(12, 8), nn.ReLU()), "classifier": nn.Linear(8, num_classes)}

    clients = {"north": drawn(45), "south": drawn(27)}
    return Task(clients, {"test": drawn(90)}, num_classes, model)


@pytest.mark.parametrize(
    "name", [name for name in SENDS_PROTOTYPES if name not in ("pfedcspc", "fedgh", "fednh", "mp_fedcl")]
)
def test_the_prototype_of_a_class_that_nobody_has_stays_absent(name: str) -> None:
    state = after(2, federation(METHODS[name](), nine_of_ten(CONFIGURED)))
    leaves = tree.named_leaves(state.server)
    counts = [leaf for path, leaf in leaves.items() if path.split("/")[-1] == "count"]
    means = [leaf for path, leaf in leaves.items() if path.split("/")[-1] == "mean"]
    assert len(counts) == len(means) > 0
    for count, mean in zip(counts, means, strict=True):
        assert (count.view(-1, CONFIGURED).sum(0) > 0).tolist() == [True] * PRESENT + [False]
        assert not mean[..., -1, :].any()


def predicted_classes(of: Federation, state: State) -> Tensor:
    message = of.method.message_for(state.server, "north")
    model = of.networks_of("north").model(of.method.local_weights(message, of.client_state(state, "north", message)))
    x = of.task.tests["test"].x
    # Also zeros, to which the row of an absent prototype, which is all zeros, would be nearest.
    everything = torch.cat([x, torch.zeros(1, 12), 1e-3 * torch.randn(500, 12, generator=torch.Generator())])
    return of.method.predict(model, everything, message, of.client_state(state, "north", message)).argmax(-1)


def test_the_nearest_prototype_is_never_one_of_a_class_that_nobody_has() -> None:
    of = federation(FedProto(inference="nearest_prototype"), nine_of_ten(CONFIGURED))
    assert predicted_classes(of, after(2, of)).max() < PRESENT


def test_scores_by_the_nearest_prototype_equal_those_of_a_task_without_the_absent_class() -> None:
    draws = torch.Generator().manual_seed(3)
    z, means = torch.randn(50, 6, generator=draws), torch.randn(CONFIGURED, 6, generator=draws)
    is_known = torch.arange(CONFIGURED) < PRESENT
    ten, nine = nearest(z, means, is_known), nearest(z, means[:PRESENT], is_known[:PRESENT])
    assert torch.equal(ten[:, :PRESENT], nine)
    assert (ten[:, PRESENT] == -torch.inf).all()


def test_nothing_is_predicted_before_there_are_prototypes_but_no_number_is_lost() -> None:
    empty = no_prototypes(CONFIGURED, 6)
    assert (nearest(torch.zeros(2, 6), empty.mean, empty.is_known) == -torch.inf).all()


def test_calibration_neither_trains_nor_reads_the_row_of_a_class_that_nobody_has() -> None:
    base = METHODS["fedavg"]()
    of = federation(CCVR(base=base, samples=20, epochs=3), nine_of_ten(CONFIGURED))  # type: ignore[arg-type]
    before = after(2, of)
    finished = of.finish(before)
    old, new = (state.server.classifier["classifier.weight"] for state in (before, finished))
    assert torch.equal(old[-1], new[-1])
    assert (old[:-1] != new[:-1]).any(-1).all()


def test_no_feature_is_made_up_for_a_class_that_nobody_has() -> None:
    known = class_gaussians(torch.eye(PRESENT), torch.arange(PRESENT), CONFIGURED)
    made = virtual_features(known, 3, torch.Generator().manual_seed(0))
    assert made.labels.bincount(minlength=CONFIGURED).tolist() == [3] * PRESENT + [0]


def test_cross_entropy_among_known_classes_equals_that_of_a_task_without_the_absent_one() -> None:
    draws = torch.Generator().manual_seed(4)
    logits, y = torch.randn(40, CONFIGURED, generator=draws), torch.arange(40) % PRESENT
    logits[:, -1] = 50.0  # an absent class that would win
    logits.requires_grad_()
    ten = known_cross_entropy(logits, y, torch.arange(CONFIGURED) < PRESENT)
    nine = nn.functional.cross_entropy(logits[:, :PRESENT], y, reduction="none")
    assert torch.allclose(ten, nine, atol=1e-6)
    [slope] = torch.autograd.grad(ten.sum(), logits)
    assert not slope[:, -1].any()


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": lambda confusion, counts: accuracy(confusion),
    "owned": owned_accuracy,
    "proportional": proportional_accuracy,
    "macro F1": lambda confusion, counts: macro_f1(confusion),
    "local index": lambda confusion, counts: local_index(confusion),
}


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_of_ten_classes_of_which_one_is_absent_are_those_of_the_nine(metric: str) -> None:
    draws = torch.Generator().manual_seed(6)
    nine = torch.randint(0, 9, (PRESENT, PRESENT), generator=draws) + 20 * torch.eye(PRESENT, dtype=torch.int64)
    counts = torch.randint(1, 50, (PRESENT,), generator=draws)
    ten = nn.functional.pad(nine, (0, 1, 0, 1))
    found = METRICS[metric](ten, nn.functional.pad(counts, (0, 1)))
    assert found == pytest.approx(METRICS[metric](nine, counts), abs=1e-12)
    assert 0 < found < 1


def test_an_absent_class_that_is_predicted_is_a_mistake_and_adds_no_class_to_the_mean() -> None:
    # Class 0: 3 of 4 right; class 1: 4 of 4 right; one example of class 0 was taken for the absent class 2.
    confusion = torch.tensor([[3, 0, 1], [0, 4, 0], [0, 0, 0]])
    # F1 of class 0 is 2·3 / (4 + 3) = 6/7, of class 1 it is 1; a third class at 0 would give (6/7 + 1) / 3.
    assert macro_f1(confusion) == pytest.approx((6 / 7 + 1) / 2)
    assert accuracy(confusion) == 7 / 8


def test_scores_of_a_client_leave_the_absent_class_out() -> None:
    nine = torch.eye(PRESENT, dtype=torch.int64) * 5
    ten = nn.functional.pad(nine, (0, 1, 0, 1))
    counts = torch.full((PRESENT,), 3)
    scores = measured("personal", PersonalJudgement(ten, ten, nn.functional.pad(counts, (0, 1))))
    assert scores == measured("personal", PersonalJudgement(nine, nine, counts))
    assert set(scores.values()) == {1.0}
