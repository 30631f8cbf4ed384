"""A small federation, runtimes that misbehave, and comparisons bit for bit: what checks of methods need."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from protofed import tree, wire
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.message import sealed
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runtimes.client_store import InMemoryStore, Receipt
from protofed.runtimes.jobs import Answer, Failure, Job, Outcome, Reason
from protofed.runtimes.sequential import Sequential
from protofed.tree import Tree

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


def federation(
    method: Method[Any, Any, Any, Any], task: Task = TASK, runtime: Any = None, **training: Any
) -> Federation:
    return Federation(method, task, dataclasses.replace(TRAINING, **training), runtime or Sequential())


def after(rounds: int, of: Federation, state: State | None = None) -> State:
    """The state after so many more rounds."""
    state = of.start() if state is None else state
    for _ in range(rounds):
        state = of.advance(state)
    return state


@lru_cache(maxsize=256)
def usual(method: Method[Any, Any, Any, Any], rounds: int) -> State:
    """The state after so many rounds of the small task. Nobody may change it."""
    if rounds == 0:
        return federation(method).start()
    return federation(method).advance(usual(method, rounds - 1))


def usual_reply(method: Method[Any, Any, Any, Any], client: str, rounds: int = 1) -> tuple[Any, Reply[Any, Any]]:
    """The message that a client gets after so many rounds, and what it replies."""
    of, state = federation(method), usual(method, rounds)
    return method.message_for(state.server, client), reply_of(of, state, client)


def reply_of(of: Federation, state: State, client: str) -> Reply[Any, Any]:
    """What one client would reply now."""
    message = of.method.message_for(state.server, client)
    context = of.client_context(client, state.round)
    job = Job(client, of.method.train, context, message, state.receipts.get(client), of.method)
    [(_, outcome)] = of.runtime.run([job])
    assert isinstance(outcome, Answer), f"client {client} failed: {outcome}"
    assert outcome.receipt is not None
    return Reply(outcome.upload, of.runtime.store.load(client, outcome.receipt))


def scripted(
    method: Method[Any, Any, Any, Any], sampled: Callable[[int], tuple[str, ...]], runtime: Any = None
) -> Federation:
    """A federation in which the test says who takes part in a round."""

    class Scripted(Federation):
        def sampled(self, round: int, *_: Any) -> tuple[str, ...]:
            return sampled(round)

    return Scripted(method, TASK, TRAINING, runtime or Sequential())


# ---- comparing


def whole(state: State) -> dict[str, Any]:
    """What the server knows and what every client keeps."""
    return {"server": state.server, "memories": memories(state)}


def memories(state: State) -> dict[str, Tree]:
    """What the clients of a simulation keep."""
    store = InMemoryStore()
    return {client: store.load(client, receipt) for client, receipt in sorted(state.receipts.items())}


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

    def run(self, jobs: Any) -> Iterator[Outcome]:
        done = list(super().run(reversed(list(jobs))))
        yield from done[1::2] + done[::2]


class Faulty(Sequential):
    """A runtime in which one client goes wrong in one round: it crashes, or it trains and sends nonsense."""

    def __init__(self, client: str, round: int, crashes: bool) -> None:
        super().__init__()
        self.client, self.round, self.crashes = client, round, crashes

    def run(self, jobs: Any) -> Iterator[Outcome]:
        for job in jobs:
            is_faulty = (job.client, job.context.round) == (self.client, self.round)
            if is_faulty and self.crashes:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to")
                continue
            [(client, outcome)] = super().run([job])
            nonsense = Answer({"nonsense": torch.zeros(1)}, outcome.receipt) if isinstance(outcome, Answer) else outcome
            yield client, nonsense if is_faulty else outcome


class ReversedClients:
    """The clients of a round, whose uploads reach the method last first."""

    summing = None

    def __init__(self, clients: Any) -> None:
        self._clients, self.ids, self.server = clients, clients.ids, clients.server

    def run(self, step: Any, message_for: Any, like: Any, group: Any = None) -> Iterator[tuple[str, Any]]:
        yield from reversed(list(self._clients.run(step, message_for, like, group)))


class NotHere:
    """The store of a server whose clients are elsewhere: it has no state of theirs."""

    def keep(self, client: ClientId, state: Tree) -> Receipt:
        raise AssertionError(f"the server keeps the state of {client}")

    def load(self, client: ClientId, receipt: Receipt) -> Tree:
        raise AssertionError(f"the server reads the state of {client}")


class Elsewhere(Sequential):
    """Clients at the other end of a wire: messages and uploads arrive as bytes, and states stay where the clients
    are."""

    def __init__(self) -> None:
        super().__init__()
        self.store = NotHere()
        self._site = Sequential()
        self._receipts: dict[str, Receipt] = {}
        self._of: Any = None

    def open(self, host: Any) -> AbstractContextManager[None]:
        self._of = host
        return super().open(host)

    def run(self, jobs: Any) -> Iterator[tuple[str, Any]]:
        for job in jobs:
            at_site = dataclasses.replace(job, receipt=self._receipts.get(str(job.receipt)), message=self._sent(job))
            [(client, outcome)] = self._site.run([at_site])
            if isinstance(outcome, Answer) and outcome.receipt is not None:
                self._receipts[str(outcome.receipt)] = outcome.receipt
                yield client, sealed(job.ticket, outcome.upload, Receipt(str(outcome.receipt)), outcome.loss)
            else:
                yield client, outcome

    def _sent(self, job: Job) -> Tree:
        """The message as a site reads it, which knows its structure beforehand."""
        method, server = self._of.method, self._of.initial_server
        is_own = getattr(job.step, "__self__", None) is method
        spec = method.message_spec if is_own else lambda step, state, client: method.message_for(state, client)
        like = spec(getattr(job.step, "__name__", ""), server, job.client)
        try:
            return wire.decode(wire.encode(job.message), like)
        except wire.WireError as error:
            raise AssertionError(
                f"the message for the step {job.step} is not what message_spec says: {error}"
            ) from None
