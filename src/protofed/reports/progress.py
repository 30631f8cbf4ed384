"""How a run goes, while it goes: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.printable import one_line
from protofed.runs.results import Round

Notice = Callable[[], str]
"""A line below the bars, such as what Ctrl-C does."""
QUIET = 10.0
"""Seconds after which plain output says that the run goes on."""


class Pace:
    """How long work has taken, and how long the rest will take at the pace so far. What was done before does not
    count: a run that is resumed has not done it in no time."""

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._at = clock()
        self._first = self._done = done
        self._total = total

    def reach(self, done: int) -> None:
        if done != self._done:
            self._done, self._at = done, self._clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float | None:
        """None until something was done."""
        steps = self._done - self._first
        if steps <= 0:
            return None
        rest = (self._at - self._began) / steps * (self._total - self._done)
        return max(0.0, rest - (self._clock() - self._at))


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class _Times(ProgressColumn):
    """Elapsed and left, of the pace in the bar's field `pace`; nothing if it has none."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        pace = task.fields.get("pace")
        if not isinstance(pace, Pace):
            return Text("")
        is_over = task.total is not None and task.completed >= task.total  # `finished` stays when a bar begins again
        left = "" if is_over else f", left {'?' if pace.left is None else duration(pace.left)}"
        return Text(f"{duration(pace.elapsed)}{left}")


class Bars(Progress):
    """Bars, and a notice below them."""

    def __init__(self, console: Console, notice: Notice) -> None:
        self._notice = notice
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Times())
        super().__init__(*columns, console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self._notice():
            yield Text(self._notice(), style="dim")


_PRINTING = threading.Lock()
os.register_at_fork(
    before=_PRINTING.acquire, after_in_parent=_PRINTING.release, after_in_child=_PRINTING.release
)  # a process that is forked while a thread prints would wait for that thread, which it does not have


class Heartbeat:
    """Says how far the work is when nothing was said for some seconds."""

    def __init__(self, console: Console, status: Callable[[], str], every: float = QUIET) -> None:
        self._console = console
        self._status = status
        self._every = every
        self._last = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def say(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _beat(self) -> None:
        while not self._end.wait(max(0.01, self._last + self._every - time.monotonic())):
            if time.monotonic() >= self._last + self._every:
                with _PRINTING, contextlib.suppress(Exception):  # the main thread meets the same and says so
                    self.say(self._status())


def scores(result: Round) -> str:
    """Accuracies in one line, as percent."""
    if result.headline is None:
        return ""
    at_home = result.judged == "own models" and "own" in result.summary
    of_domains = result.own_domains if at_home else result.domains
    domains = "  ".join(f"{one_line(domain)} {100 * scores['accuracy']:.1f}" for domain, scores in of_domains.items())
    return f"{domains}  {'own' if at_home else 'average'} {100 * result.headline:.1f}"


def line(result: Round, total: int) -> str:
    left_out = f"  left out: {', '.join(f'{one_line(c)} ({why})' for c, why in result.failures.items())}" * bool(
        result.failures
    )
    return f"round {result.round}/{total}  {scores(result)}{left_out}  {sum(result.seconds.values()):.1f} s"


class PlainRuns:
    """A line when one of many runs has done its first round, and whenever it has done another quarter of them. In
    between, how far all of them are."""

    def __init__(self, console: Console, totals: Mapping[str, int], every: float = QUIET) -> None:
        self._totals = totals
        self._told = dict.fromkeys(totals, 0)
        self._done: Sequence[int] = [0] * len(totals)
        self._pace = Pace(sum(totals.values()))
        self._is_first = True
        self._heartbeat = Heartbeat(console, self._status, every)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._heartbeat.stop()

    def update(self, done: Sequence[int]) -> None:
        """The rounds that each run has done now."""
        if self._is_first:
            self._pace, self._is_first = Pace(sum(self._totals.values()), sum(done)), False
        self._done = done
        self._pace.reach(sum(done))
        for (label, total), rounds in zip(self._totals.items(), done, strict=True):
            stage = 4 * rounds // total + (rounds > 0)
            if stage > self._told[label]:
                self._told[label] = stage
                self._heartbeat.say(f"{one_line(label)}: {rounds} of {total} rounds")

    def _status(self) -> str:
        left = "" if self._pace.left is None else f", about {duration(self._pace.left)} left"
        whole = sum(rounds >= total for rounds, total in zip(self._done, self._totals.values(), strict=True))
        runs = f"{whole} of {len(self._totals)} runs, {sum(self._done)} of {sum(self._totals.values())} rounds"
        return f"going on: {runs}, {duration(self._pace.elapsed)}{left}"


class LiveRuns:
    """A bar for all rounds, and one for each run that is under way."""

    def __init__(self, console: Console, totals: Mapping[str, int], notice: Notice) -> None:
        self._progress = Bars(console, notice)
        self._total = sum(totals.values())
        self._pace: Pace | None = None
        self._all = self._progress.add_task("rounds of all runs", total=self._total, pace=Pace(self._total))
        # When a run began is not known here, so its bar has no times.
        self._bars = {
            self._progress.add_task(one_line(label), total=total, visible=False): total
            for label, total in totals.items()
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, done: Sequence[int]) -> None:
        """The rounds that each run has done now."""
        if self._pace is None:  # what was done before is not this sweep's
            self._pace = Pace(self._total, sum(done))
        self._pace.reach(sum(done))
        self._progress.update(self._all, completed=sum(done), pace=self._pace)
        for (one, total), rounds in zip(self._bars.items(), done, strict=True):
            self._progress.update(one, completed=rounds, visible=0 < rounds < total)


def runs(console: Console, totals: Mapping[str, int], notice: Notice = lambda: "") -> LiveRuns | PlainRuns:
    """Shows how far each of many runs is: the rounds of each, by its label."""
    return LiveRuns(console, totals, notice) if console.is_terminal else PlainRuns(console, totals)


class Plain:
    """One line per round, and in between how far the round is."""

    def __init__(self, console: Console, every: float = QUIET) -> None:
        self._total = 0
        self._round = 0
        self._clients = self._expected = 0
        self._pace = Pace(0)
        self._federation: Federation | None = None
        self._heartbeat = Heartbeat(console, self._status, every)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._heartbeat.stop()

    def begin(self, federation: Federation, done: int) -> None:
        self._federation, self._total = federation, federation.training.rounds
        self._pace = Pace(self._total, done)
        self._expect_clients(done)
        if done:
            self._heartbeat.say(f"resuming after round {done}")

    def client(self, client: ClientId) -> None:
        self._clients += 1

    def round(self, result: Round) -> None:
        self._pace.reach(result.round)
        self._expect_clients(result.round)
        self._heartbeat.say(line(result, self._total))

    def _expect_clients(self, done: int) -> None:
        self._round, self._clients = done + 1, 0
        if self._federation and done < self._total:
            self._expected = len(self._federation.sampled(done))

    def _status(self) -> str:
        if self._federation is None:
            return f"preparing, {duration(self._pace.elapsed)}"
        if self._round > self._total:
            return f"ending, {duration(self._pace.elapsed)}"
        left = "" if self._pace.left is None else f", about {duration(self._pace.left)} left"
        clients = f"{min(self._clients, self._expected)} of {self._expected} clients"
        return f"in round {self._round}/{self._total}: {clients}, {duration(self._pace.elapsed)}{left}"


class Live:
    """Bars for rounds and for the clients of the round, and the accuracy so far."""

    def __init__(self, console: Console, notice: Notice) -> None:
        self._progress = Bars(console, notice)
        self._rounds = self._progress.add_task("rounds", total=None)
        self._clients = self._progress.add_task("clients", total=None)
        self._federation: Federation | None = None
        self._pace = self._clients_pace = Pace(0)
        self._replies = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, federation: Federation, done: int) -> None:
        self._federation = federation
        self._pace = Pace(self._total, done)
        self._progress.update(self._rounds, total=self._total, completed=done, pace=self._pace)
        self._expect_clients(done)

    def client(self, client: ClientId) -> None:
        self._replies += 1
        self._clients_pace.reach(self._replies)
        self._progress.update(self._clients, advance=1, description=f"clients  {one_line(client)}")

    def round(self, result: Round) -> None:
        self._pace.reach(result.round)
        self._progress.update(self._rounds, completed=result.round, description=f"rounds  {scores(result)}")
        if result.failures:
            self._progress.console.print(line(result, self._total), style="yellow", markup=False)
        self._expect_clients(result.round)

    @property
    def _total(self) -> int:
        return self._federation.training.rounds if self._federation else 0

    def _expect_clients(self, done: int) -> None:
        if self._federation and done < self._total:
            expected = len(self._federation.sampled(done))
            self._replies, self._clients_pace = 0, Pace(expected)
            self._progress.update(
                self._clients, total=expected, completed=0, description="clients", pace=self._clients_pace
            )


def observer(console: Console, notice: Notice = lambda: "") -> Live | Plain:
    return Live(console, notice) if console.is_terminal else Plain(console)
