"""`protofed data`: commands for the user's own data."""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import AsJson, print_json, say

PROBLEMS_FOUND = 2

app = typer.Typer(help="Check your own data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Check your own data before you train on them."""


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder with one folder of images, or one table, for each site.")],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Tables: the column to predict.")] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Tables: do not use this column; may be repeated.")
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Tables: the numbers in this column are codes; may be repeated."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN|PATTERN",
            help="Keep the rows of a patient together: a column; for images a pattern of file names, '^(P[0-9]+)_'.",
        ),
    ] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Images: skip damaged files.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an experiment that is ready to run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a folder of sites holds, what is wrong with it and how to fix that. See docs/your-data.md."""
    from protofed.inspection import inspect as inspected

    inspection = inspected(folder, label, skip_damaged, write, leave_out or (), categorical or (), group)
    if as_json:
        print_json(inspection.json)
    else:
        say(inspection.text)
    if inspection.errors:
        raise typer.Exit(PROBLEMS_FOUND)
