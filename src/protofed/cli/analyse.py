"""`protofed analyse`: figures from the folders of finished runs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.console import AsJson, out, print_json, say, told
from protofed.errors import BadInput

if TYPE_CHECKING:
    from protofed.reports.analysis.drawing import Options


def analyse(
    run_folders: Annotated[list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders.")] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Draw this figure; may be repeated. By default all that the runs allow."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="The folder for pictures and numbers.")] = Path("figures"),
    rounds: Annotated[
        str, typer.Option(metavar="N,N,...", help="Rounds whose states are drawn; [saving] keep keeps them.")
    ] = "",
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Look at this client's model instead of the public one; may be repeated."),
    ] = None,
    trained: Annotated[
        bool, typer.Option("--trained", help="Look at clients' models as their next training would leave them.")
    ] = False,
    examples: Annotated[int, typer.Option(min=20, help="Test examples in a panel of tsne.")] = 400,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="DOMAIN:NUMBER", help="A test image for gradcam; may be repeated."),
    ] = None,
    metric: Annotated[
        str, typer.Option(metavar="ID", help="For curves, sensitivity and ablation; by default the headline.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the figures, and draw nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw figures from finished runs, with the numbers behind them as CSV."""
    from protofed.reports.analysis.drawing import Options
    from protofed.reports.analysis.gallery import FIGURES

    if list_:
        for name, one in FIGURES.items():
            say(f"{name:<12} {one.what}")
        return
    if not run_folders:
        raise BadInput("name one or more run folders, such as results/*; --list lists the figures")
    if out_dir.exists() and not out_dir.is_dir():
        raise BadInput(f"the figures cannot go into the folder {out_dir}, which is a file")
    clients, images = tuple(client or ()), tuple(image or ())
    options = Options(tuple(_numbers(rounds)), clients, trained, examples, images, metric)
    _draw(run_folders, figure or [], out_dir, options, as_json)


def _draw(folders: list[Path], figures: list[str], out_dir: Path, options: "Options", as_json: bool) -> None:
    from protofed.reports.analysis.gallery import draw
    from protofed.runs.loading import open_run

    with told() as tell:
        drawn = draw([open_run(path) for path in folders], figures, out_dir, replace(options, tell=tell))
    if as_json:
        print_json({"files": [str(path) for path in drawn.paths], "skipped": drawn.skipped})
        return
    for path in drawn.paths:
        say(str(path))
    for name, why in drawn.skipped.items():
        out.print(f"no {name}: {why}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise BadInput(f"--rounds {text!r}: {wrong[0]!r} is not the number of a round; write 5,15,50")
    return [int(word) for word in words]
