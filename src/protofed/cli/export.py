"""`protofed export`: a trained model as a folder that can be handed over."""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import AsJson, err, out, print_json, say
from protofed.errors import BadInput

Code = Annotated[
    Path | None,
    typer.Option("--code", metavar="FOLDER", help="Import your own methods and networks from the modules here."),
]


def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to be written; it must not be there yet.")],
    site: Annotated[str, typer.Option(metavar="NAME", help="Export the model that this site uses.")] = "",
    is_global: Annotated[bool, typer.Option("--global", help="Export the model that all sites share.")] = False,
    round: Annotated[int | None, typer.Option(help="The state after this round, if [saving] keep kept it.")] = None,
    onnx: Annotated[
        bool | None, typer.Option("--onnx/--no-onnx", help="Write ONNX; by default if the packages are installed.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model that is in DIR already.")] = False,
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model into a folder: weights, graphs, preprocessing, prototypes and a card.

    Without --site and --global it is the model that all sites share, if the method has one. The run's data are only
    needed for the confusion matrix of the card.
    """
    from protofed.models.exporting import export as exported
    from protofed.models.exporting import refuse_existing
    from protofed.models.loading import is_model
    from protofed.runs.loading import open_run

    if site and is_global:
        raise BadInput("--site and --global exclude each other: a site's model, or the one of all sites")
    if is_model(run_folder):
        raise BadInput(f"{run_folder} is a model already; export reads a run folder")
    refuse_existing(folder, replace)
    result = open_run(run_folder, code=code).at(round, data=False)

    def tell(what: str) -> None:
        if err.is_terminal and not as_json:
            err.print(what, style="dim", highlight=False)

    written = exported(result, folder, site or None, onnx=onnx, replace=replace, tell=tell)
    if as_json:
        print_json({"folder": str(written.folder), "files": written.files, "notes": written.notes})
        return
    for name in written.files:
        say(str(written.folder / name))
    for note in written.notes:
        out.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
