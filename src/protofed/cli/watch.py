"""`protofed watch`: the page of runs that go on, for a browser on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import say
from protofed.cli.report import command_line


def watch(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen here; 0 takes a port that is free.")] = 0,
    models: Annotated[
        bool, typer.Option(help="When all runs have ended, add confusion matrices, t-SNE and who holds what.")
    ] = True,
) -> None:
    """Show runs in a browser while they go on. Only this machine can see the page. Ctrl-C ends it."""
    from protofed.reports.page.server import Watched, serve
    from protofed.runs.listing import run_folders as found_in

    found_in(run_folders)  # says what is wrong with a folder before anything is served
    serve(Watched(run_folders, command_line(), models), port, lambda address: say(f"watch {address} (Ctrl-C ends it)"))
