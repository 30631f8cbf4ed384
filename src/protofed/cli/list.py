"""`protofed list`: the runs in a folder, one line each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.console import AsJson, err, out, print_json, say
from protofed.printable import one_line

if TYPE_CHECKING:
    from protofed.runs.listing import ListedRun


def list_(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders of runs; by default results.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs: method, task, seed, state and headline number."""
    from protofed.runs.listing import listing

    named = folders or [Path("results")]
    found = listing(named)
    runs = sorted(found.runs, key=lambda run: (run.task, run.method, run.seed, str(run.path)))
    for path, why in found.left_out.items():
        err.print(f"left out {path}: {why}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json([_facts(run) for run in runs])
        return
    if not runs:
        say(f"no run in {', '.join(map(str, named))}")
        return
    table = Table("method", "task")
    for name in ("seed", "rounds", "%"):
        table.add_column(name, justify="right")
    table.add_column("of")
    table.add_column("state")
    table.add_column("folder", overflow="fold")
    for run in runs:
        facts = _facts(run)
        number = "–" if facts["headline"] is None else f"{100 * facts['headline']:.1f}"
        words = (run.method, run.task, str(run.seed), f"{run.done}/{run.total}", number, facts["metric"] or "–")
        table.add_row(*(escape(one_line(word)) for word in (*words, run.progress, str(run.path))))
    out.print(table)
    say("%: mean of the last five evaluated rounds, of what the method is made for (own: at home; average: domains)")


def _facts(run: "ListedRun") -> dict[str, Any]:
    metric, headline = run.headline or (None, None)
    return {
        "folder": str(run.path),
        "method": run.method,
        "task": run.task,
        "seed": run.seed,
        "state": run.progress,
        "rounds": run.done,
        "total": run.total,
        "metric": metric,
        "headline": headline,
    }
