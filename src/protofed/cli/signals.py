"""Signals to stop: stop after the round, and end at once when asked again or when the grace period is over."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from protofed.cli.console import err
from protofed.printable import printable
from protofed.stop_signals import STOP_SIGNALS

SIGNALLED = 128
"""A process that a signal ended exits with this plus the signal's number."""
LONGEST = 1e8
"""Seconds. A longer grace period, or `inf`, has no end: the system's timer cannot hold it."""
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Whether the user has asked to stop."""

    def __init__(self, offer: str = "", answer: str = "") -> None:
        self.signal = 0
        self._offer = offer
        self._answer = answer

    @property
    def notice(self) -> str:
        """What a signal to stop would do or, once it was made, what happens now."""
        return self._answer if self.is_made() else self._offer

    def is_made(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        return SIGNALLED + self.signal


@contextlib.contextmanager
def stop_on_signal(advice: str, grace_period: float, has_bars: bool = False) -> Iterator[StopRequest]:
    """The first signal to stop asks for that after the round. A second one, or the end of the grace period, ends the
    process at once. Files are then either complete or absent, and worker processes end too. SIGHUP stays ignored if it
    is, as under `nohup`. Where bars are drawn, they show the request's `notice`, and nothing is written over them."""
    # A signal may arrive while rich prints or a module is imported. So the handlers only write bytes made beforehand.
    is_limited = grace_period <= LONGEST  # guard: timers-have-an-end
    seconds = max(grace_period, 1e-3) if is_limited else 0  # 0: no timer
    at_most = f", or in {grace_period:g} s" if is_limited else ""
    answer = f"stopping after this round{at_most}; {advice}"
    stop = StopRequest(f"Ctrl-C stops after this round; {advice}", answer)
    wish = b"" if has_bars else printable(f"\n{answer}\n").encode()
    end = (SHOW_CURSOR if err.is_terminal else b"") + b"\nstopped at once; what was saved is intact\n"

    def ask(number: int, frame: Any) -> None:
        if stop.is_made():  # guard: second-signal-ends-at-once
            end_at_once(number, frame)  # guard: second-signal-ends-at-once
        stop.signal = number
        signal.setitimer(signal.ITIMER_REAL, seconds)  # guard: grace-ends, first-signal-waits-for-round
        with contextlib.suppress(OSError):
            os.write(2, wish)  # guard: signal-handler-says-ready-bytes

    def end_at_once(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, end)
        os._exit(stop.exit_code)

    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup]
    handlers = {**dict.fromkeys(heard, ask), signal.SIGALRM: end_at_once}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
