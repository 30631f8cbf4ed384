"""Users' own data: a folder with a folder of images or a table for each site.

    folder/site/class/image.png     images of the formats that `sources.images` reads
    folder/site.csv, .parquet       tables with the same columns at every site, one of them the label

Names are compared, and given back, in their composed Unicode form (NFC), since systems differ in how they spell an
accent. Hidden names are passed over. What is wrong with tables is collected as sentences, so that a person can hear of
all of it at once.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.datasets.images import (
    FORMATS,
    MOST_BYTES,
    SUFFIXES,
    check_inside,
    composed,
    contents,
    decoded_bytes,
    listed,
)
from protofed.datasets.tabular import NUMBER, Kind, Table, read_table
from protofed.errors import BadInput

SiteKind = Literal["images", "tables"]

TABLE_SUFFIXES = frozenset({".csv", ".parquet"})
SHEET_SUFFIXES = frozenset({".xls", ".xlsx", ".ods", ".tsv", ".txt"})
MOST_LOOKED_AT = 10_000
"""Names that are looked at to tell where misplaced images lie."""
MOST_LABELS = 50
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0", re.ASCII)
"""How programs write a whole number once a column has gaps."""
WITH_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
"""How half of the world writes a fraction."""
LAYOUTS = "expected folder/site/class/image, such as {0}/north/benign/1.png, or folder/site.csv, such as {0}/north.csv"


@dataclass(frozen=True)
class ImageSites:
    """The image files of each class at each site, all in the order of names; nothing has been opened yet."""

    files: Mapping[str, Mapping[str, tuple[Path, ...]]]
    ignored: tuple[Path, ...]
    """What is passed over, but for hidden names."""

    @property
    def count(self) -> int:
        return sum(len(paths) for classes in self.files.values() for paths in classes.values())


@dataclass(frozen=True)
class Described:
    """An image file that can be decoded."""

    digest: str
    """SHA-256 of the file, by which copies are found."""
    size: tuple[int, int]
    """Width and height, as stored."""
    mode: str


@dataclass(frozen=True)
class LabelledRows:
    """The rows of a site that have a label."""

    table: Table
    labels: tuple[str, ...]
    dropped: int
    """How many rows had none."""


# ---- folders


def kind_of(root: Path) -> SiteKind:
    """What a folder holds; images, if they lie where they should, whatever tables lie beside them."""
    if image_sites(root).count:
        return "images"
    if _tables_in(root)[0]:
        return "tables"
    raise BadInput(_nothing_found(root))


def files_of(root: Path, kind: SiteKind) -> list[Path]:
    """What is read of a folder."""
    if kind == "tables":
        return _tables_in(root)[0]
    return [path for classes in image_sites(root).files.values() for paths in classes.values() for path in paths]


def image_sites(root: Path) -> ImageSites:
    """The images below a folder."""
    folders, ignored = _folders_in(root, root)
    files = {}
    for site, folder in folders.items():
        files[site] = listed(folder, root).classes
        classes, passed_over = _folders_in(folder, root)
        ignored += passed_over
        for name, inner in classes.items():
            kept = {path.name for path in files[site][name]}
            ignored += [inner / other for other in sorted(_seen(inner)) if other not in kept]
    _refuse_capitals(root, "sites", files)
    _refuse_capitals(root, "classes", (name for classes in files.values() for name in classes))
    return ImageSites(files, tuple(ignored))


def read_image(path: Path, pixels: int, channels: int) -> tuple[str, NDArray[np.uint8]]:
    """The SHA-256 of a file, and its image as (C, H, W)."""
    content = contents(path, MOST_BYTES)
    return hashlib.sha256(content).hexdigest(), decoded_bytes(content, str(path), pixels, channels)


def described(path: Path) -> Described:
    """What an image file is; refuses one that cannot be decoded to its end."""
    content = contents(path, MOST_BYTES)
    decoded_bytes(content, str(path), pixels=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has just been decoded: nothing that Pillow warns of is left to refuse
        image = Image.open(BytesIO(content), formats=FORMATS)
    return Described(hashlib.sha256(content).hexdigest(), image.size, image.mode)


def _folders_in(folder: Path, root: Path) -> tuple[dict[str, Path], list[Path]]:
    """The folders in a folder by name, as the system spells them, and what else is there."""
    found: dict[str, Path] = {}
    others = []
    for name in sorted(_seen(folder), key=lambda name: (composed(name), name)):
        path = folder / name
        if path.is_symlink():
            check_inside(path, root)
        if not path.is_dir():
            others.append(path)
        elif composed(name) in found:
            raise BadInput(
                f"{folder}: two folders are called {composed(name)!r}, in different Unicode spellings: "
                "put what they hold into one"
            )
        else:
            found[composed(name)] = path
    return found, others


def _refuse_capitals(root: Path, what: str, names: Iterable[str]) -> None:
    """Refuses names that differ in capitals only: they mean one thing, and half of all systems hold them for one."""
    spelt: dict[str, str] = {}
    for name in names:
        other = spelt.setdefault(name.casefold(), name)
        if other != name:
            raise BadInput(f"{root}: the {what} {other!r} and {name!r} differ in capitals only: spell them alike")


def _seen(folder: Path) -> list[str]:
    """The names in a folder, but for hidden ones."""
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        raise BadInput(f"{folder}: there is no such folder; give the one that holds the sites") from None
    except NotADirectoryError:
        raise BadInput(f"{folder}: not a folder; give the one that holds a folder or a table for each site") from None
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read as a folder ({error.strerror})") from error
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise BadInput(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8: give it another one")
    return names


def _nothing_found(root: Path) -> str:
    """Why there is nothing to read, with the likeliest mistake."""
    layouts = LAYOUTS.format(root.name or "folder")
    sheets = [name for name in sorted(_seen(root)) if Path(name).suffix.lower() in SHEET_SUFFIXES]
    if sheets:
        return f"{root}: {sheets[0]} cannot be read: export each site's table as CSV, with commas, in UTF-8 ({layouts})"
    for path in islice(_below(root), MOST_LOOKED_AT):
        depth, suffix = len(path.relative_to(root).parts), path.suffix.lower()
        if suffix in SUFFIXES:
            inner = root.joinpath(*path.relative_to(root).parts[: depth - 3])
            advice = f"give {inner}" if depth > 3 else "make a folder for each site, and in it one for each class"
            return f"{root}: no images at folder/site/class/image; the first is {path}: {advice}"
        if suffix in TABLE_SUFFIXES:
            return (
                f"{root}: {path} lies too deep; put the tables of all sites into one folder, as site.csv, and give it"
            )
        if suffix == ".dcm":
            return f"{root}: DICOM files such as {path} are not read: export them as PNG or TIFF ({layouts})"
    return f"{root}: nothing to read; {layouts}"


def _below(root: Path) -> Iterator[Path]:
    """The files below a folder, in the order of names; links are not followed."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


# ---- tables


def read_tables(root: Path) -> tuple[dict[str, Table], list[str]]:
    """The table of each site, and what is wrong with those that cannot be read."""
    paths, _ = _tables_in(root)
    tables: dict[str, Table] = {}
    faults = []
    for path in paths:
        site = composed(path.stem)
        try:
            check_inside(path, root)
            for other in (other for other in tables if other.casefold() == site.casefold()):
                raise BadInput(f"{path}: site {site!r} has another table, {tables[other].source}: keep one")
            tables[site] = _one_separator(read_table(path))
        except BadInput as error:
            faults.append(str(error))
    return tables, faults


def ignored_beside_tables(root: Path) -> tuple[Path, ...]:
    """What lies in a folder of tables and is none."""
    return tuple(_tables_in(root)[1])


def column_faults(tables: Mapping[str, Table], leave_out: Iterable[str] = ()) -> list[str]:
    """Says of each column that only some sites have where it is missing."""
    faults = []
    for name in sorted({name for table in tables.values() for name in table.columns} - set(leave_out)):
        there = [site for site, table in tables.items() if name in table.columns]
        absent = [site for site in tables if site not in there]
        if absent:
            faults.append(
                f"column {name!r} is at {_some(there)}, but not at {_some(absent)}: add it there (cells may stay empty)"
                ", spell it alike everywhere, remove it everywhere, or name it in leave_out"
            )
    return faults


def kinds_of(
    tables: Mapping[str, Table], names: Iterable[str], categorical: Iterable[str] = ()
) -> tuple[dict[str, Kind], dict[str, str]]:
    """The kind of each column, and for those that hold numbers and words, as if by mistake, what is wrong.

    A column is meant to be numeric if some site has only numbers in it, or if most of its values are numbers.
    """
    kinds: dict[str, Kind] = {}
    faults = {}
    told = set(categorical)
    for name in names:
        words = {site: _words(table, name) for site, table in tables.items()}
        kinds[name] = "categorical" if name in told or any(words.values()) else "numeric"
        numeric = [site for site in tables if _has_values(tables[site], name) and not words[site]]
        if name not in told and any(words.values()) and (numeric or _mostly_numbers(tables.values(), name)):
            faults[name] = _odd_word(tables, name, words, numeric)
    return kinds, faults


def labelled(tables: Mapping[str, Table], label: str) -> dict[str, LabelledRows]:
    """The rows of each site that have a label; numbers that are equal are one class, however they are written."""
    every = [cell for table in tables.values() for cell in table.column(label) if cell is not None]
    is_numeric = all(NUMBER.fullmatch(cell) for cell in every)
    rows = {}
    for site, table in tables.items():
        kept = [row for row, cell in enumerate(table.column(label)) if cell is not None]
        labels = tuple(composed(cell) for cell in table.take(kept).column(label) if cell is not None)
        written = tuple(plain_number(cell) for cell in labels) if is_numeric else labels
        rows[site] = LabelledRows(table.take(kept), written, len(table) - len(kept))
    return rows


def codes_alike(table: Table, names: Iterable[str]) -> Table:
    """The table with the codes of these columns written alike: `1.0` is `1`."""
    written = {name: tuple(cell and code(cell) for cell in table.column(name)) for name in names}
    return replace(table, columns={**table.columns, **written})


def code(cell: str) -> str:
    """A category as it is compared."""
    whole = WHOLE.fullmatch(cell)
    return whole[1] if whole else composed(cell)


def plain_number(cell: str) -> str:
    """The shortest way to write a number."""
    number = float(cell)
    return str(int(number)) if number.is_integer() else repr(number)


def label_faults(tables: Mapping[str, Table], label: str) -> list[str]:
    """What is wrong with a label column."""
    for table in tables.values():
        table.column(label)
    faults = [
        f"{table.source}: no row has a label in column {label!r}: fill it in, or take the file out"
        for table in tables.values()
        if not _has_values(table, label)
    ]
    words = {site: _words(table, label) for site, table in tables.items()}
    numeric = [site for site in tables if _has_values(tables[site], label) and not words[site]]
    if numeric and any(words.values()):
        faults.append(_odd_label(tables, label, words, numeric))
    values = [cell for table in tables.values() for cell in table.column(label) if cell is not None]
    distinct = len(set(values))
    if distinct * 2 > len(values) > 20 or (distinct > MOST_LABELS and distinct * 5 > len(values)):
        faults.append(
            f"column {label!r} has {distinct} different values in {len(values)} rows: that is a measurement or an "
            "identifier, not a class; choose another label, or group its values into a few classes"
        )
    return faults


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """The classes among labels: numbers by their size, words by their letters."""
    names = set(labels)
    if all(NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def is_number(cell: str) -> bool:
    return NUMBER.fullmatch(cell) is not None


def _tables_in(root: Path) -> tuple[list[Path], list[Path]]:
    """The tables in a folder, and what else is there, in the order of names."""
    paths = [root / name for name in sorted(_seen(root), key=lambda name: (composed(name), name))]
    tables = [path for path in paths if path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir()]
    return tables, [path for path in paths if path not in set(tables)]


def _one_separator(table: Table) -> Table:
    """Refuses a table whose only column is a whole line: other separators than commas are common."""
    [*names] = table.columns
    for separator, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and separator in names[0]:
            raise BadInput(f"{table.source}: its columns seem to be separated by {called}; export it with commas")
    return table


def _words(table: Table, name: str) -> list[int]:
    """The rows whose value in this column is there and is no number."""
    return [row for row, cell in enumerate(table.column(name)) if cell is not None and not is_number(cell)]


def _has_values(table: Table, name: str) -> bool:
    return any(cell is not None for cell in table.column(name))


def _mostly_numbers(tables: Iterable[Table], name: str) -> bool:
    cells = [cell for table in tables for cell in table.column(name) if cell is not None]
    return 2 * sum(is_number(cell) or WITH_COMMA.fullmatch(cell) is not None for cell in cells) > len(cells)


def _odd_word(tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]], numeric: list[str]) -> str:
    where, word = _first_word(tables, name, words)
    others = f"only numbers at {_some(numeric)}" if numeric else "numbers elsewhere"
    more = sum(len(rows) for rows in words.values()) - 1
    correction = "write decimals with a point" if WITH_COMMA.fullmatch(word) else "correct it"
    return (
        f"{where}: column {name!r} has {word[:40]!r}, but {others}{f' ({more} more such values)' if more else ''}: "
        f"{correction}, leave the cell empty if the value is missing, or name the column in categorical if its numbers "
        "are codes"
    )


def _odd_label(tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]], numeric: list[str]) -> str:
    where, word = _first_word(tables, name, words)
    return (
        f"{where}: the label {name!r} is {word[:40]!r}, but only numbers at {_some(numeric)}: "
        "write the same classes in the same way at every site"
    )


def _first_word(tables: Mapping[str, Table], name: str, words: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """Where the first value is that is no number, and the value."""
    site = next(site for site in tables if words[site])
    row = words[site][0]
    return tables[site].place(row), tables[site].column(name)[row] or ""


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
