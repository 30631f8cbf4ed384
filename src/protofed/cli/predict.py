"""`protofed predict` and `protofed evaluate`: a model that was handed over, on new files."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.console import AsJson, out, print_json, say
from protofed.cli.export import Code
from protofed.errors import BadInput

if TYPE_CHECKING:
    from protofed.models.evaluating import Judged
    from protofed.models.predicting import Moved, Prediction

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `protofed export` wrote.")]
SHOWN = 3
"""Columns that the explanation of a row names in a table."""


def predict(
    model: Model,
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Images, folders of images, or tables.")],
    explain: Annotated[
        bool, typer.Option("--explain/--no-explain", help="Tables: say which columns moved the probability.")
    ] = True,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Predict the class of new images or rows. Neither the run nor its data are needed."""
    from protofed.models.loading import load_model
    from protofed.models.predicting import predictions

    if as_csv and as_json:
        raise BadInput("--csv and --json exclude each other")
    found = list(predictions(load_model(model, code=code), files, explain))
    if as_json:
        print_json([asdict(one) for one in found])
    elif as_csv:
        say(_csv(found).rstrip("\n"))
    else:
        _print_table(found)


def _csv(found: Sequence["Prediction"]) -> str:
    """A line for each prediction: all probabilities, and the change by each column of a table's row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    classes = list(found[0].probabilities) if found else []
    columns = sorted({moved.column for one in found for moved in one.explanation})
    head = ["source", "class", "probability", "nearest_prototype", "distance"]
    writer.writerow([*head, *(f"p({name})" for name in classes), *(f"moved by {name}" for name in columns)])
    for one in found:
        near = one.nearest
        moved = {each.column: each.change for each in one.explanation}
        prototype = ["", ""] if near is None else [near.label, f"{near.distance:.6g}"]
        values = [f"{one.probabilities[name]:.6g}" for name in classes] + [f"{moved[name]:.6g}" for name in columns]
        writer.writerow([_harmless(one.source), _harmless(one.label), f"{one.probability:.6g}", *prototype, *values])
    return text.getvalue()


def _harmless(text: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


def _print_table(found: Sequence["Prediction"]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    near, why = any(one.nearest for one in found), any(one.explanation for one in found)
    table.add_column("file", overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    if near:
        table.add_column("nearest prototype")
        table.add_column("distance", justify="right")
    if why:
        table.add_column("moved most by (points)")
    for one in found:
        cells = [one.source, one.label, f"{100 * one.probability:.1f} %"]
        if near:
            cells += ["", ""] if one.nearest is None else [one.nearest.label, f"{one.nearest.distance:.3g}"]
        if why:
            cells.append(", ".join(map(_moved, one.explanation[:SHOWN])))
        table.add_row(*map(escape, cells))
    out.print(table)


def _moved(one: "Moved") -> str:
    return f"{one.column} = {'missing' if one.value is None else one.value} {100 * one.change:+.1f}"


def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder class/image or site/class/image, or a table.")],
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="Tables: the column of the class, if it is not that of the training.")
    ] = "",
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Judge a model on labelled data, such as those of a site that did not train it."""
    from protofed.models.evaluating import judged
    from protofed.models.loading import load_model

    loaded = load_model(model, code=code)
    found = judged(loaded, data, label)
    if as_json:
        print_json({site: _facts(one, loaded.classes) for site, one in found.items()})
        return
    for site, one in found.items():
        _print_judged(site, one, loaded.classes)


def _facts(one: "Judged", classes: Sequence[str]) -> dict[str, object]:
    return {
        "examples": int(one.confusion.sum()),
        "without_label": one.left_out,
        **one.scores,
        "intervals": one.intervals,
        "sensitivity": dict(zip(classes, one.sensitivity, strict=True)),
        "classes": list(classes),
        "confusion": one.confusion.tolist(),
    }


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    between = "" if interval is None else f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"
    return f"{100 * value:.1f} %{between}"


def _print_judged(site: str, one: "Judged", classes: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    names = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro-F1"}
    intervals = one.intervals
    scores = ", ".join(f"{words} {_with_interval(one.scores[name], intervals[name])}" for name, words in names.items())
    left = f" ({one.left_out} rows without a label are left out)" if one.left_out else ""
    out.print(f"{escape(site)}: {int(one.confusion.sum())} examples{left}", highlight=False)
    say(f"  {scores}; the most frequent class alone gives {100 * one.scores['majority_rate']:.1f} %")
    table = Table(box=None)
    table.add_column("true \\ predicted")
    for name in classes:
        table.add_column(escape(name), justify="right")
    table.add_column("sensitivity", justify="right")
    for k, name in enumerate(classes):
        share = one.sensitivity[k]
        cells = [str(int(count)) for count in one.confusion[k]]
        table.add_row(escape(name), *cells, "–" if share is None else f"{100 * share:.1f} %")
    out.print(table)
