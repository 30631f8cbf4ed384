"""The engine: who takes part, what counts, and that nothing but the seed and the good replies decides the result."""

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from doubles import Faulty, Shuffled, Tampering, bits, tiny
from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Uploads
from protofed.api.task import ClientId, Task
from protofed.engine.collector import Collector
from protofed.engine.federation import Federation
from protofed.engine.message import Bounds
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.errors import RunFailed
from protofed.methods.families import WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.fpl import FPL
from protofed.methods.moon import Moon
from protofed.nn.networks import Parts, Patterns
from protofed.optim.optimizers import Sgd
from protofed.runtimes.jobs import Failure, Job, Reason, Ticket
from protofed.runtimes.sequential import Sequential
from protofed.tree import Mean, Nothing, Params, record

TRAINING = Training(rounds=2, epochs=1, batch_size=8, optimizer=Sgd(lr=0.1, momentum=0.9), seed=3)
METHODS = [FedAvg(), FPL(), Moon()]
named = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


def after_rounds(federation: Federation, rounds: int = 2) -> State:
    state = federation.start()
    for _ in range(rounds):
        state = federation.advance(state)
    return state


def without_client(task: Task, client: ClientId) -> Task:
    domains = {name: domain for name, domain in task.domain_of.items() if name != client}
    return replace(task, clients={n: d for n, d in task.clients.items() if n != client}, domain_of=domains)


def spoiled(upload: Any) -> Any:
    """The upload with NaN for its first tensor."""
    is_first = iter([True])

    def spoil(leaf: Tensor) -> Tensor:
        return torch.full_like(leaf, torch.nan) if next(is_first, False) else leaf

    return tree.map(spoil, upload)


BAD_RUNTIMES: dict[str, Sequential] = {"failed": Faulty({"c01"}), "refused": Tampering("c01", spoiled)}
bad = pytest.mark.parametrize("runtime", BAD_RUNTIMES.values(), ids=BAD_RUNTIMES)


# ---- who takes part


@pytest.mark.parametrize(
    ("fraction", "clients", "count"), [(0.5, 4, 2), (0.01, 4, 1), (0.625, 4, 3), (0.6, 4, 2), (1.0, 4, 4), (0.3, 10, 3)]
)
def test_the_fraction_decides_how_many_take_part(fraction: float, clients: int, count: int) -> None:
    federation = Federation(FedAvg(), tiny(clients), replace(TRAINING, fraction=fraction))
    for sampled in (federation.sampled(t) for t in range(20)):
        assert len(sampled) == len(set(sampled)) == count
        assert list(sampled) == sorted(sampled)
        assert set(sampled) <= set(federation.task.clients)


def test_the_sample_depends_on_the_seed_and_the_round_alone(tiny_task: Task) -> None:
    def drawn(seed: int) -> list[tuple[ClientId, ...]]:
        federation = Federation(FedAvg(), tiny_task, replace(TRAINING, fraction=0.5, seed=seed))
        return [federation.sampled(t) for t in range(30)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 6  # each of the pairs of four clients turns up
    assert {client for pair in drawn(0) for client in pair} == set(tiny_task.clients)


def test_only_the_sampled_train_and_are_remembered(tiny_task: Task) -> None:
    federation = Federation(Moon(), tiny_task, replace(TRAINING, fraction=0.5))
    state = federation.advance(federation.start())
    assert tuple(sorted(state.memories)) == federation.sampled(0)
    assert state.round == 1


# ---- clients that fail


@named
@bad
def test_a_client_without_a_good_reply_is_as_good_as_absent(
    tiny_task: Task, method: Method[Any, Any, Any, Any], runtime: Sequential
) -> None:
    found = after_rounds(Federation(method, tiny_task, TRAINING, runtime))
    expected = after_rounds(Federation(method, without_client(tiny_task, "c01"), TRAINING))
    assert bits((found.server, found.memories)) == bits((expected.server, expected.memories))
    whole = after_rounds(Federation(method, tiny_task, TRAINING))
    assert bits(found.server) != bits(whole.server)
    assert "c01" not in found.memories
    assert [failure.client for failure in found.failures] == ["c01"]
    assert whole.failures == expected.failures == ()


@bad
def test_a_client_without_a_good_reply_keeps_what_it_had(tiny_task: Task, runtime: Sequential) -> None:
    good = Federation(Moon(), tiny_task, TRAINING)
    before = good.advance(good.start())
    after = replace(good, runtime=runtime).advance(before)
    assert bits(after.memories["c01"]) == bits(before.memories["c01"])
    assert bits(after.memories["c00"]) != bits(before.memories["c00"])
    assert good.advance(after).failures == ()  # failures are those of the last round


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (BAD_RUNTIMES["failed"], "round 2: client c01 left out: CLIENT_ERROR: told to fail"),
        (
            BAD_RUNTIMES["refused"],
            "round 2: client c01 left out: NON_FINITE: params/features.0.weight: holds 96 values",
        ),
    ],
    ids=BAD_RUNTIMES,
)
def test_a_failure_is_logged_with_its_reason(
    tiny_task: Task, runtime: Sequential, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = Federation(FedAvg(), tiny_task, TRAINING)
    with caplog.at_level(logging.WARNING):
        before = good.advance(good.start())
        assert caplog.messages == []
        state = replace(good, runtime=runtime).advance(before)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(message)
    assert [(f.client, f.reason in message, f.detail in caplog.messages[0]) for f in state.failures] == [
        ("c01", True, True)
    ]


def test_too_few_good_replies_end_the_run_and_nothing_is_committed(tiny_task: Task) -> None:
    training = replace(TRAINING, minimum_replies=3)
    good = Federation(Moon(), tiny_task, training)
    before = good.advance(good.start())
    kept = bits((before.server, before.memories))
    message = (
        "round 2: 2 of 4 clients replied well, and the run needs 3. The first failure: c01: CLIENT_ERROR: told to fail."
    )
    with pytest.raises(RunFailed, match=message):
        replace(good, runtime=Faulty({"c03", "c01"})).advance(before)
    assert bits((before.server, before.memories)) == kept
    assert replace(good, runtime=Faulty({"c03"})).advance(before).round == 2  # three are enough


def test_a_round_without_any_good_reply_ends_the_run(tiny_task: Task) -> None:
    federation = Federation(FedAvg(), tiny_task, TRAINING, Faulty(set(tiny_task.clients)))
    with pytest.raises(RunFailed, match="round 1: 0 of 4 clients"):
        federation.advance(federation.start())


# ---- order


@pytest.mark.parametrize("method", [FedAvg(), FPL()], ids=lambda m: type(m).__name__)
def test_the_order_of_arrival_changes_no_bit(method: Method[Any, Any, Any, Any]) -> None:
    task = tiny(11)
    start = Federation(method, task, TRAINING).start()
    orders = (
        Federation(method, task, TRAINING, runtime)
        for runtime in [Sequential(), *(Shuffled(seed) for seed in range(50))]
    )
    results = {str(sorted(bits(federation.advance(start).server).items())) for federation in orders}
    assert len(results) == 1


def in_order(ids: Sequence[str], arrivals: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return Collector(ids, Ticket("run", 0, "round", 1, "model", 1), Bounds(0, 0), inf, lambda client: True).sorted(
        arrivals
    )


def test_outcomes_come_in_the_order_of_the_ids_as_soon_as_they_can() -> None:
    arrivals: list[str] = []

    def arriving() -> Iterator[tuple[str, int]]:
        for client in "badc":
            arrivals.append(client)
            yield client, ord(client)

    ordered = in_order("abcd", arriving())
    assert [(next(ordered), "".join(arrivals)) for _ in range(4)] == [
        (("a", 97), "ba"),
        (("b", 98), "ba"),
        (("c", 99), "badc"),
        (("d", 100), "badc"),
    ]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@named
def test_the_order_of_the_clients_in_the_task_changes_no_bit(
    method: Method[Any, Any, Any, Any], fraction: float
) -> None:
    task, training = tiny(11), replace(TRAINING, fraction=fraction)
    backwards = replace(task, clients=dict(reversed(task.clients.items())))
    assert list(backwards.clients) != list(task.clients)
    found, expected = (after_rounds(Federation(method, each, training)) for each in (backwards, task))
    assert bits((found.server, found.memories)) == bits((expected.server, expected.memories))


@named
def test_a_run_may_go_on_from_any_state_in_a_new_federation(
    tiny_task: Task, method: Method[Any, Any, Any, Any]
) -> None:
    first, second = (Federation(method, tiny_task, TRAINING) for _ in range(2))
    resumed = second.advance(first.advance(first.start()))
    whole = after_rounds(Federation(method, tiny_task, TRAINING))
    assert bits((resumed.server, resumed.memories)) == bits((whole.server, whole.memories))


# ---- methods that do as little as a test needs


@record
class Sums:
    total: Tensor


@dataclass(frozen=True)
class Bare(Method[Sums, Nothing, Nothing, Sums]):
    """Every client sends 100 numbers; the server adds them up."""

    def init_server(self, central: ServerContext) -> Sums:
        return Sums(torch.zeros(100))

    def message_for(self, server: Sums, client: ClientId) -> Nothing:
        return Nothing()

    def upload_spec(self, server: Sums, central: ServerContext) -> Sums:
        return server

    def aggregate(self, server: Sums, uploads: Uploads[Sums], central: ServerContext) -> Sums:
        total = server.total
        for _, upload in uploads:
            total = total + upload.total
        return Sums(total)

    def init_memory(self, local: ClientContext, message: Nothing) -> Nothing:
        return Nothing()

    def local_weights(self, message: Nothing, memory: Nothing) -> Params:
        return {}

    async def train(self, local: ClientContext, message: Nothing, memory: Nothing) -> Reply[Sums, Nothing]:
        return Reply(Sums(torch.ones(100)), memory)


@dataclass(frozen=True)
class Hasty(Bare):
    """Reads the first few uploads only."""

    reads: int = 0

    def aggregate(self, server: Sums, uploads: Uploads[Sums], central: ServerContext) -> Sums:
        for _, _ in zip(range(self.reads), uploads, strict=False):
            pass
        return server


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_method_that_does_not_read_all_uploads_ends_the_run(tiny_task: Task, reads: int) -> None:
    federation = Federation(Hasty(reads), tiny_task, TRAINING)
    start = federation.start()
    with pytest.raises(RunFailed, match="round 1: the method did not read all uploads"):
        federation.advance(start)


@dataclass(frozen=True)
class Watched(Bare):
    """Counts how many uploads are alive whenever one more is made."""

    uploads: list["weakref.ref[Tensor]"] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    async def train(self, local: ClientContext, message: Nothing, memory: Nothing) -> Reply[Sums, Nothing]:
        upload = Sums(torch.ones(100))
        self.uploads.append(weakref.ref(upload.total))
        self.alive.append(sum(ref() is not None for ref in self.uploads))
        return Reply(upload, memory)


@dataclass(frozen=True)
class WatchedMean(Watched):
    def aggregate(self, server: Sums, uploads: Uploads[Sums], central: ServerContext) -> Sums:
        mean = Mean()
        for _, upload in uploads:
            mean.add(upload)
        value: Sums = mean.value()
        return value


@pytest.mark.parametrize("kind", [Watched, WatchedMean])
def test_uploads_are_let_go_as_they_are_read(kind: type[Watched]) -> None:
    """The one that is read and the one that is made: memory does not grow with the number of clients."""
    federation = Federation(kind(), tiny(10), TRAINING)
    method = federation.method
    assert isinstance(method, Watched)
    federation.advance(federation.start())
    assert len(method.alive) == 10
    assert max(method.alive) <= 2


@dataclass(frozen=True)
class Hooked(Bare):
    calls: list[str] = field(default_factory=list)

    def setup(self, server: Sums, clients: Clients) -> Sums:
        self.calls.append(f"setup {len(clients.ids)}")
        return self.aggregate(server, clients.run(self.train, lambda client: Nothing(), server), clients.server)

    def round(self, server: Sums, clients: Clients) -> Sums:
        self.calls.append(f"round {len(clients.ids)}")
        return super().round(server, clients)

    def finish(self, server: Sums, clients: Clients) -> Sums:
        self.calls.append(f"finish {len(clients.ids)}")
        return Sums(-server.total)


def test_setup_and_finish_happen_once_with_all_clients(tiny_task: Task) -> None:
    method = Hooked()
    federation = Federation(method, tiny_task, replace(TRAINING, fraction=0.5))
    state = after_rounds(federation)
    end = federation.finish(state)
    assert method.calls == ["setup 4", "round 2", "round 2", "finish 4"]
    assert end.server.total.unique().tolist() == [-(4 + 2 + 2)]
    assert (state.round, end.round) == (2, 2)


@pytest.mark.parametrize("phase", ["setup", "finish"])
def test_a_phase_that_fails_is_named(tiny_task: Task, phase: str) -> None:
    @dataclass(frozen=True)
    class Failing(Hooked):
        def finish(self, server: Sums, clients: Clients) -> Sums:
            return self.setup(server, clients)

    bad = Federation(Failing(), tiny_task, TRAINING, Faulty(set(tiny_task.clients)))
    with pytest.raises(RunFailed, match=f"{phase}: 0 of 4 clients"):
        bad.start() if phase == "setup" else bad.finish(State(2, Sums(torch.zeros(100)), {}))


def test_every_client_whose_step_ended_is_told_of(tiny_task: Task) -> None:
    told: list[ClientId] = []
    federation = Federation(Bare(), tiny_task, TRAINING, Faulty({"c02"}), on_client=told.append)
    federation.advance(federation.start())
    assert told == ["c00", "c01", "c02", "c03"]


# ---- what is given to clients


def test_a_client_that_never_took_part_has_a_fresh_memory(tiny_task: Task) -> None:
    federation = Federation(Moon(), tiny_task, TRAINING)
    state = federation.start()
    message = federation.method.message_for(state.server, "c00")
    assert federation.client_state(state, "c00", message).exists == 0
    state = federation.advance(state)
    assert federation.client_state(state, "c00", message) is state.memories["c00"]
    assert state.memories["c00"].exists == 1


def test_an_error_in_the_first_memory_of_a_client_concerns_that_client_only(tiny_task: Task) -> None:
    @dataclass(frozen=True)
    class Forgetful(Bare):
        def init_memory(self, local: ClientContext, message: Nothing) -> Nothing:
            if local.id == "c01":
                raise ValueError("cannot remember")
            return Nothing()

    federation = Federation(Forgetful(), tiny_task, TRAINING)
    state = federation.advance(federation.start())
    assert [failure.client for failure in state.failures] == ["c01"]


def test_a_runtime_that_loses_a_client_ends_the_run_by_name(tiny_task: Task) -> None:
    class Losing(Sequential):
        def run(self, jobs: Iterable[Job]) -> Iterator[tuple[ClientId, Reply[Any, Any] | Failure]]:
            return (pair for pair in super().run(jobs) if pair[0] != "c02")

    federation = Federation(Bare(), tiny_task, TRAINING, Losing())
    with pytest.raises(RunFailed, match="c02"):
        federation.advance(federation.start())


@dataclass(frozen=True)
class TwoSteps(Bare):
    """Every round runs two steps at every client, each with a fit."""

    seeds: list[int] = field(default_factory=list)

    def round(self, server: Sums, clients: Clients) -> Sums:
        for _ in range(2):
            server = super().round(server, clients)
        return server

    async def train(self, local: ClientContext, message: Nothing, memory: Nothing) -> Reply[Sums, Nothing]:
        request = local.fit(params={}).send(None)
        self.seeds.append(request.seed)
        return Reply(Sums(torch.ones(100)), memory)


def test_two_steps_of_one_round_do_not_draw_the_same(tiny_task: Task) -> None:
    method = TwoSteps()
    federation = Federation(method, tiny_task, TRAINING)
    federation.advance(federation.start())
    assert len(method.seeds) == 8
    assert len(set(method.seeds)) == 8


def test_clients_with_equal_networks_share_them(tiny_task: Task) -> None:
    def parts(client: ClientId) -> Parts:
        small = torch.nn.Linear(12, 3), torch.nn.Linear(3, 5)
        return dict(zip(("features", "classifier"), small, strict=True)) if client == "c03" else tiny_task.model(client)

    federation = Federation(FedAvg(), replace(tiny_task, model=parts), TRAINING)
    assert federation.networks_of("c00") is federation.networks_of("c02")
    assert federation.networks_of("c00") is not federation.networks_of("c03")


def test_reasons_are_stable_names() -> None:
    assert all(reason.value == reason.name for reason in Reason)


@dataclass(frozen=True)
class Growing(FedAvg):
    """Its server record gains a leaf."""

    def aggregate(self, server: Any, uploads: Any, central: Any) -> Any:
        after = super().aggregate(server, uploads, central)
        return replace(after, params={**after.params, "features.more": torch.zeros(1)})


@dataclass(frozen=True)
class Talkative(FedAvg):
    """Calls its classifier private and asks for it all the same."""

    private: ClassVar[Patterns] = ("classifier.*",)

    def upload_spec(self, server: Any, central: Any) -> Any:
        return WeightUpload(central.initial_params(), torch.tensor(0))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Growing(), "changed the structure of the server: params/features.more came or went"),
        (Talkative(), "private, but its uploads hold classifier.bias, classifier.weight"),
    ],
)
def test_a_method_that_breaks_its_own_rules_ends_the_run(tiny_task: Task, method: Any, message: str) -> None:
    federation = Federation(method, tiny_task, Training(rounds=1, epochs=1, batch_size=4))
    with pytest.raises(RunFailed, match=message):
        federation.advance(federation.start())


@pytest.mark.parametrize("arrivals", [[("x", 0), ("a", 1), ("b", 2)], [("a", 1), ("a", 1), ("b", 2)]])
def test_strangers_and_second_replies_are_not_passed_over(arrivals: list[tuple[str, int]]) -> None:
    with pytest.raises(RunFailed, match="twice, or without being asked"):
        list(in_order(["a", "b"], arrivals))
