"""Which files of a folder are read, by their names and places. Nothing is opened here."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from protofed.datasets.images import SUFFIXES, check_inside, composed, listed
from protofed.errors import BadInput

SiteKind = Literal["images", "tables"]

TABLE_SUFFIXES = frozenset({".csv", ".parquet"})
SPREADSHEET_SUFFIXES = frozenset({".xls", ".xlsx", ".ods", ".tsv", ".txt"})
MAX_SEARCHED = 10_000
"""Files searched for misplaced images and tables."""
LAYOUTS = "expected folder/site/class/image, such as {0}/north/benign/1.png, or folder/site.csv, such as {0}/north.csv"


@dataclass(frozen=True)
class ImageSites:
    """The image files of each class at each site, in the order of their names. None has been opened yet."""

    files: Mapping[str, Mapping[str, tuple[Path, ...]]]
    ignored: tuple[Path, ...]
    """Files and folders that are not read, except hidden ones."""

    @property
    def paths(self) -> list[Path]:
        return [path for classes in self.files.values() for paths in classes.values() for path in paths]

    @property
    def count(self) -> int:
        return len(self.paths)


def kind_of(root: Path) -> SiteKind:
    """What a folder holds. Images in the right place take precedence over tables."""
    if image_sites(root).count:
        return "images"
    if table_files(root):
        return "tables"
    raise BadInput(_nothing_to_read(root))


def data_files(root: Path, kind: SiteKind) -> list[Path]:
    """The files of a folder that are read."""
    if kind == "tables":
        return table_files(root)
    return image_sites(root).paths


def image_sites(root: Path) -> ImageSites:
    """The images below a folder."""
    sites, ignored = _subfolders(root, root)
    files = {}
    for site, site_folder in sites.items():
        files[site] = listed(site_folder, root).classes
        classes, not_folders = _subfolders(site_folder, root)
        ignored += not_folders
        for name, class_folder in classes.items():
            image_names = {path.name for path in files[site][name]}
            ignored += [class_folder / other for other in sorted(_names(class_folder)) if other not in image_names]
    refuse_case_variants(str(root), "sites", files)
    refuse_case_variants(str(root), "classes", (name for classes in files.values() for name in classes))
    return ImageSites(files, tuple(ignored))


def table_files(root: Path) -> list[Path]:
    """The tables in a folder, in the order of their names."""
    return [path for path in _paths(root) if _is_table(path)]


def table_sites(root: Path) -> list[str]:
    """The sites that have a table in a folder."""
    return [composed(path.stem) for path in table_files(root)]


def other_files(root: Path) -> tuple[Path, ...]:
    """Files and folders beside the tables of a folder, except hidden ones."""
    return tuple(path for path in _paths(root) if not _is_table(path))


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir()


def _paths(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names(folder), key=lambda name: (composed(name), name))]


def _subfolders(folder: Path, root: Path) -> tuple[dict[str, Path], list[Path]]:
    """The subfolders by composed name, and everything else in the folder. Paths are spelt as the system spells them."""
    subfolders: dict[str, Path] = {}
    others = []
    for path in _paths(folder):
        name = composed(path.name)
        if path.is_symlink():
            check_inside(path, root)
        if not path.is_dir():
            others.append(path)
        elif name in subfolders:
            raise BadInput(
                f"{folder}: two folders are called {name!r}, in different Unicode spellings; move their files into one"
            )
        else:
            subfolders[name] = path
    return subfolders, others


def refuse_case_variants(where: str, what: str, names: Iterable[str]) -> None:
    """Refuses names that differ only in case: they mean the same, and on many systems they are the same file."""
    spelling: dict[str, str] = {}
    for name in names:
        other = spelling.setdefault(name.casefold(), name)
        if other != name:
            raise BadInput(f"{where}: the {what} {other!r} and {name!r} differ only in case; use one spelling")


def _names(folder: Path) -> list[str]:
    """The names in a folder, except hidden ones."""
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        raise BadInput(f"{folder}: there is no such folder; give the folder that contains the sites") from None
    except NotADirectoryError:
        raise BadInput(
            f"{folder}: not a folder; give the folder that contains a subfolder or a table for each site"
        ) from None
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read as a folder ({error.strerror})") from error
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise BadInput(f"{folder}: the name {os.fsencode(name)!r} is not UTF-8; rename it")
    return names


def _nothing_to_read(root: Path) -> str:
    """Why a folder has nothing to read, with the most likely mistake."""
    layouts = LAYOUTS.format(root.name or "folder")
    spreadsheets = [name for name in sorted(_names(root)) if Path(name).suffix.lower() in SPREADSHEET_SUFFIXES]
    if spreadsheets:
        return (
            f"{root}: {spreadsheets[0]} cannot be read; export the table of each site as CSV, with commas, in UTF-8 "
            f"({layouts})"
        )
    for path in islice(_files_below(root), MAX_SEARCHED):
        hint = _misplaced(path, root, layouts)
        if hint:
            return f"{root}: {hint}"
    return f"{root}: nothing to read; {layouts}"


def _misplaced(path: Path, root: Path, layouts: str) -> str | None:
    """What to do about data that lie at the wrong place or have the wrong format."""
    parts, suffix = path.relative_to(root).parts, path.suffix.lower()
    if suffix in SUFFIXES:
        inner = root.joinpath(*parts[: len(parts) - 3])
        advice = f"give {inner}" if len(parts) > 3 else "make a folder for each site, and in it one for each class"
        return f"no images at folder/site/class/image; the first image is {path}: {advice}"
    if suffix in TABLE_SUFFIXES:
        return f"{path} lies too deep; put the tables of all sites into one folder, as site.csv, and give that folder"
    return None


def _files_below(root: Path) -> Iterator[Path]:
    """All files below a folder, in the order of their names. Links are not followed."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
