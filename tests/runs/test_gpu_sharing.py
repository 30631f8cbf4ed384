"""How many runs share a GPU, on simulated GPUs: each has a throughput for every number of runs at work."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from protofed.runs.gpu_sharing import FIRST, FIRST_AT_ONCE, Beat, Sharing, first_at_once

START, WARM = 10.0, 2
"""Seconds until a process has started, and rounds in which its code is compiled, each for three times as long."""
STEP = 0.1


@dataclass
class Run:
    name: str
    cost: float
    """Seconds of a round, alone on the GPU."""
    rounds: int
    noise: float = 0.0
    starting: float = START
    done: float = 0.0
    beat: Beat = field(default_factory=lambda: Beat(0, 0.0))
    luck: float = 1.0

    def advance(self, now: float, share: float, draws: random.Random) -> None:
        if self.starting > 0:
            self.starting -= STEP
            return
        before, rate = int(self.done), share / self.cost / (3.0 if self.done < WARM else 1.0) * self.luck
        self.done += STEP * rate
        if int(self.done) > before:
            self.luck = draws.uniform(1 - self.noise, 1 + self.noise)
            if int(self.done) > WARM:
                self.beat = Beat(int(self.done), now - self.done % 1 / rate)


@dataclass
class Done:
    seconds: float
    widths: list[int]
    """That were tried, in order."""
    said: str

    @property
    def last(self) -> int:
        return self.widths[-1]


def simulated(
    runs: list[Run],
    throughput: Callable[[list[Run]], float],
    most: int = 16,
    fixed: int | None = None,
    first: int = FIRST,
) -> Done:
    """Does the runs as a sweep does: the oldest ones work, the others wait for their turn."""
    sharing, draws = Sharing(most, first), random.Random(1)
    queue, busy, now, idle, widths = [*runs], list[Run](), 0.0, 0, [sharing.width]
    while queue or busy:
        width = fixed or sharing.width
        while queue and len(busy) < width:
            if idle:  # a process that is there need not start
                queue[0].starting, idle = 1.0, idle - 1
            busy.append(queue.pop(0))
        working = busy[:width]
        at_work = [run for run in working if run.starting <= 0]
        now += STEP
        for run in working:
            run.advance(now, throughput(at_work) / len(at_work) if at_work else 0.0, draws)
        idle += sum(run.done >= run.rounds for run in busy)
        busy = [run for run in busy if run.done < run.rounds]
        working = [run for run in working if run in busy]
        room = len(queue) + len(busy) - len(working)
        sharing.update(now, {run.name: run.beat for run in working}, room=lambda _, room=room: room)  # type: ignore[misc]
        if sharing.width != widths[-1]:
            widths.append(sharing.width)
    return Done(now, widths, sharing.said)


def alike(count: int = 12, rounds: int = 100, noise: float = 0.0) -> list[Run]:
    return [Run(str(k), 0.9, rounds, noise) for k in range(count)]


def different() -> list[Run]:
    return [Run(str(k), 0.3 * (1 + k % 5) ** 1.5, 60) for k in range(15)]


def turns(runs: list[Run]) -> float:
    return 1.0


def side_by_side(runs: list[Run]) -> float:
    return float(len(runs))


def four_at_once(runs: list[Run]) -> float:
    return min(4.0, len(runs))


@pytest.mark.parametrize("runs", [alike, different, lambda: alike(noise=0.1), lambda: alike(6, 8)])
def test_a_gpu_whose_processes_take_turns_is_no_slower_than_one_run_after_another(
    runs: Callable[[], list[Run]],
) -> None:
    shared = simulated(runs(), turns)
    one_by_one = simulated(runs(), turns, fixed=1)
    assert shared.seconds < 1.02 * one_by_one.seconds
    assert shared.last <= 3  # a third is tried, and may be so when the runs end


def test_what_is_found_stays() -> None:
    shared = simulated(alike(4, 300), turns)
    assert shared.widths == [2, 3, 1, 2]
    assert shared.said.startswith(
        "2 runs at a time, 1.11 rounds/s together; 2 instead of 1: +0 %; 3 instead of 2: +0 %"
    )


@pytest.mark.parametrize("runs", [alike, different, lambda: alike(noise=0.1)])
def test_a_gpu_for_four_runs_gets_four(runs: Callable[[], list[Run]]) -> None:
    shared = simulated(runs(), four_at_once)
    two = simulated(runs(), four_at_once, fixed=2)
    four = simulated(runs(), four_at_once, fixed=4)
    assert 4 in shared.widths
    assert max(shared.widths) <= 6
    assert shared.seconds < 0.8 * two.seconds
    assert shared.seconds < 1.45 * four.seconds


def test_cores_limit_the_number_of_runs() -> None:
    assert max(simulated(alike(), side_by_side, most=5).widths) == 5
    assert simulated(alike(3), side_by_side, most=1).widths == [1]


@pytest.mark.parametrize("runs", [lambda: alike(rounds=200), lambda: alike(rounds=200, noise=0.1)])
def test_a_gpu_on_which_two_runs_hinder_each_other_gets_one(runs: Callable[[], list[Run]]) -> None:
    shared = simulated(runs(), lambda runs: 0.8 ** (len(runs) - 1))
    one_by_one = simulated(runs(), turns, fixed=1)
    assert shared.last == 1
    assert shared.seconds < 1.05 * one_by_one.seconds


def test_a_gpu_on_which_three_hinder_each_other_gets_two() -> None:
    shared = simulated(alike(4, 300), lambda runs: {1: 1.0, 2: 1.6}.get(len(runs), 1.2))
    assert shared.widths == [2, 3, 1, 2]
    assert "2 instead of 1: +60 %; 3 instead of 2: -25 %" in shared.said


def test_short_runs_cost_no_more_than_one_after_another() -> None:
    for throughput in (turns, four_at_once):
        shared = simulated(alike(6, 4), throughput)
        assert shared.seconds < simulated(alike(6, 4), throughput, fixed=1).seconds


def eight_short_runs() -> list[Run]:
    return [Run(str(k), 0.07, 40) for k in range(8)]


def test_four_short_runs_begin_where_kernels_run_at_the_same_time() -> None:
    """Eight runs of three seconds: a start of ten is shared by four, and then three get done in the time of one."""
    shared = simulated(eight_short_runs(), lambda runs: min(3.0, len(runs)), first=FIRST_AT_ONCE)
    assert shared.seconds < simulated(eight_short_runs(), turns, fixed=1).seconds / 1.5


@pytest.mark.parametrize(("throughput", "last"), [(turns, {1, 2, 3}), (lambda runs: 0.93 ** (len(runs) - 1), {1})])
def test_four_that_are_too_many_become_fewer(throughput: Callable[[list[Run]], float], last: set[int]) -> None:
    shared = simulated(alike(8, 150), throughput, first=FIRST_AT_ONCE)
    assert shared.last in last
    assert shared.seconds < 1.05 * simulated(alike(8, 150), throughput, fixed=1).seconds


@pytest.mark.parametrize(
    ("cores", "gigabytes", "first"), [(16, 139, 4), (16, 24, 2), (6, 139, 3), (2, 139, 2), (16, 8, 2), (64, 48, 3)]
)
def test_a_small_machine_begins_with_fewer_runs(cores: int, gigabytes: int, first: int) -> None:
    assert first_at_once(cores, gigabytes * 2**30) == first


def fed(sharing: Sharing, rates: dict[str, float], begin: float, end: float) -> None:
    """Runs that finish a round every 1/rate seconds."""
    now = begin
    while now < end:
        now += 0.1
        beats = {run: Beat(1 + int(now * rate), int(now * rate) / rate) for run, rate in rates.items()}
        sharing.update(now, beats)


def test_a_run_is_compared_with_itself_only() -> None:
    """Two runs share well. Then a slow one takes the place of one of them: that says nothing about sharing."""
    sharing = Sharing(16)
    fed(sharing, {"a": 5.0, "b": 5.0}, 0, 10)
    assert sharing.width == 1  # is tried, as there is no third
    fed(sharing, {"c": 0.5}, 10, 30)
    assert sharing.width == 2  # c was not measured with two yet
    fed(sharing, {"c": 0.4, "d": 4.0}, 30, 60)
    assert sharing.said.startswith("2 runs at a time, 4.4 rounds/s together; 2 instead of 1: +60 %")


@pytest.mark.parametrize(
    ("rounds_of_other", "is_calm", "is_measured"), [(9, True, True), (0, True, False), (9, False, False)]
)
def test_nothing_is_measured_while_a_run_starts_or_is_being_paused(
    rounds_of_other: int, is_calm: bool, is_measured: bool
) -> None:
    sharing = Sharing(16)
    for now in range(1, 100):
        other = Beat(rounds_of_other and rounds_of_other + now, now)
        sharing.update(now, {"a": Beat(now, now), "b": other}, is_calm, lambda _: 1)
    assert (sharing.width != FIRST) == is_measured


def test_other_runs_are_measured_anew() -> None:
    """Large runs take turns. Small ones that come later do not."""

    def runs(count: int) -> list[Run]:
        return [Run(f"{'large' if k < 4 else 'small'} {k}", 0.9, 200) for k in range(count)]

    def throughput(at_work: list[Run]) -> float:
        return turns(at_work) if any(run.name.startswith("large") for run in at_work) else four_at_once(at_work)

    assert max(simulated(runs(4), throughput).widths) == 3
    assert 4 in simulated(runs(16), throughput).widths
