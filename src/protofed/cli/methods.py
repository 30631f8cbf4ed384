"""`protofed methods`: the list of methods, and one with its settings."""

from dataclasses import asdict
from typing import Annotated, get_args

import typer
from rich.table import Table

from protofed.api.registry import Tag
from protofed.cli.console import AsJson, beginning, out, print_json, print_settings
from protofed.errors import BadInput
from protofed.methods import METHODS, bases_of

TAGS = get_args(Tag)


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Describe this method.", autocompletion=lambda incomplete: beginning(METHODS, incomplete)),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            help=f"List only methods with this tag; may be repeated. Tags: {', '.join(TAGS)}.",
            autocompletion=lambda incomplete: beginning(TAGS, incomplete),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or describe one with its settings."""
    for word in tag or []:
        if word not in TAGS:
            from protofed.runs.config.schema import nearest

            raise BadInput(f"no method has the tag {word!r}{nearest(word, TAGS)}")
    if name is None:
        _list(set(tag or []), as_json)
    else:
        _describe(name, as_json)


def _describe(name: str, as_json: bool) -> None:
    from protofed.api.describe import about, settings_of
    from protofed.runs.config.schema import chosen

    cls = chosen(METHODS, name, "method")
    settings = settings_of(cls)
    if as_json:
        facts = {"name": name, "tags": cls.tags, "about": about(cls), "settings": [asdict(one) for one in settings]}
        print_json({**facts, "bases": bases_of(cls)})
        return
    out.print(about(cls), highlight=False, markup=False)
    if bases_of(cls):
        out.print(f"\nBases: {', '.join(bases_of(cls))}", highlight=False, markup=False)
    if settings:
        out.print()
        print_settings([asdict(one) for one in settings])


def _list(tags: set[str], as_json: bool) -> None:
    """The methods that have all these tags."""
    sources = {name: METHODS.source(name) for name in METHODS}
    listed = {name: source for name, source in sources.items() if tags <= set(source.tags)}
    if as_json:
        print_json({name: {"about": source.summary, "tags": source.tags} for name, source in listed.items()})
        return
    table = Table("method", "what it is", "tags")
    for name, source in listed.items():
        table.add_row(name, source.summary, ", ".join(source.tags))
    out.print(table)
