"""What all commands share: the two consoles, JSON output and common options."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from protofed.printable import printable, printable_json


class SafeConsole(Console):
    """Shows what cannot be seen as escapes. Names of sites, classes and files may hold commands for a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # guard: consoles-print-no-commands
            safe = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=safe)


out: Console = SafeConsole()
err: Console = SafeConsole(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OutDir = Annotated[Path, typer.Option("--out", help="The folder in which run folders are created.")]
GracePeriod = Annotated[
    float,
    typer.Option(
        "--grace-period", min=0, help="Seconds that the current round may still take after Ctrl-C or SIGTERM."
    ),
]
GRACE_PERIOD = 30.0


def print_json(value: Any) -> None:
    print(printable_json(value, indent=2))


def say(text: str) -> None:
    """Prints text as it is: no colours, no markup, no line breaks of rich's own."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)
