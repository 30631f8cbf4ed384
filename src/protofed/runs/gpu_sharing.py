"""How many runs share a GPU: found by measurement while they run.

Two begin, or four where their kernels run at the same time. Then the next number is tried, for as long as all
together get faster by it. A run is compared only with itself, since rounds of different runs cost differently: if w
runs share the GPU and each has the rate r, they get w · r done. What is measured are whole cycles of rounds, at rest:
no run has begun, ended or been paused meanwhile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log

FIRST = 2
"""Runs at the beginning: while one is being started, the other may have the GPU."""
FIRST_AT_ONCE, CORES_EACH, BYTES_EACH = 4, 2, 16 * 2**30
"""Runs at the beginning where kernels of several processes run at the same time, and what the machine must have for
each of them. Short runs would end before four were tried."""
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""The numbers of runs that are tried."""
MIN_GAIN, MIN_GAIN_OF_SECOND = 0.08, -0.03
"""What more runs must bring. The second stays unless it is slower: one run has the GPU while the other is started."""
MIN_ROUNDS, MIN_SECONDS = 3, 2.0
"""What a rate is measured over."""


@dataclass(frozen=True)
class Beat:
    """How far a run was when its last cycle of rounds ended. The first rounds, in which code is compiled, do not count:
    until then `rounds` is 0."""

    rounds: int
    time: float


def first_at_once(cores: int, memory: int) -> int:
    """How many runs begin on a GPU with so much memory and so many cores, if their kernels run at the same time."""
    return max(FIRST, min(FIRST_AT_ONCE, cores // CORES_EACH, memory // BYTES_EACH))


class Sharing:
    """The number of runs that share a GPU. `most`: as many as the machine has cores for. `first`: how many begin."""

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._widths = [*(width for width in WIDTHS if width < most), most]
        self.width = min(first, most)
        """How many runs may work now."""
        self.said = ""
        """What was found, in words; empty until something was."""
        self._compared_with: int | None = None
        """The width that the present one is tried against."""
        self._gains: dict[int, float] = {}
        """What a width brings over the one below it."""
        self._rates: dict[str, dict[int, float]] = {}
        """Rounds per second of each run, by width."""
        self._together: dict[int, float] = {}
        self._is_settled = False
        self._begin({}, 0.0)

    def update(
        self,
        now: float,
        working: Mapping[str, Beat],
        is_calm: bool = True,
        room: Callable[[float], int] = lambda rounds_per_second: 0,
    ) -> None:
        """Takes note of the runs that may work. `is_calm`: those that were told to pause do. `room`: how many more
        could work, if all together do so many rounds per second now."""
        is_same = working.keys() == self._runs and self.width == self._phase_width
        if not is_same or not is_calm or not all(beat.rounds for beat in working.values()):
            self._begin(working, now)
            return
        if self._is_settled and not self._rates.keys() & working.keys():  # other runs may share otherwise
            self._is_settled, self._gains, self._rates = False, {}, {}
        for run, beat in working.items():
            if run not in self._bases and beat.time > self._since:  # the cycle before was disturbed
                self._bases[run] = beat
        rates = {run: rate for run in working if (rate := self._rate(run, working[run]))}
        if len(rates) == self.width and not self._is_settled:
            for run, rate in rates.items():
                self._rates.setdefault(run, {})[self.width] = rate
            self._together[self.width] = sum(rates.values())
            self._decide(room)

    def _begin(self, working: Mapping[str, Beat], now: float) -> None:
        """A new phase: what was measured before its end does not count."""
        self._runs, self._phase_width, self._since = {*working}, self.width, now
        self._bases: dict[str, Beat] = {}

    def _rate(self, run: str, beat: Beat) -> float | None:
        base = self._bases.get(run, beat)
        rounds, seconds = beat.rounds - base.rounds, beat.time - base.time
        return rounds / seconds if rounds >= MIN_ROUNDS and seconds >= MIN_SECONDS else None

    def _decide(self, room: Callable[[float], int]) -> None:
        at_most = self.width + room(self._together[self.width])
        if self._compared_with is not None:
            low, high = sorted((self.width, self._compared_with))
            gain = self._gain(low, high)
            if gain is None:  # other runs are at work than before
                self.width, self._compared_with = self._compared_with, self.width
                return
            self._gains[high] = gain
            self.width = high if gain >= (MIN_GAIN if high > 2 else MIN_GAIN_OF_SECOND) else low
        self._compared_with = None
        above = next((width for width in self._widths if width > self.width), self.width)
        is_known = above == self.width or above in self._gains
        if not is_known and above <= at_most:
            self._compared_with, self.width = self.width, above
        elif self.width > 1 and self.width not in self._gains:
            self._compared_with, self.width = self.width, self._below(self.width)
        else:
            self._is_settled = True
            self.said = self._summary() + ("" if is_known else "; there is no room for more, or no run")

    def _gain(self, low: int, high: int) -> float | None:
        """What the wider number of runs brings, by all runs that were measured with both."""
        both = [rates for rates in self._rates.values() if low in rates and high in rates]
        if not both:
            return None
        slowdown = exp(sum(log(rates[high] / rates[low]) for rates in both) / len(both))
        return high / low * slowdown - 1

    def _summary(self) -> str:
        runs = f"{self.width} run{'s' * (self.width > 1)} at a time"
        rate = f"{self._together[self.width]:.3g} rounds/s{' together' * (self.width > 1)}"
        gains = [
            f"{width} instead of {self._below(width)}: {round(100 * gain):+d} %"
            for width, gain in sorted(self._gains.items())
        ]
        return "; ".join([f"{runs}, {rate}", *gains])

    def _below(self, width: int) -> int:
        return self._widths[self._widths.index(width) - 1]
