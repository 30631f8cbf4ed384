"""What the page shows, as plain JSON: tasks, groups of runs that differ in nothing but the seed, and the runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from protofed.metrics.registry import METRICS
from protofed.privacy.settings import PrivacySettings
from protofed.privacy.statement import promise
from protofed.reports.analysis.drawing import COMPARED, SEED, labels
from protofed.reports.page.series import Budget, client_means, rounded, series
from protofed.reports.tables import Numbers, Row, half_width, headline_of, metric, paired_differences
from protofed.runs.config.schema import field_names, filled
from protofed.runs.listing import ListedRun, Listing
from protofed.runs.results import summed
from protofed.version import __version__

MAX_FAILURES = 100
"""Of one run whose reasons the page holds."""
MAX_TEXT = 300
"""Characters of a reason or a setting."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class RunGroup:
    """Runs on one task that differ in nothing but the seed."""

    label: str
    runs: Sequence[ListedRun]

    @property
    def first(self) -> ListedRun:
        return self.runs[0]


@dataclass(frozen=True)
class TaskGroups:
    label: str
    groups: Sequence[RunGroup]


def arranged(runs: Sequence[ListedRun]) -> list[TaskGroups]:
    """The runs by task, and by what they differ in there. Runs with the same settings and seed are all kept."""
    by_task: dict[str, list[ListedRun]] = {}
    for run in runs:
        by_task.setdefault(repr(_section(run, ("task",))), []).append(run)
    tasks = [own[0] for own in by_task.values()]
    names = labels([{"task.name": run.task, **dict(_section(run, ("task",)))} for run in tasks], "task.name")
    return [TaskGroups(name, _groups(own)) for name, own in zip(names, by_task.values(), strict=True)]


def _groups(runs: Sequence[ListedRun]) -> list[RunGroup]:
    members: dict[str, list[ListedRun]] = {}
    for run in sorted(runs, key=lambda one: (one.method, one.seed)):
        members.setdefault(repr(_section(run, COMPARED)), []).append(run)
    names = labels(
        [{"method.name": own[0].method, **dict(_section(own[0], COMPARED))} for own in members.values()], "method.name"
    )
    return [RunGroup(name, own) for name, own in zip(_unlike(names), members.values(), strict=True)]


def _unlike(names: Sequence[str]) -> list[str]:
    """Groups that differ only in settings that some of them do not have are numbered."""
    return [f"{name} ({names[: k + 1].count(name)})" if names.count(name) > 1 else name for k, name in enumerate(names)]


def _section(run: ListedRun, sections: Sequence[str]) -> list[tuple[str, Any]]:
    """The settings of these sections, but the seed."""
    return sorted(
        (key, value) for key, value in run.settings.items() if key.partition(".")[0] in sections and key != SEED
    )


def facts(listing: Listing, title: str, command: str, is_live: bool = False) -> Facts:
    """All that the page shows, but what is made from states."""
    tasks = arranged(listing.runs)
    budget = Budget.of(listing.runs)
    keys = list(dict.fromkeys(key for run in listing.runs for key in run.settings))
    return {
        "title": title,
        "live": is_live,
        "made": {"protofed": __version__, "time": time.strftime("%Y-%m-%d %H:%M %Z"), "command": command},
        "metrics": {m.id: {"label": m.label, "note": m.note} for m in METRICS},
        "settings": keys,
        "thinned": budget.is_short,
        "tasks": [_task_facts(task, keys, budget) for task in tasks],
        "left_out": [[str(path), why] for path, why in listing.left_out.items()],
    }


def _task_facts(task: TaskGroups, keys: Sequence[str], budget: Budget) -> Facts:
    rows = [_row(group) for group in task.groups]
    headline = headline_of(rows)
    runs = [run for group in task.groups for run in group.runs]
    clients = dict.fromkeys(c for run in runs for r in run.evaluated for c in (*r.at_home, *r.new))
    return {
        "label": task.label,
        "headline": headline,
        "domains": list(dict.fromkeys(domain for run in runs for r in run.evaluated for domain in r.domains)),
        "clients": sorted(clients),
        "groups": [
            {
                "label": group.label,
                "method": group.first.method,
                "own_models": row.uses_own_models,
                "standing": _standing(row, rows, headline),
                "runs": [_run_facts(run, headline, keys, budget) for run in group.runs],
            }
            for group, row in zip(task.groups, rows, strict=True)
        ],
    }


def _row(group: RunGroup) -> Row:
    evaluated = [run for run in group.runs if run.evaluated]
    seeds = [_numbers(run) for run in evaluated]
    progress = "" if all(run.progress == "done" for run in group.runs) else "not done"
    uses_own = any(run.uses_own_models for run in evaluated)
    return Row(group.label, seeds, uses_own, group.first.method == "fedavg", None, progress)


def _numbers(run: ListedRun) -> Numbers:
    means = summed(run.rounds, "last_five")
    return Numbers(run.seed, means.domains, means.own_domains, means.metrics)


def _standing(row: Row, rows: Sequence[Row], headline: str) -> Facts:
    """How the group does: the mean and deviation over seeds of each number, in percent, and the gain over FedAvg with
    its 95 % confidence interval where both came to their end."""
    ids = dict.fromkeys(key for numbers in row.seeds for key in numbers.metrics)
    domains = dict.fromkeys(domain for numbers in row.seeds for domain in numbers.domains)
    return {
        "metrics": {key: _spread([n.metrics.get(key) for n in row.seeds]) for key in ids},
        "domains": {d: _spread([n.domains.get(d, {}).get("accuracy") for n in row.seeds]) for d in domains},
        "own_domains": {d: _spread([n.own_domains.get(d, {}).get("accuracy") for n in row.seeds]) for d in domains},
        "gain": _gain(row, rows, headline),
    }


def _spread(values: Sequence[float | None]) -> list[float]:
    """Mean and sample standard deviation over seeds, in percent; the mean alone of a single seed."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return []
    return [round(fmean(known), 3), *([round(stdev(known), 3)] if len(known) > 1 else [])]


def _gain(row: Row, rows: Sequence[Row], headline: str) -> list[float]:
    reference = next((one for one in rows if one.is_reference and one.seeds), None)
    if reference is None or row is reference or row.progress or reference.progress:
        return []
    pairs = paired_differences(row, reference, metric(headline))
    if not pairs:
        return []
    middle, half = fmean(pairs), half_width(pairs)
    return [round(value, 3) for value in ((middle,) if half is None else (middle, middle - half, middle + half))]


def _run_facts(run: ListedRun, headline: str, keys: Sequence[str], budget: Budget) -> Facts:
    failures = [(r.round, client, why) for r in run.rounds for client, why in r.failures.items()]
    trained = [r for r in run.rounds if r.round]
    return {
        "folder": str(run.path),
        "seed": run.seed,
        "progress": run.progress,
        "done": run.done,
        "total": run.total,
        "headline": rounded(summed(run.rounds, "last_five").metrics.get(headline)) if run.evaluated else None,
        "seconds": round(fmean(sum(r.seconds.values()) for r in trained), 4) if trained else None,
        "bytes": round(fmean(_moved(r.traffic) for r in trained)) if trained else None,
        "series": series(run, budget),
        "clients": client_means(run),
        "failures": [[number, client, _text(why)] for number, client, why in failures[:MAX_FAILURES]],
        "num_failures": len(failures),
        "settings": [_text(run.settings[key]) if key in run.settings else None for key in keys],
        "environment": {_text(key): _text(value) for key, value in {**run.environment, **_privacy(run)}.items()},
    }


def _privacy(run: ListedRun) -> dict[str, str]:
    own = {
        name: run.settings[f"privacy.{name}"]
        for name in field_names(PrivacySettings)
        if f"privacy.{name}" in run.settings
    }
    settings = filled(PrivacySettings, own, "privacy")
    return {"differential privacy": promise(settings)} if settings.is_on else {}


def _moved(traffic: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(one.values()) for one in traffic.values())


def _text(value: object) -> str | int | float | bool:
    """A setting or a fact as JSON can hold it, not too long."""
    if isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
