"""A task from users' own files: every site is a client, and a domain with a test set of its own.

Test sets are drawn at each site and stratified by class. A file that lies at several places in the same form leaks from
training into tests. So copies within a class of a site go to the same side, and what several sites or classes have is
trained on and never tested.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Interval, Lt
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.datasets import sites
from protofed.datasets.images import check_memory
from protofed.datasets.sites import LabelledRows, SiteKind
from protofed.datasets.tabular import Encoder, Kind, Table, sum_of, summary_of
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.seeds import derive_seed
from protofed.tasks import models
from protofed.tasks.partition import split

log = logging.getLogger(__name__)

IMAGE_NETWORKS: dict[str, Callable[[int, int], Parts]] = {
    "small_cnn": models.small_cnn,
    "cnn2": models.cnn2,
    "cnn3": models.cnn3,
    "resnet10": models.resnet10,
}
MOST_LISTED = 100
"""Damaged files that are named one by one."""
ONLY_SIDE = {"small_cnn": 28}
"""Networks that read images of one size."""


@dataclass(frozen=True)
class Sample:
    """The examples of a site in a fixed order, before they are divided."""

    labels: tuple[str, ...]
    contents: tuple[str, ...]
    """What tells examples apart that are not copies of each other."""


@dataclass(frozen=True)
class Sides:
    """Rows of a site, ascending."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True)
class Own:
    """Your own images or tables: a folder with a folder or a table for each site; `protofed data inspect` writes it."""

    path: str = ""
    """The folder with the sites; if relative, it is looked for in the folder in which the run is started."""
    kind: SiteKind = "images"
    """Images in folder/site/class/, or tables folder/site.csv or folder/site.parquet."""
    label: str | None = None
    """Of tables: the column that is to be predicted. Rows without a label are left out."""
    leave_out: Sequence[str] = ()
    """Of tables: columns that are not used, such as identifiers."""
    categorical: Sequence[str] = ()
    """Of tables: columns whose numbers are codes, not amounts."""
    pixels: Annotated[int, Interval(ge=8, le=512)] = 32
    """Of images: the side to which they are scaled."""
    channels: Literal[1, 3] = 3
    """Of images: 3 for colours, 1 for grey."""
    skip_damaged: bool = False
    """Of images: whether files that cannot be decoded are left out; otherwise they end the run."""
    max_damaged: Annotated[float, Interval(ge=0, lt=1)] = 0.01
    """Of images: the largest share of all files that `skip_damaged` may leave out; beyond it a whole folder may be bad.
    """
    model: Literal["small_cnn", "cnn2", "cnn3", "resnet10", "mlp"] | None = None
    """The network; small_cnn reads images of 28 pixels. Unless given, cnn3 for images and mlp for tables."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.25
    """The share of each class at each site that is kept for testing."""
    seed: Annotated[int, Ge(0)] = 0
    """Of the draw of the test sets; it is not the run's seed."""

    def build(self) -> Task:
        root = self._root()
        network = self._network()
        return _image_task(self, root, network) if self.kind == "images" else _table_task(self, root)

    def stamp(self) -> str:
        """Of the files that are read, by their names, sizes and times: a run on changed files is another run."""
        root = self._root()
        files = sorted(sites.files_of(root, self.kind))
        facts = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()

    def _root(self) -> Path:
        root = Path(self.path)
        if not self.path:
            raise BadInput("task own: path is not set; give the folder with the sites, or see `protofed data inspect`")
        if not root.is_dir():
            raise BadInput(
                f"task own: path {self.path!r} is no folder, seen from {Path.cwd()}: start the run in the folder from "
                "which the path leads to the sites, or give the whole path"
            )
        return root

    def _network(self) -> str:
        name = self.model or ("cnn3" if self.kind == "images" else "mlp")
        known = [*IMAGE_NETWORKS] if self.kind == "images" else ["mlp"]
        if name not in known:
            raise BadInput(f"task own: model {name!r} is not for {self.kind}: choose {' or '.join(known)}")
        side = ONLY_SIDE.get(name, self.pixels)
        if side != self.pixels:
            raise BadInput(f"task own: model {name!r} reads images of {side} pixels, not {self.pixels}: choose cnn3")
        return name


def divisions(samples: Mapping[str, Sample], test: float, seed: int) -> dict[str, Sides]:
    """Training and test rows of each site, no two copies of one example on different sides, wherever they are."""
    places = defaultdict(set)
    for site, sample in samples.items():
        for label, content in zip(sample.labels, sample.contents, strict=True):
            places[content].add((site, label))
    shared = {content for content, cells in places.items() if len(cells) > 1}
    return {site: _divided(sample, shared, test, derive_seed(seed, site)) for site, sample in samples.items()}


def untested(samples: Mapping[str, Sample], sides: Mapping[str, Sides]) -> list[str]:
    """The classes that are in no test set."""
    tested = {samples[site].labels[row] for site, own in sides.items() for row in own.test.tolist()}
    return [name for name in sites.in_order(_all_labels(samples)) if name not in tested]


def _divided(sample: Sample, shared: set[str], test: float, seed: int) -> Sides:
    first = {content: row for row, content in reversed([*enumerate(sample.contents)]) if content not in shared}
    rows = sorted(first.values())
    tested = set()
    if rows:
        chosen = split(_numbered(sample.labels, sites.in_order(sample.labels))[rows], test, seed).test
        tested = {sample.contents[rows[k]] for k in chosen.tolist()}
    is_test = torch.tensor([content in tested for content in sample.contents])
    return Sides((~is_test).nonzero().flatten(), is_test.nonzero().flatten())


def _all_labels(samples: Mapping[str, Sample]) -> set[str]:
    return {label for sample in samples.values() for label in sample.labels}


def _numbered(labels: Sequence[str], classes: Sequence[str]) -> Tensor:
    """The labels as places among the classes."""
    number = {name: k for k, name in enumerate(classes)}
    return torch.tensor([number[label] for label in labels])


def _assembled(
    samples: Mapping[str, Sample],
    sides: Mapping[str, Sides],
    inputs: Mapping[str, Tensor],
    parts: Callable[[int], Parts],
    transform: Transform,
) -> Task:
    """A client and a domain for each site; one whose test set would be empty only trains."""
    classes = sites.in_order(_all_labels(samples))
    _check_tests(samples, sides, classes)
    stores = {site: Data.of(inputs[site], _numbered(sample.labels, classes)) for site, sample in samples.items()}
    tests = {site: store.rows(sides[site].test) for site, store in stores.items() if len(sides[site].test)}
    return Task(
        name="own",
        clients={site: store.rows(sides[site].train) for site, store in stores.items()},
        tests=tests,
        num_classes=len(classes),
        model=lambda client: parts(len(classes)),
        domain_of={site: site for site in tests},
        local_tests=tests,
        transform=transform,
    )


def _check_tests(samples: Mapping[str, Sample], sides: Mapping[str, Sides], classes: Sequence[str]) -> None:
    """Says what cannot be tested, and refuses what cannot be learnt."""
    if len(classes) < 2:
        raise BadInput(f"task own: all examples are of class {classes[0]!r}; there must be two classes to tell apart")
    if not any(len(own.test) for own in sides.values()):
        raise BadInput(
            "task own: no site has an example for testing: every class has only one at each site, or copies that lie "
            "at several sites; remove copies, or raise test_fraction"
        )
    for name in untested(samples, sides):
        log.warning("task own: class %r is in no test set: it has too few examples at each site", name)
    for site in (site for site, own in sides.items() if not len(own.test)):
        log.warning("task own: %s has too few examples for a test set, and only trains", site)


# ---- images


def _image_task(settings: Own, root: Path, network: str) -> Task:
    found = sites.image_sites(root)
    if not found.count:
        sites.kind_of(root)
        raise BadInput(f'task own: {root} holds tables, not images: set kind = "tables"')
    check_memory(found.count, settings.pixels, str(root))
    samples, inputs = _decoded(found.files, settings)
    half = (0.5,) * settings.channels
    sides = divisions(samples, settings.test_fraction, settings.seed)
    parts = partial(IMAGE_NETWORKS[network], settings.channels)
    return _assembled(samples, sides, inputs, parts, Transform(half, half))


def _decoded(
    files: Mapping[str, Mapping[str, Sequence[Path]]], settings: Own
) -> tuple[dict[str, Sample], dict[str, Tensor]]:
    """The examples and pixels (N, C, H, W) of every site that has an image."""
    samples, inputs = {}, {}
    damaged: list[str] = []
    for site, classes in files.items():
        labelled = [(path, name) for name, paths in classes.items() for path in paths]
        sample, x = _read(labelled, settings, damaged)
        if len(x):
            samples[site], inputs[site] = sample, torch.from_numpy(x)
        else:
            log.warning("task own: %s has no images and is left out", site)
    _check_damage(damaged, sum(len(paths) for classes in files.values() for paths in classes.values()), settings)
    return samples, inputs


def _check_damage(damaged: Sequence[str], count: int, settings: Own) -> None:
    """Says which files are left out; refuses to go on where they are too many."""
    if not damaged:
        return
    listed = "".join(f"\n  {fault}" for fault in damaged[:MOST_LISTED])
    if len(damaged) > MOST_LISTED:
        listed += f"\n  and {len(damaged) - MOST_LISTED} more, which `protofed data inspect` names"
    found = f"task own: {len(damaged)} of {count} files are damaged"
    if len(damaged) > settings.max_damaged * count:  # guard: few-images-may-be-damaged
        raise BadInput(
            f"{found}, more than max_damaged = {settings.max_damaged:g} of them: get them again, remove them, or raise "
            f"max_damaged in [task]:{listed}"
        )
    log.warning("%s and left out:%s", found, listed)


def _read(labelled: Sequence[tuple[Path, str]], settings: Own, damaged: list[str]) -> tuple[Sample, NDArray[np.uint8]]:
    """The images of one site, decoded one at a time into their places; adds to `damaged` what is left out."""
    x = np.empty((len(labelled), settings.channels, settings.pixels, settings.pixels), np.uint8)
    labels: list[str] = []
    digests: list[str] = []
    for path, label in labelled:
        try:
            digest, x[len(labels)] = sites.read_image(path, settings.pixels, settings.channels)
        except BadInput as error:
            if not settings.skip_damaged:
                raise BadInput(
                    f"{error}; or set skip_damaged = true in [task] to leave such files out. "
                    "`protofed data inspect` names all of them"
                ) from error
            damaged.append(str(error))
            continue
        labels.append(label)
        digests.append(digest)
    return Sample(tuple(labels), tuple(digests)), x[: len(labels)]


# ---- tables


def _table_task(settings: Own, root: Path) -> Task:
    tables, faults = sites.read_tables(root)
    if not tables and not faults:
        sites.kind_of(root)
        raise BadInput(f'task own: {root} holds images, not tables: set kind = "images"')
    _refuse(faults)
    rows, kinds = _checked_tables(tables, settings)
    samples = {site: sample_of(own) for site, own in rows.items()}
    sides = divisions(samples, settings.test_fraction, settings.seed)
    summaries = (summary_of(own.table.take(sides[site].train.tolist()), kinds) for site, own in rows.items())
    encoder = Encoder.fit(sum_of(summaries))
    inputs = {site: torch.from_numpy(encoder.encode(own.table)) for site, own in rows.items()}
    return _assembled(samples, sides, inputs, partial(models.mlp, len(encoder.features)), Transform())


def _checked_tables(tables: Mapping[str, Table], settings: Own) -> tuple[dict[str, LabelledRows], dict[str, Kind]]:
    """The rows that have a label, and the kinds of the columns that are used."""
    if settings.label is None:
        raise BadInput("task own: label is not set; name the column that is to be predicted")
    if settings.label in settings.leave_out:
        raise BadInput(f"task own: {settings.label!r} is the label and in leave_out: it cannot be both")
    _refuse(sites.column_faults(tables, settings.leave_out))
    _refuse(sites.label_faults(tables, settings.label))
    names = _used(tables, settings)
    kinds, faults = sites.kinds_of(tables, names, settings.categorical)
    _refuse([*faults.values()])
    rows = sites.labelled(tables, settings.label)
    dropped = ", ".join(f"{site} {own.dropped}" for site, own in rows.items() if own.dropped)
    if dropped:
        log.warning("task own: rows without a label are left out: %s", dropped)
    codes = [name for name, kind in kinds.items() if kind == "categorical"]
    return {site: replace(own, table=sites.codes_alike(own.table, codes)) for site, own in rows.items()}, kinds


def _used(tables: Mapping[str, Table], settings: Own) -> list[str]:
    """The columns that are read: the same at every site, and in the first one's order."""
    first = next(iter(tables.values()))
    known = {name for table in tables.values() for name in table.columns}
    for name in (*settings.leave_out, *settings.categorical):
        if name not in known:
            first.column(name)
    names = [name for name in first.columns if name != settings.label and name not in settings.leave_out]
    if not names:
        raise BadInput(f"task own: there is no column but the label {settings.label!r} to learn from")
    return names


def sample_of(rows: LabelledRows) -> Sample:
    """Rows are never copies of each other here: two patients may have the same values."""
    places = tuple(rows.table.place(row) for row in range(len(rows.table)))
    return Sample(rows.labels, places)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise BadInput("\n".join(faults))
