"""pFedCSPC and FedCSPC: what wraps the base, what the server makes of prototypes, what clients start from."""

import dataclasses
from dataclasses import dataclass
from math import exp, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubles import tiny
from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    ODD_TASK,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    loaded,
    mean_cross_entropy,
    reply_of,
    scripted,
    trained_by_hand,
    usual,
    whole,
)
from protofed.api.requests import Fit
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.methods._shared.models import HEAD
from protofed.methods.families import GlobalModel
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddyn import FedDyn
from protofed.methods.fedprox import FedProx
from protofed.methods.moon import Moon
from protofed.methods.pfedcspc import PFedCSPC
from protofed.methods.pfedcspc.calibration import Partners, Pool, drawn_partners
from protofed.methods.pfedcspc.records import Guidance, Kept, Published
from protofed.nn.networks import Networks, Parts, matching, without
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes, class_sums

WIDTH = 6
"""P, what the classifier reads behind a projection."""


@dataclass(frozen=True)
class Projected(PFedCSPC):
    """The method on networks with a projection, which the small task's networks lack."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts = spec.model(client)
        projection = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, WIDTH))
        return {"features": parts["features"], "projection": projection, "classifier": nn.Linear(WIDTH, CLASSES)}


OFF = {"alignment_weight": 0.0, "calibration": False, "personal_initialisation": False, "knowledge_weight": 0.0}
BASES = [FedAvg(), FedProx(proximal_weight=0.1), Moon(), FedASAM(averaging=True, averaging_start=0.0)]
SHORT = PFedCSPC(calibration_epochs=4)
DEEP = Projected(calibration_epochs=4, contrast_weight=0.5)
GLOBAL = PFedCSPC(calibration_epochs=4, personalised=False)
GUIDED = {**OFF, "alignment_weight": 0.5}

each_base = pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)


# ---- conformance


SETTINGS = {
    "default": PFedCSPC(),
    "projected": DEEP,
    "global": GLOBAL,
    "everything off": PFedCSPC(**OFF),
    "class means": PFedCSPC(calibration_epochs=4, prototypes="class_means"),
    "on MOON": Projected(calibration_epochs=4, base=Moon()),
    "on FedASAM": PFedCSPC(calibration_epochs=4, base=FedASAM(averaging=True, averaging_start=0.0)),
    "no calibration": PFedCSPC(calibration=False),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Any, setting: str) -> None:
    check(SETTINGS[setting])


# ---- identities


@each_base
@pytest.mark.parametrize("personalised", [True, False])
def test_with_everything_off_it_is_its_base(base: GlobalModel[Any], personalised: bool) -> None:
    method = PFedCSPC(base=base, personalised=personalised, **OFF)
    found, expected = usual(method, 3), usual(base, 3)
    assert_same(found.server.base, expected.server, "the server")
    memories = {client: memory.base for client, memory in found.memories.items()}
    assert_same(memories, expected.memories, "the memories")
    assert_same(method.public(found.server)[0], base.public(expected.server)[0], "the public model")
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    model = federation(base).networks_of("ann").model(base.public(expected.server)[0])
    assert torch.equal(method.predict(model, x, method.public(found.server)[1], None), model.logits(x))


def test_terms_that_are_off_cost_nothing_whatever_their_weight() -> None:
    silent = PFedCSPC(**{**OFF, "alignment_weight": 9.0}, node=False, angle=False, edge=False)
    assert_same(usual(silent, 2).server.base, usual(FedAvg(), 2).server, "without node, angle and edge")


@each_base
def test_the_first_round_is_the_bases(base: GlobalModel[Any]) -> None:
    """There are no prototypes to align with, and no calibrated head to start from."""
    found, expected = usual(PFedCSPC(calibration_epochs=4, base=base), 1), usual(base, 1)
    assert_same(found.server.base, expected.server, "the first round")


DIFFERENCES = {
    "node": (PFedCSPC(**GUIDED), PFedCSPC(**GUIDED, node=False)),
    "angle": (PFedCSPC(**GUIDED), PFedCSPC(**GUIDED, angle=False)),
    "edge": (PFedCSPC(**GUIDED), PFedCSPC(**GUIDED, edge=False)),
    "the calibration": (DEEP, dataclasses.replace(DEEP, calibration=False)),
    "the contrast": (DEEP, dataclasses.replace(DEEP, contrast=False)),
    "the augmentation": (DEEP, dataclasses.replace(DEEP, augmentation=False)),
    "the margin": (DEEP, dataclasses.replace(DEEP, margin=0.0)),
    "the easy pairs": (DEEP, dataclasses.replace(DEEP, easy_weight=0.1)),
    "the temperature": (DEEP, dataclasses.replace(DEEP, temperature=0.1)),
    "the temperature of the nodes": (PFedCSPC(**GUIDED), PFedCSPC(**GUIDED, alignment_temperature=0.1)),
    "personal initialisation": (SHORT, dataclasses.replace(SHORT, personal_initialisation=False)),
    "its temperature": (SHORT, dataclasses.replace(SHORT, initialisation_temperature=0.05)),
    "clusters": (SHORT, dataclasses.replace(SHORT, prototypes="class_means")),
    "the share of a sample": (SHORT, dataclasses.replace(SHORT, sampled_share=1.0)),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_setting_makes_a_difference(what: str) -> None:
    one, other = (fingerprint(usual(method, 2).server.base) for method in DIFFERENCES[what])
    assert one != other


def test_without_a_projection_the_contrasts_have_no_effect() -> None:
    plain = dataclasses.replace(SHORT, contrast=False, augmentation=False)
    assert_close(usual(plain, 2).server, usual(SHORT, 2).server, "a network without projection", within=1e-6)


def test_one_whole_cluster_per_class_is_the_class_mean() -> None:
    single = dataclasses.replace(SHORT, clusters=1, repeats=1, sampled_share=1.0)
    means = dataclasses.replace(SHORT, prototypes="class_means")
    assert_same(whole(usual(single, 2)), whole(usual(means, 2)), "class means")


def test_personal_and_global_variants_without_mixing_train_the_same() -> None:
    unmixed = dataclasses.replace(SHORT, personal_initialisation=False)
    assert_same(usual(unmixed, 2).server, usual(GLOBAL, 2).server, "the server")


# ---- the client


def test_a_client_descends_equation_18() -> None:
    method = PFedCSPC(**GUIDED)
    state = usual(method, 1)
    known = state.server.prototypes
    assert known.is_known.all()

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        z_own, y = z[batch.weight > 0], batch.y[batch.weight > 0]
        u = known.mean[y]
        node = F.cross_entropy(F.cosine_similarity(z_own[:, None], known.mean, dim=-1) / 0.5, y)
        pairs = [(i, j) for i in range(len(y)) for j in range(len(y)) if y[i] != y[j]]
        of_z = torch.stack([(z_own[i] - z_own[j]).norm() for i, j in pairs])
        of_u = torch.stack([(u[i] - u[j]).norm() for i, j in pairs])
        edge = F.smooth_l1_loss(of_z / of_z.mean(), of_u / of_u.mean())
        angles = [
            (cosine(z_own, i, j, k) - cosine(u, i, j, k)).abs()
            for i, j in pairs
            for k in range(len(y))
            if y[k] not in (y[i], y[j])
        ]
        angle = torch.stack(angles).mean() if angles else 0.0
        return mean_cross_entropy(parts, z, batch) + 0.5 * (node + angle + edge)

    expected, _ = trained_by_hand(state.server.base.params, "ann", loss, round=1)
    reply = reply_of(federation(method), state, "ann")
    assert_close(reply.upload.base.params, expected, "ann's weights", within=5e-5)
    assert_same(reply.memory.params, reply.upload.base.params, "what ann keeps")


def cosine(points: Tensor, i: int, j: int, k: int) -> Tensor:
    return F.cosine_similarity(points[i] - points[j], points[k] - points[j], dim=0)


def test_prototypes_are_of_the_trained_encoder_in_evaluation_mode() -> None:
    upload = reply_of(federation(means := PFedCSPC(prototypes="class_means")), usual(means, 1), "ann").upload
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = loaded(upload.base.params, training=False)["features"](TASK.transform.clean(data.x))
    expected = class_sums(z, data.y, torch.ones(len(z)), CLASSES).prototypes()
    assert_close(upload.prototypes.mean, expected.mean, "ann's prototypes", within=1e-6)
    assert upload.prototypes.count.tolist() == (expected.count > 0).float().tolist()


def test_the_upload_has_a_slot_for_each_class_cluster_and_repeat() -> None:
    method = dataclasses.replace(SHORT, clusters=2, repeats=3)
    upload = reply_of(federation(method, ODD_TASK), federation(method, ODD_TASK).start(), "bob").upload
    assert upload.prototypes.mean.shape == (CLASSES * 6, FEATURES)
    # Bob has one example, of class 1: one cluster, three samples, all of them the example.
    assert upload.prototypes.count.tolist() == [0.0] * 6 + [1.0] * 3 + [0.0] * 15
    assert torch.equal(upload.prototypes.mean[6], upload.prototypes.mean[8])


def test_samples_are_drawn_anew_for_each_client_and_round() -> None:
    draws = [federation(SHORT).client_context(client, t).step_seed for client in SIZES for t in range(3)]
    z, y = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)), TASK.clients["ann"].labels
    local = federation(SHORT).client_context("ann", 0)
    assert len(y) == len(z)
    found = {tuple(SHORT.sampled(z, dataclasses.replace(local, step_seed=s)).mean.flatten().tolist()) for s in draws}
    assert len(found) == len(draws)


@pytest.mark.parametrize("method", [SHORT, GLOBAL], ids=["personal", "global"])
def test_only_personal_clients_keep_their_model(method: PFedCSPC) -> None:
    state = usual(method, 2)
    message, memory = method.message_for(state.server, "bob"), state.memories["bob"]
    own = method.local_weights(message, memory)
    if method.personalised:
        assert_same(own, memory.params, "bob's weights")
        assert fingerprint(own) != fingerprint(message.base.params)
    else:
        assert memory.params == {}
        assert_same(own, message.base.params, "bob's weights")


def test_a_base_that_remembers_does_so_inside() -> None:
    state = usual(PFedCSPC(calibration_epochs=4, base=Moon()), 2)
    for memory in state.memories.values():
        assert_same(memory.base.params, memory.params, "MOON's previous model")
        assert memory.base.exists == 1


# ---- the calibration


def central_of(method: PFedCSPC, round: int = 0) -> Any:
    return federation(method).server_context(round, "round")


def random_pool(method: PFedCSPC) -> tuple[Pool, Partners]:
    """Prototypes of classes 0, 1 and 3 at three clients, the second of which has one class."""
    draws = torch.Generator().manual_seed(4)
    label = torch.tensor([0, 0, 1, 1, 3, 1, 1, 0, 3, 3])
    client = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
    pool = Pool(torch.rand(10, FEATURES, generator=draws), label, client)
    return pool, drawn_partners(pool, method.augmentations, draws)


@torch.no_grad()
def slow_server_loss(method: PFedCSPC, parts: Parts, rows: list[int], pool: Pool, partners: Partners) -> float:
    """Eq. (17), one prototype at a time, in float64."""
    head, classifier, u = parts["projection"].double(), parts["classifier"].double(), pool.mean.double()
    z = {i: head(u[i]) for i in rows}
    unit = {i: z[i] / z[i].norm() for i in rows}
    label, client = pool.label.tolist(), pool.client.tolist()
    total = 0.0
    for i in rows:
        logits = classifier(z[i])[[0, 1, 3]]
        total += -logits.log_softmax(0)[[0, 1, 3].index(label[i])].item()
        hard = {s: (label[s] == label[i]) != (client[s] == client[i]) for s in rows}
        term = {
            s: (1.0 if hard[s] else method.easy_weight) * exp(float(unit[i] @ unit[s]) / method.temperature)
            for s in rows
            if s != i
        }
        positives = [s for s in term if label[s] == label[i]]
        if method.contrast and positives:
            logs = [log(term[s] / sum(term.values())) for s in positives]
            total += -method.contrast_weight * sum(logs) / len(logs)
        if method.augmentation:
            hinges = []
            for a in range(method.augmentations):
                strength = partners.strength[i, a].double()
                near = u[i] + strength * (u[i] - u[partners.same[i, a]])
                far = u[i] + strength * (u[partners.other[i, a]] - u[i])
                gap = (z[i] - head(near)).square().sum() - (z[i] - head(far)).square().sum() + method.margin
                hinges.append(max(0.0, gap.item()))
            total += method.contrast_weight * sum(hinges) / len(hinges)
    return total / len(rows)


@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.parametrize("augmentation", [True, False])
def test_the_loss_of_the_server_is_equation_17(contrast: bool, augmentation: bool) -> None:
    method = dataclasses.replace(DEEP, contrast=contrast, augmentation=augmentation, margin=0.01)
    pool, partners = random_pool(method)
    networks = Networks(lambda: method.networks(TASK.spec, "ann"))
    params = networks.init(5)
    rows = [7, 2, 0, 5, 9, 8, 3, 1]
    index = torch.tensor([*rows, 7, 2])  # the last two only fill the batch
    weight = torch.tensor([1.0] * 8 + [0.0] * 2)
    batch = Batch(pool.mean[index], pool.label[index], weight, index, torch.tensor(True), torch.tensor(0))
    is_known = torch.tensor([True, True, False, True])
    found = method.calibration_loss(networks.model(params, training=True), batch, pool, partners, is_known)
    parts = method.networks(TASK.spec, "ann")
    for part, module in parts.items():
        own = {name.removeprefix(f"{part}."): leaf for name, leaf in params.items() if name.startswith(part)}
        module.load_state_dict(own, strict=False)
    expected = slow_server_loss(method, parts, rows, pool, partners)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_calibration_asks_for_four_fits_of_the_head() -> None:
    method, requests = dataclasses.replace(DEEP, calibration_epochs=100, calibration_rate=0.2), []
    central = central_of(method, round=7)
    answer = central.answer
    central = dataclasses.replace(central, answer=lambda request: requests.append(request) or answer(request))
    params = central.initial_params()
    pool, _ = random_pool(method)
    head = method.calibrated(params, pool, central)
    assert all(isinstance(request, Fit) for request in requests)
    assert [request.epochs for request in requests] == [30, 30, 30, 10]
    assert [request.optimizer.lr for request in requests] == pytest.approx([0.02, 0.002, 0.0002, 0.00002])
    for request in requests:
        assert (request.batch_size, request.objectives[0].trains) == (100, HEAD)
        assert request.optimizer == Sgd(lr=request.optimizer.lr, weight_decay=1e-5)
        assert_same(without(request.params, HEAD), without(params, HEAD), "the encoder")
    assert head.keys() == matching(params, HEAD).keys()
    assert requests[1].params["classifier.weight"] is not params["classifier.weight"]
    networks = central.networks
    before, after_ = (
        F.cross_entropy(networks.model(p).scores(pool.mean), pool.label).item() for p in (params, {**params, **head})
    )
    assert after_ < before


def test_the_row_of_a_class_without_prototypes_stays() -> None:
    central = central_of(DEEP)
    params, (pool, _) = central.initial_params(), random_pool(DEEP)
    head = DEEP.calibrated(params, pool, central)
    moved = (head["classifier.weight"] - params["classifier.weight"]).abs().max(-1).values
    assert moved[2] < 1e-5  # weight decay alone: at most 4 steps of 0.1 · 10⁻⁵
    assert moved[[0, 1, 3]].min() > 1e-4


def test_the_server_keeps_the_plain_mean_and_sends_the_calibrated_head() -> None:
    unmixed = dataclasses.replace(DEEP, personal_initialisation=False)
    server = usual(unmixed, 1).server
    message = unmixed.message_for(server, "eve").base.params
    assert_same(without(message, HEAD), without(server.base.params, HEAD), "the encoder")
    assert_same(matching(message, HEAD), server.head, "the head")
    assert fingerprint(server.head) != fingerprint(matching(server.base.params, HEAD))


def test_prototypes_and_exemplars_are_means_over_owners() -> None:
    state, of = usual(DEEP, 0), federation(DEEP)
    uploads = {client: reply_of(of, state, client).upload for client in SIZES}
    server = usual(DEEP, 1).server
    networks = of.networks_of("ann")
    model = networks.model({**server.base.params, **server.head})
    label = torch.arange(CLASSES).repeat_interleave(15)
    for c in range(CLASSES):
        own = [u.prototypes.mean[(u.prototypes.count > 0) & (label == c)] for u in uploads.values()]
        own = [rows for rows in own if len(rows)]
        assert server.prototypes.count[c] == len(own)
        expected = torch.stack([rows.mean(0) for rows in own]).mean(0)
        torch.testing.assert_close(server.prototypes.mean[c], expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            expected = torch.stack([model.projection(rows).mean(0) for rows in own]).mean(0)
        torch.testing.assert_close(server.exemplars.mean[c], expected, atol=1e-5, rtol=1e-5)


# ---- personal initialisation


def test_equal_losses_give_the_unweighted_mean_of_the_encoders() -> None:
    """Clients of unequal sizes, whose heads are equal and whose encoders are not."""
    central = central_of(SHORT)
    server = SHORT.init_server(central)
    models = {name: central.networks.init(seed) for seed, name in enumerate(["ann", "bob", "cyd"])}
    models = {name: {**params, **server.head} for name, params in models.items()}
    pool, _ = random_pool(SHORT)
    encoders, mixing = SHORT.mixture(server, models, pool, central)
    assert mixing["bob"].tolist() == pytest.approx([1 / 3] * 3)
    assert mixing["dan"].tolist() == [0.0] * 3
    found = SHORT.message_for(dataclasses.replace(server, encoders=encoders, mixing=mixing), "ann").base.params
    mean = {n: torch.stack([p[n] for p in models.values()]).mean(0) for n in without(server.base.params, HEAD)}
    assert_close(without(found, HEAD), mean, "ann's encoder", within=1e-6)


def test_mixing_weights_are_equation_4() -> None:
    state, of = usual(DEEP, 1), federation(DEEP)
    uploads = {client: reply_of(of, usual(DEEP, 0), client).upload for client in sorted(SIZES)}
    label = torch.arange(CLASSES).repeat_interleave(15)
    for client, own in uploads.items():
        rows = own.prototypes.count > 0
        losses = []
        for other in uploads.values():
            model = of.networks_of(client).model(other.base.params)
            logits = model.classifier(model.projection(own.prototypes.mean[rows]))
            losses.append(F.cross_entropy(logits, label[rows]).item())
        shares = [exp(-value / DEEP.initialisation_temperature) for value in losses]
        assert state.server.mixing[client].tolist() == pytest.approx([s / sum(shares) for s in shares], rel=1e-5)
        assert len({round(s, 6) for s in shares}) > 1
        weights = state.server.mixing[client]
        message = DEEP.message_for(state.server, client).base.params
        for name in without(message, HEAD):
            stacked = torch.stack([upload.base.params[name].double() for upload in uploads.values()])
            expected = torch.tensordot(weights, stacked, 1).float()
            torch.testing.assert_close(message[name], expected, atol=1e-6, rtol=1e-5)


def test_a_client_that_was_away_starts_from_the_global_encoder() -> None:
    others = ("ann", "bob", "dan", "eve")
    of = scripted(SHORT, lambda t: others if t == 1 else tuple(sorted(SIZES)))
    server = after(2, of).server
    away, there = (SHORT.message_for(server, client).base.params for client in ("cyd", "ann"))
    assert_same(away, {**server.base.params, **server.head}, "cyd's start")
    assert fingerprint(without(there, HEAD)) != fingerprint(without(away, HEAD))
    assert_same(matching(there, HEAD), matching(away, HEAD), "the head of both")


def test_the_global_variant_sends_everyone_the_same_and_keeps_no_encoders() -> None:
    server = usual(GLOBAL, 2).server
    assert (server.encoders, server.mixing) == ({}, {})
    assert_same(GLOBAL.message_for(server, "ann"), GLOBAL.message_for(server, "eve"), "the messages")


# ---- prediction


def test_the_public_model_predicts_by_equation_15() -> None:
    networks = Networks(lambda: {"features": nn.Identity(), "classifier": nn.Linear(2, 3, bias=False)})
    model = networks.model({"classifier.weight": torch.tensor([[log(2), 0.0], [0.0, 0.0], [0.0, 0.0]])})
    exemplars = Prototypes(torch.tensor([[0.0, 2.0], [4.0, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0]))
    nothing: Any = None
    method = PFedCSPC(knowledge_weight=0.25, temperature=0.5)
    found = method.predict(model, torch.tensor([[1.0, 0.0]]), Published(nothing, nothing, exemplars), None)
    # Classifier: logits (log 2, 0, 0), shares (1/2, 1/4, 1/4). Exemplars: cosines (0, 1) over 0.5, none for class 2.
    e = exp(2)
    expected = [0.75 / 2 + 0.25 / (1 + e), 0.75 / 4 + 0.25 * e / (1 + e), 0.75 / 4]
    assert found[0].tolist() == pytest.approx(expected)


def test_a_clients_own_model_predicts_by_its_classifier() -> None:
    state = usual(SHORT, 1)
    message, memory = SHORT.message_for(state.server, "ann"), state.memories["ann"]
    assert type(message) is Guidance
    assert isinstance(memory, Kept)
    model = federation(SHORT).networks_of("ann").model(memory.params)
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    assert torch.equal(SHORT.predict(model, x, message, memory), model.logits(x))
    public, with_ = SHORT.public(state.server)
    assert not torch.equal(SHORT.predict(model, x, with_, None), model.logits(x))
    assert_same(public, {**state.server.base.params, **state.server.head}, "the public weights")


def test_before_the_first_round_the_public_model_predicts_as_its_classifier_does() -> None:
    server = usual(SHORT, 0).server
    params, message = SHORT.public(server)
    model = federation(SHORT).networks_of("ann").model(params)
    x = batch_of(TASK.transform.clean(TASK.tests["domain 0"].x), TASK.tests["domain 0"].y).x
    assert torch.equal(SHORT.predict(model, x, message, None).argmax(-1), model.logits(x).argmax(-1))


@pytest.mark.parametrize("calibrates", [True, False])
def test_an_average_of_the_base_is_public_only_without_calibration(calibrates: bool) -> None:
    method = PFedCSPC(base=FedASAM(averaging=True, averaging_start=0.0), calibration=calibrates, calibration_epochs=4)
    state: State = usual(method, 2)
    server = state.server
    expected = {**server.base.params, **server.head} if calibrates else server.base.average
    assert_same(method.public(server)[0], expected, "the public model")
    assert fingerprint(server.base.average) != fingerprint(server.base.params)


def test_a_base_hears_how_far_clients_went_from_what_they_were_given() -> None:
    """FedDyn's server keeps the mean of what its clients keep; the calibration of the head is no way of theirs."""
    method = PFedCSPC(base=FedDyn(penalty_weight=0.1, weighting="uniform"), personalised=False, calibration_epochs=30)
    own = Federation(method, tiny(), Training(rounds=3, epochs=2, batch_size=4, optimizer=Sgd(lr=0.05)))
    state = own.start()
    for _ in range(3):
        state = own.advance(state)
    for name, drift in state.server.base.drift.items():
        clients = torch.stack([memory.base.drift[name] for memory in state.memories.values()])
        torch.testing.assert_close(drift, clients.mean(0), rtol=1e-4, atol=1e-5)
