"""Signals that ask a program to stop: Ctrl-C, what `timeout` and batch systems send, and a terminal that closes.

They reach all processes of a group at once. Only the first of them acts on it: it ends its round, saves, and ends the
others. So these leave such signals to it, from their first moment on.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals to stop wait until this ends. Processes that are started within it hold them back too, until they call
    `leave_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Ignores signals to stop, also those that were held back. SIGTERM ends the process if the parent sends it, as
    multiprocessing does. To be called before the process has other threads, which would get the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # guard: stop-signal-no-client-failure
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGHUP])
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo([signal.SIGTERM]).si_pid
        if sender == parent:  # guard: stop-signal-of-others-ignored
            os._exit(128 + signal.SIGTERM)
