"""`protofed tasks`: the list of tasks, and one with its clients."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.console import AsJson, beginning, out, print_json, print_settings, say
from protofed.printable import one_line
from protofed.tasks import TASKS

if TYPE_CHECKING:
    from protofed.api.task import Task


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(help="Describe this task.", autocompletion=lambda incomplete: beginning(TASKS, incomplete)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the task; may be repeated."),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the classes of each client, and some images of each domain.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="The folder for the pictures.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the tasks, or describe one with its settings and its clients."""
    if name is None:
        _list(as_json)
        return
    from protofed.runs.config.config import task_settings

    settings = task_settings(name, set_ or [])
    if plot:
        _plot(settings.build(), out_dir)
    elif as_json:
        print_json({**_about(name), **_clients(settings.build())})
    else:
        about = _about(name)
        out.print(f"{name}: {about['about']}\n", highlight=False, markup=False)
        if about["settings"]:
            print_settings(about["settings"])
            out.print()
        _show_clients(settings.build())  # last: the data may not be here


def _about(name: str) -> dict[str, Any]:
    from protofed.api.describe import about, settings_of

    return {"name": name, "about": about(TASKS[name]), "settings": [asdict(one) for one in settings_of(TASKS[name])]}


def _clients(task: "Task") -> dict[str, Any]:
    return {
        "classes": task.num_classes,
        "tests": {domain: len(data) for domain, data in task.tests.items()},
        "clients": {c: {"domain": task.domain_of.get(c), "examples": len(d)} for c, d in task.clients.items()},
    }


def _show_clients(task: "Task") -> None:
    found = _clients(task)
    tests, clients = found["tests"], found["clients"]
    table = Table("client", "domain", "training examples", "test examples of the domain")
    for client, facts in clients.items():
        domain = str(facts["domain"])
        table.add_row(
            *(escape(one_line(name)) for name in (client, domain)), str(facts["examples"]), str(tests.get(domain, "–"))
        )
    out.print(table)


def _plot(task: "Task", folder: Path) -> None:
    from protofed.reports.federation import contact_sheet, who_holds_what

    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"{task.name}-clients.png"]
    who_holds_what(task, pictures[0])
    if task.spec.input.kind == "image":
        pictures.append(folder / f"{task.name}-images.png")
        contact_sheet(task, pictures[1])
    for picture in pictures:
        say(f"picture {picture}")


def _list(as_json: bool) -> None:
    summaries = {name: TASKS.source(name).summary for name in TASKS}
    if as_json:
        print_json(summaries)
        return
    table = Table("task", "what it is")
    for name, text in summaries.items():
        table.add_row(name, text)
    out.print(table)
