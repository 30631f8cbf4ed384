"""Ctrl-C and SIGTERM: stop after the round, and end at once when asked again or when the grace period is over."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from protofed.cli.console import err
from protofed.printable import printable

SIGNALLED = 128
"""A process that a signal ended exits with this plus the signal's number."""
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self.signal = 0

    def is_made(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        return SIGNALLED + self.signal


@contextlib.contextmanager
def stop_on_signal(advice: str, grace_period: float) -> Iterator[StopRequest]:
    """The first Ctrl-C or SIGTERM asks to stop after the round. A second one, or the end of the grace period, ends the
    process at once. Files are then either complete or absent, and worker processes end too."""
    stop = StopRequest()
    # A signal may arrive while rich prints or a module is imported. So the handlers only write bytes made beforehand.
    wish = printable(f"\nstopping after this round, or in {grace_period:g} s; {advice}\n").encode()
    end = (SHOW_CURSOR if err.is_terminal else b"") + b"\nstopped at once; what was saved is intact\n"

    def ask(number: int, frame: Any) -> None:
        if stop.is_made():  # guard: second-signal-ends-at-once
            end_at_once(number, frame)  # guard: second-signal-ends-at-once
        stop.signal = number
        signal.setitimer(signal.ITIMER_REAL, max(grace_period, 1e-3))  # guard: grace-ends, first-signal-waits-for-round
        with contextlib.suppress(OSError):
            os.write(2, wish)  # guard: signal-handler-says-ready-bytes

    def end_at_once(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, end)
        os._exit(stop.exit_code)

    handlers = {signal.SIGINT: ask, signal.SIGTERM: ask, signal.SIGALRM: end_at_once}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
