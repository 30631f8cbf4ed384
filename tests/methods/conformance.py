"""What every method must do, whatever it computes.

CHECKS is a list of functions that take a method and raise AssertionError when it misbehaves. A new method is held to
all of them by being in METHODS. The small task, the doubles and the slow references that tests of methods share are
here too.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from doubles import job_of
from protofed import tree, wire
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.requests import Map
from protofed.api.task import Task
from protofed.data.batches import Batch, Data, batch_at, training_plan
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation, Training
from protofed.engine.round import RoundClients
from protofed.engine.state import State
from protofed.engine.upload_validation import UploadValidator
from protofed.nn.networks import Model, Networks, Parts, matching
from protofed.optim.optimizers import Sgd
from protofed.runtimes.base import Answer, Failure, Reason
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed
from protofed.tree import Params

torch.set_num_threads(1)

RUNTIMES: dict[str, Callable[[], Any]] = {"sequential": Sequential}
"""Every runtime must reproduce the sequential one, bit for bit."""

CLASSES = 4
FEATURES = 8
SIZES = {"ann": 11, "bob": 6, "cyd": 9, "dan": 5, "eve": 7}
"""Unequal, not multiples of the batch size, and none equal to the number of classes."""
TRAINING = Training(rounds=3, epochs=2, batch_size=8, optimizer=Sgd(lr=0.05, momentum=0.9, weight_decay=1e-4), seed=3)


# ---- the task


def small_network(client: str = "") -> Parts:
    features = nn.Sequential(
        nn.Conv2d(3, FEATURES, 3, stride=2, padding=1),
        nn.BatchNorm2d(FEATURES),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


def examples(labels: Tensor, domain: int) -> Data:
    """Images of a class have the class's pattern, drawn in the colours of the domain."""
    draws = torch.Generator().manual_seed(1000 + domain)
    patterns = torch.rand(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    colours = 0.4 + 0.6 * torch.rand(3, 1, 1, generator=draws)
    noise = torch.rand(len(labels), 3, 8, 8, generator=draws)
    images = (0.7 * patterns[labels] + 0.3 * noise) * colours
    return Data.of((255 * images).to(torch.uint8), labels)


def labels_of(size: int, domain: int) -> Tensor:
    return torch.randint(0, CLASSES, (size,), generator=torch.Generator().manual_seed(domain))


def small_task(labels: Mapping[str, list[int]] | None = None) -> Task:
    """Five clients of unequal sizes, each its own domain, or clients with exactly these labels."""
    if labels is None:
        labels = {name: labels_of(size, domain).tolist() for domain, (name, size) in enumerate(SIZES.items())}
    clients = {name: examples(torch.tensor(own), domain) for domain, (name, own) in enumerate(labels.items())}
    tests = {f"domain {d}": examples(torch.arange(CLASSES).repeat(3), 50 + d) for d in range(2)}
    public = examples(torch.arange(CLASSES).repeat(4), 60)
    return Task(
        clients, tests, CLASSES, small_network, transform=Transform(pad=1, flip=True), public=public, name="small"
    )


TASK = small_task()
ODD_TASK = small_task({"ann": [0, 1, 2, 0, 1, 2, 0, 1, 2], "bob": [1], "cyd": [2, 2, 2, 2, 2], "dan": [0, 2, 0, 2, 0]})
"""Nobody has class 3, bob has one example, cyd has one class."""


def federation(method: Method, task: Task = TASK, runtime: Any = None, **training: Any) -> Federation:
    return Federation(method, task, dataclasses.replace(TRAINING, **training), runtime or Sequential())


def after(rounds: int, of: Federation, state: State | None = None) -> State:
    """The state after so many more rounds."""
    state = of.start() if state is None else state
    for _ in range(rounds):
        state = of.advance(state)
    return state


@lru_cache(maxsize=256)
def usual(method: Method, rounds: int) -> State:
    """The state after so many rounds of the small task. Nobody may change it."""
    if rounds == 0:
        return federation(method).start()
    return federation(method).advance(usual(method, rounds - 1))


def usual_reply(method: Method, client: str, rounds: int = 1) -> tuple[Any, Reply[Any, Any]]:
    """The message that a client gets after so many rounds, and what it replies."""
    of, state = federation(method), usual(method, rounds)
    return method.message_for(state.server, client), reply_of(of, state, client)


def reply_of(of: Federation, state: State, client: str) -> Reply[Any, Any]:
    """What one client would reply now."""
    message = of.method.message_for(state.server, client)
    job = job_of(of, client, message, state.receipts.get(client), state.round)
    [(_, outcome)] = of.runtime.run([job])
    assert isinstance(outcome, Answer), f"client {client} failed: {outcome}"
    assert outcome.receipt is not None
    return Reply(outcome.upload, of.runtime.store.load(client, outcome.receipt))


def scripted(method: Method, sampled: Callable[[int], tuple[str, ...]], runtime: Any = None) -> Federation:
    """A federation in which the test says who takes part in a round."""

    class Scripted(Federation):
        def sampled(self, round: int, *_: Any) -> tuple[str, ...]:
            return sampled(round)

    return Scripted(method, TASK, TRAINING, runtime or Sequential())


# ---- comparing


def whole(state: State) -> dict[str, Any]:
    return {"server": state.server, "memories": dict(sorted(state.memories.items()))}


def fingerprint(value: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every bit of a tree, by path."""
    return {
        path: (str(leaf.dtype), tuple(leaf.shape), leaf.detach().contiguous().numpy().tobytes())
        for path, leaf in tree.named_leaves(value).items()
    }


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Equal bit for bit, types and shapes included."""
    a, b = fingerprint(actual), fingerprint(expected)
    assert a.keys() == b.keys(), f"{what}: leaves {sorted(a.keys() ^ b.keys())} are on one side only"
    different = [path for path in a if a[path] != b[path]]
    assert not different, f"{what}: {len(different)} of {len(a)} leaves differ, such as {different[:3]}"


def assert_close(actual: Any, expected: Any, what: str, within: float) -> None:
    a, b = tree.named_leaves(actual), tree.named_leaves(expected)
    assert a.keys() == b.keys(), f"{what}: leaves {sorted(a.keys() ^ b.keys())} are on one side only"
    for path in a:
        assert a[path].shape == b[path].shape, f"{what}: {path} has shapes {a[path].shape} and {b[path].shape}"
        gap = (a[path].double() - b[path].double()).abs().max().item() if a[path].numel() else 0.0
        assert gap <= within, f"{what}: {path} differs by {gap:.2g}"


def assert_finite(value: Any, what: str) -> None:
    bad = [path for path, leaf in tree.named_leaves(value).items() if not torch.isfinite(leaf.double()).all()]
    assert not bad, f"{what}: {bad[:3]} hold values that are not finite"


def assert_tensors_only(value: Any, what: str) -> None:
    bad = {path: type(leaf).__name__ for path, leaf in tree.named_leaves(value).items() if not isinstance(leaf, Tensor)}
    assert not bad, f"{what}: holds more than tensors: {bad}"


def holds(leaf: Tensor, secret: Tensor) -> bool:
    """Whether the secret's numbers lie one after another anywhere in the leaf, in any shape and number type."""
    flat, wanted = leaf.detach().flatten().double(), secret.detach().flatten().double()
    if len(flat) < len(wanted):
        return False
    windows = flat.unfold(0, len(wanted), 1)
    return bool(((windows - wanted).abs() <= 1e-6 * wanted.abs() + 1e-12).all(-1).any())


# ---- doubles


class ShuffledArrival(Sequential):
    """A runtime that does the jobs in another order than asked, and whose replies come in a third."""

    def run(self, jobs: Any) -> Iterator[tuple[str, Any]]:
        done = list(Sequential().run(reversed(list(jobs))))
        yield from done[1::2] + done[::2]


@dataclasses.dataclass(frozen=True)
class Faulty(Sequential):
    """A runtime in which one client goes wrong in one round: it crashes, or it trains and sends nonsense."""

    client: str
    round: int
    crashes: bool

    def run(self, jobs: Any) -> Iterator[tuple[str, Any]]:
        for job in jobs:
            is_faulty = (job.client, job.context.round) == (self.client, self.round)
            if is_faulty and self.crashes:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to")
                continue
            [(client, outcome)] = Sequential().run([job])
            yield client, Reply({"nonsense": torch.zeros(1)}, outcome.memory) if is_faulty else outcome


class ReversedClients:
    """The clients of a round, whose uploads reach the method last first."""

    def __init__(self, clients: Any) -> None:
        self._clients, self.ids, self.server = clients, clients.ids, clients.server

    def run(self, step: Any, message_for: Any, like: Any) -> Iterator[tuple[str, Any]]:
        return reversed(list(self._clients.run(step, message_for, like)))


# ---- slow references


def identity_model(weight: list[list[float]] | Tensor) -> Model:
    """A model whose features are its inputs and whose classifier is this matrix."""
    matrix = torch.as_tensor(weight, dtype=torch.float32)
    networks = Networks(lambda: {"features": nn.Identity(), "classifier": nn.Linear(*matrix.T.shape, bias=False)})
    return networks.model({"classifier.weight": matrix}, training=True)


def batch_of(x: Any, y: Any, weight: Any = None) -> Batch:
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
    weight = torch.ones(len(y)) if weight is None else torch.as_tensor(weight, dtype=torch.float32)
    return Batch(x, y, weight, torch.arange(len(y)), torch.tensor(True), torch.tensor(0))


def loaded(params: Params, client: str = "", *, training: bool) -> Parts:
    """Plain torch modules with these weights."""
    parts = small_network(client)
    for part, module in parts.items():
        own = {name.removeprefix(f"{part}."): leaf.clone() for name, leaf in params.items() if name.startswith(part)}
        missing = module.load_state_dict(own, strict=False)
        assert not missing.unexpected_keys
        module.train(training)
    return parts


def trained_by_hand(
    params: Params,
    client: str,
    loss: Callable[[Parts, Tensor, Batch], Tensor],
    *,
    round: int = 0,
    fit: int = 0,
    epochs: int = TRAINING.epochs,
    trains: str = "*",
) -> tuple[Params, list[tuple[Batch, Tensor]]]:
    """The plain torch loop that a fit must equal: the weights that it ends with, and each batch with its features."""
    parts = loaded(params, client, training=True)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    sgd = TRAINING.optimizer
    optimizer = torch.optim.SGD(
        [p for name, p in named.items() if fnmatchcase(name, trains)],
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    draws = torch.Generator().manual_seed(derive_seed(step, "request", fit))
    plan = training_plan(TASK.clients[client], TRAINING.batch_size, epochs, TASK.transform, draws)
    seen = []
    for step in range(len(plan.index)):
        batch = batch_at(TASK.clients[client], plan, step, TASK.transform)
        optimizer.zero_grad()
        z = parts["features"](batch.x)
        loss(parts, z, batch).backward()
        optimizer.step()
        seen.append((batch, z.detach()))
    state = {f"{part}.{name}": leaf for part, module in parts.items() for name, leaf in module.state_dict().items()}
    return {name: state[name] for name in params}, seen


def mean_cross_entropy(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
    """Of the rows that count, by plain torch."""
    rows = batch.weight > 0
    return nn.functional.cross_entropy(parts["classifier"](z)[rows], batch.y[rows])


# ---- the checks


def check_same_seed_same_result(method: Method) -> None:
    first, second = after(2, federation(method)), after(2, federation(method))
    assert_same(whole(second), whole(first), "two runs of one seed")
    other = after(2, federation(method, seed=TRAINING.seed + 1))
    assert fingerprint(whole(other)) != fingerprint(whole(first)), "another seed gives the same result"


def check_runtimes_agree(method: Method) -> None:
    for name, runtime in {**RUNTIMES, "shuffled arrival": ShuffledArrival}.items():
        state = after(2, federation(method, runtime=runtime()))
        assert_same(whole(state), whole(usual(method, 2)), f"runtime {name} against the sequential one")


def check_order_of_the_task(method: Method) -> None:
    turned = dict(reversed(TASK.clients.items()))
    state = after(2, federation(method, dataclasses.replace(TASK, clients=turned)))
    assert_same(whole(state), whole(usual(method, 2)), "clients listed in another order")


def check_order_of_uploads(method: Method) -> None:
    """Servers may number things differently, so what they make a client do is compared."""
    of, state = federation(method), usual(method, 1)
    states = []
    for kind in (lambda clients: clients, ReversedClients):
        clients = RoundClients(of, state, of.ids, "round")
        ended = clients.after(method.round(state.server, kind(clients)))
        states.append(dataclasses.replace(ended, round=state.round + 1))
    for client in ("ann", "dan"):
        forward, backward = (reply_of(of, state, client) for state in states)
        assert_close(backward, forward, f"{client} after uploads were read in reverse", within=1e-4)


def check_nothing_private_is_uploaded(method: Method) -> None:
    for client in TASK.clients:
        message, reply = usual_reply(method, client)
        sent, leaves = wire.encode(reply.upload), tree.named_leaves(reply.upload)
        private = matching(method.local_weights(message, reply.memory), method.private)
        for name, weight in private.items():
            named = [path for path in leaves if path.split("/")[-1] == name]
            assert not named, f"{name} is private, and the upload of {client} has it as {named}"
            if weight.numel() <= 3 or weight.min() == weight.max():  # so little may be equal by chance
                continue
            for secret in (weight, weight.T) if weight.ndim == 2 else (weight,):
                found = [path for path, leaf in leaves.items() if holds(leaf, secret)]
                assert not found, f"{name} is private, and the upload of {client} holds its values in {found}"
                assert fingerprint(secret)[""][2] not in sent, f"the bytes of {name} are in the upload of {client}"
        _assert_no_examples(leaves, TASK.clients[client], client)


def _assert_no_examples(leaves: dict[str, Tensor], data: Data, client: str) -> None:
    stored = data.x[data.index]
    for kind, rows in (("stored", stored), ("clean", TASK.transform.clean(stored))):
        for i, row in enumerate(rows):
            found = [path for path, leaf in leaves.items() if holds(leaf, row)]
            assert not found, f"the upload of {client} holds its {kind} example {i} in {found}"
    for kind, labels in (("in order", data.labels), ("sorted", data.labels.sort().values)):
        found = [path for path, leaf in leaves.items() if holds(leaf, labels)]
        assert not found, f"the upload of {client} holds the labels of its examples ({kind}) in {found}"


def check_records_survive_the_wire(method: Method) -> None:
    of, state = federation(method), usual(method, 1)
    central = of.server_context(state.round, "round")
    fresh = method.init_server(central)
    like = method.upload_spec(state.server, central)
    for client in TASK.clients:
        message, reply = usual_reply(method, client)
        template = method.message_for(fresh, client)
        memory = method.init_memory(of.client_context(client, 0), template)
        for what, value, expected in (
            ("server", state.server, fresh),
            ("message", message, template),
            ("upload", reply.upload, like),
            ("memory", reply.memory, memory),
        ):
            assert_tensors_only(value, f"the {what} of {client}")
            data = wire.encode(value)
            back = wire.decode(data, expected)
            assert_same(back, value, f"the {what} of {client} after the wire")
            assert type(back) is type(value), f"the {what} of {client} is a {type(back)} after the wire"
            assert wire.encode(back) == data, f"the {what} of {client} is encoded differently the second time"
        passed = UploadValidator(like, of.limits).validated(client, reply.upload)
        assert not isinstance(passed, Failure), f"the gate refuses the upload of {client}: {passed}"
    again = of.advance(through_the_wire(of, state))
    assert_same(whole(again), whole(usual(method, 2)), "a round from decoded state")


def through_the_wire(of: Federation, state: State) -> State:
    """The state as another process would have it."""
    method = of.method
    fresh = method.init_server(of.server_context(0, "round"))
    memories = {
        client: wire.decode(
            wire.encode(memory), method.init_memory(of.client_context(client, 0), method.message_for(fresh, client))
        )
        for client, memory in state.memories.items()
    }
    return State(state.round, wire.decode(wire.encode(state.server), fresh), memories)


def check_resuming_changes_nothing(method: Method) -> None:
    first = federation(method)
    second = federation(dataclasses.replace(method))
    resumed = after(2, second, through_the_wire(second, after(1, first)))
    assert_same(whole(resumed), whole(usual(method, 3)), "a run that was interrupted after its first round")


def check_a_client_may_fail(method: Method) -> None:
    """A client that fails must be as if it had not been asked."""
    everyone, others = tuple(sorted(TASK.clients)), tuple(sorted(TASK.clients.keys() - {"cyd"}))
    absent = scripted(method, lambda t: others if t == 1 else everyone)
    expected = [after(2, absent, usual(method, 0))]
    expected.append(absent.advance(expected[0]))
    for crashes in (True, False):
        how = "crashed" if crashes else "sent nonsense"
        of = federation(method, runtime=Faulty("cyd", round=1, crashes=crashes))
        before = of.advance(of.start())
        state = of.advance(before)
        assert [f.client for f in state.failures] == ["cyd"], f"the failure of cyd is not on record: {state.failures}"
        assert_same(state.memories["cyd"], before.memories["cyd"], f"the memory of cyd, which {how}")
        assert_same(whole(state), whole(expected[0]), f"cyd {how} in the second round, against cyd absent")
        assert_same(whole(of.advance(state)), whole(expected[1]), f"the round after cyd {how}")


def check_odd_clients_are_fine(method: Method) -> None:
    of = federation(method, ODD_TASK)
    state = after(3, of)
    assert not state.failures, f"clients failed: {state.failures}"
    assert_finite(whole(state), "a class nobody has, a client of one example, a client of one class")
    for who, scores in _scores(of, state):
        assert not scores.isnan().any(), f"{who} predicts NaN"
        assert torch.isfinite(scores[:, :3]).all(), f"{who} has no finite score for a class that clients have"
        assert (torch.isfinite(scores[:, 3]) | (scores[:, 3] == -torch.inf)).all(), (
            f"{who} cannot score the absent class"
        )


def _scores(of: Federation, state: State) -> Iterator[tuple[str, Tensor]]:
    """What every client's own model and the public model say of a test set."""
    method, networks = of.method, of.networks_of(of.ids[0])
    x = of.task.transform.clean(of.task.tests["domain 0"].x)
    with torch.no_grad():
        for client in of.ids:
            message = method.message_for(state.server, client)
            memory = of.client_state(state, client, message)
            model = of.networks_of(client).model(method.local_weights(message, memory))
            yield f"the model of {client}", method.predict(model, x, message, memory)
        public = method.public(state.server)
        if public is not None:
            params, message = public
            yield "the public model", method.predict(networks.model(params), x, message, None)


def check_inputs_are_left_alone(method: Method) -> None:
    of = federation(method)
    state = after(1, of)
    data = {client: (own.x, own.y, own.index) for client, own in TASK.clients.items()}
    messages = {client: method.message_for(state.server, client) for client in TASK.clients}
    kept = {"state": whole(state), "messages": messages, "data": data}
    before = fingerprint(kept)
    after(1, of, state)
    changed = [path for path, bits in fingerprint(kept).items() if bits != before[path]]
    assert not changed, f"a round changed what it was given: {changed[:3]}"


def check_no_hidden_state(method: Method) -> None:
    kind = type(method)
    assert dataclasses.is_dataclass(method), f"{kind.__name__} is not a dataclass"
    assert kind.__dataclass_params__.frozen, f"{kind.__name__} is not frozen"
    hash(method)
    assert dataclasses.replace(method) == method
    own, shared = copy.deepcopy(vars(method)), dict(vars(kind))
    assert set(own) <= {f.name for f in dataclasses.fields(method)}, "there are attributes that are not fields"
    after(2, federation(method))
    assert vars(method) == own, f"a run changed the method: {own} became {vars(method)}"
    assert dict(vars(kind)) == shared, f"a run changed the class {kind.__name__}"


def check_models_predict(method: Method) -> None:
    of, state = federation(method), usual(method, 2)
    predictions = dict(_scores(of, state))
    assert len(predictions) == len(of.ids) + (method.public(state.server) is not None)
    for who, scores in predictions.items():
        assert scores.shape == (3 * CLASSES, CLASSES), f"{who} gives scores of shape {tuple(scores.shape)}"
        assert torch.isfinite(scores).all(), f"{who} gives scores that are not finite"
    public = method.public(state.server)
    if public is not None:
        params, message = public
        for domain, data in TASK.tests.items():
            request = Map(of.networks_of("ann"), params, (message, None), data, TASK.transform, 0, method.outcomes)
            predicted = of.runtime.answer(request).predicted
            assert predicted.shape == data.labels.shape, f"{domain}: not every test example was judged once"


def check_few_clients_at_a_time(method: Method) -> None:
    for fraction in (0.5, 0.2):  # of five clients, the second leaves one out of all four rounds
        of = federation(method, rounds=4, fraction=fraction)
        state = of.start()
        seen = set(state.memories)  # a method may ask clients before the first round
        for t in range(4):
            seen |= set(of.sampled(t))
            state = of.advance(state)
            assert not state.failures, f"clients failed: {state.failures}"
            assert state.memories.keys() == seen, f"memories of {sorted(state.memories)}, but {sorted(seen)} took part"
        assert_finite(whole(state), f"fraction {fraction}")
        for who, scores in _scores(of, state):
            assert scores.shape == (3 * CLASSES, CLASSES), f"{who} gives scores of shape {tuple(scores.shape)}"
            assert not scores.isnan().any(), f"{who} predicts NaN"


CHECKS: list[Callable[[Method], None]] = [
    check_same_seed_same_result,
    check_runtimes_agree,
    check_order_of_the_task,
    check_order_of_uploads,
    check_nothing_private_is_uploaded,
    check_records_survive_the_wire,
    check_resuming_changes_nothing,
    check_a_client_may_fail,
    check_odd_clients_are_fine,
    check_inputs_are_left_alone,
    check_no_hidden_state,
    check_models_predict,
    check_few_clients_at_a_time,
]
