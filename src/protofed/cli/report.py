"""`protofed report`: runs as one HTML page that opens without a network."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import AsJson, err, print_json, say, told


def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of them.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Above the page; by default methods and tasks.")] = "",
    models: Annotated[
        bool,
        typer.Option(
            help="Also load the models, for confusion matrices, t-SNE and who holds what; takes some seconds a method."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about runs: tables, curves, clients, models, settings. See docs/page.md."""
    from protofed.reports.page.make import page_facts, refuse_other_file, write_page

    refuse_other_file(html)
    with told() as tell:
        found, page = page_facts(run_folders, title, command_line(), models, tell)
    size = write_page(page, html)
    for path, why in found.left_out.items():
        err.print(f"left out {path}: {why}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        left_out = {str(path): why for path, why in found.left_out.items()}
        print_json({"file": str(html), "bytes": size, "runs": len(found.runs), "left_out": left_out})
    else:
        runs = "1 run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
        say(f"page {html} ({runs}, {size / 1e6:.1f} MB)")


def command_line() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
