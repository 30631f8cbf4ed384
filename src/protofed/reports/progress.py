"""How a run goes, while it goes: a live bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.printable import one_line
from protofed.runs.results import Round


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


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
    """A line when one of many runs has done its first round, and whenever it has done another quarter of them."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._told = dict.fromkeys(totals, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, done: Sequence[int]) -> None:
        """The rounds that each run has done now."""
        for (label, total), rounds in zip(self._totals.items(), done, strict=True):
            stage = 4 * rounds // total + (rounds > 0)
            if stage > self._told[label]:
                self._told[label] = stage
                said = f"{one_line(label)}: {rounds} of {total} rounds"
                self._console.print(said, highlight=False, soft_wrap=True, markup=False)


class LiveRuns:
    """A bar for all rounds, and one for each run that is under way."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._progress = bar(console)
        self._all = self._progress.add_task("rounds of all runs", total=sum(totals.values()))
        self._bars = {
            self._progress.add_task(one_line(label), total=total, start=False, visible=False): total
            for label, total in totals.items()
        }
        self._begun: set[TaskID] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, done: Sequence[int]) -> None:
        """The rounds that each run has done now."""
        self._progress.update(self._all, completed=sum(done))
        for (one, total), rounds in zip(self._bars.items(), done, strict=True):
            if rounds and one not in self._begun:
                self._begun.add(one)
                self._progress.start_task(one)
            self._progress.update(one, completed=rounds, visible=0 < rounds < total)


def runs(console: Console, totals: Mapping[str, int]) -> LiveRuns | PlainRuns:
    """Shows how far each of many runs is: the rounds of each, by its label."""
    return LiveRuns(console, totals) if console.is_terminal else PlainRuns(console, totals)


class Plain:
    """One line per round."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def begin(self, federation: Federation, done: int) -> None:
        self._total = federation.training.rounds
        if done:
            self._console.print(f"resuming after round {done}", highlight=False)

    def client(self, client: ClientId) -> None:
        pass

    def round(self, result: Round) -> None:
        self._console.print(line(result, self._total), highlight=False, soft_wrap=True, markup=False)


class Live:
    """Bars for rounds and for the clients of the round, and the accuracy so far."""

    def __init__(self, console: Console) -> None:
        self._progress = bar(console)
        self._rounds = self._progress.add_task("rounds", total=None)
        self._clients = self._progress.add_task("clients", total=None)
        self._federation: Federation | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, federation: Federation, done: int) -> None:
        self._federation = federation
        self._progress.update(self._rounds, total=federation.training.rounds, completed=done)
        self._expect_clients(done)

    def client(self, client: ClientId) -> None:
        self._progress.update(self._clients, advance=1, description=f"clients  {one_line(client)}")

    def round(self, result: Round) -> None:
        self._progress.update(self._rounds, advance=1, description=f"rounds  {scores(result)}")
        if result.failures:
            self._progress.console.print(line(result, self._total), style="yellow", markup=False)
        self._expect_clients(result.round)

    @property
    def _total(self) -> int:
        return self._federation.training.rounds if self._federation else 0

    def _expect_clients(self, done: int) -> None:
        if self._federation and done < self._total:
            expected = len(self._federation.sampled(done))
            self._progress.update(self._clients, total=expected, completed=0, description="clients")


def observer(console: Console) -> Live | Plain:
    return Live(console) if console.is_terminal else Plain(console)
