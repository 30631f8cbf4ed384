"""What all commands share: the two consoles, JSON output and common options."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)

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
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """Prints text as it is: no colours, no markup, no line breaks of rich's own."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)
