"""Comparisons as TOML: several methods on one or more tasks with several seeds, and the published numbers beside ours.

title, source     what is compared, and where the published numbers stand
seeds             of every run
summary           last_five, last or best
target            an accuracy, in percent; how many rounds it takes to reach it is reported
[common]          sections that all runs share, as in an experiment's file: common.training and so on
[tasks.LABEL]     sections that runs on this task have, its task.name among them
[methods.LABEL]   sections that runs of this method have, its method.name among them; [methods.LABEL.on.TASK] more of
                  them on one task
[small]           sections for a run on a sliver with the first seed, to see that everything works
[published.TASK]  columns, and one list of percentages for each method's label
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from protofed.errors import BadInput
from protofed.runs.config import config
from protofed.runs.config.config import NO_IMPORTS, Config
from protofed.runs.config.schema import nearest
from protofed.runs.config.toml import Place, Table, document
from protofed.runs.config.toml_locations import Key
from protofed.runs.config.user_classes import Importer, importer_for
from protofed.runs.runner import Summary

KEYS = ("title", "source", "seeds", "summary", "target", "common", "tasks", "methods", "small", "published")


@dataclass(frozen=True)
class Comparison:
    title: str
    source: str
    """Where the published numbers stand; empty where there are none."""
    seeds: tuple[int, ...]
    summary: Summary
    target: float | None
    """A share."""
    runs: Mapping[str, Mapping[str, tuple[Config, ...]]]
    """By task and method: a configuration for each seed."""
    published: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By task, method and column: percent."""

    @property
    def configs(self) -> list[Config]:
        return [one for methods in self.runs.values() for seeds in methods.values() for one in seeds]


def load(
    path: Path,
    *,
    is_small: bool = False,
    overrides: Iterable[str] = (),
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> Comparison:
    """The comparison in a file; of its tasks and methods only these, by their labels, if some are named."""
    table, place = document(path)
    for key, chosen in (("tasks", tasks), ("methods", methods)):
        known = _labelled(table, key, str(path))
        _refuse_unknown(chosen, known, f"{path}: {key}")
        table[key] = {label: own for label, own in known.items() if label in chosen} if chosen else known
    chosen_table = _only_chosen(table, str(path))
    importer = importer_for(path)
    return parse(chosen_table, str(path), is_small=is_small, overrides=overrides, place=place, importer=importer)


def _only_chosen(table: dict[str, Any], source: str) -> dict[str, Any]:
    """The table without what it says of tasks and methods that were left out."""
    tasks, methods = table["tasks"], table["methods"]
    methods = {
        label: {**own, "on": {t: v for t, v in _tables(own, "on", f"{source}: methods.{label}").items() if t in tasks}}
        if "on" in own
        else own
        for label, own in methods.items()
    }
    published = {
        task: {label: row for label, row in rows.items() if label == "columns" or label in methods}
        for task, rows in _tables(table, "published", source).items()
        if task in tasks
    }
    return {**table, "methods": methods, "published": published}


def parse(
    table: Table,
    source: str,
    *,
    is_small: bool = False,
    overrides: Iterable[str] = (),
    place: Place | None = None,
    importer: Importer = NO_IMPORTS,
) -> Comparison:
    """The comparison in a table; `overrides` are set in every run."""
    for key in table:
        if key not in KEYS:
            raise BadInput(f"{source}: {key}: unknown key{nearest(key, KEYS)}")
    tasks, methods = (_labelled(table, key, source) for key in ("tasks", "methods"))
    small = _value(table, "small", dict, {}, source) if is_small else {}
    seeds = tuple(_value(table, "seeds", list, [0, 1, 2], source))
    if not seeds or not all(type(s) is int and s >= 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise BadInput(f"{source}: seeds: must be different whole numbers, not {list(seeds)}")
    seeds = seeds[:1] if is_small else seeds

    def configs(task: str, method: str) -> tuple[Config, ...]:
        own = {key: value for key, value in methods[method].items() if key != "on"}
        on = _tables(methods[method], "on", f"{source}: methods.{method}")
        _refuse_unknown(on, tasks, f"{source}: methods.{method}.on")
        sections = merged(_value(table, "common", dict, {}, source), tasks[task], own, on.get(task, {}), small)
        sections = {key: value for key, value in sections.items() if value}
        layers: list[Key] = [("small",)] if is_small else []
        layers += [("methods", method, "on", task), ("methods", method), ("tasks", task), ("common",)]

        def where(key: Key) -> str:
            """The line of the last section that has the key, which is the one that counts."""
            found = (place((*layer, *key)) for layer in layers) if place else ()
            return f"{next((one for one in found if one != source), source)} ({method} on {task})"

        return tuple(config.parse(sections, where, [*overrides, f"training.seed={seed}"], importer) for seed in seeds)

    runs = {task: {method: configs(task, method) for method in methods} for task in tasks}
    return Comparison(
        title=_value(table, "title", str, Path(source).stem, source),
        source=_value(table, "source", str, "", source),
        seeds=seeds,
        summary=_summary(table, source),
        target=_target(table, source),
        runs=runs,
        published=dict(_published(table, tasks, methods, source)),
    )


def merged(*tables: Table) -> dict[str, Any]:
    """Later tables over earlier ones, section by section; a section that names something else starts afresh."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            before = result.get(key)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                is_other = "name" in value and value["name"] != before.get("name", value["name"])
                result[key] = merged(value) if is_other else merged(before, value)
            else:
                result[key] = merged(value) if isinstance(value, Mapping) else value
    return result


def _labelled(table: Table, key: str, source: str) -> Mapping[str, Table]:
    found: Mapping[str, Table] = _value(table, key, dict, {}, source)
    if not found or not all(isinstance(value, dict) for value in found.values()):
        raise BadInput(f"{source}: {key}: needs at least one section, such as [{key}.fedavg]")
    return found


def _value(table: Table, key: str, kind: type, default: Any, source: str) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind):
        raise BadInput(f"{source}: {key}: must be a {kind.__name__}, not {value!r}")
    return value


def _tables(table: Table, key: str, source: str) -> dict[str, Any]:
    """The tables below a key, by their labels."""
    found: dict[str, Any] = _value(table, key, dict, {}, source)
    for label in found:
        _value(found, label, dict, {}, f"{source}: {key}")
    return found


def _summary(table: Table, source: str) -> Summary:
    summary: Summary = table.get("summary", "last_five")
    if summary not in get_args(Summary):
        raise BadInput(f"{source}: summary: must be one of {', '.join(get_args(Summary))}, not {summary!r}")
    return summary


def _target(table: Table, source: str) -> float | None:
    target = table.get("target")
    if target is None:
        return None
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 100:
        raise BadInput(f"{source}: target: must be a percentage, not {target!r}")
    return target / 100


def _published(
    table: Table, tasks: Table, methods: Table, source: str
) -> Iterable[tuple[str, dict[str, dict[str, float]]]]:
    published = _tables(table, "published", source)
    _refuse_unknown(published, tasks, f"{source}: published")
    for task, rows in published.items():
        where = f"{source}: published.{task}"
        columns = _value(rows, "columns", list, [], where)
        if not all(isinstance(column, str) for column in columns):
            raise BadInput(f"{where}.columns: must be names, not {columns}")
        numbers = {label: row for label, row in rows.items() if label != "columns"}
        _refuse_unknown(numbers, methods, where)
        for label, row in numbers.items():
            if not isinstance(row, list) or len(row) != len(columns):
                raise BadInput(f"{where}.{label}: must be a list of {len(columns)} numbers, one for each column")
        yield task, {label: _cells(columns, row, f"{where}.{label}") for label, row in numbers.items()}


def _cells(columns: list[str], row: list[Any], where: str) -> dict[str, float]:
    """By column; "-" stands for a number that was not published."""
    for value in row:
        if value != "-" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadInput(f'{where}: {value!r} is neither a number nor "-"')
    return {column: value for column, value in zip(columns, row, strict=True) if value != "-"}


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for label in given:
        if label not in known:
            raise BadInput(f"{where}.{label}: is not in the comparison{nearest(label, list(known))}")
