"""Inspects a folder of the user's data: what it contains, what is wrong with it, what to do about it, and an experiment
file that is ready to run.

Files are read and split by the same functions as in the task `custom`, so the inspection describes what a run does.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protofed.datasets import sites
from protofed.errors import BadInput, RunFailed
from protofed.inspection.duration import seconds_of
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
    group: str | None = None,
) -> Inspection:
    """Reads a folder of sites. With `write`, and if there are no errors, it also writes an experiment file.

    For tables, `label` names the column to be predicted, `leave_out` the columns that are not used, and `categorical`
    the columns whose numbers are codes. `skip_damaged` leaves out images that cannot be decoded. `group` is a
    column, or a pattern of the names of images, that tells which examples belong together.
    """
    if write is not None:
        check_target(write)
    kind = sites.kind_of(path)
    requested = Custom(
        str(path), kind, label, tuple(leave_out), tuple(categorical), skip_damaged=skip_damaged, group=group
    )
    inspection = inspected_images(path, requested) if kind == "images" else inspected_tables(path, requested)
    if write is None or inspection.errors:
        return inspection
    write_new(write, inspection.toml)
    return replace(inspection, written=write, seconds=seconds_of(write))


def check_target(path: Path) -> None:
    """Refuses to overwrite a file, or to write into a folder that does not exist."""
    if os.path.lexists(path):
        raise BadInput(f"{path}: exists already and is not overwritten; choose another name, or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}; make it first")


def write_new(path: Path, text: str) -> None:
    """Writes a new file, completely or not at all."""
    check_target(path)
    try:
        write_atomically(path, text.encode())
    except RunFailed as error:
        raise BadInput(f"{path}: cannot be written ({error.__cause__}); choose another place") from error
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: not written, since the path of the data is not UTF-8; rename it") from error
