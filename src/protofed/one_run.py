"""One run at a time in a process.

Torch's generators, its number of threads and its other settings belong to the whole process. Two runs in threads would
draw from each other's generators while networks are built and when dropout draws, and so give other bits every time.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from protofed.errors import BadInput

_lock = threading.RLock()
"""Held by the thread that runs. The same thread may begin another run within its run: that is no concurrency."""


@contextmanager
def only_run() -> Iterator[None]:
    """Refuses to go on while another thread of this process runs a federation."""
    lock = _lock
    if not lock.acquire(blocking=False):  # guard: one-run-at-a-time
        raise BadInput(
            "another thread of this process is at a run: runs share torch's generators and settings, so two at once "
            "would change each other's numbers. Run one after another, each in a process of its own (multiprocessing "
            "with the start method spawn), or let `protofed compare` run many at once"
        )
    try:
        yield
    finally:
        lock.release()


def _forget() -> None:
    """A process that was forked has none of the other threads, whatever they were at."""
    global _lock
    if not _lock.acquire(blocking=False):
        _lock = threading.RLock()
    else:
        _lock.release()


os.register_at_fork(after_in_child=_forget)
