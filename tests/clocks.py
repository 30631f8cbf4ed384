"""Time in tests whose verdict must not depend on how busy the machine is.

How long work takes is measured in processor time, which other processes do not use up. What a test waits for is a
condition, and `PATIENCE` is only there so that a test that would hang fails.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 600.0
"""Seconds of wall clock: what takes longer hangs."""


@contextmanager
def processor_time_below(seconds: float) -> Iterator[None]:
    """Fails if this process needs more processor time for what is done inside."""
    begin = time.process_time()
    yield
    used = time.process_time() - begin
    assert used < seconds, f"it took {used:.2f} s of processor time, and {seconds:g} s are allowed"


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {PATIENCE:g} s"
        time.sleep(0.005)


def processor_time_of(pid: int) -> float:
    """Seconds that a running process has worked, in user and system mode, as /proc/<pid>/stat counts them."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_worked(pid: int, seconds: float) -> None:
    """Returns when a process has worked so much longer."""
    begin = processor_time_of(pid)
    wait_for(lambda: processor_time_of(pid) >= begin + seconds)


class ManualClock:
    """Stands for `time.monotonic` in a test of one process: it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
