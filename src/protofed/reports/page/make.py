"""Makes the page of some runs, and writes it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from protofed.errors import BadInput
from protofed.reports.page.document import document
from protofed.reports.page.facts import Facts, arranged, facts
from protofed.reports.page.models import add_models
from protofed.runs.listing import Listing, listing
from protofed.runs.store.checkpoint import write_atomically

BEGIN = b"<!doctype html>"


def page_facts(
    paths: Sequence[Path], title: str, command: str, with_models: bool, tell: Callable[[str], None]
) -> tuple[Listing, Facts]:
    """The runs in these folders, and what their page shows."""
    found = listing(paths)
    if not found.runs:
        refuse_nothing(found, paths)
    page = facts(found, title or title_of(found), command)
    if with_models:
        add_models(page, arranged(found.runs), tell)
    return found, page


def title_of(found: Listing) -> str:
    tasks = list(dict.fromkeys(run.task for run in found.runs))
    methods = list(dict.fromkeys(run.method for run in found.runs))
    names = ", ".join(methods) if len(methods) <= 4 else f"{len(methods)} methods"
    return f"{names} on {', '.join(tasks)}" if found.runs else "no run yet"


def refuse_nothing(found: Listing, paths: Sequence[Path]) -> None:
    """Says why there is no run to show."""
    if found.left_out:
        raise BadInput("\n".join(found.left_out.values()))
    raise BadInput(f"there is no run folder in {', '.join(map(str, paths))}: name one or more, such as results/*")


def write_page(page: Facts, path: Path) -> int:
    """Writes the page; its size in bytes."""
    refuse_other_file(path)
    data = document(page).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return len(data)


def refuse_other_file(path: Path) -> None:
    """Refuses to overwrite what is no page: a name that was mistyped must not cost a file."""
    if path.is_dir():
        raise BadInput(f"--html {path} is a folder: name a file, such as {path / 'report.html'}")
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            is_page = file.read(len(BEGIN)).lower() == BEGIN
    except OSError as error:
        raise BadInput(f"--html {path} cannot be read: {error.strerror}; choose another name") from error
    if not is_page:  # guard: page-overwrites-pages-only
        raise BadInput(f"--html {path} exists and is no HTML page; it is not overwritten: choose another name")
