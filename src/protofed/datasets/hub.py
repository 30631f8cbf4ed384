"""Sets of images in the form of Hugging Face's `datasets`: from its hub, or saved to a folder.

Needs the extra `protofed[hub]`. Images are decoded here, by the rules of `images.py`, and not by `datasets`; code that
comes with a set is never run.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.examples import Examples, Split
from protofed.datasets.files import inside
from protofed.datasets.folders import shortened
from protofed.datasets.images import check_inside, check_memory, decoded, decoded_bytes
from protofed.errors import BadInput

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class _Rows:
    """One part of a set: its rows, and where the files that they may name are allowed to lie."""

    table: Any
    where: str
    homes: tuple[Path, ...]


def hub_split(source: str, image: str, label: str, domain: str | None, pixels: int) -> Mapping[str, Split]:
    """The training and test images of each domain of `hf:owner/name` or `hf:/folder`, by the names of three columns.

    Without a column of domains there is one domain, called as the set is."""
    train, test = (_part(part, image, label, domain, source) for part in _train_and_test(source))
    sets = {
        name: (train.domains.get(name, ()), test.domains.get(name, ())) for name in {**train.domains, **test.domains}
    }
    if not sets:
        raise BadInput(f"{source}: has no rows")
    for name, rows in sets.items():
        if not all(map(len, rows)):
            numbers = f"{len(rows[0])} training and {len(rows[1])} test images"
            raise BadInput(f"{source}: domain {name!r} has {numbers}: each needs some of both")
    check_memory(sum(len(part.labels) for part in (train, test)), pixels, source)
    return {
        name: Split(train.examples(own, pixels), test.examples(other, pixels)) for name, (own, other) in sets.items()
    }


@dataclass(frozen=True)
class _Part:
    """Rows whose labels and domains are known and whose images are still encoded."""

    rows: _Rows
    image: str
    labels: NDArray[np.int64]
    domains: Mapping[str, Sequence[int]]
    """The numbers of the rows of each domain."""

    def examples(self, own: Sequence[int], pixels: int) -> Examples:
        x = np.empty((len(own), 3, pixels, pixels), np.uint8)
        for place, row in enumerate(own):
            x[place] = _decoded(self.rows.table[row][self.image], self.rows, row, pixels)
        return Examples(x, self.labels[np.array(own, np.int64)])


def _train_and_test(source: str) -> tuple[_Rows, _Rows]:
    library = _library(source)
    parts, homes = _loaded(library, source)
    names = list(parts) if isinstance(parts, dict) else []
    test = next((name for name in ("test", "validation") if name in names), None)
    if "train" not in names or test is None:
        there = ", ".join(names) if names else "a single one without a name"
        raise BadInput(f"{source}: needs the parts train and test (or validation), but has {there}")
    train_rows, test_rows = (_Rows(parts[name], f"{source}, {name}", homes) for name in ("train", test))
    return train_rows, test_rows


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise BadInput(f"{source}: reading it needs another package: pip install 'protofed[hub]'") from error


def _loaded(library: Any, source: str) -> tuple[Any, tuple[Path, ...]]:
    """The parts of the set, and the folders that their files may lie in."""
    kind, _, place = source.partition(":")
    is_folder = Path(place).is_absolute()
    if kind != "hf" or not (is_folder or HUB_NAME.fullmatch(place)):
        raise BadInput(f"{source}: not hf:owner/name, and not hf: with the full path of a folder")
    if not is_folder and Path(place).exists():
        raise BadInput(f"{source}: {place} is also a folder here, which would be read instead: give its full path")
    try:
        parts = library.load_from_disk(place) if is_folder else library.load_dataset(place)
    except Exception as error:  # the network, the disk, and the library's own kinds of errors
        raise BadInput(f"{source}: cannot be loaded ({error})") from error
    if not is_folder:
        cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        return parts, (Path(library.config.HF_DATASETS_CACHE), Path(cache))
    for part in parts.values() if isinstance(parts, dict) else ():
        for file in part.cache_files:
            check_inside(Path(file["filename"]), Path(place))
        try:
            part.data.validate(full=True)  # offsets that lead out of the file would end the process, not the reading
        except Exception as error:  # the library's own kinds of errors
            raise BadInput(f"{source}: its tables are damaged ({error}): save it again") from error
    return parts, (Path(place),)


def _part(rows: _Rows, image: str, label: str, domain: str | None, source: str) -> _Part:
    library = _library(source)
    columns = [name for name in (image, label, domain) if name is not None]
    features = rows.table.features
    missing = [name for name in columns if name not in features]
    if missing:
        raise BadInput(f"{rows.where}: has no column {', '.join(missing)}; its columns are {', '.join(features)}")
    table = rows.table.select_columns(columns)
    encoded = table.select_columns([image])
    if isinstance(features[image], library.Image):
        encoded = encoded.cast_column(image, library.Image(decode=False))
    elif getattr(features[image], "dtype", "") not in ("binary", "large_binary"):
        raise BadInput(f"{rows.where}: column {image} holds {features[image]}, neither images nor bytes")
    labels = _labels(list(table[label]), rows, label)
    whole = source.rstrip("/").rpartition("/")[2]
    domains = [whole] * len(labels) if domain is None else _domains(table, domain, rows)
    own: dict[str, list[int]] = {}
    for row, name in enumerate(domains):
        own.setdefault(name, []).append(row)
    return _Part(_Rows(encoded, rows.where, rows.homes), image, labels, own)


def _labels(values: list[Any], rows: _Rows, column: str) -> NDArray[np.int64]:
    for row, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise BadInput(
                f"{rows.where}, row {row}: {column} is {value!r}, but labels are whole numbers from 0: "
                "datasets.Dataset.class_encode_column makes them from names"
            )
    return np.array(values, np.int64)


def _domains(table: Any, column: str, rows: _Rows) -> list[str]:
    """The domain of each row, by name where the column holds the number of a name."""
    names = getattr(table.features[column], "names", None)
    values = [names[value] if names and type(value) is int else value for value in table[column]]
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise BadInput(f"{rows.where}, row {row}: {column} is {value!r}, but a domain is named by text")
    return values


def _decoded(value: Any, rows: _Rows, row: int, pixels: int) -> NDArray[np.uint8]:
    where = f"{rows.where}, row {row}"
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes):
        return decoded_bytes(content, where, pixels)
    named = value.get("path") if isinstance(value, dict) else None
    if not isinstance(named, str):
        raise BadInput(f"{where}: has no image")
    # A row of a set from elsewhere could name any file of this machine.
    for home in rows.homes if "\0" not in named else ():
        path = home / named
        if inside(home, path):
            return decoded(path, pixels)
    homes = " and ".join(map(str, rows.homes))
    raise BadInput(f"{where}: its image is the file {shortened([named])}, outside {homes}")
