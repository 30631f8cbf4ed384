"""The runtime of several processes: the sequential one's bits, whatever dies on the way, and nothing left behind."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clocks import PATIENCE, wait_for
from doubles import Faulty, bits, job_of, tiny
from methods.sampling import some_methods
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.evaluation import Outcomes
from protofed.api.method import Method, Uploads
from protofed.api.requests import Map, Total
from protofed.api.task import ClientId, Task
from protofed.data.batches import Batch, Data
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.errors import BadInput, RunFailed
from protofed.methods import METHODS
from protofed.methods.fedavg import FedAvg
from protofed.methods.moon import Moon
from protofed.nn.networks import Networks
from protofed.optim.optimizers import Sgd
from protofed.runtimes.jobs import Answer, Failure, Job, Outcome, Reason, Runtime
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tree import Nothing, Params, record

TRAINING = Training(rounds=2, epochs=1, batch_size=8, optimizer=Sgd(lr=0.1, momentum=0.9), seed=3)
SIZE = 2


@pytest.fixture(autouse=True)
def _impatience() -> Iterator[None]:
    """A test that hangs fails."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


OTHERS: set[int] = set()
"""Children that the process had before a test, such as those of the test runner."""


def pids() -> list[int]:
    """The children of this process, zombies too."""
    found = [Path(f"/proc/self/task/{task}/children").read_text().split() for task in os.listdir("/proc/self/task")]
    return sorted({int(pid) for own in found for pid in own} - OTHERS)


def is_running(pid: int) -> bool:
    """Zombies do not run: whether an orphan is reaped is up to the system."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(processes: list[int]) -> None:
    """Returns when these have ended and, if they are children of this process, are reaped."""

    def have_ended() -> bool:
        multiprocessing.active_children()  # reaps
        return not any(map(is_running, processes)) and not set(pids()) & set(processes)

    wait_for(have_ended)


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
    return sorted(found)


def named_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("protofed", "psm_"))}  # noqa: S108


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test may leave a process, a zombie, shared memory or an open file behind."""
    OTHERS.clear()
    OTHERS.update(pids())
    files, segments = open_files(), named_segments()
    yield
    assert pids() == []
    assert open_files() == files
    assert named_segments() <= segments


@pytest.fixture
def workers() -> Iterator[Workers]:
    runtime = Workers(SIZE)
    yield runtime
    runtime.close()


def federation(method: Any, runtime: Runtime, task: Task | None = None, **training: Any) -> Federation:
    return Federation(method, task or tiny(), replace(TRAINING, **training), runtime)


def after_all(of: Federation, rounds: int = 2) -> State:
    """The state after setup, so many rounds and the method's last word."""
    state = of.start()
    for _ in range(rounds):
        state = of.advance(state)
    return of.finish(state)


def assert_same(found: State, expected: State) -> None:
    assert bits((found.server, found.memories)) == bits((expected.server, expected.memories))
    assert found.failures == expected.failures


# ---- the sequential one's bits


@some_methods
def test_every_bit_is_that_of_the_sequential_runtime(name: str, workers: Workers) -> None:
    task, method = tiny(), METHODS[name]()
    found, expected = (after_all(federation(method, runtime, task)) for runtime in (workers, Sequential()))
    assert_same(found, expected)
    assert found.traffic == expected.traffic


def test_training_of_the_federation_at_hand_counts_and_not_that_of_the_first(workers: Workers) -> None:
    task, method = tiny(), Moon()
    first = federation(method, workers, task).start()
    before = pids()
    other = {"epochs": 3, "batch_size": 5, "seed": 9, "rounds": 7, "optimizer": Sgd(lr=0.3, lr_decay=0.5)}
    found, expected = (
        federation(method, runtime, task, **other).advance(replace(first, round=1))
        for runtime in (workers, Sequential())
    )
    assert_same(found, expected)
    assert pids() == before


# ---- methods that do as little as a test needs


@record
class Numbers:
    total: Tensor


@dataclass(frozen=True)
class Bare(Method[Numbers, Numbers, Nothing, Numbers]):
    """Every client sends what it is told to; the server adds up."""

    def init_server(self, central: ServerContext) -> Numbers:
        return Numbers(torch.zeros(3))

    def message_for(self, server: Numbers, client: ClientId) -> Numbers:
        return server

    def upload_spec(self, server: Numbers, central: ServerContext) -> Numbers:
        return server

    def aggregate(self, server: Numbers, uploads: Uploads[Numbers], central: ServerContext) -> Numbers:
        return Numbers(sum((upload.total for _, upload in uploads), server.total))

    def local_weights(self, message: Numbers, memory: Nothing) -> Params:
        return {}

    async def train(self, local: ClientContext, message: Numbers, memory: Nothing) -> Reply[Numbers, Nothing]:
        return Reply(self.upload(local, message), memory)

    def upload(self, local: ClientContext, message: Numbers) -> Any:
        return Numbers(message.total + 2 ** int(local.id[1:]))


@dataclass(frozen=True)
class Deviant(Bare):
    """In the second round, c01 does this instead."""

    deed: Callable[[], Any] = lambda: None

    def upload(self, local: ClientContext, message: Numbers) -> Any:
        return self.deed() if (local.id, local.round) == ("c01", 1) else super().upload(local, message)


def raises() -> None:
    raise KeyError("lost")


SILENT = torch.zeros(3).to_sparse()
DEEDS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "not finite": lambda: Numbers(torch.full((3,), torch.nan)),
    "no tensor": lambda: Numbers("three"),
    "none": lambda: Numbers(None),
    "no record": lambda: "three",
    "a function": lambda: Numbers(lambda: None),
    "leaves": lambda: sys.exit(4),
    "other names": lambda: {"sum": torch.zeros(3)},
    "other shape": lambda: Numbers(torch.zeros(0, 3)),
    "other type": lambda: Numbers(torch.zeros(3, dtype=torch.complex64)),
    "meta": lambda: Numbers(torch.zeros(3, device="meta")),
    "sparse": lambda: Numbers(SILENT),
}


@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS)
def test_a_failure_reads_as_in_the_sequential_runtime(deed: Callable[[], Any], workers: Workers) -> None:
    task, method = tiny(), Deviant(deed=deed)
    found, expected = (after_all(federation(method, runtime, task)) for runtime in (workers, Sequential()))
    assert_same(found, expected)
    assert [failure.client for failure in found.failures] == ["c01"]


@dataclass(frozen=True)
class Unready(Bare):
    ready: tuple[ClientId, ...] = ()

    def init_memory(self, local: ClientContext, message: Numbers) -> Nothing:
        if local.id in self.ready:
            return super().init_memory(local, message)
        raise ValueError(f"not {local.id}") if local.id == "c02" else KeyError(local.round)


def test_a_memory_that_cannot_be_made_is_the_same_failure(workers: Workers) -> None:
    outcomes = []
    for runtime in (workers, Sequential()):
        of = federation(Unready(), runtime)
        runtime.open(of)
        outcomes.append(dict(runtime.run(jobs(of))))
    assert outcomes[0] == outcomes[1]
    assert "ValueError: not c02 (test_workers.py, line" in outcomes[0]["c02"].detail


@pytest.mark.parametrize("size", [1, 2])
def test_clients_after_those_whose_memory_cannot_be_made_work(size: int) -> None:
    found = []
    for runtime in (Workers(size), Sequential()):
        of = federation(Unready(("c00", "c03", "c06")), runtime, tiny(7))
        runtime.open(of)
        outcomes = dict(runtime.run(jobs(of)))
        found.append({c: o if isinstance(o, Failure) else o.upload.total.tolist() for c, o in outcomes.items()})
        runtime.close()
    assert found[0] == found[1]
    assert [client for client, own in found[1].items() if isinstance(own, list)] == ["c00", "c03", "c06"]


def jobs(of: Federation, step: Any = None, message: Any = None, clients: Any = None) -> Iterator[Job]:
    message = Numbers(torch.zeros(3)) if message is None else message
    for client in of.ids if clients is None else clients:
        job = job_of(of, client, message)
        yield replace(job, step=step or job.step)


# ---- processes that die


def killed(by: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), by)


DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "killed": (killed, "the worker process died (signal 9): the system may have run out of memory"),
    "crashed": (lambda: killed(signal.SIGUSR1), "the worker process died (signal 10)"),
    "left": (lambda: os._exit(3), "the worker process died (exit status 3)"),
}


@pytest.mark.parametrize(("deed", "detail"), DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_process_that_dies_costs_one_client_one_round(size: int, deed: Callable[[], Any], detail: str) -> None:
    task, method, workers = tiny(), Deviant(deed=deed), Workers(size)
    of = federation(method, workers, task, rounds=3)
    first = of.advance(of.start())
    second = of.advance(first)
    assert second.failures == (Failure("c01", Reason.CLIENT_ERROR, detail),)
    assert bits(second.server) == bits(replace(of, runtime=Faulty({"c01"})).advance(first).server)
    third = of.advance(second)
    assert_same(third, replace(of, runtime=Sequential()).advance(second))
    assert third.failures == ()
    assert len(pids()) == size
    workers.close()


def test_a_process_that_dies_between_rounds_costs_nothing(workers: Workers) -> None:
    of = federation(FedAvg(), workers)
    state = of.start()
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    await_end(pids())
    assert_same(of.advance(state), replace(of, runtime=Sequential()).advance(state))
    assert len(pids()) == SIZE


def test_interruptions_are_the_parents_to_act_on(workers: Workers) -> None:
    of = federation(FedAvg(), workers)
    state = of.advance(of.start())
    before = pids()
    for pid in before:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    assert of.advance(state).failures == ()
    assert pids() == before


ORPHANS = """
import time
from clocks import PATIENCE
from doubles import tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.runtimes.workers import Workers
from runtimes.test_workers import Deviant, pids

def busy():
    print("busy", flush=True)
    time.sleep(2 * PATIENCE)

of = Federation(Deviant(deed=busy), tiny(), Training(rounds=2), Workers(3))
state = of.advance(of.start())
print(*pids(), flush=True)
of.advance(state)
"""


def test_processes_end_with_a_parent_that_is_killed_even_while_they_work() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.stdout.readline() == "busy\n"
        assert len(children) == 3
        assert all(map(is_running, children))
        parent.kill()
    await_end(children)


UNCLOSED = """
from doubles import tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.fedavg import FedAvg
from protofed.runtimes.workers import Workers

of = Federation(FedAvg(), tiny(), Training(rounds=2), Workers(3))
of.advance(of.start())
"""


def test_a_program_that_does_not_close_its_runtime_ends() -> None:
    """multiprocessing ends its processes by a signal that they ignore if others send it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", UNCLOSED], env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_processes_leave_signals_to_stop_to_their_parent(workers: Workers, number: int) -> None:
    """They neither die of them nor run the parent's handler."""
    before = signal.signal(number, lambda *_: os._exit(3))
    try:
        of = federation(FedAvg(), workers)
        state = of.advance(of.start())
        at_work = pids()
        assert len(at_work) == SIZE
        for pid in at_work:
            subprocess.run(["kill", f"-{number}", str(pid)], check=True)
        assert not of.advance(state).failures
        assert pids() == at_work
    finally:
        signal.signal(number, before)


# ---- opening and closing


def test_processes_are_started_once_and_again_only_for_another_method_or_task(workers: Workers) -> None:
    task, method, other = tiny(), FedAvg(), FedAvg()
    seen = []
    for of in (
        federation(method, workers, task),
        federation(method, workers, task, epochs=2),
        federation(other, workers, task),
        federation(other, workers, tiny()),
    ):
        workers.open(of)
        seen.append(set(pids()))
    after_all(of)
    assert [len(own) for own in seen] == [SIZE] * 4
    assert seen[0] == seen[1]
    assert not seen[1] & seen[2]
    assert not seen[2] & seen[3]
    assert set(pids()) == seen[3]


def test_a_closed_runtime_can_be_opened_again(workers: Workers) -> None:
    of = federation(Moon(), workers)
    state = of.advance(of.start())
    workers.close()
    assert pids() == []
    workers.close()
    assert_same(of.advance(state), replace(of, runtime=Sequential()).advance(state))


def test_closing_gives_all_back_even_while_somebody_holds_a_stream(workers: Workers) -> None:
    of = federation(Bare(), workers, tiny(7))
    workers.open(of)
    stream = workers.run(jobs(of))
    next(stream)
    workers.close()
    assert pids() == []
    assert not {"/memfd", "socket"} & set(open_files())
    stream.close()
    del stream


def test_a_runtime_that_is_not_open_says_so() -> None:
    of = federation(FedAvg(), Sequential())
    with pytest.raises(RuntimeError, match="must be opened"):
        next(iter(Workers(1).run(jobs(of))))


def test_a_runtime_that_is_forgotten_leaves_no_process() -> None:
    of = federation(FedAvg(), Workers(SIZE))
    of.advance(of.start())
    own = pids()
    assert len(own) == SIZE
    del of
    gc.collect()
    await_end(own)


def test_there_is_a_process_for_each_core_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    for runtime, expected in ((Workers(), 3), (Workers(1), 1)):
        runtime.open(federation(FedAvg(), runtime))
        assert len(pids()) == expected
        runtime.close()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BadInput, match="needs Linux, and this is darwin: take sequential"):
        Workers().open(federation(FedAvg(), Sequential()))


# ---- streams


def test_jobs_are_asked_for_only_when_a_process_is_free(workers: Workers) -> None:
    of = federation(Bare(), workers, tiny(7))
    workers.open(of)
    asked: list[ClientId] = []

    def counted() -> Iterator[Job]:
        for job in jobs(of):
            asked.append(job.client)
            yield job

    ahead = []
    for number, _ in enumerate(workers.run(counted()), 1):
        ahead.append(len(asked) - number)
    assert ahead == [2, 2, 2, 2, 2, 1, 0]  # the process that became free works on while the reader reads


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_reader_may_stop(reads: int, workers: Workers) -> None:
    of = federation(FedAvg(), workers, tiny(7))
    state = of.start()
    stream = workers.run(jobs(of, message=of.method.message_for(state.server, "c00")))
    for _ in range(reads):
        next(stream)
    stream.close()
    assert_same(of.advance(state), replace(of, runtime=Sequential()).advance(state))
    assert len(pids()) == SIZE


def test_two_streams_may_be_read_in_turns(workers: Workers) -> None:
    of = federation(Bare(), workers, tiny(5))
    workers.open(of)
    streams = [workers.run(jobs(of, message=Numbers(torch.full((3,), base)))) for base in (100.0, 200.0)]
    found: list[dict[ClientId, float]] = [{}, {}]
    for pair in zip(*streams, strict=True):
        for own, (client, answer) in zip(found, pair, strict=True):
            assert isinstance(answer, Answer)
            own[client] = answer.upload.total[0].item()
    assert found == [{f"c{k:02d}": base + 2**k for k in range(5)} for base in (100, 200)]


def test_an_error_of_the_server_ends_the_work(workers: Workers) -> None:
    of = federation(Bare(), workers, tiny(5))
    workers.open(of)

    def broken() -> Iterator[Job]:
        yield from jobs(of, clients=("c00", "c01", "c02"))
        raise LookupError("no message")

    with pytest.raises(LookupError, match="no message"):
        list(workers.run(broken()))
    assert len(dict(workers.run(jobs(of)))) == 5


# ---- what travels


async def echo(local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
    return Reply(message, memory)


def echoed(of: Federation, message: Any) -> Any:
    of.runtime.open(of)
    [(_, answer)] = of.runtime.run(jobs(of, echo, message, ["c00"]))
    return answer.upload if isinstance(answer, Answer) else answer


LEAVES: dict[str, Tensor] = {
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "channels last": torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 3).T,
    "expanded": torch.randn(3, 1).expand(3, 4),
    "strided": torch.arange(20).view(4, 5)[::2, 1:],
    "bool": torch.tensor([True, False, True]),
    "half": torch.randn(5).half(),
    "brain": torch.randn(7).bfloat16(),
    "nan": torch.tensor([torch.nan, -0.0, torch.inf]),
    "graph": torch.ones(2, requires_grad=True) * 2,
    "last empty": torch.zeros(3, 0),
}


def values(leaf: Tensor) -> str:
    """As text, in which NaN equals NaN, and 0 is not −0."""
    return repr(leaf.flatten().tolist())


def test_tensors_arrive_as_copies_would(workers: Workers) -> None:
    found = echoed(federation(Bare(), workers), (LEAVES, [Numbers(torch.arange(3))]))
    assert list(found[0]) == list(LEAVES)
    assert found[1][0].total.tolist() == [0, 1, 2]
    for name, leaf in LEAVES.items():
        copy, own = leaf.detach().clone(), found[0][name]
        assert (own.dtype, own.shape, own.stride()) == (copy.dtype, copy.shape, copy.stride()), name
        assert values(own) == values(copy), name


def test_memory_grows_and_shrinks_with_what_it_holds(workers: Workers) -> None:
    of = federation(Bare(), workers)
    for size in (1, 5000, 17, 300_000, 0, 9):
        assert torch.equal(echoed(of, {"x": torch.arange(size)})["x"], torch.arange(size))


def test_a_reply_survives_the_next_one() -> None:
    workers = Workers(1)
    of = federation(Bare(), workers)
    workers.open(of)
    answers = dict(workers.run(jobs(of)))
    found = {client: answer.upload.total[0].item() for client, answer in answers.items() if isinstance(answer, Answer)}
    assert found == {f"c{k:02d}": 2**k for k in range(4)}
    workers.close()


async def addresses(local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
    return Reply(torch.tensor([local.data.x.data_ptr(), torch.get_num_threads(), os.getpid()]), memory)


def test_data_are_not_copied_and_each_process_has_one_thread(workers: Workers) -> None:
    task = tiny()
    torch.set_num_threads(2)
    try:
        torch.randn(1000, 1000).sum()  # starts the threads of this process
        of = federation(Bare(), workers, task)
        workers.open(of)
        found = {client: reply.upload.tolist() for client, reply in workers.run(jobs(of, addresses))}  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(1)
    assert {own[2] for own in found.values()} <= set(pids())
    assert {client: own[:2] for client, own in found.items()} == {
        client: [data.x.data_ptr(), 1] for client, data in task.clients.items()
    }


def test_methods_that_other_processes_could_not_import_work_too(workers: Workers) -> None:
    @dataclass(frozen=True)
    class Inner(Bare):
        def upload(self, local: ClientContext, message: Numbers) -> Numbers:
            return Numbers(torch.ones(3))

    assert after_all(federation(Inner(), workers)).server.total.tolist() == [8.0] * 3  # four clients, two rounds


def test_a_step_that_cannot_be_sent_ends_the_run_and_says_why(workers: Workers) -> None:
    async def inner(local: ClientContext, message: Any, memory: Any) -> None:
        pass

    of = federation(Bare(), workers)
    workers.open(of)
    with pytest.raises(
        RunFailed, match=r"what client c00 is asked to do cannot be sent .*inner.*top level of a module"
    ):
        list(workers.run(jobs(of, inner)))


def test_a_reply_that_cannot_be_sent_is_a_failure(workers: Workers) -> None:
    state = after_all(federation(Deviant(deed=lambda: {(lambda: None): torch.zeros(3)}), workers))
    assert [(f.client, f.reason) for f in state.failures] == [("c01", Reason.CLIENT_ERROR)]
    assert "lambda" in state.failures[0].detail


# ---- requests of the server


@dataclass(frozen=True)
class Elsewhere(FedAvg):
    """Where another process than the first predicts, there is a deed. What is predicted is who does it."""

    deed: Callable[[], Any] = lambda: None
    home: int = field(default_factory=os.getpid)

    def outcomes(self, model: Any, batch: Batch, message: Any, memory: Any) -> Outcomes:
        if os.getpid() != self.home:
            self.deed()
        return here(model, batch, message, memory)


def here(model: Any, batch: Batch, message: Any, memory: Any) -> Outcomes:
    return Outcomes(torch.full(batch.y.shape, os.getpid()), torch.zeros(batch.y.shape, dtype=torch.float64))


def who(answers: list[Outcomes]) -> set[int]:
    """The processes that gave these answers, whichever examples they are about."""
    return {pid for answer in answers for pid in answer.predicted.tolist()}


@dataclass(frozen=True)
class Meeting:
    """A deed that each process ends only when all have come to it, so that none answers before the others wake."""

    folder: Path

    def __call__(self) -> None:
        (self.folder / str(os.getpid())).touch()
        wait_for(lambda: len(list(self.folder.iterdir())) >= SIZE)


def asked(of: Federation, *sets: Data) -> list[Map[Outcomes]]:
    """What an evaluation asks about these examples, each with weights of its own."""
    networks, params = of.networks_of(of.ids[0]), of.start().server.params
    first = Map(networks, params, (None, None), sets[0], of.task.transform, 0, of.method.outcomes)
    others = [{name: leaf + 0.1 * k for name, leaf in params.items()} for k, _ in enumerate(sets)]
    return [replace(first, params=own, data=data) for own, data in zip(others, sets, strict=True)]


def parts_of(task: Task) -> list[Data]:
    """Sets of few examples, of all kinds that a task has."""
    tests = [data.rows(torch.arange(size)) for data in task.tests.values() for size in (3, 6)]
    return [*task.tests.values(), *tests, *task.clients.values()]


def test_answers_are_those_of_one_process(workers: Workers) -> None:
    of = federation(FedAvg(), workers)
    requests = asked(of, *parts_of(of.task))
    assert bits(workers.answers(requests)) == bits(Sequential().answers(requests))


def test_requests_are_spread_over_the_processes(workers: Workers, tmp_path: Path) -> None:
    of = federation(Elsewhere(deed=Meeting(tmp_path)), workers)
    requests = asked(of, *parts_of(of.task))
    assert who(workers.answers(requests)) == set(pids())
    assert who([workers.answer(requests[0])]) == {os.getpid()}, "one request is not worth the way"
    assert who(workers.answers(requests[:1])) == {os.getpid()}


def test_what_processes_do_not_know_is_answered_here(workers: Workers) -> None:
    of = federation(Elsewhere(deed=killed), workers)
    (known,) = asked(of, of.task.tests["near"])
    data, networks = of.task.tests["near"], Networks(lambda: of.method.networks(of.task.spec, "c00"))
    strange = [
        replace(known, data=Data.of(data.x.clone(), data.y)),
        replace(known, data=Data.of(data.x, 1 - data.y.clamp(max=1))),
        replace(known, networks=networks),
        replace(known, transform=Transform(mean=(0.5,), std=(2.0,))),
        replace(known, function=Elsewhere().outcomes),
        replace(known, function=here),
        Total(known.networks, known.params, (None, None), data, of.task.transform, 0, of.method.outcomes),
    ]
    before = pids()
    assert who(workers.answers(strange)) == {os.getpid()}
    assert pids() == before, "a process was asked"


def raised() -> None:
    raise ValueError("not here")


@pytest.mark.parametrize("deed", [killed, raised, lambda: sys.exit(4)], ids=["killed", "raised", "left"])
def test_what_processes_fail_at_is_answered_here(deed: Callable[[], Any], workers: Workers) -> None:
    of = federation(Elsewhere(deed=deed), workers)
    requests = asked(of, *parts_of(of.task))
    assert who(workers.answers(requests)) == {os.getpid()}
    assert_same(of.advance(of.start()), replace(of, runtime=Sequential()).advance(of.start()))


def test_what_cannot_be_sent_is_answered_here(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = federation(Elsewhere(deed=Meeting(tmp_path)), workers)
    requests = asked(of, *parts_of(of.task))
    strange = [replace(request, context=(lambda: None, None)) for request in requests]
    assert who(workers.answers(strange)) == {os.getpid()}
    assert who(workers.answers([*strange[:2], *requests])) == {os.getpid(), *pids()}
    monkeypatch.setattr(os, "posix_fallocate", exhausted(lambda: True))
    long = [
        replace(request, data=request.data.rows(torch.zeros(200_000, dtype=torch.int64))) for request in requests[:2]
    ]
    assert who(workers.answers(long)) == {os.getpid()}
    assert len(pids()) == SIZE


class Misnamed(FedAvg):
    """Its function has the name of another one, as after a careless decorator."""

    def outcomes(self, model: Any, batch: Batch, message: Any, memory: Any) -> Outcomes:
        return here(model, batch, message, memory)

    outcomes.__name__ = "other"

    def other(self, model: Any, batch: Batch, message: Any, memory: Any) -> Outcomes:
        return Outcomes(torch.zeros_like(batch.y), torch.zeros(batch.y.shape, dtype=torch.float64))


def test_a_function_that_is_not_found_by_its_name_is_computed_here(workers: Workers) -> None:
    of = federation(Misnamed(), workers)
    requests, before = asked(of, *parts_of(of.task)), pids()
    assert who(workers.answers(requests)) == {os.getpid()}
    assert pids() == before, "a process has died of it"


def test_another_federation_of_the_same_method_and_task_has_the_same_processes(
    workers: Workers, tmp_path: Path
) -> None:
    first = federation(Elsewhere(deed=Meeting(tmp_path)), workers)
    asked(first, *parts_of(first.task))
    before = pids()
    second = Federation(first.method, first.task, TRAINING, workers)
    with workers.open(second):
        assert who(workers.answers(asked(second, *parts_of(second.task)))) == set(before)


async def asleep(*_: Any) -> Any:
    time.sleep(2 * PATIENCE)


@pytest.mark.parametrize("deadline", [1e9, 1e300])
def test_a_deadline_that_no_clock_can_hold_is_no_deadline(deadline: float, workers: Workers) -> None:
    state = after_all(federation(Bare(), workers, deadline=deadline))
    assert_same(state, after_all(federation(Bare(), Sequential())))
    assert state.failures == ()


def test_processes_that_were_ended_for_being_late_are_missed_by_nobody(workers: Workers, tmp_path: Path) -> None:
    of = federation(Elsewhere(deed=Meeting(tmp_path)), workers)
    requests = asked(of, *parts_of(of.task))
    stream = workers.run(replace(job, deadline=time.monotonic() - 1) for job in jobs(of, asleep))
    assert {failure.reason for _, failure in stream} == {Reason.LATE}
    with workers.open(of):
        assert who(workers.answers(requests)) == set(pids())
        assert len(pids()) == SIZE


def test_an_error_of_a_request_is_raised(workers: Workers) -> None:
    of = federation(Elsewhere(deed=raised, home=0), workers)
    with pytest.raises(ValueError, match="not here"):
        workers.answers(asked(of, *parts_of(of.task)))


class Asking(Workers):
    """Puts requests to the processes whenever a client's work has ended."""

    requests: list[Map[Outcomes]]

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        self.found: list[set[int]] = []
        for outcome in super().run(jobs):
            self.found.append(who(self.answers(self.requests)))
            yield outcome


def test_while_all_processes_work_for_clients_requests_are_answered_here() -> None:
    workers = Asking(SIZE)
    of = federation(Elsewhere(), workers)
    state, workers.requests = of.start(), asked(of, *parts_of(of.task))
    assert_same(of.advance(state), replace(of, runtime=Sequential()).advance(of.start()))
    assert len(workers.found) == len(of.ids)
    assert workers.found[0] == {os.getpid()}, "a process that works for a client was asked"
    assert workers.found[-1] & set(pids()), "nobody works for a client any more"
    workers.close()


# ---- memory that is not there


def exhausted(where: Callable[[], bool]) -> Callable[[int, int, int], None]:
    real = os.posix_fallocate

    def fallocate(file: int, start: int, size: int) -> None:
        if where():
            raise OSError(28, "No space left on device")
        real(file, start, size)

    return fallocate


def test_no_memory_for_a_message_ends_the_run(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", exhausted(lambda: True))
    of = federation(Bare(), workers)
    with pytest.raises(RunFailed, match="no shared memory for a record of 64 bytes: No space left on device"):
        of.advance(of.start())


async def swollen(local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
    return Reply(torch.zeros(1000, dtype=torch.int64), memory)


def test_no_memory_for_a_reply_is_a_failure(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, calls = os.getpid(), count()
    monkeypatch.setattr(os, "posix_fallocate", exhausted(lambda: os.getpid() != parent and next(calls) == 0))
    workers.count = 1
    of = federation(Bare(), workers)
    workers.open(of)
    found: list[Any] = [outcome for _, outcome in workers.run(jobs(of, swollen, clients=["c00", "c01"]))]
    assert "RunFailed: there is no shared memory for a record of 8000 bytes" in found[0].detail
    assert found[1].upload.shape == (1000,)
