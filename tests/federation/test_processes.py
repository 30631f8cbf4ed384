"""The process that does a site's work: it can hang, die and be ended without harm to the site."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import wait_for
from protofed.federation.processes import OutOfTime, Worker, WorkerDied

calls = 0


def handle(data: bytes) -> bytes | None:
    global calls
    calls += 1
    match data.partition(b" ")[0]:
        case b"hang":
            time.sleep(600)
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise ValueError("on purpose")
        case b"none":
            return None
        case b"who":
            return f"{os.getpid()} {calls}".encode()
    return data[::-1]


class Beats:
    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def beats() -> Beats:
    return Beats()


@pytest.fixture
def worker(beats: Beats) -> Iterator[Worker]:
    one = Worker(handle, beats, beats=0.02)
    yield one
    one.close()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_of_any_size_are_answered(worker: Worker) -> None:
    large = os.urandom(5 * 2**20)
    assert worker.answer(b"abc", 10) == b"cba"
    assert worker.answer(large, 30) == large[::-1]
    assert worker.answer(b"", 10) == b""
    assert worker.answer(b"none", 10) is None


def test_one_process_does_it_all_and_it_is_not_this_one(worker: Worker) -> None:
    first, second = (worker.answer(b"who", 10) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.split()[0], first.split()[1], second.split()[1]) == (second.split()[0], b"1", b"2")
    assert int(first.split()[0]) != os.getpid()
    assert calls == 0


def test_a_worker_that_hangs_is_ended_and_another_takes_its_place(worker: Worker, beats: Beats) -> None:
    answer = worker.answer(b"who", 10)
    assert answer is not None
    begin = time.monotonic()
    with pytest.raises(OutOfTime):
        worker.answer(b"hang", 0.3)
    assert time.monotonic() - begin < 5
    assert beats.count >= 3
    assert not is_there(int(answer.split()[0]))
    assert worker.answer(b"abc", 10) == b"cba"


def test_a_worker_that_takes_no_message_is_ended_too(worker: Worker, beats: Beats) -> None:
    answer = worker.answer(b"who", 10)
    assert answer is not None
    os.kill(pid := int(answer.split()[0]), signal.SIGSTOP)
    before = beats.count
    with pytest.raises(OutOfTime):
        worker.answer(bytes(20 * 2**20), 0.3)
    assert beats.count >= before + 3
    assert not is_there(pid)
    assert worker.answer(b"abc", 10) == b"cba"


@pytest.mark.parametrize("how", [b"die", b"raise"])
def test_a_worker_that_dies_is_noticed_at_once(worker: Worker, how: bytes) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match="signal 9" if how == b"die" else "exit code 1"):
        worker.answer(how, 60)
    assert time.monotonic() - begin < 5
    assert worker.answer(b"abc", 10) == b"cba"


def test_a_worker_that_died_while_it_had_nothing_to_do_is_replaced(worker: Worker) -> None:
    answer = worker.answer(b"who", 10)
    assert answer is not None
    pid = int(answer.split()[0])
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))  # all of its threads have ended
    assert worker.answer(b"abc", 10) == b"cba"


def test_a_site_that_stops_ends_its_worker_in_the_middle_of_an_order(worker: Worker) -> None:
    answer = worker.answer(b"who", 10)
    assert answer is not None

    def stop() -> None:
        raise InterruptedError

    worker._beat = stop
    with pytest.raises(InterruptedError):
        worker.answer(b"hang", 60)
    assert not is_there(int(answer.split()[0]))


CHILD = """
import os, sys, time
from protofed.federation.processes import Worker, end_with_parent
def handle(data):
    if data == b"who":
        return str(os.getpid()).encode()
    time.sleep(600)
worker = Worker(handle, lambda: None)
print(worker.answer(b"who", 60).decode(), flush=True)
worker.answer(b"hang", 600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_worker_ends_with_a_site_that_is_killed_even_in_the_middle_of_an_order() -> None:
    source = str(Path(__file__).parent.parent.parent / "src")
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}) as site:
        assert site.stdout is not None
        worker = int(site.stdout.readline())
        site.kill()
        site.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{worker}/stat").exists():
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                break
            assert time.monotonic() < end
            time.sleep(0.02)
