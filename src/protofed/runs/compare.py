"""Comparisons as TOML: several methods on one or more tasks with several seeds, next to published numbers.

title             of the report
source            where the numbers were published
seeds             one run for each seed
summary           last_five, last, best, or validation: the round that is best on validation examples
target            an accuracy in percent: the report says how many rounds it took to reach it
metric            the metric that is drawn and that the target is of, such as public.accuracy; by default those of the
                  published columns are drawn, and the target is of what methods are compared by
sorted            whether tables begin with the best method; otherwise they keep the order of the file
note              what must be known to read the report: what the source leaves open, and what was chosen
remarks           sentences for the report
[common]          settings of all runs, in the sections of an experiment file: [common.training] and so on
[tasks.LABEL]     settings of the runs on one task, with its task.name
[methods.LABEL]   settings of the runs of one method, with its method.name; [methods.LABEL.on.TASK]: more for one task
[small]           settings for a quick test with the first seed and little data
[published.TASK]  columns, and for each method's label a list of percentages
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from protofed.errors import BadInput
from protofed.metrics.registry import METRICS
from protofed.runs.config import config
from protofed.runs.config.config import NO_IMPORTS, Config
from protofed.runs.config.schema import nearest
from protofed.runs.config.toml import Place, Table, document
from protofed.runs.config.toml_locations import Key
from protofed.runs.config.user_classes import Importer, importer_for
from protofed.runs.results import Summary

KINDS: dict[type, str] = {dict: "a section", list: "a list", str: "a text", bool: "true or false"}
KEYS = (
    "title",
    "source",
    "seeds",
    "summary",
    "target",
    "metric",
    "sorted",
    "note",
    "remarks",
    "common",
    "tasks",
    "methods",
    "small",
    "published",
)


@dataclass(frozen=True)
class Comparison:
    title: str
    source: str
    """Where the numbers were published; empty if there are none."""
    seeds: tuple[int, ...]
    summary: Summary
    target: float | None
    """An accuracy between 0 and 1."""
    runs: Mapping[str, Mapping[str, tuple[Config, ...]]]
    """By task and method: a configuration for each seed."""
    published: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By task, method and column: percent."""
    metric: str = ""
    """The id of the metric that is drawn and that the target is of; empty if the file names none."""
    is_sorted: bool = False
    note: str = ""
    """What must be known to read the report."""
    remarks: tuple[str, ...] = ()

    @property
    def configs(self) -> list[Config]:
        return [one for methods in self.runs.values() for seeds in methods.values() for one in seeds]

    @property
    def labels(self) -> list[str]:
        """What each of these is called."""
        place = {task: f" on {task}" if len(self.runs) > 1 else "" for task in self.runs}
        return [
            f"{method}{place[task]}, seed {seed}"
            for task, methods in self.runs.items()
            for method in methods
            for seed in self.seeds
        ]


def load(
    path: Path,
    *,
    is_small: bool = False,
    overrides: Iterable[str] = (),
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> Comparison:
    """The comparison in a file, restricted to these tasks and methods if labels are given."""
    table, place = document(path)
    if not table.keys() & {"tasks", "methods"} and table.keys() & {"task", "method"}:
        raise BadInput(f"{path} is one experiment, not a comparison of several: protofed run {path}")
    for key, chosen in (("tasks", tasks), ("methods", methods)):
        labelled = _labelled(table, key, str(path))
        _refuse_unknown(chosen, labelled, f"{path}: {key}")
        table[key] = {label: one for label, one in labelled.items() if label in chosen} if chosen else labelled
    chosen_table = _only_chosen(table, str(path))
    importer = importer_for(path)
    return parse(chosen_table, str(path), is_small=is_small, overrides=overrides, place=place, importer=importer)


def _only_chosen(table: dict[str, Any], source: str) -> dict[str, Any]:
    """The table without the entries of tasks and methods that were not chosen."""
    tasks, methods = table["tasks"], table["methods"]
    methods = {
        label: {**one, "on": {t: v for t, v in _tables(one, "on", f"{source}: methods.{label}").items() if t in tasks}}
        if "on" in one
        else one
        for label, one in methods.items()
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
    """The comparison in a table. `overrides` are set in every run."""
    for key in table:
        if key not in KEYS:
            raise BadInput(f"{source}: {key}: unknown key{nearest(key, KEYS)}")
    tasks, methods = (_labelled(table, key, source) for key in ("tasks", "methods"))
    small = _value(table, "small", dict, {}, source) if is_small else {}
    seeds = tuple(_value(table, "seeds", list, [0, 1, 2], source))
    if not seeds or not all(type(s) is int and s >= 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise BadInput(f"{source}: seeds: must be distinct whole numbers, not {list(seeds)}")
    seeds = seeds[:1] if is_small else seeds

    def configs(task: str, method: str) -> tuple[Config, ...]:
        plain = {key: value for key, value in methods[method].items() if key != "on"}
        on = _tables(methods[method], "on", f"{source}: methods.{method}")
        _refuse_unknown(on, tasks, f"{source}: methods.{method}.on")
        sections = merged(_value(table, "common", dict, {}, source), tasks[task], plain, on.get(task, {}), small)
        sections = {key: value for key, value in sections.items() if value}
        layers: list[Key] = [("small",)] if is_small else []
        layers += [("methods", method, "on", task), ("methods", method), ("tasks", task), ("common",)]

        def where(key: Key) -> str:
            """The line of the last layer that has the key: it overrides the others."""
            places = (place((*layer, *key)) for layer in layers) if place else ()
            return f"{next((one for one in places if one != source), source)} ({method} on {task})"

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
        metric=_metric(table, source),
        is_sorted=_value(table, "sorted", bool, False, source),
        note=" ".join(_value(table, "note", str, "", source).split()),
        remarks=_remarks(table, source),
    )


def merged(*tables: Table) -> dict[str, Any]:
    """Merges tables; later ones override earlier ones. A section with another `name` replaces the earlier one."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            before = result.get(key)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                is_replaced = "name" in value and value["name"] != before.get("name", value["name"])
                result[key] = merged(value) if is_replaced else merged(before, value)
            else:
                result[key] = merged(value) if isinstance(value, Mapping) else value
    return result


def _labelled(table: Table, key: str, source: str) -> Mapping[str, Table]:
    labelled: Mapping[str, Table] = _value(table, key, dict, {}, source)
    if not labelled or not all(isinstance(value, dict) for value in labelled.values()):
        raise BadInput(f"{source}: {key}: needs at least one section, such as [{key}.LABEL]")
    return labelled


def _value(table: Table, key: str, kind: type, default: Any, source: str) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind):
        raise BadInput(f"{source}: {key}: must be {KINDS[kind]}, not {value!r}")
    return value


def _tables(table: Table, key: str, source: str) -> dict[str, Any]:
    """The tables below a key, by their labels."""
    labelled: dict[str, Any] = _value(table, key, dict, {}, source)
    for label in labelled:
        _value(labelled, label, dict, {}, f"{source}: {key}")
    return labelled


def _remarks(table: Table, source: str) -> tuple[str, ...]:
    remarks = _value(table, "remarks", list, [], source)
    if not all(isinstance(remark, str) for remark in remarks):
        raise BadInput(f"{source}: remarks: must be a list of texts")
    return tuple(remarks)


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


def _metric(table: Table, source: str) -> str:
    metric: str = _value(table, "metric", str, "", source)
    known = [one.id for one in METRICS if one.group != "domain"]
    if metric and metric not in known:
        raise BadInput(f"{source}: metric: {metric!r} is no metric of a run{nearest(metric, known)}")
    return metric


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
    """The numbers by column. "-" means that none was published."""
    for value in row:
        if value != "-" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadInput(f'{where}: {value!r} is neither a number nor "-"')
    return {column: value for column, value in zip(columns, row, strict=True) if value != "-"}


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for label in given:
        if label not in known:
            raise BadInput(f"{where}.{label}: is not in the comparison{nearest(label, list(known))}")
