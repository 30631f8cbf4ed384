"""What `protofed run` and `protofed show` print of a run."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from protofed.cli.console import out, print_json, say
from protofed.evaluation.evaluate import Scores
from protofed.metrics.registry import METRICS
from protofed.printable import one_line
from protofed.runs.listing import flat
from protofed.runs.results import Round, Summed, parsed, summed
from protofed.runs.store.folder import RunFolder


def show_results(folder: RunFolder, as_json: bool) -> None:
    rounds = parsed(folder.read_rounds(), str(folder.path / "rounds.jsonl"))
    evaluated = [r for r in rounds if r.is_evaluated]
    scores = summed(rounds, "last_five") if evaluated else None
    if as_json:
        means = asdict(scores) if scores else {}
        rows = [asdict(r) for r in rounds]
        facts = {"folder": str(folder.path), "done": folder.is_done, "last_five": means, "rounds": rows}
        print_json({**facts, "settings": settings_in(folder), "environment": folder.read_environment()})
        return
    state = "done" if folder.is_done else f"not finished: {sum(r.round > 0 for r in rounds)} rounds so far"
    say(f"{folder.path}: {state}")
    if scores:
        out.print(_rounds_table(evaluated, scores))
        out.print(_metrics_table(scores))
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


def settings_in(folder: RunFolder) -> dict[str, Any]:
    return dict(flat(tomllib.loads(folder.read_config())))


def _rounds_table(rounds: list[Round], scores: Summed) -> Table:
    """About ten rounds, and the mean of the last five: what clients see at home with models of their own, or how the
    public model does on each domain."""
    uses_own, has_homes = rounds[-1].judged == "own models", "own" in rounds[-1].summary
    at_home = uses_own and has_homes
    domains = [domain for domain in rounds[-1].domains if not at_home or len(rounds[-1].domains) > 1]
    what = "at home, with clients' own models" if at_home else "own models" if uses_own else "public model"
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
        table.add_row(str(r.round), *cells(r.own_domains if at_home else r.domains, r.headline or 0.0), *loss)
    table.add_section()
    mean = scores.metrics["own" if at_home else "average"]
    table.add_row("last five", *cells(scores.own_domains if at_home else scores.domains, mean), style="bold")
    return table


def _metrics_table(scores: Summed) -> Table:
    """Every metric that was measured, with its meaning."""
    table = Table("metric", "last five, %", "what it is", title="metrics", title_justify="left")
    for metric in METRICS:
        if metric.id in scores.metrics:
            table.add_row(metric.id, *_percent([scores.metrics[metric.id]]), metric.note)
    return table


def _percent(values: list[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]
