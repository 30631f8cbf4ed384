"""Training that went wrong, in words, with what to try."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from protofed.metrics import formulas
from protofed.metrics.bootstrap import bootstrap_interval
from protofed.printable import one_line
from protofed.reports.sites import SiteResult, class_name, reported_round, site_results
from protofed.runs.results import Round

SWING = 0.1
"""A fall of accuracy from one evaluated round to the next, as a share."""
FALLS = 2
"""So many such falls among the last rounds are a swing."""
LAST = 10
"""Rounds that are looked at for swings."""

ONE_CLASS = (
    "There the accuracy is the majority rate, and nothing was learnt. Try balance = true in [task], which shows rare "
    "classes more often; more rounds; or a third or the threefold of the learning rate (training.optimizer.lr)."
)
CHANCE = (
    "Its confidence interval reaches down to that of a guess. Try more rounds; a third or the threefold of the "
    "learning rate (training.optimizer.lr); or a network with normalisation (`protofed data inspect --write` chooses "
    "one). With few test examples, only more of them help."
)
SWINGS = (
    "The number of a single round is luck then. Try a third of the learning rate (training.optimizer.lr), or fewer "
    "epochs in a round (training.epochs). validation_fraction in [task] keeps examples by which a good round is chosen."
)


@dataclass(frozen=True)
class Remark:
    what: str
    """What is wrong, up to where."""
    places: tuple[str, ...]
    """The sites, each with a detail in brackets; none if it concerns the whole run."""
    advice: str

    @property
    def text(self) -> str:
        where = f" at {', '.join(self.places)}" if self.places else ""
        return f"{self.what[0].upper()}{self.what[1:]}{where}. {self.advice}"


def together(found: Mapping[str, Sequence[Sequence[Remark]]]) -> list[str]:
    """The remarks on several runs of several methods: by method, a list for each seed. Each advice is given once."""
    kinds = dict.fromkeys((r.what, r.advice) for seeds in found.values() for seed in seeds for r in seed)
    lines = []
    for what, advice in kinds:
        methods = []
        for label, seeds in found.items():
            matching = [remark for seed in seeds for remark in seed if remark.what == what]
            sites = Counter(place.partition(" (")[0] for remark in matching for place in remark.places)
            where = [f"{site} ({times} of {len(seeds)} seeds)" for site, times in sites.items()]
            if matching:
                methods.append(f"{label} at {', '.join(where)}" if where else f"{label} ({len(matching)} seeds)")
        lines.append(f"{what[0].upper()}{what[1:]}: {'; '.join(methods)}. {advice}")
    return lines


def remarks(rounds: Sequence[Round], classes: Sequence[str]) -> list[Remark]:
    """What is wrong with how a run went; nothing if all is well."""
    shown = reported_round(rounds)
    if shown is None:
        return []
    trained = [result for result in site_results(shown) if not result.is_held_out]
    return [*_one_class(trained, classes), *_chance(trained), *_swings(rounds)]


def _one_class(results: Sequence[SiteResult], classes: Sequence[str]) -> Iterator[Remark]:
    named = {result.site: result.only_prediction for result in results}
    stuck = [f"{one_line(site)} ({class_name(classes, k)!r})" for site, k in named.items() if k is not None]
    if stuck:
        yield Remark("one class is predicted for every test example", tuple(stuck), ONE_CLASS)


def _chance(results: Sequence[SiteResult]) -> Iterator[Remark]:
    """Sites whose balanced accuracy may be that of a guess."""
    found = [
        f"{one_line(result.site)} ({100 * formulas.balanced_accuracy(result.confusion):.0f} %)"
        for result in results
        if result.only_prediction is None and _may_be_chance(result)
    ]
    if found:
        yield Remark("the balanced accuracy may be chance", tuple(found), CHANCE)


def _may_be_chance(result: SiteResult) -> bool:
    present = int((result.confusion.sum(1) > 0).sum())
    if present < 2:
        return False
    interval = bootstrap_interval(result.confusion, formulas.balanced_accuracy)
    lowest = formulas.balanced_accuracy(result.confusion) if interval is None else interval.low
    return lowest <= 1 / present


def _swings(rounds: Sequence[Round]) -> Iterator[Remark]:
    last = [r.headline for r in rounds if r.headline is not None][-LAST:]
    falls = sum(before - after >= SWING for before, after in pairwise(last))
    if falls >= FALLS:
        what = f"the accuracy swings: it fell at least {FALLS} times in the last {LAST} evaluated rounds"
        yield Remark(f"{what} by {100 * SWING:.0f} points or more from one to the next", (), SWINGS)
