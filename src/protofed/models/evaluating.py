"""How well a model that was handed over does on labelled data, such as those of a site that did not train it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.api.evaluation import confusion_of
from protofed.datasets import sites
from protofed.datasets.images import listed
from protofed.datasets.preprocessing import ImageFiles, TableRows
from protofed.datasets.tabular import Table, read_table
from protofed.errors import BadInput
from protofed.metrics import formulas
from protofed.metrics.bootstrap import bootstrap_interval
from protofed.models.loading import LoadedModel
from protofed.models.predicting import BATCH, table_files

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Judged:
    """A model on one site's data."""

    confusion: Counts  # (C, C), how often class i was taken for class j
    left_out: int = 0
    """Rows without a label."""

    @property
    def scores(self) -> dict[str, float]:
        c = self.confusion
        return {
            "accuracy": formulas.accuracy(c),
            "balanced_accuracy": formulas.balanced_accuracy(c),
            "macro_f1": formulas.macro_f1(c),
            "majority_rate": formulas.majority_rate(c),
        }

    @property
    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """95 % intervals of the scores that can be wrong, by bootstrap; None where all draws give the same value."""
        formula = {
            "accuracy": formulas.accuracy,
            "balanced_accuracy": formulas.balanced_accuracy,
            "macro_f1": formulas.macro_f1,
        }
        found = {name: bootstrap_interval(self.confusion, one) for name, one in formula.items()}
        return {name: None if one is None else (one.low, one.high) for name, one in found.items()}

    @property
    def sensitivity(self) -> list[float | None]:
        """The share of each class that was found; None for a class that the data do not have."""
        truth = self.confusion.sum(1)
        return [float(self.confusion[k, k] / n) if n else None for k, n in enumerate(truth)]


def judged(loaded: LoadedModel, data: Path, label: str = "") -> dict[str, Judged]:
    """The model on each site of a folder (site/class/image, or a table for each site), or on one site: a folder
    class/image, or a table. `label` is the column of the class, if it is not the one of the training."""
    match loaded.preprocessing:
        case ImageFiles() as images:
            found = {site: _images(loaded, images, files) for site, files in _sites(data).items()}
        case TableRows() as rows:
            found = {path.stem: _table(loaded, rows, read_table(path), label) for path in table_files([data])}
        case None:
            raise BadInput("this model reads tensors only: no file format is known for its task")
    return found


def _sites(data: Path) -> dict[str, Mapping[str, Sequence[Path]]]:
    """The images of each class at each site."""
    if not data.is_dir():
        raise BadInput(f"{data}: give a folder, with the images in class/image or site/class/image")
    one = listed(data).classes
    if any(one.values()):
        return {data.name: one}
    several = sites.image_sites(data)
    if not several.count:
        raise BadInput(f"{data}: no images at class/image or site/class/image below this folder")
    return {site: classes for site, classes in several.files.items() if any(classes.values())}


def _images(loaded: LoadedModel, images: ImageFiles, files: Mapping[str, Sequence[Path]]) -> Judged:
    labelled = [(path, name) for name, paths in files.items() for path in paths]
    labels = _numbers(loaded, [name for _, name in labelled], str(labelled[0][0].parent.parent))
    predicted = []
    for begin in range(0, len(labelled), BATCH):
        x = images.read([path for path, _ in labelled[begin : begin + BATCH]])
        predicted.append(loaded.predict(x).argmax(-1))
    return Judged(confusion_of(torch.cat(predicted), labels, len(loaded.classes)))


def _table(loaded: LoadedModel, rows: TableRows, table: Table, label: str) -> Judged:
    label = label or rows.label
    if not label:
        raise BadInput(f"{table.source}: which column is the class? The model does not say; name it with --label")
    cells = table.column(label)
    there = [row for row, cell in enumerate(cells) if cell is not None]
    if not there:
        raise BadInput(f"{table.source}: column {label!r} is empty; rows without a label cannot be judged")
    part = table.take(there)
    labels = _numbers(loaded, [cell for cell in part.column(label) if cell is not None], table.source)
    predicted = loaded.predict(rows.encoded(part)).argmax(-1)
    return Judged(confusion_of(predicted, labels, len(loaded.classes)), len(cells) - len(there))


def _numbers(loaded: LoadedModel, names: Sequence[str], where: str) -> torch.Tensor:
    """The classes as numbers. A number counts as a class however it is written: `1.0` is `1`."""
    index = {name: k for k, name in enumerate(loaded.classes)}
    spelt = [name if name in index else sites.normalised_code(name) for name in names]
    unknown = sorted({name for name in spelt if name not in index})
    if unknown:
        raise BadInput(
            f"{where}: the model does not know the class {unknown[0]!r}; it knows {', '.join(loaded.classes)}. Rename "
            "it, or leave its examples out"
        )
    return torch.tensor([index[name] for name in spelt])
