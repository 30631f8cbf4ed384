"""Image datasets in the format of Hugging Face's `datasets`, from its hub or from a folder.

Needs the extra `protofed[hub]`. Images are decoded by `images.py`, not by `datasets`. Code that comes with a dataset is
never run.
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
from protofed.datasets.image_folders import shortened
from protofed.datasets.images import check_inside, check_memory, decoded, decoded_bytes
from protofed.errors import BadInput

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class _Rows:
    """The rows of one part, and the folders in which image files named by the rows may lie."""

    table: Any
    where: str
    homes: tuple[Path, ...]


def hub_split(source: str, image: str, label: str, domain: str | None, pixels: int) -> Mapping[str, Split]:
    """The training and test images of each domain of `hf:owner/name` or `hf:/folder`.

    `image`, `label` and `domain` name columns. Without a domain column, the dataset is one domain of the same name.
    """
    train, test = (_part(part, image, label, domain, source) for part in _train_and_test(source))
    rows = {
        name: (train.domains.get(name, ()), test.domains.get(name, ())) for name in {**train.domains, **test.domains}
    }
    if not rows:
        raise BadInput(f"{source}: has no rows")
    for name, (train_rows, test_rows) in rows.items():
        if not (train_rows and test_rows):
            numbers = f"{len(train_rows)} training and {len(test_rows)} test images"
            raise BadInput(f"{source}: domain {name!r} has {numbers}; every domain needs both")
    check_memory(sum(len(part.labels) for part in (train, test)), pixels, source)
    return {
        name: Split(train.examples(train_rows, pixels), test.examples(test_rows, pixels))
        for name, (train_rows, test_rows) in rows.items()
    }


@dataclass(frozen=True)
class _Part:
    """Rows with their labels and domains. The images are not decoded yet."""

    rows: _Rows
    image: str
    labels: NDArray[np.int64]
    domains: Mapping[str, Sequence[int]]
    """The row numbers of each domain."""

    def examples(self, numbers: Sequence[int], pixels: int) -> Examples:
        x = np.empty((len(numbers), 3, pixels, pixels), np.uint8)
        for k, row in enumerate(numbers):
            x[k] = _decoded(self.rows.table[row][self.image], self.rows, row, pixels)
        return Examples(x, self.labels[np.array(numbers, np.int64)])


def _train_and_test(source: str) -> tuple[_Rows, _Rows]:
    library = _library(source)
    parts, homes = _loaded(library, source)
    names = list(parts) if isinstance(parts, dict) else []
    test = next((name for name in ("test", "validation") if name in names), None)
    if "train" not in names or test is None:
        present = ", ".join(names) if names else "a single unnamed part"
        raise BadInput(f"{source}: needs the parts train and test (or validation), but has {present}")
    train_rows, test_rows = (_Rows(parts[name], f"{source}, {name}", homes) for name in ("train", test))
    return train_rows, test_rows


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise BadInput(f"{source}: needs another package: pip install 'protofed[hub]'") from error


def _loaded(library: Any, source: str) -> tuple[Any, tuple[Path, ...]]:
    """The parts of the dataset, and the folders in which their files may lie."""
    kind, _, location = source.partition(":")
    is_folder = Path(location).is_absolute()
    if kind != "hf" or not (is_folder or HUB_NAME.fullmatch(location)):
        raise BadInput(f"{source}: expected hf:owner/name, or hf: with the full path of a folder")
    if not is_folder and Path(location).exists():
        raise BadInput(f"{source}: {location} is also a folder here, which would be read instead; give its full path")
    try:
        parts = library.load_from_disk(location) if is_folder else library.load_dataset(location)
    except Exception as error:  # errors of the network, of the disk and of the library
        raise BadInput(f"{source}: cannot be loaded ({error})") from error
    if not is_folder:
        cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        return parts, (Path(library.config.HF_DATASETS_CACHE), Path(cache))
    for part in parts.values() if isinstance(parts, dict) else ():
        for file in part.cache_files:
            check_inside(Path(file["filename"]), Path(location))
        try:
            part.data.validate(full=True)  # offsets outside the file would crash the process later
        except Exception as error:  # errors of the library
            raise BadInput(f"{source}: its tables are damaged ({error}); save it again") from error
    return parts, (Path(location),)


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
        raise BadInput(f"{rows.where}: column {image} has type {features[image]}; expected images or bytes")
    labels = _labels(list(table[label]), rows, label)
    dataset_name = source.rstrip("/").rpartition("/")[2]
    domains = [dataset_name] * len(labels) if domain is None else _domains(table, domain, rows)
    rows_by_domain: dict[str, list[int]] = {}
    for row, name in enumerate(domains):
        rows_by_domain.setdefault(name, []).append(row)
    return _Part(_Rows(encoded, rows.where, rows.homes), image, labels, rows_by_domain)


def _labels(values: list[Any], rows: _Rows, column: str) -> NDArray[np.int64]:
    for row, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise BadInput(
                f"{rows.where}, row {row}: {column} is {value!r}, but labels must be integers from 0; "
                "datasets.Dataset.class_encode_column makes them from names"
            )
    return np.array(values, np.int64)


def _domains(table: Any, column: str, rows: _Rows) -> list[str]:
    """The name of each row's domain, also where the column holds indices of names."""
    names = getattr(table.features[column], "names", None)
    values = [names[value] if names and type(value) is int else value for value in table[column]]
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise BadInput(f"{rows.where}, row {row}: {column} is {value!r}, but a domain must be a name")
    return values


def _decoded(value: Any, rows: _Rows, row: int, pixels: int) -> NDArray[np.uint8]:
    where = f"{rows.where}, row {row}"
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes):
        return decoded_bytes(content, where, pixels)
    file = value.get("path") if isinstance(value, dict) else None
    if not isinstance(file, str):
        raise BadInput(f"{where}: has no image")
    # A dataset from elsewhere could name any file of this machine.
    for home in rows.homes if "\0" not in file else ():
        path = home / file
        if inside(home, path):
            return decoded(path, pixels)
    homes = " and ".join(map(str, rows.homes))
    raise BadInput(f"{where}: its image is the file {shortened([file])}, which is outside {homes}")
