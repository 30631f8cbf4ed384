"""What `protofed run` and `protofed show` print of a run."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from protofed.cli.console import out, print_json, say
from protofed.evaluation.evaluate import Scores
from protofed.metrics.registry import METRICS
from protofed.printable import one_line
from protofed.privacy.ledger import LEDGER, most_spent, read
from protofed.privacy.settings import PrivacySettings
from protofed.privacy.statement import facts, lines
from protofed.reports.advice import remarks
from protofed.reports.sites import NOTES, class_table, reported_round, site_results, site_table
from protofed.runs.config.config_diff import flat
from protofed.runs.config.schema import filled
from protofed.runs.results import Round, Summed, parsed, summed
from protofed.runs.store.folder import RunFolder


def show_results(folder: RunFolder, as_json: bool) -> None:
    rounds = parsed(folder.read_rounds(), str(folder.path / "rounds.jsonl"))
    evaluated = [r for r in rounds if r.is_evaluated]
    scores = summed(rounds, "last_five") if evaluated else None
    classes, shown = folder.read_classes(), reported_round(rounds)
    private = privacy_in(folder)
    if as_json:
        print_json(
            {
                "folder": str(folder.path),
                "done": folder.is_done,
                "last_five": asdict(scores) if scores else {},
                "sites": {"round": shown.round, "classes": classes, "of": _site_facts(shown, classes)} if shown else {},
                "remarks": [remark.text for remark in remarks(rounds, classes)],
                "privacy": facts(*private) if private else {},
                "rounds": [asdict(r) for r in rounds],
                "settings": settings_in(folder),
                "environment": folder.read_environment(),
            }
        )
        return
    state = "done" if folder.is_done else f"not finished: {sum(r.round > 0 for r in rounds)} rounds so far"
    stopped = f"; ended early, {rounds[-1].stopped}" if rounds and rounds[-1].stopped else ""
    say(f"{folder.path}: {state}{stopped}")
    is_own_data = _is_own_data(folder)
    if shown and shown.confusion and is_own_data:
        _show_sites(shown, classes)
    if scores:
        out.print(_rounds_table(evaluated, scores, is_own_data))
        if not is_own_data or scores.metrics.keys() & {one.id for one in METRICS if one.group == "personal"}:
            out.print(_metrics_table(scores, evaluated[-1].judged == "own models"))
    for remark in remarks(rounds, classes) if is_own_data else []:
        out.print(f"\n! {remark.text}", style="yellow", markup=False, highlight=False)
    if is_own_data and scores and _method(folder) != "local":
        say(
            '\nLocal training alone, for comparison: run the same file once more with name = "local" as the only line '
            "of [method]."
        )
    for line in lines(*private) if private else ():
        say(line)
    failures = sum(len(r.failures) for r in rounds)
    if failures:
        out.print(f"{failures} replies did not count; rounds.jsonl says which and why", style="yellow")


def show_settings(folder: RunFolder) -> None:
    """All settings of a run, defaults included, and what it was begun with."""
    table = Table("setting", "value", title="settings", title_justify="left")
    for name, value in settings_in(folder).items():
        table.add_row(escape(one_line(name)), escape(one_line(value if isinstance(value, str) else json.dumps(value))))
    out.print(table)
    facts = folder.read_environment()
    versions = ", ".join(f"{name} {facts[name]}" for name in ("protofed", "commit", "torch", "python") if name in facts)
    if "command" in facts:
        say(f"command: {one_line(str(facts['command']))}")
    if versions:
        say(f"versions: {one_line(versions)}")


def privacy_in(folder: RunFolder) -> tuple[PrivacySettings, float] | None:
    """What a run promises under differential privacy, and Σ 1/m² of the client that has released most."""
    settings = filled(PrivacySettings, _section(folder, "privacy"), "privacy")
    return (settings, most_spent(read(folder.privacy / LEDGER))) if settings.is_on else None


def settings_in(folder: RunFolder) -> dict[str, Any]:
    return dict(flat(tomllib.loads(folder.read_config())))


def _is_own_data(folder: RunFolder) -> bool:
    return _section(folder, "task").get("name") == "custom"


def _method(folder: RunFolder) -> object:
    return _section(folder, "method").get("name")


def _section(folder: RunFolder, name: str) -> Mapping[str, object]:
    section = tomllib.loads(folder.read_config()).get(name, {})
    return section if isinstance(section, dict) else {}


def _site_facts(shown: Round, classes: Sequence[str]) -> dict[str, object]:
    return {result.site: result.facts(classes) for result in site_results(shown)}


def _show_sites(shown: Round, classes: Sequence[str]) -> None:
    """What each site gets, before anything else."""
    results, chosen = site_results(shown), "best on validation examples" if shown.validation else "the last evaluated"
    model = "with its own model" if shown.judged == "own models" else "with the model of all"
    out.print(site_table(results, f"What each site gets on its own test examples, {model}, %"))
    say(f"of round {shown.round}, {chosen}")
    if (table := class_table(results, classes)) is not None:
        out.print(table)
    for note in NOTES:
        out.print(note, highlight=False, markup=False)
    out.print()


def _rounds_table(rounds: list[Round], scores: Summed, is_own_data: bool) -> Table:
    """About ten rounds, and the mean of the last five: what clients see at home with models of their own, or how the
    public model does on each domain. For own data always what sites see at home."""
    uses_own, has_homes = rounds[-1].judged == "own models", "own" in rounds[-1].summary
    at_home = (uses_own or is_own_data) and has_homes
    domains = [domain for domain in rounds[-1].domains if not at_home or len(rounds[-1].domains) > 1]
    domains = [domain for domain in domains if not (is_own_data and domain in rounds[-1].new)]
    model = "clients' own models" if uses_own else "the public model"
    what = f"at home, with {model}" if at_home else "own models" if uses_own else "public model"
    table = Table(title=f"accuracy, % ({what})", title_justify="left")
    for name in ("round", *domains, "own" if at_home else "average"):
        table.add_column(escape(one_line(name)), justify="right")
    has_losses = any(r.loss is not None for r in rounds)
    if has_losses:
        table.add_column("training loss", justify="right")
    step = max(1, len(rounds) // 10)

    def cells(by_domain: Mapping[str, Scores], mean: float) -> list[str]:
        return _percent([*(by_domain[d]["accuracy"] for d in domains), mean])

    for r in rounds[-1::-step][::-1]:
        loss = [] if r.loss is None else [f"{r.loss:.4g}"]
        mean = r.summary["own"] if at_home else r.headline or 0.0
        table.add_row(str(r.round), *cells(r.own_domains if at_home else r.domains, mean), *loss)
    table.add_section()
    mean = scores.metrics["own" if at_home else "average"]
    table.add_row("last five", *cells(scores.own_domains if at_home else scores.domains, mean), style="bold")
    return table


def _metrics_table(scores: Summed, uses_own: bool) -> Table:
    """Every metric that was measured, with its meaning. Of models of clients' own, their mean over domains that most of
    them have never seen comes last."""
    table = Table("metric", "last five, %", "what it is", title="metrics", title_justify="left")
    for metric in sorted(METRICS, key=lambda metric: uses_own and metric.id == "average"):
        if metric.id in scores.metrics:
            is_foreign = uses_own and metric.id == "average"
            note = "own models on the test sets of all domains, most of them foreign" if is_foreign else metric.note
            table.add_row(metric.id, *_percent([scores.metrics[metric.id]]), note)
    return table


def _percent(values: list[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]
