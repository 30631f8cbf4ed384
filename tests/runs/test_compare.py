"""Files of comparisons: which runs they ask for, and what is wrong with a bad one."""

import copy
from pathlib import Path
from typing import Any

import pytest

from protofed import BadInput
from protofed.runs import compare
from protofed.runs.compare import merged, parse

TABLE: dict[str, Any] = {
    "title": "Title",
    "seeds": [3, 1],
    "summary": "best",
    "target": 80,
    "common": {"training": {"rounds": 7, "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.1}}},
    "tasks": {
        "shift": {"task": {"name": "minidigits"}},
        "skew": {"task": {"name": "minidigits_skewed"}, "training": {"epochs": 2}},
    },
    "methods": {
        "FedAvg": {"method": {"name": "fedavg"}},
        "FPL": {
            "method": {"name": "fpl", "temperature": 0.1},
            "training": {"optimizer": {"lr": 0.25}},
            "on": {"skew": {"method": {"temperature": 0.3}}},
        },
        "Adam": {"method": {"name": "fedavg"}, "training": {"optimizer": {"name": "adam"}}},
    },
    "small": {"training": {"rounds": 1}},
    "published": {"shift": {"columns": ["pen", "average"], "FPL": [90.5, "-"]}},
}


def test_sections_are_laid_over_one_another() -> None:
    found = parse(TABLE, "test")
    assert (found.title, found.seeds, found.summary, found.target) == ("Title", (3, 1), "best", 0.8)
    assert {task: list(methods) for task, methods in found.runs.items()} == {
        "shift": ["FedAvg", "FPL", "Adam"],
        "skew": ["FedAvg", "FPL", "Adam"],
    }
    assert len(found.configs) == 12
    assert [c.training.seed for c in found.runs["skew"]["FPL"]] == [3, 1]
    shift, skew = found.runs["shift"]["FPL"][0].resolved(), found.runs["skew"]["FPL"][0].resolved()
    assert shift["training"]["optimizer"] | {"lr": 0.25, "momentum": 0.1} == shift["training"]["optimizer"]
    assert (shift["method"]["temperature"], skew["method"]["temperature"]) == (0.1, 0.3)
    assert (shift["training"]["epochs"], skew["training"]["epochs"]) == (5, 2)
    assert shift["training"]["rounds"] == skew["training"]["rounds"] == 7
    assert found.published == {"shift": {"FPL": {"pen": 90.5}}}


def test_another_optimiser_does_not_inherit_the_settings_of_the_first() -> None:
    optimizer = parse(TABLE, "test").runs["shift"]["Adam"][0].resolved()["training"]["optimizer"]
    assert optimizer["name"] == "adam"
    assert optimizer["lr"] != 0.5


def test_the_small_form_and_overrides_go_over_everything() -> None:
    small = parse(TABLE, "test", is_small=True, overrides=["training.epochs=9"])
    assert {c.training.rounds for c in small.configs} == {1}
    assert {c.training.seed for c in small.configs} == {3}, "the first seed will do"
    assert {c.training.epochs for c in small.configs} == {9}


def test_merged_leaves_what_it_reads_alone() -> None:
    a, b = {"x": {"y": 1, "z": {"name": "p", "k": 1}}}, {"x": {"z": {"name": "q"}}, "w": 2}
    before = copy.deepcopy((a, b))
    assert merged(a, b) == {"x": {"y": 1, "z": {"name": "q"}}, "w": 2}
    assert merged(a, {"x": {"z": {"name": "p", "j": 2}}})["x"]["z"] == {"name": "p", "k": 1, "j": 2}
    assert (a, b) == before


def test_some_of_the_tasks_and_methods_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(
        '[tasks.a.task]\nname = "minidigits"\n[tasks.b.task]\nname = "minidigits_skewed"\n'
        '[methods.x.method]\nname = "fedavg"\n[methods.x.on.b.training]\nrounds = 2\n[methods.y.method]\nname = "fpl"\n'
        '[published.a]\ncolumns = ["average"]\nx = [1]\ny = [2]\n[published.b]\ncolumns = ["average"]\ny = [3]\n'
    )
    found = compare.load(path, tasks=["a"], methods=["x"])
    assert {task: list(methods) for task, methods in found.runs.items()} == {"a": ["x"]}
    assert found.published == {"a": {"x": {"average": 1}}}
    assert len(compare.load(path).configs) == 12
    with pytest.raises(BadInput, match="is not in the comparison"):
        compare.load(path, tasks=["c"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": [1]}, "sedes: unknown key; did you mean 'seeds'"),
        ({"seeds": []}, "seeds: must be distinct whole numbers"),
        ({"seeds": [1, 1]}, "seeds: must be distinct whole numbers"),
        ({"seeds": [True]}, "seeds: must be distinct whole numbers"),
        ({"seeds": 3}, "seeds: must be a list, not 3"),
        ({"seeds": [[0]]}, "seeds: must be distinct whole numbers"),
        ({"common": 3}, "common: must be a section, not 3"),
        ({"published": "x"}, "published: must be a section, not 'x'"),
        ({"published": {"shift": 5}}, "published: shift: must be a section, not 5"),
        ({"published": {"shift": {"columns": [["a"]], "FPL": [1]}}}, "published.shift.columns: must be names"),
        ({"methods": {"FPL": {"method": {"name": "fpl"}, "on": 3}}}, "methods.FPL: on: must be a section, not 3"),
        ({"summary": "first"}, "summary: must be one of last_five, last, best, validation, not 'first'"),
        ({"metric": "public.acuracy"}, "metric: 'public.acuracy' is no metric of a run"),
        ({"metric": "domain.accuracy"}, "metric: 'domain.accuracy' is no metric of a run"),
        ({"note": ["a"]}, "note: must be a text"),
        ({"target": 0}, "target: must be a percentage, not 0"),
        ({"methods": {}}, "methods: needs at least one section"),
        ({"tasks": {"a": 3}}, "tasks: needs at least one section"),
        ({"methods": {"FPL": {"method": {"name": "fpll"}}}}, "FPL on shift.*'fpll' is unknown; did you mean 'fpl'"),
        ({"methods": {"FPL": {"method": {"name": "fpl"}, "on": {"shft": {}}}}}, "FPL.on.shft: .*did you mean 'shift'"),
        ({"published": {"shft": {}}}, "published.shft: is not in the comparison; did you mean 'shift'"),
        ({"published": {"shift": {"columns": ["a"], "FLP": [1]}}}, "published.shift.FLP: .*did you mean 'FPL'"),
        ({"published": {"shift": {"columns": ["a"], "FPL": [1, 2]}}}, "FPL: must be a list of 1 numbers"),
        ({"published": {"shift": {"columns": ["a"], "FPL": ["x"]}}}, "'x' is neither a number nor \"-\""),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse({**TABLE, **change}, "test")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "experiments").rglob("*.toml")), ids=lambda path: path.stem
)
def test_every_comparison_that_ships_can_be_read(path: Path) -> None:
    for is_small in (False, True):
        assert compare.load(path, is_small=is_small).configs
