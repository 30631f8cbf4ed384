"""Writes docs/reference: the commands from their help, and every key of an experiment from the schema. `make docs`."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer

from method_docs import table
from protofed.api.describe import about, settings_of
from protofed.cli.app import app
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.privacy.settings import PrivacySettings
from protofed.runs import compare
from protofed.runs.config.sections import (
    IN_TRAINING,
    SECTIONS,
    EvaluationSettings,
    SavingSettings,
)
from protofed.runs.observers import LoggingSettings
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS
from protofed.transforms.chain import UploadSettings
from protofed.transforms.robust_stage import RobustSettings

NOTE = "<!-- Written by `make docs`; do not edit. -->"
COLUMNS = ["key", "values", "default", "meaning"]
FILLED = {
    "training": Training,
    "uploads": UploadSettings,
    "robust": RobustSettings,
    "secure": SecureSettings,
    "privacy": PrivacySettings,
    "runtime": RuntimeSettings,
    "evaluation": EvaluationSettings,
    "saving": SavingSettings,
    "logging": LoggingSettings,
}
"""The dataclasses of the sections other than [task] and [method], which have one for every name."""


def pages(root: Path) -> dict[Path, str]:
    """The files of the reference that are generated, with what they should hold."""
    folder = root / "docs/reference"
    return {folder / "commands.md": commands_page(), folder / "configuration.md": configuration_page()}


# ---- commands


def commands_page() -> str:
    group: Any = typer.main.get_command(app)
    intro = (
        "All commands of `protofed`, from their help. `protofed COMMAND -h` prints the same.\n\n"
        f"{group.epilog}\n\n`protofed --install-completion` lets the shell complete commands, methods and tasks."
    )
    return "\n\n".join(["# Commands", NOTE, intro, *(_command(name, one) for name, one in commands(group))]) + "\n"


def commands(group: Any, prefix: str = "protofed") -> Iterator[tuple[str, Any]]:
    """Every command that can be given, with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _command(name: str, command: Any) -> str:
    with command.make_context(name, [], resilient_parsing=True) as context:
        usage = _usage(" ".join([name, *command.collect_usage_pieces(context)]))
        records = [one.get_help_record(context) for one in command.params]
    rows = [[f"`{_plain(record[0])}`", record[1].replace("\\[", "[")] for record in records if record]
    text = inspect.cleandoc(command.help or "")
    return f"## {name}\n\n{text}\n\n```\n{usage}\n```\n\n{table(['argument or option', 'meaning'], rows)}"


KINDS = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "path": "PATH"}


def _plain(text: str) -> str:
    """What stands for a value, in one way, whichever version of typer wrote it."""
    if text.startswith("-"):
        choices = re.sub(r"<([^<>]*\|[^<>]*)>", r"[\1]", re.sub(r"<list\[(\w+)\]>", r"<\1>", text))
        return re.sub(r"<(\w+)( range)?>", lambda m: KINDS.get(m[1], m[1].upper()) + (m[2] or "").upper(), choices)
    return re.sub(r"\W", "", text.partition(" <")[0]).upper()


def _usage(text: str) -> str:
    """The arguments of a command, likewise: EXPERIMENT, [RUN]..."""
    text = re.sub(r"\[\[(\w+)\]\.\.\.\]\.\.\.", r"[\1]...", re.sub(r"\{([^}]+)\}", r"\1", text))
    text = re.sub(r"\[(\w+)\.\.\.\](\.\.\.)?", r"[\1]...", text).replace("......", "...")
    return re.sub(r"(?<=\] ).*", lambda m: m[0].upper(), text)


# ---- keys of an experiment


def configuration_page() -> str:
    parts = [
        "# Configuration",
        NOTE,
        "Every key of an experiment file, with its values, its default and its meaning. Numbers are given in the unit "
        "that the meaning names: rounds, epochs, seconds, examples, shares between 0 and 1. A key that is not listed "
        "is refused, and so is a value outside its range; the message names the line. "
        "`--set SECTION.KEY=VALUE` overrides a key on the command line.",
        "The sections are " + ", ".join(f"[`[{name}]`](#{name})" for name in SECTIONS) + ". "
        "[Comparisons](#comparisons) have keys of their own.",
        _tasks(),
        "## method\n\n" + table(["key", "values", "meaning"], [_method_row()]) + "\n\n"
        "The other keys are those of the method; [its page](../methods/README.md) lists them, and so does "
        "`protofed methods NAME`.",
    ]
    for name, cls in FILLED.items():
        without = IN_TRAINING if name == "training" else ()
        parts.append(f"## {name}\n\n{_keys(cls, without)}")
        if name == "training":
            parts += [_registered(f"training.{key}", registry, key) for key, registry in IN_TRAINING.items()]
    return "\n\n".join([*parts, _comparisons()]) + "\n"


def _method_row() -> list[str]:
    names = ", ".join(f"[`{name}`](../methods/{name}.md)" for name in METHODS)
    return ["`name`", names, "The method; or `module:Class`, for [one of your own](../your-method.md)."]


def _tasks() -> str:
    head = (
        "## task\n\n`name` is one of the following, or `module:Class` for a task of your own. "
        "The other keys depend on it. [Tasks](../tasks/README.md) describes the data."
    )
    return "\n\n".join([head, *(f"### task {name}\n\n{_keys(cls)}" for name, cls in TASKS.items())])


def _registered(where: str, registry: Any, key: str) -> str:
    default = getattr(Training(), key)
    own_name = next(name for name, cls in registry.items() if type(default) is cls)
    head = f"### {where}\n\n`name` is one of the following; without one, keys change the default, `{own_name}`"
    given = {f.name: getattr(default, f.name) for f in fields(default) if getattr(default, f.name) != _default(f)}
    values = f" with {', '.join(f'`{name} = {json.dumps(value)}`' for name, value in given.items())}" if given else ""
    return "\n\n".join(
        [f"{head}{values}.", *(f"#### {key} {name}\n\n{about(cls)}\n\n{_keys(cls)}" for name, cls in registry.items())]
    )


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _keys(cls: type, without: Any = ()) -> str:
    rows = [
        [f"`{one.name}`", one.kind, "" if one.default is MISSING else f"`{_toml(one.default)}`", one.meaning]
        for one in settings_of(cls)
        if one.name not in without
    ]
    return table(COLUMNS, rows) if rows else "It has no other keys."


def _toml(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return str(value)


def _comparisons() -> str:
    """From the docstring of the module that reads comparisons: a key, at least two spaces, its meaning."""
    rows: list[list[str]] = []
    for line in (compare.__doc__ or "").split("\n\n", 1)[1].splitlines():
        key, _, meaning = line.partition("  ")
        if key:
            rows.append([f"`{key}`", meaning.strip()])
        elif line.strip():
            rows[-1][1] += f" {line.strip()}"
    return (
        "## Comparisons\n\n`protofed compare` reads a file with these keys. "
        "[How to compare methods](../how-to/compare.md) has an example.\n\n" + table(["key", "meaning"], rows)
    )
