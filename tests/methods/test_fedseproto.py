"""FedSeProto: its losses (Eq. 10 to 15), its two phases, prototypes (Eq. 3 and 12), and what never leaves a client."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    small_network,
    usual,
)
from protofed import tree, wire
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.requests import Fit
from protofed.api.task import Task
from protofed.data.batches import Batch, batch_at, training_plan
from protofed.engine.state import State
from protofed.methods.families import PrototypeUpload, WeightsAndPrototypes
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.fedseproto.losses import balanced_pull, divergence, preference, shared_information
from protofed.methods.fedseproto.networks import ImageDecoder, decoder
from protofed.nn.networks import Networks, Parts, matching, without
from protofed.prototypes.class_means import Prototypes
from protofed.tree import Params

SHARED = {"features", "semantic", "classifier"}
PRIVATE = {"domain", "decoder"}
HETERO = FedSeProto(shares="prototypes")
CE_ONLY = FedSeProto(distillation=False, information=False, alignment=False)

Loss = Callable[[Parts, Tensor, Batch], Tensor]


def parts_in(params: Params) -> set[str]:
    return {name.partition(".")[0] for name in params}


def prototypes(means: list[list[float]], counts: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(means), torch.tensor(counts))


# ---- conformance

PATHS = [
    FedSeProto(),
    FedSeProto(phase_mode="epoch"),
    FedSeProto(phase_mode="round"),
    FedSeProto(phase_mode="joint"),
    HETERO,
    FedSeProto(distillation=False),
    FedSeProto(information=False),
    FedSeProto(alignment=False),
    CE_ONLY,
]


def settings_of(method: FedSeProto) -> str:
    return ",".join(f"{k}={v}" for k, v in vars(method).items() if v != getattr(FedSeProto(), k)) or "default"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("method", PATHS, ids=settings_of)
def test_it_conforms(method: FedSeProto, check: Callable[[Method], None]) -> None:
    check(method)


# ---- the terms, by hand


def test_the_shared_information_is_half_the_mean_squares_and_the_error_of_the_decoder() -> None:
    semantic, domain = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    x, rebuilt = torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2)
    rebuilt[0, 0, 1, 1] = 3.0
    # First example: (1 + 9) / 2 / 2 = 2.5, and (4 + 0) / 2 / 2 = 1, and one pixel of four off by 2: 4 / 4 = 1.
    # Second: 0, and (0 + 16) / 2 / 2 = 4, and no error.
    assert shared_information(semantic, domain, x, rebuilt).tolist() == [4.5, 4.0]


def test_the_divergence_is_that_of_the_teacher_from_the_student_in_this_order() -> None:
    teacher, student = torch.tensor([[log(3.0), 0.0]]), torch.tensor([[0.0, 0.0]])
    # Softmax: (3/4, 1/4) and (1/2, 1/2). KL = 3/4 log(3/2) + 1/4 log(1/2); the other way 1/2 log(2/3) + 1/2 log 2.
    assert divergence(teacher, student).item() == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)
    assert divergence(student, teacher).item() == pytest.approx(0.5 * log(2 / 3) + 0.5 * log(2), abs=1e-6)


def test_the_distillation_falls_when_semantic_features_keep_what_is_known_and_domain_features_lose_it() -> None:
    s1, s2 = torch.tensor([1.0, 0.5], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    found = preference(s1, s2)
    # −log(e^(−s1) / (e^(−s1) + e^(−s2))): log 2 where they are equal.
    assert found[0].item() == pytest.approx(log(2), abs=1e-6)
    assert found[1].item() == pytest.approx(-log(exp(-0.5) / (exp(-0.5) + exp(-2))), abs=1e-6)
    up, down = torch.autograd.grad(found[0], [s1, s2])
    assert up[0].item() == 0.5
    assert down[0].item() == -0.5


def test_the_teacher_gets_no_gradient() -> None:
    teacher = torch.tensor([[1.0, 2.0, -1.0]], requires_grad=True)
    student = torch.tensor([[0.0, 1.0, 3.0]], requires_grad=True)
    to_teacher, to_student = torch.autograd.grad(
        divergence(teacher, student).sum(), [teacher, student], allow_unused=True
    )
    assert to_teacher is None
    assert to_student.abs().sum() > 0


def test_every_class_of_the_batch_counts_alike_in_the_pull() -> None:
    known = prototypes([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0], [0.0, 0.0]], [3.0, 2.0, 1.0, 0.0])
    z = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [1.0, 5.0], [7.0, 7.0], [9.0, 9.0]])
    batch = batch_of(z, [0, 0, 0, 1, 3, 1], [1, 1, 1, 1, 1, 0])
    # Class 0: mean squares 1, 2 and 0, so 1. Class 1: (0 + 16) / 2 = 8. Class 2 is not in the batch, class 3 has no
    # prototype, and the last row only fills the batch: (1 + 8) / 2 = 4.5. A plain mean would be 11 / 4 or 11 / 5.
    assert balanced_pull(z, batch, known).item() == 4.5


def test_a_batch_without_a_known_prototype_is_not_pulled_and_prototypes_get_no_gradient() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    unknown = prototypes([[0.0, 0.0], [9.0, 9.0]], [0.0, 1.0])
    (gradient,) = torch.autograd.grad(balanced_pull(z, batch_of(z.detach(), [0, 0]), unknown), z)
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    mean = torch.zeros(2, 2, requires_grad=True)
    loss = balanced_pull(z, batch_of(z.detach(), [0, 1]), Prototypes(mean, torch.ones(2)))
    to_z, to_mean = torch.autograd.grad(loss, [z, mean], allow_unused=True)
    assert to_z.abs().sum() > 0
    assert to_mean is None


# ---- the objective against a slow reference


def total_by_hand(method: FedSeProto, known: Prototypes, parts: Parts, z: Tensor, batch: Batch) -> Tensor:
    """Eq. (15), an example at a time, with plain exp and log; the classifier and the soft labels are constants."""
    weight, bias = parts["classifier"].weight.detach(), parts["classifier"].bias.detach()
    semantic, domain = parts["semantic"](z), parts["domain"](z)
    rebuilt = parts["decoder"](torch.cat([semantic, domain], dim=1))
    sums, distances = {"CE": 0.0, "KD": 0.0, "MI": 0.0}, {}
    rows = [i for i in range(len(batch.y)) if batch.weight[i] > 0]
    for i in rows:
        wanted, kept, lost = ((weight @ v + bias).exp() for v in (z[i].detach(), semantic[i], domain[i]))
        wanted, kept, lost = wanted / wanted.sum(), kept / kept.sum(), lost / lost.sum()
        s1, s2 = (wanted * (wanted / kept).log()).sum(), (wanted * (wanted / lost).log()).sum()
        y = int(batch.y[i])
        sums["CE"] -= kept[y].log()
        sums["KD"] -= ((-s1).exp() / ((-s1).exp() + (-s2).exp())).log()
        lengths = (semantic[i] ** 2).mean() / 2 + (domain[i] ** 2).mean() / 2
        sums["MI"] += lengths + ((batch.x[i] - rebuilt[i]) ** 2).mean()
        if known.count[y] > 0:
            distances.setdefault(y, []).append(((semantic[i] - known.mean[y]) ** 2).mean())
    loss = sums["CE"] / len(rows)
    if method.distillation:
        loss = loss + method.distillation_weight * sums["KD"] / len(rows)
    if method.information:
        loss = loss + method.information_weight * sums["MI"] / len(rows)
    if method.alignment and distances:
        of_class = [sum(own) / len(own) for own in distances.values()]
        loss = loss + method.prototype_weight * sum(of_class) / len(of_class)
    return loss


def joint_by_hand(method: FedSeProto, known: Prototypes, parts: Parts, z: Tensor, batch: Batch) -> Tensor:
    return mean_cross_entropy(parts, z, batch) + total_by_hand(method, known, parts, z, batch)


def modules(params: Params, kind: torch.dtype = torch.float32) -> Parts:
    """Plain torch modules in training mode with these weights."""
    parts = FedSeProto().networks(TASK.spec, "ann")
    for part, module in parts.items():
        own = {name.removeprefix(f"{part}."): leaf.clone() for name, leaf in params.items() if name.startswith(part)}
        assert not module.load_state_dict(own, strict=False).unexpected_keys
        module.train().to(kind)
    return parts


def parameters(parts: Parts) -> Params:
    return {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}


def some_batch() -> tuple[Batch, Prototypes]:
    """Classes 0 to 3 with 3, 2, 1 and 1 rows that count, and one that does not; class 3 has no prototype."""
    draws = torch.Generator().manual_seed(0)
    known = Prototypes(torch.rand(CLASSES, FEATURES, generator=draws), torch.tensor([2.0, 1.0, 3.0, 0.0]))
    x = torch.rand(8, 3, 8, 8, generator=draws)
    return batch_of(x, [0, 0, 1, 0, 2, 3, 1, 2], [1, 1, 1, 1, 1, 1, 1, 0]), known


STRONG = FedSeProto(distillation_weight=2.0, information_weight=3.0, prototype_weight=0.7)


@pytest.mark.parametrize("reference", [total_by_hand, joint_by_hand], ids=["second phase", "joint"])
@pytest.mark.parametrize(
    "method",
    [
        STRONG,
        replace(STRONG, distillation=False),
        replace(STRONG, information=False),
        replace(STRONG, alignment=False),
        CE_ONLY,
    ],
    ids=settings_of,
)
def test_the_objective_and_its_gradient_are_those_of_equation_15(method: FedSeProto, reference: Any) -> None:
    batch, known = some_batch()
    networks = Networks(partial(method.networks, TASK.spec, "ann"))
    params = networks.init(1)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items() if name in networks.trainable}
    loss = method.loss if reference is total_by_hand else method.joint_loss
    found = loss(networks.model({**params, **leaves}, training=True), batch, known)
    slopes = torch.autograd.grad(found, list(leaves.values()), materialize_grads=True)
    parts = modules(params, torch.float64)
    double = replace(batch, x=batch.x.double())
    expected = reference(method, known, parts, parts["features"](double.x), double)
    named = parameters(parts)
    wanted = torch.autograd.grad(expected, list(named.values()), materialize_grads=True)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(dict(zip(leaves, slopes, strict=True)), dict(zip(named, wanted, strict=True)), "gradients", 1e-5)


def test_no_term_of_the_second_phase_has_a_gradient_for_the_classifier() -> None:
    batch, known = some_batch()
    networks = Networks(partial(STRONG.networks, TASK.spec, "ann"))
    params = networks.init(1)
    head = {name: leaf.clone().requires_grad_() for name, leaf in params.items() if name.startswith("classifier")}
    model = networks.model({**params, **head}, training=True)
    assert not STRONG.loss(model, batch, known).requires_grad
    basic, joint = (
        torch.autograd.grad(loss(model, batch, known), list(head.values()))
        for loss in (STRONG.basic_loss, STRONG.joint_loss)
    )
    assert_same(joint, basic, "the classifier's gradient")
    assert basic[0].abs().sum() > 0


# ---- the phases


def drive(method: FedSeProto, client: str, state: State) -> tuple[list[tuple[Fit, Params]], Reply[Any, Any]]:
    """The fits that a client's step asks for, with their answers, and what it ends with."""
    of, fits, answer = federation(method), [], None
    message = method.message_for(state.server, client)
    step = method.train(of.client_context(client, state.round), message, of.client_state(state, client, message))
    while True:
        try:
            request = step.send(answer)
        except StopIteration as end:
            return fits, end.value
        answer = of.runtime.answer(request)
        if isinstance(request, Fit):
            fits.append((request, answer.params))


def trained(params: Params, client: str, seed: int, epochs: int, phases: list[tuple[Loss, list[str]]]) -> Params:
    """A plain torch loop with an optimiser for each phase, which take turns on every batch."""
    parts, sgd = modules(params), TRAINING.optimizer
    named = parameters(parts)
    own = [[p for name, p in named.items() if not any(fnmatchcase(name, f) for f in frozen)] for _, frozen in phases]
    optimizers = [
        torch.optim.SGD(some, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay) for some in own
    ]
    draws = torch.Generator().manual_seed(seed)
    plan = training_plan(TASK.clients[client], TRAINING.batch_size, epochs, TASK.transform, draws)
    for step in range(len(plan.index)):
        batch = batch_at(TASK.clients[client], plan, step, TASK.transform)
        for (loss, _), some, optimizer in zip(phases, own, optimizers, strict=True):
            slopes = torch.autograd.grad(loss(parts, parts["features"](batch.x), batch), some, materialize_grads=True)
            for p, slope in zip(some, slopes, strict=True):
                p.grad = slope
            optimizer.step()
    state = {f"{part}.{name}": leaf for part, module in parts.items() for name, leaf in module.state_dict().items()}
    return {name: state[name] for name in params}


# When the phases alternate: for each fit its epochs and its phases. There are two epochs.
SCHEDULES = {
    "batch": [(2, "12")],
    "epoch": [(1, "1"), (1, "2"), (1, "1"), (1, "2")],
    "round": [(2, "1"), (2, "2")],
    "joint": [(2, "j")],
}


@pytest.mark.parametrize("settings", [STRONG, CE_ONLY], ids=["all terms", "cross-entropy only"])
@pytest.mark.parametrize("phase_mode", SCHEDULES)
def test_a_client_trains_as_a_plain_loop_does(phase_mode: Any, settings: FedSeProto) -> None:
    method = replace(settings, phase_mode=phase_mode)
    state = usual(method, 1)
    known = state.server.prototypes
    assert known.is_known.all()
    phases: dict[str, tuple[Loss, list[str]]] = {
        "1": (mean_cross_entropy, ["semantic.*", "domain.*", "decoder.*"]),
        "2": (partial(total_by_hand, method, known), ["classifier.*"]),
        "j": (partial(joint_by_hand, method, known), []),
    }
    fits, reply = drive(method, "ann", state)
    params = {**state.server.params, **state.memories["ann"].params}
    for (request, _), (epochs, which) in zip(fits, SCHEDULES[phase_mode], strict=True):
        params = trained(params, "ann", request.seed, epochs, [phases[letter] for letter in which])
    assert len({request.seed for request, _ in fits}) == len(fits)
    assert_close({**reply.upload.params, **reply.memory.params}, params, "ann's weights", within=5e-5)
    assert parts_in(reply.upload.params) == SHARED
    assert parts_in(reply.memory.params) == PRIVATE


def test_the_first_phase_is_fedavg_and_the_second_leaves_the_classifier_alone() -> None:
    method = FedSeProto(phase_mode="round")
    state = usual(method, 0)
    [(first, basic), (second, decoupled)], _ = drive(method, "ann", state)
    start = usual(FedAvg(), 0).server.params
    assert_same({name: first.params[name] for name in start}, start, "the weights at the start")
    fedavg = reply_of(federation(FedAvg()), usual(FedAvg(), 0), "ann").upload.params
    assert_same({name: basic[name] for name in start}, fedavg, "features and classifier after the first phase")
    others = ("semantic.*", "domain.*", "decoder.*")
    assert_same(matching(basic, others), matching(first.params, others), "the rest after the first phase")
    assert_same(matching(decoupled, ("classifier.*",)), matching(basic, ("classifier.*",)), "the classifier")
    rest = without(second.params, ("classifier.*",))
    assert [name for name in rest if torch.equal(decoupled[name], rest[name])] == []


def test_the_phases_alternate_on_every_batch_by_default() -> None:
    assert fingerprint(usual(FedSeProto(), 1).server) == fingerprint(usual(FedSeProto(phase_mode="batch"), 1).server)
    ends = {mode: str(fingerprint(usual(FedSeProto(phase_mode=mode), 1).server)) for mode in SCHEDULES}
    assert len(set(ends.values())) == len(SCHEDULES)


def test_in_the_first_round_there_is_nothing_to_align_with() -> None:
    off = FedSeProto(alignment=False)
    assert not usual(FedSeProto(), 0).server.prototypes.is_known.any()
    assert_same(usual(FedSeProto(), 1).server, usual(off, 1).server, "the first round")
    assert fingerprint(usual(FedSeProto(), 2).server.params) != fingerprint(usual(off, 2).server.params)


@pytest.mark.parametrize("switch", ["distillation", "information", "alignment"])
def test_a_term_is_off_by_its_switch_and_by_its_weight_and_off_is_not_on(switch: str) -> None:
    weight = {"alignment": "prototype_weight"}.get(switch, f"{switch}_weight")
    off = usual(FedSeProto(**{switch: False}), 2)
    assert_same(usual(FedSeProto(**{weight: 0.0}), 2).server.params, off.server.params, f"without {switch}")
    for other in (FedSeProto(), CE_ONLY):
        assert fingerprint(usual(other, 2).server.params) != fingerprint(off.server.params)


# ---- prototypes and the server


@pytest.mark.parametrize("method", [FedSeProto(), HETERO], ids=settings_of)
def test_prototypes_are_the_mean_semantic_features_of_the_final_weights_in_evaluation_mode(method: FedSeProto) -> None:
    reply = reply_of(federation(method), usual(method, 1), "ann")
    parts = modules({**reply.upload.params, **reply.memory.params})
    data = TASK.clients["ann"]
    with torch.no_grad():
        z = parts["semantic"].eval()(parts["features"].eval()(TASK.transform.clean(data.x))).double()
    counts = torch.bincount(data.y, minlength=CLASSES)
    mean = [z[data.y == c].mean(0) if counts[c] else torch.zeros(FEATURES) for c in range(CLASSES)]
    assert counts.max() > 1
    expected = Prototypes(torch.stack(mean).float(), (counts > 0).float())  # which classes, not how many of each
    assert_close(reply.upload.prototypes, expected, "ann's prototypes", within=1e-5)


def test_the_server_takes_the_weighted_mean_of_weights_and_the_plain_mean_of_prototypes_over_owners() -> None:
    known = prototypes([[7.0, 7.0]] * 3, [1.0, 1.0, 5.0])
    before = WeightsAndPrototypes({"semantic.weight": torch.tensor([0.0])}, known)
    uploads = [
        ("a", {"semantic.weight": torch.tensor([1.0])}, [[1.0, 2.0], [9.0, 9.0], [0.0, 0.0]], [1.0, 1.0, 0.0], 30),
        ("b", {"semantic.weight": torch.tensor([5.0])}, [[3.0, 6.0], [0.0, 0.0], [0.0, 0.0]], [1.0, 0.0, 0.0], 10),
    ]
    stream = [(who, PrototypeUpload(w, prototypes(m, c), torch.tensor(n))) for who, w, m, c, n in uploads]
    server = FedSeProto().aggregate(before, iter(stream), None)
    # (30 · 1 + 10 · 5) / 40 = 2. Class 0: ((1, 2) + (3, 6)) / 2, without weights. Class 1: a's. Class 2: kept.
    assert server.params["semantic.weight"].tolist() == [2.0]
    assert server.prototypes.mean.tolist() == [[2.0, 4.0], [9.0, 9.0], [7.0, 7.0]]
    assert server.prototypes.count.tolist() == [2.0, 1.0, 5.0]


def test_the_classifier_on_semantic_features_predicts() -> None:
    def build() -> Parts:
        return {"features": nn.Identity(), "semantic": nn.Linear(2, 2), "classifier": nn.Linear(2, 2, bias=False)}

    params = {
        "semantic.weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        "semantic.bias": torch.tensor([0.0, 1.0]),
        "classifier.weight": torch.tensor([[2.0, 0.0], [0.0, 3.0]]),
    }
    x = torch.tensor([[1.0, 5.0]])
    # Semantic: swapped and one added, (5, 2). Scores: (10, 6), where the plain classifier would say (2, 15).
    assert FedSeProto().predict(Networks(build).model(params), x, None, None).tolist() == [[10.0, 6.0]]


# ---- what stays and what travels


def test_domain_encoders_and_decoders_differ_and_the_rest_is_the_same_in_every_message() -> None:
    of, state = federation(FedSeProto()), usual(FedSeProto(), 1)
    messages = [of.method.message_for(state.server, client) for client in of.ids]
    for message in messages:
        assert_same(message, messages[0], "messages")
        assert parts_in(message.params) == SHARED
    first, second = state.memories["ann"].params, state.memories["bob"].params
    assert parts_in(first) == PRIVATE
    assert [name for name in first if torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("method", [FedSeProto(), HETERO], ids=settings_of)
def test_nothing_that_is_kept_is_in_the_bytes_of_an_upload(method: FedSeProto) -> None:
    for client in TASK.clients:
        reply = reply_of(federation(method), usual(method, 1), client)
        sent = wire.encode(reply.upload)
        kept = {name: leaf.numpy().tobytes() for name, leaf in reply.memory.params.items()}
        assert parts_in(kept) == (PRIVATE if method is not HETERO else PRIVATE | SHARED)
        assert [name for name, data in kept.items() if data in sent or name.encode() in sent] == []


def test_a_client_goes_on_from_the_domain_encoder_and_decoder_that_it_kept() -> None:
    state = usual(FedSeProto(), 1)
    [(request, _)], _ = drive(FedSeProto(), "ann", state)
    assert_same(matching(request.params, ("domain.*", "decoder.*")), state.memories["ann"].params, "what ann kept")
    assert_same(without(request.params, ("domain.*", "decoder.*")), state.server.params, "what the server sent")


def test_with_prototypes_only_nothing_else_travels_and_there_is_no_public_model() -> None:
    state = usual(HETERO, 1)
    upload = reply_of(federation(HETERO), state, "ann").upload
    sizes = {path: tuple(leaf.shape) for path, leaf in tree.named_leaves(upload).items()}
    assert sizes == {"prototypes/mean": (CLASSES, FEATURES), "prototypes/count": (CLASSES,), "num_examples": ()}
    assert upload.num_examples.item() == 0
    assert state.server.params == {}
    assert HETERO.public(state.server) is None
    assert FedSeProto().public(usual(FedSeProto(), 1).server) is not None
    reply = reply_of(federation(FedSeProto()), usual(FedSeProto(), 0), "ann")
    first = {**reply.upload.params, **reply.memory.params}
    own = state.memories["ann"].params
    assert_same({name: own[name] for name in first}, first, "the first round, which is alike whatever is shared")


def mixed_task() -> Task:
    """Every second client has one more layer; the features have the same size."""

    def model(client: str) -> Parts:
        parts = small_network()
        if client in ("bob", "dan"):
            parts["features"] = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), *parts["features"])
        return parts

    return replace(TASK, model=model)


def test_clients_with_different_encoders_learn_from_each_others_prototypes() -> None:
    of = federation(HETERO, mixed_task())
    state = after(2, of)
    assert not state.failures
    assert of.networks_of("ann").signature != of.networks_of("bob").signature
    assert len(state.memories["bob"].params) > len(state.memories["ann"].params)
    assert state.server.prototypes.count.tolist() == usual(FedSeProto(), 2).server.prototypes.count.tolist()
    alone = after(2, federation(replace(HETERO, alignment=False), mixed_task()))
    for client in of.ids:
        assert fingerprint(state.memories[client]) != fingerprint(alone.memories[client])
        model = of.networks_of(client).model(of.method.local_weights(state.server, state.memories[client]))
        scores = of.method.predict(model, TASK.transform.clean(TASK.tests["domain 0"].x), state.server, None)
        assert torch.isfinite(scores).all()


def test_clients_with_different_encoders_cannot_share_weights() -> None:
    state = after(1, federation(FedSeProto(), mixed_task()))
    assert [failure.client for failure in state.failures] == ["bob", "dan"]


# ---- the networks


def moved(built: nn.Module, bias: float) -> Tensor:
    """What a decoder gives when its last bias is this."""
    *_, last = built.parameters()
    with torch.no_grad():
        last.fill_(bias)
        return built(torch.zeros(2, 16))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 8, 12), (1, 40, 36), (12,), (5, 6)], ids=str)
def test_a_decoder_ends_in_the_shape_of_the_input(shape: tuple[int, ...]) -> None:
    built = decoder(16, shape)
    assert built(torch.zeros(2, 16)).shape == (2, *shape)
    assert isinstance(built, ImageDecoder) == (len(shape) == 3)
    assert moved(built, -100.0).max() < -50  # a ReLU at the end would not let this through
    assert moved(built, 100.0).min() > 50  # nor a sigmoid this


def test_an_image_decoder_grows_from_four_to_thirty_two_and_is_resized_only_otherwise() -> None:
    sizes = [tuple(p.shape) for p in decoder(16, (3, 32, 32)).parameters() if p.dim() > 1]
    assert sizes == [(2048, 16), (128, 64, 4, 4), (64, 32, 4, 4), (32, 3, 4, 4)]
    built, z = decoder(16, (3, 16, 16)), torch.linspace(-3, 3, 32).view(2, 16)
    assert built.grown(z).shape == (2, 3, 32, 32)
    # Halving by bilinear interpolation takes the mean of each 2×2.
    torch.testing.assert_close(built(z), nn.functional.avg_pool2d(built.grown(z), 2))
    built.size = (32, 32)
    assert torch.equal(built(z), built.grown(z))


def test_vectors_can_be_learnt_too(tiny_task: Task) -> None:
    state = after(2, federation(FedSeProto(), tiny_task))
    assert not state.failures
    # 8 features: the decoder reads 16, has 16 hidden and gives 12.
    own = state.memories["c00"].params
    assert [tuple(own[name].shape) for name in sorted(own)] == [(16,), (16, 16), (12,), (12, 16), (8,), (8, 8)]


def test_a_projection_is_part_of_the_general_encoder() -> None:
    def model(client: str) -> Parts:
        return {**small_network(), "projection": nn.Linear(FEATURES, 5), "classifier": nn.Linear(5, CLASSES)}

    of = federation(FedSeProto(), replace(TASK, model=model))
    state = after(2, of)
    assert not state.failures
    assert state.server.prototypes.mean.shape == (CLASSES, 5)
    assert state.server.params["semantic.weight"].shape == (5, 5)
    start = of.start().server.params
    assert not torch.equal(state.server.params["projection.weight"], start["projection.weight"])
