"""How long it took, how long it will take, and that it is said often enough."""

import io
import threading

import pytest
from rich.console import Console

from clocks import wait_for
from protofed.reports import progress
from protofed.reports.progress import Heartbeat, Pace, duration
from protofed.runs.runner import execute
from run_doubles import small_experiment


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    clock = Clock()
    pace = Pace(10, done=4, clock=clock)  # a run that is resumed after four rounds
    clock.now += 7
    assert (pace.elapsed, pace.left) == (7.0, None)
    clock.now += 1
    pace.reach(5)
    assert pace.left == 5 * 8.0
    clock.now += 3
    assert pace.left == 37.0  # while the next round goes on it becomes less
    pace.reach(5)  # said again, nothing new
    assert pace.left == 37.0
    clock.now += 1
    pace.reach(6)
    assert pace.left == 4 * (12 / 2)
    clock.now += 1000
    assert pace.left == 0.0
    pace.reach(10)
    assert pace.left == 0.0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_output_says_that_a_long_round_goes_on() -> None:
    file = io.StringIO()
    with progress.Plain(Console(file=file, width=200), every=0.02) as observer:
        wait_for(lambda: "preparing, " in file.getvalue())
        observer.begin(small_experiment("fedavg", 2).federation, 0)
        observer.client("c0")
        wait_for(lambda: "in round 1/2: 1 of 3 clients, " in file.getvalue())
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate()), "it goes on after its end"


def test_plain_output_of_many_runs_says_how_far_all_are() -> None:
    file = io.StringIO()
    with progress.PlainRuns(Console(file=file, width=200), {"a": 4, "b": 4}, every=0.02) as shown:
        shown.update([4, 1])
        wait_for(lambda: "going on: 1 of 2 runs, 5 of 8 rounds, " in file.getvalue())


def test_it_is_quiet_as_long_as_lines_come() -> None:
    file = io.StringIO()
    heartbeat = Heartbeat(Console(file=file), lambda: "beat", every=3600)
    heartbeat.start()
    heartbeat.say("line")
    heartbeat.stop()
    heartbeat.stop()
    assert file.getvalue() == "line\n"


def test_bars_have_a_notice_and_begin_again_with_each_round() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    said = ["Ctrl-C stops after this round"]
    observer = progress.observer(console, lambda: said[0])
    assert isinstance(observer, progress.Live)
    with observer:
        experiment = small_experiment("fedavg", 3)
        execute(experiment, observer=observer)
        rounds, clients = observer._progress.tasks
        assert (rounds.completed, rounds.total) == (3, 3)
        observer.begin(experiment.federation, 2)
        assert clients.completed == 0
        assert "left ?" in str(progress._Times().render(clients))
        said[0] = "stopping after this round"
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "Ctrl-C stops after this round" in shown
    assert shown.rindex("stopping after this round") > shown.rindex("Ctrl-C stops after this round")


def test_rounds_that_were_done_before_do_not_make_a_sweep_fast() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    shown = progress.runs(console, {"a": 100, "b": 100})
    assert isinstance(shown, progress.LiveRuns)
    with shown:
        shown.update([100, 50])
        assert shown._pace is not None
        assert shown._pace.left is None
        shown.update([100, 51])
        assert shown._pace.left is not None
