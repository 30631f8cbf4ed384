"""Predictions of new files by a model that was handed over."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protofed.datasets.images import SUFFIXES
from protofed.datasets.preprocessing import ImageFiles, TableRows
from protofed.datasets.sites import TABLE_SUFFIXES
from protofed.datasets.tabular import Table, read_table
from protofed.datasets.tabular.encoding import Numeric
from protofed.errors import BadInput
from protofed.models.loading import LoadedModel

BATCH = 64
"""Examples that are predicted at once."""


@dataclass(frozen=True)
class Nearest:
    """The prototype that an example is nearest to."""

    label: str
    """Its class."""
    kind: str
    distance: float
    """Euclidean, between features."""


@dataclass(frozen=True)
class Moved:
    """What a column of a row did to the probability of the predicted class."""

    column: str
    value: str | None
    change: float
    """How much lower the probability would be with an ordinary value: the mean of a number, and of codes the mean over
    all categories."""


@dataclass(frozen=True)
class Prediction:
    source: str
    """The file, and the line of a table."""
    label: str
    probability: float
    probabilities: dict[str, float]
    nearest: Nearest | None
    """None if the method has no prototypes."""
    explanation: tuple[Moved, ...] = ()
    """The columns of a table's row, the one that did most first."""


def predictions(loaded: LoadedModel, paths: Sequence[Path], explain: bool = True) -> Iterator[Prediction]:
    """What the model says of images, folders of images, and rows of tables, in the order of the files."""
    match loaded.preprocessing:
        case ImageFiles() as images:
            files = image_files(paths)
            for begin in range(0, len(files), BATCH):
                some = files[begin : begin + BATCH]
                yield from predicted(loaded, images.read(some), [str(path) for path in some])
        case TableRows() as rows:
            for path in table_files(paths):
                table = read_table(path)
                yield from _rows(loaded, rows, table, explain)
        case None:
            raise BadInput(
                "this model reads tensors only: no file format is known for its task. From Python: "
                "protofed.load(MODEL).predict(x)"
            )


def predicted(loaded: LoadedModel, x: Tensor, sources: Sequence[str]) -> list[Prediction]:
    """What the model says of examples as they are stored."""
    model = loaded.model
    with torch.no_grad():
        inputs = model.transform(x)
        probabilities = model.as_probabilities(model(inputs)).double()
        features = model.embed(inputs)
    nearest = _nearest(loaded, features)
    chosen = probabilities.argmax(-1).tolist()
    return [
        Prediction(
            source,
            loaded.classes[label],
            probabilities[row, label].item(),
            dict(zip(loaded.classes, probabilities[row].tolist(), strict=True)),
            nearest[row],
        )
        for row, (source, label) in enumerate(zip(sources, chosen, strict=True))
    ]


def _nearest(loaded: LoadedModel, features: Tensor) -> list[Nearest | None]:
    best: list[Nearest | None] = [None] * len(features)
    for kind, points in loaded.model.prototypes.items():
        distance, index = torch.cdist(features.double(), points.values.double()).min(-1)
        for row, (gap, k) in enumerate(zip(distance.tolist(), index.tolist(), strict=True)):
            before = best[row]
            if before is None or gap < before.distance:
                best[row] = Nearest(loaded.classes[int(points.label[k])], kind, gap)
    return best


# ---- tables


def _rows(loaded: LoadedModel, rows: TableRows, table: Table, explain: bool) -> Iterator[Prediction]:
    for begin in range(0, len(table), BATCH):
        part = table.take(range(begin, min(begin + BATCH, len(table))))
        x, sources = rows.encoded(part), [part.place(row) for row in range(len(part))]
        found = predicted(loaded, x, sources)
        reasons = _explained(loaded, rows, part, x, found) if explain else [()] * len(found)
        for one, why in zip(found, reasons, strict=True):
            yield Prediction(one.source, one.label, one.probability, one.probabilities, one.nearest, why)


def _explained(
    loaded: LoadedModel, rows: TableRows, table: Table, x: Tensor, found: Sequence[Prediction]
) -> list[tuple[Moved, ...]]:
    """For each row, what each of its columns did to the probability of the predicted class."""
    moved: list[list[Moved]] = [[] for _ in found]
    labels = torch.tensor([loaded.classes.index(one.label) for one in found])
    begin = 0
    for column in rows.encoder.columns:
        width = len(column.features)
        usual = _ordinary(loaded, x, begin, 1 if isinstance(column, Numeric) else width - 2, width, labels)
        for row, one in enumerate(found):
            cell = table.column(column.column)[row]
            moved[row].append(Moved(column.column, cell, one.probability - usual[row].item()))
        begin += width
    return [tuple(sorted(own, key=lambda one: -abs(one.change))) for own in moved]


@torch.no_grad()
def _ordinary(loaded: LoadedModel, x: Tensor, begin: int, choices: int, width: int, labels: Tensor) -> Tensor:
    """The probability of the labels (N,) with an ordinary value in a column: of a number its mean, which is 0 in what
    the network reads; of codes the mean over all categories."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for choice in range(max(choices, 1)):
        other = x.clone()
        other[:, begin : begin + width] = 0
        if choices > 1 or width > 2:
            other[:, begin + choice] = 1
        found = loaded.model.as_probabilities(loaded.model(loaded.model.transform(other))).double()
        total += found.gather(1, labels[:, None])[:, 0]
    return total / max(choices, 1)


# ---- files


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Images, and the images below folders in the order of their names."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        below = sorted(_below(path))
        if not below:
            raise BadInput(f"{path}: no images below this folder; {', '.join(sorted(SUFFIXES))} are read")
        found += below
    for path in found:
        if path.suffix.lower() in TABLE_SUFFIXES:
            raise BadInput(f"{path}: this model reads images, not tables")
    return found


def _below(folder: Path) -> Iterator[Path]:
    """All images below a folder. Links to folders are not followed, and hidden files are passed over."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, n) for n in names if not n.startswith(".") and Path(n).suffix.lower() in SUFFIXES)


def table_files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(one for one in path.iterdir() if one.suffix.lower() in TABLE_SUFFIXES)
        elif path.suffix.lower() not in TABLE_SUFFIXES:
            raise BadInput(f"{path}: this model reads tables, .csv or .parquet")
        else:
            found.append(path)
    if not found:
        raise BadInput("no table was found; .csv and .parquet are read")
    return found
