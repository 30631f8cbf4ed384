"""What a folder of users' own data holds, what is wrong with it and what to do, and an experiment that is ready to run.

Everything is read by the functions that the task `own` reads with, and divided as it divides, so that what is said here
is what a run does.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protofed.datasets import sites
from protofed.errors import BadInput, RunFailed
from protofed.inspection.findings import Finding
from protofed.inspection.images import inspected_images
from protofed.inspection.page import Inspection
from protofed.inspection.tables import inspected_tables
from protofed.runs.store.checkpoint import write_atomically
from protofed.tasks.custom import Custom

__all__ = ["Finding", "Inspection", "check_target", "inspect", "write_new"]


def inspect(
    path: Path,
    label: str | None = None,
    skip_damaged: bool = False,
    write: Path | None = None,
    leave_out: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> Inspection:
    """Reads a folder of sites; with `write`, and unless there are errors, an experiment file is written as well.

    Of tables, `label` names the column to be predicted, `leave_out` columns that are not used, and `categorical`
    columns whose numbers are codes. `skip_damaged` leaves out images that cannot be decoded.
    """
    if write is not None:
        check_target(write)
    kind = sites.kind_of(path)
    wishes = Custom(str(path), kind, label, tuple(leave_out), tuple(categorical), skip_damaged=skip_damaged)
    found = inspected_images(path, wishes) if kind == "images" else inspected_tables(path, wishes)
    if write is None or found.errors:
        return found
    write_new(write, found.toml)
    return replace(found, written=write)


def check_target(path: Path) -> None:
    """Refuses to write over a file, or where there is no folder."""
    if os.path.lexists(path):
        raise BadInput(f"{path}: is there already, and is not written over: choose another name, or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}: make it first")


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there yet, whole or not at all."""
    check_target(path)
    try:
        write_atomically(path, text.encode())
    except RunFailed as error:
        raise BadInput(f"{path}: cannot be written ({error.__cause__}): choose another place") from error
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: not written, since the path of the data is not UTF-8: give it another name") from error
