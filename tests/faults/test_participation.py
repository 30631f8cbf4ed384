"""Who takes part and who counts: clients that vanish, are late, or come back; messages that come twice or too late.

Rows R9, R20 to R23, R25 and R26. The census (census.py) says who was counted, and a checker that shares no code with
the engine compares that with what the doubles (wires.py) did.
"""

import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from clocks import PATIENCE, ManualClock
from doubles import Faulty, Shuffled, bits, tiny
from faults.census import (
    CLASSES,
    Census,
    History,
    census_of,
    complaints,
    forgotten,
    one_hot,
    people,
    visits,
    who_counts,
)
from faults.kills import ended, forked
from faults.wires import DropOut, Mail, Outcomes, Unruly, Weather, Wired, relabelled
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Uploads
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.engine.collector import Collector
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.errors import RunFailed
from protofed.methods.families import PrototypeUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.moon import Moon
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.jobs import Failure, Job, Reason
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tasks.minidigits import Minidigits
from protofed.tree import Params, Tree, leaves, record
from protofed.tree import map as tree_map
from run_doubles import small_experiment

TRAINING = Training(rounds=1000, epochs=1, batch_size=8, optimizer=Sgd(lr=0.1, momentum=0.9), seed=3)


def federation(task: Task, runtime: Any = None, **training: Any) -> Federation:
    settings = replace(TRAINING, quarantine=0, **training)
    return Federation(census_of(task), task, settings, runtime or Sequential(), name="run-1")


def hash_of(state: State) -> str:
    """Of every bit of the server and of all memories."""
    whole = bits({"server": state.server, "memories": dict(sorted(state.memories.items()))})
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()


# ---- R20: clients drop out


def rounds_of(of: Federation, history: History, rounds: int) -> Iterator[tuple[set[ClientId], State, State]]:
    """For each round: who must have counted, and the states around it."""
    state = of.start()
    for _ in range(rounds):
        before, state = state, of.advance(state)
        yield who_counts(history.asked[-1], history.arrivals[-1]), before, state


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_with_a_third_dropping_out_exactly_those_that_replied_count_by_their_examples(fraction: float) -> None:
    """R20, with failures: 50 clients, 100 rounds, 30 %."""
    task, history, found, absences = people(50), History(), [], 0
    of = federation(task, DropOut(0.3, seed=1, history=history), fraction=fraction)
    for counted, before, after in rounds_of(of, history, 100):
        found += complaints(task, counted, before, after)
        found += forgotten(counted, visits(before.memories), visits(after.memories))
        untouched = {client: memory for client, memory in before.memories.items() if client not in counted}
        assert bits(untouched) == bits({client: after.memories[client] for client in untouched})
        absences += len(history.asked[-1]) - len(counted)
        assert {f.client for f in after.failures} == set(history.asked[-1]) - counted
    assert found == []
    assert 0.27 < absences / sum(map(len, history.asked)) < 0.33
    assert len(history.asked) == 100


def test_with_a_third_of_the_messages_lost_exactly_those_that_arrived_count() -> None:
    """R20, with messages that are lost on a wire; the clients' memories are at the clients."""
    task, found = people(50), []
    wire = Unruly(Weather(lost=0.3), seed=2)
    for counted, before, after in rounds_of(federation(task, wire), wire.history, 100):
        known = visits(wire.memories)
        wire.tell(after)
        found += complaints(task, counted, before, after)
        found += forgotten(counted, known, visits(wire.memories))
    assert found == []
    assert 0.27 < wire.deeds["lost"] / 5000 < 0.33


def test_a_class_without_a_reply_keeps_its_prototype() -> None:
    """R20: it happens in the rounds above only if some class has few holders."""
    task = people(50)
    holders = [c for c, data in task.clients.items() if CLASSES - 1 in data.labels.tolist()]
    good = federation(task)
    before = good.advance(good.start())
    after = replace(good, runtime=Faulty(set(holders))).advance(before)
    assert 0 < len(holders) < 4
    assert before.server.prototypes.count[-1] > 0
    assert bits(after.server.prototypes.mean[-1]) == bits(before.server.prototypes.mean[-1])
    assert after.server.prototypes.count[-1] == before.server.prototypes.count[-1]
    assert bits(after.server.params) != bits(before.server.params)


def test_the_checker_finds_a_client_that_is_counted_twice_missing_or_with_another_weight() -> None:
    """A census that could not fail would prove nothing."""
    task, history = people(10), History()
    of = federation(task, DropOut(0.3, seed=1, history=history))
    [(counted, before, after)] = list(rounds_of(of, history, 1))
    absent, present = sorted(set(task.clients) - counted)[0], sorted(counted)[0]
    assert complaints(task, counted, before, after) == []
    assert complaints(task, counted | {absent}, before, after) != []
    assert complaints(task, counted - {present}, before, after) != []
    nudged = after.server.params["who"] + 1e-11 * one_hot(present, task.clients)
    wrong = replace(after, server=replace(after.server, params={"who": nudged}))
    assert complaints(task, counted, before, wrong) != []
    assert forgotten(counted, visits(before.memories), visits(after.memories)) == []
    assert forgotten(counted, visits(before.memories), visits(before.memories)) != []


def handwriting() -> Task:
    """scikit-learn's digits: 1,300 for ten clients, each of which lacks two classes, and the rest to test with."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16).float(), torch.tensor(y)
    clients = {}
    for k in range(10):
        rows = torch.arange(k, 1300, 10)
        own = rows[(y[rows] != k) & (y[rows] != (k + 1) % 10)]
        clients[f"c{k}"] = Data.of(x[own], y[own])
    return Task(clients, {"all": Data.of(x[1300:], y[1300:])}, 10, perceptron, name="handwriting")


def perceptron(client: ClientId) -> Parts:
    return {"features": nn.Sequential(nn.Linear(64, 32), nn.ReLU()), "classifier": nn.Linear(32, 10)}


def final_accuracy(task: Task, share: float, rounds: int, **training: Any) -> float:
    settings = replace(TRAINING, rounds=rounds, **training)
    runtime = DropOut(share, seed=settings.seed, history=History())
    result = execute(Experiment(Federation(FedAvg(), task, settings, runtime), evaluate_every=rounds))
    return result.metrics("last")["average"]


def loss_of_accuracy(task: Task, rounds: int, **training: Any) -> tuple[float, float]:
    """The mean accuracy over 5 seeds without drop-out, and what 30 % cost."""
    means = [fmean(final_accuracy(task, share, rounds, seed=s, **training) for s in range(5)) for share in (0, 0.3)]
    return means[0], means[0] - means[1]


def test_dropping_out_costs_at_most_two_points_of_accuracy() -> None:
    """R20: once the rounds are enough to converge, which one is not."""
    task = handwriting()
    without, cost = loss_of_accuracy(task, 20, epochs=2, batch_size=32)
    assert cost <= 0.02
    assert without > 0.8
    assert final_accuracy(task, 0, 1, epochs=2, batch_size=32) < without - 0.1


@pytest.mark.slow
def test_dropping_out_costs_at_most_two_points_of_accuracy_on_minidigits() -> None:
    """R20, on images of four domains."""
    sgd = Sgd(lr=0.05, momentum=0.9)
    without, cost = loss_of_accuracy(Minidigits().build(), 20, batch_size=32, optimizer=sgd)
    assert cost <= 0.02
    assert without > 0.7


# ---- R21: too few replies


@dataclass
class Flaky(Sequential):
    """All but the first few clients fail, as often as it is told; then all is well."""

    replies: int
    times: int = 1000

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        self.times -= 1
        for number, job in enumerate(jobs):
            if self.times >= 0 and number >= self.replies:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to fail")
            else:
                yield from super().run([job])


def abandoned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("ROUND_ABANDONED")]


@pytest.mark.parametrize("replies", [0, 1, 4])
@pytest.mark.parametrize("attempts", [1, 3])
def test_too_few_replies_leave_everything_as_it_was(
    replies: int, attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """R21: 0, 1 and one fewer than the minimum."""
    of = federation(people(8), minimum_replies=5, attempts=attempts)
    before = of.advance(of.start())
    known, flaky = hash_of(before), Flaky(replies)
    with caplog.at_level(logging.WARNING), pytest.raises(RunFailed, match=f"Given up after {attempts} attempts"):
        replace(of, runtime=flaky).advance(before)
    assert hash_of(before) == known
    assert len(abandoned(caplog)) == attempts == 1000 - flaky.times
    assert f"round 2: {replies} of 8 clients replied well, and the run needs 5" in abandoned(caplog)[0]
    assert replace(of, runtime=Flaky(5)).advance(before).round == 2  # as many as the minimum are enough


def test_a_round_that_succeeds_at_the_second_attempt_is_the_round_without_the_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R21: with training, whose draws must not depend on the attempt."""
    of = Federation(Moon(), tiny(4), replace(TRAINING, minimum_replies=3))
    before = of.advance(of.start())
    with caplog.at_level(logging.WARNING):
        after = replace(of, runtime=Flaky(2, times=1)).advance(before)
    assert hash_of(after) == hash_of(of.advance(before))
    assert len(abandoned(caplog)) == len(after.abandoned) == 1
    assert "2 of 4 clients replied well" in after.abandoned[0]
    assert of.advance(after).abandoned == ()


def test_another_attempt_asks_other_clients() -> None:
    """R21: those who did not reply may never will."""
    of = federation(people(20), fraction=0.3)
    assert len({of.sampled(4, attempt) for attempt in range(5)}) == 5
    assert of.sampled(4) == of.sampled(4, 0)


@pytest.mark.parametrize("replies", [0, 2])
def test_a_run_that_is_given_up_can_be_resumed_from_where_it_was(replies: int, tmp_path: Path) -> None:
    """R21: through a run's folder; the resumed run ends as if nothing had happened."""
    good = small_experiment("fedavg", rounds=4)
    of = replace(good.federation, training=replace(good.federation.training, minimum_replies=3))
    good, folder, rounds = replace(good, federation=of), RunFolder(tmp_path / "run"), iter(range(2))
    execute(good, folder, should_stop=lambda: next(rounds, None) is None)
    with pytest.raises(RunFailed, match="Given up after 3 attempts; what was saved is intact"):
        execute(replace(good, federation=replace(of, runtime=Flaky(replies))), folder, resume=True)
    assert (folder.rounds_saved, folder.is_done) == (2, False)
    resumed, whole = execute(good, folder, resume=True), execute(good)
    assert folder.is_done
    assert hash_of(resumed.state) == hash_of(whole.state)


HASTY = """
task.name = "minidigits"
method.name = "fedavg"
training = { rounds = 2, epochs = 1, deadline = 1e-6, attempts = 2 }
"""


def test_the_command_ends_badly_when_no_reply_is_in_time(tmp_path: Path) -> None:
    """R21: every reply is later than the deadline."""
    experiment, out = tmp_path / "hasty.toml", tmp_path / "out"
    experiment.write_text(HASTY)
    command = [sys.executable, "-m", "protofed.cli.app", "run", str(experiment), "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode not in (0, 2), ended
    assert "Given up after 2 attempts" in ended.stderr
    assert ended.stderr.count("ROUND_ABANDONED") == 2
    assert "Traceback" not in ended.stderr
    (folder,) = out.iterdir()
    assert not RunFolder(folder).is_done


# ---- R22: stragglers

NAP = 60.0


@dataclass(frozen=True)
class Sleepy(Census):
    """One client sleeps before it replies, in rounds after the second."""

    sleep: Callable[[float], None] = time.sleep

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if local.id == "c002" and local.round >= 2:
            self.sleep(NAP)
        return await super().train(local, message, memory)


def sleepy(task: Task, runtime: Any, sleep: Callable[[float], None] = time.sleep) -> Federation:
    return replace(federation(task, runtime, rounds=3), method=Sleepy(tuple(sorted(task.clients)), sleep=sleep))


def with_deadline(of: Federation, seconds: float) -> Federation:
    return replace(of, training=replace(of.training, deadline=seconds))


def test_a_client_that_sleeps_ten_deadlines_is_late_and_the_round_is_not() -> None:
    """R22, with processes that can be ended."""
    task, workers = people(6), Workers(2)
    of = sleepy(task, workers)
    try:
        first = of.advance(of.start())  # processes are made
        began = time.monotonic()
        before = of.advance(first)  # as long as a round takes on this machine now
        deadline = min(max(1.0, 20 * (time.monotonic() - began)), NAP / 10)
        began = time.monotonic()
        after = with_deadline(of, deadline).advance(before)
        seconds = time.monotonic() - began
    finally:
        workers.close()
    assert [(f.client, f.reason) for f in after.failures] == [("c002", Reason.LATE)]
    assert complaints(task, set(task.clients) - {"c002"}, before, after) == []
    assert bits(after.memories["c002"]) == bits(before.memories["c002"])
    assert deadline <= seconds < NAP, "the round waited for the sleeper"
    assert after.refused == {"LATE": 1}
    assert after.strikes == {}


def test_after_the_deadline_nobody_more_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22, one client after another: the sleeper cannot be ended, and those after it are not asked."""
    clock = ManualClock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    task = people(6)
    of = sleepy(task, Sequential(), sleep=clock.advance)
    before = of.advance(of.advance(of.start()))
    after = with_deadline(of, NAP / 10).advance(before)
    details = {f.client: (f.reason, f.detail) for f in after.failures}
    unasked = (Reason.LATE, "the deadline came before it was asked")
    assert details == {
        "c002": (Reason.LATE, "its reply came after the deadline"),
        **dict.fromkeys(("c003", "c004", "c005"), unasked),
    }
    assert complaints(task, {"c000", "c001"}, before, after) == []
    assert after.traffic["c003"].down == 0
    assert after.traffic["c001"].down > 0


def test_a_message_that_arrives_in_the_next_round_is_stale() -> None:
    """R22: it was LATE in its own round, and cannot count in another."""

    class Slow(Wired):
        def carried(self, mail: list[Mail]) -> Iterable[Mail]:
            kept, self.kept = getattr(self, "kept", []), [one for one in mail if one.client == "c001"]
            return [*kept, *(one for one in mail if one not in self.kept)]

    task, wire = people(5), Slow()
    of = federation(task, wire)
    first = of.advance(of.start())
    second = of.advance(first)
    assert [(f.client, f.reason) for f in first.failures] == [("c001", Reason.LATE)]
    assert [(f.client, f.reason) for f in second.failures] == [("c001", Reason.STALE_ROUND)]
    assert "round 0" in second.failures[0].detail
    assert complaints(task, set(task.clients) - {"c001"}, first, second) == []


@pytest.mark.parametrize(("fraction", "over", "count"), [(0.2, 1.3, 13), (0.22, 1.3, 15), (1.0, 1.3, 50), (0.2, 1, 10)])
def test_more_clients_are_asked_than_needed(fraction: float, over: float, count: int) -> None:
    """R22: ⌈1.3 × target⌉ of 50, never more than there are; all that reply count."""
    task, history = people(50), History()
    of = federation(task, DropOut(0.2, seed=5, history=history), fraction=fraction, over_selection=over)
    [(counted, before, after)] = list(rounds_of(of, history, 1))
    assert len(set(history.asked[0])) == len(history.asked[0]) == count
    assert complaints(task, counted, before, after) == []


# ---- R23: doubled, held back, mixed up, replayed


def test_doubled_delayed_reordered_and_replayed_messages_count_at_most_once() -> None:
    """R23: well over 1,000 of such; exactly those whose answer arrived in its round count, once."""
    task, found, reasons = people(30), [], Counter[str]()
    elsewhere = Unruly(Weather(), seed=0)
    other_run = replace(federation(task, elsewhere), name="run-0")
    other_run.advance(other_run.start())
    weather = Weather(lost=0.05, doubled=0.3, delayed=0.15, spoiled=0.05, replayed=0.2)
    wire = Unruly(weather, seed=4, foreign=elsewhere.archive)
    for counted, before, after in rounds_of(federation(task, wire, fraction=0.8), wire.history, 60):
        known = visits(wire.memories)
        wire.tell(after)
        found += complaints(task, counted, before, after) + forgotten(counted, known, visits(wire.memories))
        assert {f.client for f in after.failures} == set(wire.history.asked[-1]) - counted
        reasons.update(after.refused)
    assert found == []
    assert wire.deeds["doubled"] + wire.deeds["delayed"] + wire.deeds["replayed"] > 1000, wire.deeds
    assert reasons.keys() == {"DUPLICATE", "STALE_ROUND", "WRONG_RUN", "UNDECODABLE", "LATE"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "run-0"}, Reason.WRONG_RUN),
        ({"round": 0}, Reason.STALE_ROUND),
        ({"round": 7}, Reason.STALE_ROUND),
        ({"phase": "setup"}, Reason.STALE_ROUND),
        ({"call": 2}, Reason.STALE_ROUND),
        ({"model": "0" * 16}, Reason.WRONG_MODEL),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("is_all_there_is", [True, False])
def test_a_message_that_answers_something_else_does_not_count(
    change: dict[str, Any], reason: Reason, is_all_there_is: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """R23: the client is left out for it only if nothing better comes, and it is on record either way."""

    class Replaying(Wired):
        def carried(self, mail: list[Mail]) -> Iterable[Mail]:
            if mail[0].ticket.round == 0:
                return mail
            wrong = relabelled(mail[1], **change)
            return [wrong, *mail[2:], mail[0]] if is_all_there_is else [wrong, *mail]

    task, wire = people(5), Replaying()
    of = federation(task, wire)
    before = of.advance(of.start())
    after = of.advance(before)
    assert after.refused == {reason: 1}
    assert [f.reason for f in after.failures] == ([reason] if is_all_there_is else [])
    assert complaints(task, set(task.clients) - ({"c001"} if is_all_there_is else set()), before, after) == []
    assert sum(reason in message and "c001" in message for message in caplog.messages) == 1


def test_every_further_copy_is_a_duplicate() -> None:
    """R23: five copies, one counts."""

    class Copying(Wired):
        def carried(self, mail: list[Mail]) -> Iterable[Mail]:
            return [one for one in mail for _ in range(5)]

    task, wire = people(4), Copying()
    of = federation(task, wire)
    start = of.start()
    after = of.advance(start)
    assert complaints(task, set(task.clients), start, after) == []
    assert (after.refused, after.failures, after.strikes) == ({"DUPLICATE": 16}, (), {})


# ---- R25: nothing to take a mean of


@dataclass(frozen=True)
class Weightless(Census):
    """Everybody says that it has no examples."""

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[PrototypeUpload, Any]:
        reply = await super().train(local, message, memory)
        nothing = tree_map(torch.zeros_like, reply.upload)
        return Reply(replace(nothing, params=reply.upload.params), reply.memory)


@pytest.mark.parametrize("case", ["all fail", "all weights are 0"])
def test_a_round_without_any_weight_is_abandoned(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """R25: no division by zero, no NaN, and the state as it was."""
    good = federation(people(6))
    before = good.advance(good.start())
    known = hash_of(before)
    if case == "all fail":
        bad = replace(good, runtime=Faulty(set(good.ids)))
    else:
        bad = replace(good, method=Weightless(good.ids))
    with caplog.at_level(logging.WARNING), pytest.raises(RunFailed, match="Given up after 3 attempts"):
        bad.advance(before)
    assert len(abandoned(caplog)) == 3
    assert hash_of(before) == known
    assert all(leaf.isfinite().all() for leaf in leaves(before.server))
    assert good.advance(before).round == 2


def test_a_failure_in_the_last_round_is_on_record(tmp_path: Path) -> None:
    """R20: rounds.jsonl has it."""
    good, folder = small_experiment("fedavg", rounds=1), RunFolder(tmp_path / "run")
    execute(replace(good, federation=replace(good.federation, runtime=Faulty({"c1"}))), folder)
    assert '"refused": {"CLIENT_ERROR": 1}' in folder.read_rounds()


# ---- R9: the order of arrival


@dataclass(frozen=True)
class Noisy(Census):
    """Every client sends numbers of many sizes, whose sum depends on its order, in float64 too."""

    def init_server(self, central: ServerContext) -> Any:
        server = super().init_server(central)
        return replace(server, params={"short": torch.zeros(64), "long": torch.zeros(64, dtype=torch.float64)})

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[PrototypeUpload, Any]:
        reply = await super().train(local, message, memory)
        draw = torch.Generator().manual_seed(local.step_seed)
        noise = torch.randn(64, generator=draw) * 10 ** (4 * torch.rand(64, generator=draw))
        params = {"short": noise, "long": noise.double() / 3}
        return replace(reply, upload=replace(reply.upload, params=params))


def hashes_of_arrivals(orders: int) -> set[str]:
    task = people(100)
    of = Federation(Noisy(tuple(sorted(task.clients))), task, TRAINING)
    start = of.start()
    return {hash_of(replace(of, runtime=Shuffled(seed)).advance(start)) for seed in range(orders)}


class CarelessMean:
    """Sums in float32, in the order in which it is given the trees."""

    def __init__(self) -> None:
        self.total: Tree = None
        self.weight = 0.0

    def add(self, tree: Tree, weight: float = 1.0) -> None:
        own = tree_map(lambda leaf: leaf.float() * weight, tree)
        self.total = own if self.total is None else tree_map(torch.add, self.total, own)
        self.weight += weight

    def value(self) -> Tree:
        return tree_map(lambda leaf: leaf / self.weight, self.total)


def test_fifty_orders_of_arrival_of_a_hundred_clients_give_one_state() -> None:
    """R9."""
    assert len(hashes_of_arrivals(50)) == 1


def test_an_engine_that_sums_as_replies_arrive_gives_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9: what the test above would find."""

    def unsorted(self: Collector, arrivals: Iterable[tuple[ClientId, Any]]) -> Iterator[tuple[ClientId, Any]]:
        self._awaited.clear()
        yield from arrivals

    monkeypatch.setattr(Collector, "sorted", unsorted)
    monkeypatch.setattr("protofed.api.sums.Mean", CarelessMean)
    assert len(hashes_of_arrivals(10)) > 1


# ---- R26: what a client keeps is its own


@record
class Marks:
    """By client, what it sent last."""

    own: dict[ClientId, Tensor]  # (2,)


@record
class Mark:
    own: Tensor  # (2,), 128 random bits


def mark_of(client: ClientId) -> Tensor:
    """The 128 bits that a client draws: its own for ever, and in no relation to the engine's seeds."""
    bytes_of = hashlib.sha256(f"watermark of {client}".encode()).digest()[:16]
    return torch.frombuffer(bytearray(bytes_of), dtype=torch.int64).clone()


@dataclass(frozen=True)
class Watermarked(Method[Marks, Mark, Mark, Mark]):
    """A client marks its memory when it first takes part and sends its mark, which comes back to it alone. Whatever a
    step is given that is not the client's own goes into the file `book`."""

    book: Path = Path()

    def init_server(self, central: ServerContext) -> Marks:
        return Marks({client: torch.zeros(2, dtype=torch.int64) for client in sorted(central.spec.clients)})

    def message_for(self, server: Marks, client: ClientId) -> Mark:
        return Mark(server.own[client])

    def upload_spec(self, server: Marks, central: ServerContext) -> Mark:
        return Mark(torch.zeros(2, dtype=torch.int64))

    def aggregate(self, server: Marks, uploads: Uploads[Mark], central: ServerContext) -> Marks:
        return Marks({**server.own, **{client: upload.own for client, upload in uploads}})

    def init_memory(self, local: ClientContext, message: Mark) -> Mark:
        return Mark(torch.zeros(2, dtype=torch.int64))

    def local_weights(self, message: Mark, memory: Mark) -> Params:
        return {}

    async def train(self, local: ClientContext, message: Mark, memory: Mark) -> Reply[Mark, Mark]:
        for what, given in (("memory", memory.own), ("message", message.own)):
            if given.any() and not given.equal(mark_of(local.id)):
                self.note(f"round {local.round}: the {what} of {local.id} is another's")
        if message.own.any() != memory.own.any():
            self.note(f"round {local.round}: {local.id} lost its memory or its message")
        return Reply(Mark(mark_of(local.id)), Mark(mark_of(local.id)))

    def note(self, violation: str) -> None:
        with self.book.open("a") as file:
            file.write(violation + "\n")


class Churn(Sequential):
    """Clients fail now and then, and each is away for a long while at times; all return for the last rounds. A function
    of client and round alone."""

    def __init__(self, absence: int) -> None:
        super().__init__()
        self.absence = absence

    def run(self, jobs: Iterable[Job]) -> Outcomes:
        for job in jobs:
            if self.is_away(job.client, job.context.round, job.context.num_rounds):
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "away")
            else:
                yield from super().run([job])

    def is_away(self, client: ClientId, now: int, rounds: int) -> bool:
        is_long = (now // self.absence + int(client[1:])) % 3 == 0
        return now < rounds - 10 and (is_long or random.Random(f"{client} {now}").random() < 0.2)


def watermarked(book: Path, clients: int = 30, rounds: int = 200, absence: int = 60) -> Experiment:
    training = Training(rounds=rounds, epochs=1, fraction=0.5, seed=5, quarantine=0)
    of = Federation(Watermarked(book), people(clients), training, Churn(absence))
    return Experiment(of, identity="watermarked")


class Killer(Silent):
    """Kills its process when so many rounds are saved."""

    def __init__(self, after: int) -> None:
        self.left = after

    def round(self, result: object) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_middle(experiment: Experiment, folder: RunFolder, after: int) -> None:
    """Goes on with a run in another process, which is killed when so many more rounds are saved."""
    child = forked(lambda: execute(experiment, folder, resume=True, observer=Killer(after)))
    assert ended(child) == -signal.SIGKILL, "the run ended before it was killed"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("clients", "rounds", "absence"), [(12, 40, 10), pytest.param(30, 200, 60, marks=pytest.mark.slow)]
)
def test_nobody_is_ever_given_what_another_keeps(clients: int, rounds: int, absence: int, tmp_path: Path) -> None:
    """R26: half of the clients are asked, many of those are away, some for more than 50 rounds of 200; the run is
    stopped, killed and resumed all the time."""
    book, folder, kills = tmp_path / "violations", RunFolder(tmp_path / "run"), 0
    experiment = watermarked(book, clients, rounds, absence)
    while not folder.is_done:
        if kills * 20 < folder.rounds_saved < rounds - 10:
            kill_in_the_middle(experiment, folder, after=3)
            kills += 1
        left = iter(range(7))
        result = execute(experiment, folder, resume=True, should_stop=lambda left=left: next(left, None) is None)
    assert not book.exists(), book.read_text()
    assert kills >= rounds // 20 - 1
    assert sorted(result.state.memories) == sorted(experiment.federation.ids)
    assert all(memory.own.equal(mark_of(client)) for client, memory in result.state.memories.items())
    whole = execute(watermarked(tmp_path / "other", clients, rounds, absence))
    assert hash_of(result.state) == hash_of(whole.state)


def test_an_engine_that_swaps_two_memories_is_found_out(tmp_path: Path) -> None:
    """R26: what the test above would find, whatever is swapped."""
    for number, what in enumerate(("memories", "messages", "a memory that is lost")):
        book = tmp_path / str(number)
        of = watermarked(book).federation
        of = replace(of, training=replace(of.training, fraction=1.0), runtime=Sequential())
        state = of.advance(of.start())
        assert not book.exists()
        swapped = {**state.receipts, "c001": state.receipts["c002"], "c002": state.receipts["c001"]}
        marks = {**state.server.own, "c001": state.server.own["c002"]}
        lost = {client: receipt for client, receipt in state.receipts.items() if client != "c003"}
        wrong = {
            "memories": replace(state, receipts=swapped),
            "messages": replace(state, server=Marks(marks)),
            "a memory that is lost": replace(state, receipts=lost),
        }[what]
        of.advance(wrong)
        assert book.exists(), what
