"""`protofed audit`: what an attacker learns from a finished run, and what attacks would have done to it."""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import AsJson, print_json, say, told
from protofed.cli.export import Code


def audit(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="The folder of the report; by default RUN/audit.")
    ] = None,
    min_owners: Annotated[
        int, typer.Option(min=2, help="Name classes that fewer clients have, if others are told of them.")
    ] = 2,
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the uploads of a finished run tell: who was trained on, which classes clients have, prototypes of
    few examples. See docs/privacy.md.

    The last round is replayed from its checkpoint, which needs the run's data.
    """
    from protofed.audit.report import audit as audited
    from protofed.audit.report import facts, markdown, write
    from protofed.runs.loading import open_run

    with told() as tell:
        found = audited(open_run(run_folder, code=code), min_owners, tell)
        paths = write(found, report or run_folder / "audit")
    if as_json:
        print_json({**facts(found), "files": [str(path) for path in paths]})
        return
    say("\n\n".join(markdown(found)))
    for path in paths:
        say(str(path))
