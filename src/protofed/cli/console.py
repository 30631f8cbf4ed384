"""What all commands share: the two consoles, JSON output and common options."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from protofed.errors import RunFailed
from protofed.printable import printable, printable_json


class SafeConsole(Console):
    """Shows what cannot be seen as escapes. Names of sites, classes and files may hold commands for a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # guard: consoles-print-no-commands
            safe = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=safe)


class CannotPrint(RunFailed):
    """Standard output is full or closed."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"could not print: {error.strerror or error}; what was saved is intact, and protofed show prints it again"
        )
        self.is_unheard = error.errno == errno.EPIPE
        """Whether the reader has gone, such as `head`: then nobody wants to know."""


class _Output:
    """Standard output, whatever it is at the moment. A write that fails is an error of its own."""

    def write(self, text: str) -> int:
        with self._named():
            return self._file.write(text)

    def flush(self) -> None:
        with self._named():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def _file(self) -> IO[str]:
        file: IO[str] = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # a live bar puts itself in its place
        return file

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # guard: output-full-named
            # What is left in the buffer must not fail again at the end.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())
            raise CannotPrint(error) from error


out: Console = SafeConsole(file=cast(IO[str], _Output()))
err: Console = SafeConsole(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OutDir = Annotated[Path, typer.Option("--out", help="The folder in which run folders are created.")]
HoldOut = Annotated[
    list[str] | None,
    typer.Option(
        "--hold-out",
        metavar="SITE",
        help="Your own data: train without this site and test on it (task.hold_out); may be repeated.",
    ),
]
GracePeriod = Annotated[
    float,
    typer.Option(
        "--grace-period", min=0, help="Seconds that the current round may still take after Ctrl-C or SIGTERM."
    ),
]
GRACE_PERIOD = 30.0


def held_out(sites: list[str] | None) -> list[str]:
    """The override that `--hold-out` stands for."""
    names = json.dumps(sites or [], ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML, but for this letter, is JSON
    return [f"task.hold_out={names}"] if sites else []


def print_json(value: Any) -> None:
    print(printable_json(value, indent=2), file=out.file)
    out.file.flush()


def say(text: str) -> None:
    """Prints text as it is: no colours, no markup, no line breaks of rich's own."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def print_settings(settings: Iterable[Mapping[str, Any]]) -> None:
    """Each setting of a method or task: name, default, kind and meaning."""
    out.print("Settings:", highlight=False)
    for one in settings:
        default = "" if one["is_required"] else f" = {json.dumps(one['default'], ensure_ascii=False)}"
        kind = f"{one['kind']}, required" if one["is_required"] else one["kind"]
        out.print(f"{one['name']}{default}  ({kind})", highlight=False, markup=False)
        if one["meaning"]:
            out.print(f"    {one['meaning']}", highlight=False, markup=False)


def beginning(names: Iterable[str], begun: str) -> list[str]:
    """For a shell that completes a word."""
    return [name for name in names if name.startswith(begun)]


@contextlib.contextmanager
def told() -> Iterator[Callable[[str], None]]:
    """Says what is being done: in one line on a terminal, elsewhere line by line."""
    if not err.is_terminal:
        yield lambda what: err.print(what, markup=False, highlight=False, soft_wrap=True)
        return
    with err.status("reading") as status:
        yield lambda what: status.update(escape(what))
