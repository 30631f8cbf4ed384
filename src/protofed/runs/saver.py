"""Saves the states of a run, one at a time."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from protofed.runs.store.client_state import Saved


class Saver:
    """Saves one state at a time: before the next round begins, or, with `behind`, while it runs on another device."""

    def __init__(self, behind: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if behind else None
        self._pending: Future[Saved | None] | None = None
        self._waited = 0.0
        self.seconds = 0.0
        """How long the run waited for the save that was begun last, and for the one before it."""

    def begin(self, save: Callable[[], Saved | None]) -> Saved | None:
        """What was saved, unless that happens behind."""
        self.wait()
        begin = time.perf_counter()
        done = None
        if self._pool is None:
            done = save()
        else:
            self._pending = self._pool.submit(save)
        self.seconds, self._waited = self._waited + time.perf_counter() - begin, 0.0
        return done

    def wait(self) -> Saved | None:
        """What has been saved behind since the last time, if anything."""
        begin = time.perf_counter()
        pending, self._pending = self._pending, None
        done = None if pending is None else pending.result()
        self._waited += time.perf_counter() - begin
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()


class Clock:
    """Laps of a round, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, *, without: float = 0.0) -> None:
        now = time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last - without, 6)
        self._last = now
