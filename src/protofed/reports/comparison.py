"""The report of a comparison: tables, pictures, every number as JSON, and how all of it was made."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from protofed.api.method import weighting_of
from protofed.methods import METHODS
from protofed.metrics.formulas import rounds_to_target
from protofed.metrics.registry import METRICS
from protofed.printable import printable, printable_json
from protofed.reports import advice
from protofed.reports.figures import accuracy_over_rounds, standings
from protofed.reports.site_tables import sheets_of, worse_than_local
from protofed.reports.sites import reported_round, site_results
from protofed.reports.tables import (
    GAIN_NOTE,
    Numbers,
    Row,
    Sheet,
    cost_sheet,
    headline_of,
    home_sheet,
    metric,
    personal_note,
    personal_sheet,
)
from protofed.runs.compare import Comparison
from protofed.runs.config.config import Config
from protofed.runs.results import Round, Summary, summed
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import environment
from protofed.runs.sweep import Outcome
from protofed.tasks import ReadsOwnFiles

FEW = 8
"""Up to so many methods can be told apart as lines in one picture."""
SUMMARIES = {
    "last_five": "mean of the last five evaluated rounds",
    "last": "last round",
    "best": "best round",
    "validation": "the round that is best on validation examples",
}


@dataclass(frozen=True)
class TaskReport:
    """One task's part of a comparison."""

    task: str
    rows: Sequence[Row]
    domains: Sequence[str]
    rounds: Mapping[str, Sequence[Sequence[Round]]]
    """By method: those of each seed whose numbers are shown."""
    failures: Sequence[str]
    stopped: Sequence[str] = ()
    """The runs that were stopped before their end, and how far they are."""
    is_own_data: bool = False
    """Whether the data are a user's own: then what each site gets at home comes first."""
    remarks: Sequence[str] = ()
    """What is wrong with how runs on a user's own data went, and what to try."""


def reports(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[TaskReport]:
    """What came of a comparison, from the outcomes of its configurations in order."""
    remaining = iter(outcomes)
    return [
        _task_report(comparison, task, {m: [next(remaining) for _ in seeds] for m, seeds in methods.items()})
        for task, methods in comparison.runs.items()
    ]


def write(comparison: Comparison, outcomes: Sequence[Outcome], folder: Path) -> Path:
    """Writes report.md, results.json and pictures; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    made = environment()
    parts = [f"# {comparison.title}\n", *_partial(outcomes), _how(comparison, made)]  # guard: stopped-comparison-marked
    results = {}
    for k, part in enumerate(reports(comparison, outcomes)):
        picture = _file_name(part.task, k, list(comparison.runs))
        _draw(part, folder / picture, comparison.metric)
        parts.append(_section(part, comparison, picture))
        results[part.task] = {row.label: [asdict(seed) for seed in row.seeds] for row in part.rows}
    is_partial = any(map(is_stopped, outcomes))
    facts = {
        "title": comparison.title,
        "partial": is_partial,
        "seeds": list(comparison.seeds),
        "made": made,
        "results": results,
    }
    write_atomically(folder / "results.json", printable_json(facts, indent=1).encode())
    write_atomically(folder / "report.md", printable("\n".join(parts)).encode())
    return folder / "report.md"


def _partial(outcomes: Sequence[Outcome]) -> list[str]:
    """What stands above a report of runs of which some were stopped."""
    left = sum(map(is_stopped, outcomes))
    if not left:
        return []
    return [
        f"**Partial: the comparison was stopped, and {left} of {len(outcomes)} runs are not done.** Methods with such "
        "runs are marked with the rounds that these have; their numbers are of the rounds so far, and they have no Δ. "
        "The same command goes on with them.\n"
    ]


def _file_name(task: str, k: int, tasks: Sequence[str]) -> str:
    """Of a task's picture; tasks whose names differ in nothing that a file's name should have are numbered."""
    names = [re.sub(r"\W+", "_", one.lower()) for one in tasks]
    return f"{names[k]}.png" if names.count(names[k]) == 1 else f"{names[k]}_{k + 1}.png"


def _task_report(comparison: Comparison, task: str, runs: Mapping[str, Sequence[Outcome]]) -> TaskReport:
    rows, rounds, failures, stopped, remarks = [], {}, list[str](), list[str](), list[str]()
    first = next(iter(comparison.runs[task].values()))[0]
    is_own_data = isinstance(first.task, ReadsOwnFiles)
    reference = METHODS["local" if is_own_data else "fedavg"]
    for label, outcomes in runs.items():
        configs, published = comparison.runs[task][label], comparison.published.get(task, {}).get(label)
        by_seed = list(zip(comparison.seeds, outcomes, strict=True))
        shown = [(seed, one.rounds) for seed, one in by_seed if one.is_done or (is_stopped(one) and _is_judged(one))]
        seeds = [_numbers(own, seed, comparison.summary) for seed, own in shown]
        uses_own = any(r.judged == "own models" for _, own in shown for r in own)
        progress = _progress([one for one in outcomes if is_stopped(one)], configs[0].training.rounds)
        rows.append(Row(label, seeds, uses_own, type(configs[0].method) is reference, published, progress))
        if shown:
            rounds[label] = [own for _, own in shown]
        failures += [f"{label}, seed {seed}: {one.failure}" for seed, one in by_seed if one.failure]
        stopped += [
            f"{label}, seed {seed}: {_progress([one], configs[0].training.rounds)}"
            for seed, one in by_seed
            if is_stopped(one)
        ]
    if comparison.target is not None:
        by = comparison.metric or headline_of(rows, is_own_data)
        rows = [_with_target(row, rounds.get(row.label, ()), by, comparison.target) for row in rows]
    if comparison.is_sorted:
        best_last = metric(headline_of(rows, is_own_data))
        rows.sort(key=lambda row: row.mean(best_last) if row.values(best_last) else 0.0, reverse=True)
    domains = dict.fromkeys(domain for ended in rounds.values() for r in ended[0] for domain in r.domains)
    if is_own_data:
        done = {label: [one for one in outcomes if one.is_done] for label, outcomes in runs.items()}
        said = {label: [advice.remarks(one.rounds, one.classes) for one in ended] for label, ended in done.items()}
        remarks += [*advice.together(said), *worse_than_local(rows)]
    return TaskReport(task, rows, list(domains), rounds, failures, stopped, is_own_data, remarks)


def is_stopped(outcome: Outcome) -> bool:
    """Whether a run was stopped before its end: it goes on next time."""
    return not outcome.is_done and outcome.failure is None


def _is_judged(outcome: Outcome) -> bool:
    return any(r.is_evaluated for r in outcome.rounds)


def _progress(stopped: Sequence[Outcome], total: int) -> str:
    """How far runs are that were stopped, such as `3 to 5 of 10 rounds`; empty if there are none."""
    done = [one.rounds[-1].round if one.rounds else 0 for one in stopped]
    if not done:
        return ""
    return (
        f"{min(done)} of {total} rounds" if min(done) == max(done) else f"{min(done)} to {max(done)} of {total} rounds"
    )


def _with_target(row: Row, runs: Sequence[Sequence[Round]], by: str, target: float) -> Row:
    """The row, with the rounds that each run took to reach the target."""
    reached = [rounds_to_target((r.metric(by) for r in rounds if r.round), target) for rounds in runs]
    seeds = [
        seed if count is None else replace(seed, costs={**seed.costs, "reached": count})
        for seed, count in zip(row.seeds, reached, strict=True)
    ]
    return replace(row, seeds=seeds)


def _numbers(rounds: Sequence[Round], seed: int, summary: Summary) -> Numbers:
    """Everything that a report says of one run."""
    trained = [r for r in rounds if r.round]
    moved = [t for r in trained for t in r.traffic.values()]
    scores, evaluated = summed(rounds, summary), reported_round(rounds)
    costs = {
        "down": fmean(t["down"] for t in moved),
        "up": fmean(t["up"] for t in moved),
        "seconds": fmean(sum(r.seconds.values()) for r in trained),
        "left_out": sum(len(r.failures) for r in rounds),
    }
    tested = {result.site: result.num_tested for result in site_results(evaluated)} if evaluated else {}
    return Numbers(seed, scores.domains, scores.own_domains, scores.metrics, costs, scores.at_home, scores.new, tested)


def _draw(part: TaskReport, path: Path, by: str) -> None:
    if not part.rounds:
        return
    metrics, headline = [by] if by else published_metrics(part.rows), headline_of(part.rows, part.is_own_data)
    title = f"{part.task}: {'mean' if metrics else 'accuracy, mean'} and range of the seeds"
    if len(part.rounds) <= FEW:
        accuracy_over_rounds(part.rounds, path, title, headline, metrics)
    else:
        standings(part.rows, path, title, metrics[-1] if metrics else headline)


def published_metrics(rows: Sequence[Row]) -> list[str]:
    """The metrics of the published table that some method has here, by id; none for a table of domains."""
    published = {key for row in rows for key in row.published or ()} - {"average"}
    return [one.id for one in METRICS if one.id in published and any(row.values(metric(one.id)) for row in rows)]


def _section(part: TaskReport, comparison: Comparison, picture: str) -> str:
    accuracies = sheets_of(part.rows, part.domains, part.is_own_data)
    if any("[" in cell for _, sheet, _ in accuracies for line in sheet.rows for cell in line[1:]):
        accuracies = [(title, sheet, f"{note} {GAIN_NOTE}") for title, sheet, note in accuracies]
    tables: list[tuple[str, Sheet | None, str]] = [
        *accuracies,
        ("Area under the ROC curve that clients see on their own domain, %", _area_sheet(part), ""),
        ("Global and personal metrics, %", personal_sheet(part.rows), personal_note(part.rows)),
        ("Costs: bytes per round and client, seconds per round", _costs(part, comparison), ""),
    ]
    configs = {label: seeds[0] for label, seeds in comparison.runs[part.task].items()}
    terms = [f"- {label}: {', '.join(said)}" for label, said in differing_terms(configs).items()]
    lines = [
        f"## {part.task}\n",
        *(["Terms that differ from most methods':\n", *terms, ""] if terms else []),
        *([f"![{part.task}]({picture})\n"] if part.rounds else []),
    ]
    for title, sheet, note in tables:
        if sheet is not None:
            lines += [f"### {title}\n", sheet.markdown(), *([note.replace("\n", " ") + "\n"] if note else [])]
    if part.remarks:
        lines += ["### Remarks\n", *(f"- {one}" for one in part.remarks), ""]
    if part.stopped:
        lines += ["### Runs that are not done yet\n", *(f"- {one}" for one in part.stopped), ""]
    if part.failures:
        lines += ["### Runs that failed\n", *(f"- {failure}" for failure in part.failures), ""]
    return "\n".join(lines)


def _costs(part: TaskReport, comparison: Comparison) -> Sheet:
    label = next((one.label for one in METRICS if one.id == comparison.metric), "")
    return cost_sheet(part.rows, comparison.target, label)


def differing_terms(configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Where a method is not compared on equal terms: settings of training that most of the others do not have."""
    terms = {label: _terms(config) for label, config in configs.items()}
    usual = {
        key: Counter(repr(one.get(key)) for one in terms.values()).most_common(1)[0][0]
        for key in dict.fromkeys(key for one in terms.values() for key in one)
    }
    said = {
        label: [f"{key} {value}" for key, value in one.items() if repr(value) != usual[key]]
        for label, one in terms.items()
    }
    return {label: differences for label, differences in said.items() if differences}


def _terms(config: Config) -> dict[str, object]:
    terms: dict[str, object] = {"fine_tune": config.evaluation.fine_tune}
    for key, value in config.resolved()["training"].items():
        terms |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    weighting = weighting_of(config.method, config.training.weighting)
    return {key: value for key, value in {**terms, "weighting": weighting}.items() if value is not None}


def _area_sheet(part: TaskReport) -> Sheet | None:
    if any(row.values(metric("auc")) for row in part.rows):
        return home_sheet(part.rows, part.domains, "auc")
    return None


def _how(comparison: Comparison, made: Mapping[str, str | int]) -> str:
    first = comparison.configs[0].training
    lines = [
        f"- made by `{made['command']}` at commit {made['commit']} (protofed {made['protofed']})",
        f"- on {_hardware(made)}, torch {made['torch']}, Python {made['python']}",
        f"- seeds {', '.join(map(str, comparison.seeds))}; {SUMMARIES[comparison.summary]}; mean ± sample standard "
        "deviation over seeds",
        f"- {first.rounds} rounds of {first.epochs} local epochs, batch {first.batch_size}, unless a task's or "
        "method's section of the file says otherwise",
    ]
    lines += [f"- {remark}" for remark in comparison.remarks]
    if comparison.source:
        lines.append(f"- published numbers: {comparison.source}")
    return "\n".join(lines) + "\n" + (f"\n{comparison.note}\n" if comparison.note else "")


def _hardware(made: Mapping[str, object]) -> str:
    gpu = f"one {made['gpu']} and " if made.get("gpu") else ""
    return f"{gpu}{made['cores']} cores of {made['processor']}"
