"""Tables, pictures and progress, on numbers worked out by hand."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from protofed.metrics.registry import METRICS
from protofed.reports import comparison as reporting
from protofed.reports import progress
from protofed.reports.comparison import _file_name, differing_terms
from protofed.reports.figures import accuracy_over_rounds, standings
from protofed.reports.tables import (
    Numbers,
    Row,
    cost_sheet,
    domain_sheet,
    half_width,
    home_sheet,
    metric,
    paired_differences,
    personal_sheet,
    sheets,
)
from protofed.runs import compare
from protofed.runs.results import Round
from protofed.runs.runner import execute
from protofed.runs.sweep import Outcome
from run_doubles import small_experiment

IDS = {metric.id for metric in METRICS}
COSTS = {"down", "up", "seconds", "left_out", "reached"}


def numbers(values: Mapping[str, float], seed: int = 0) -> Numbers:
    """Numbers of a run by what they are called: metrics, costs, and accuracies on domains."""
    domains = {name: {"accuracy": value} for name, value in values.items() if name not in IDS | COSTS}
    metrics = {name: value for name, value in values.items() if name in IDS}
    costs = {name: value for name, value in values.items() if name in COSTS}
    return Numbers(seed, domains, own_domains=domains, metrics=metrics, costs=costs)


def row(label: str, *averages: float, own_models: bool = False) -> Row:
    seeds = [numbers({"a": v - 0.1, "b": v + 0.1, "average": v, "own": v + 0.05}, k) for k, v in enumerate(averages)]
    return Row(label, seeds, own_models, is_reference=label == "fedavg")


def test_cells_are_mean_and_sample_deviation_in_percent() -> None:
    # 0.70, 0.72, 0.74: mean 0.72, deviation sqrt((0.02² + 0 + 0.02²) / 2) = 0.02
    assert row("fpl", 0.70, 0.72, 0.74).cell(metric("average")) == "72.0 ± 2.0"
    assert row("fpl", 0.70).cell(metric("average")) == "70.0"
    assert row("fpl", 0.70).cell(metric("public.accuracy")) == "–"
    assert row("fpl").cell(metric("average")) == "failed"


def test_the_table_has_the_papers_layout() -> None:
    rows = [row("local", 0.4, 0.5, own_models=True), row("fedavg", 0.7, 0.74), row("fpl", 0.745, 0.755), row("broken")]
    sheet = domain_sheet(rows, ["a", "b"])
    assert sheet.header == ["method", "a", "b", "AVG", "Δ", "own"]
    names, gains = [cells[0] for cells in sheet.rows], [cells[4] for cells in sheet.rows]
    assert names == ["local*", "fedavg", "fpl", "broken"]
    # Differences 4.5 and 1.5: mean 3, deviation 2.1213; t is 12.706 with one degree of freedom, and √2 = 1.4142.
    assert gains == ["–", "–", "+3.0 [-16.1, +22.1]", "–"]
    assert sheet.markdown().splitlines()[0] == "| method | a | b | AVG | Δ | own |"
    assert sheet.markdown().splitlines()[4].startswith("| fpl | 65.0 ± 0.7 | 85.0 ± 0.7 | 75.0 ± 0.7 | +3.0 [")


def test_own_models_are_compared_by_what_clients_see_at_home() -> None:
    rows = [row("local", 0.4, 0.5, own_models=True), row("fedavg", 0.7, 0.74), row("fpl", 0.75, 0.79)]
    (first, at_home, note), (second, on_domains, _) = sheets(rows, ["a", "b"])
    assert at_home.header == ["method", "a", "b", "own", "Δ"]
    assert [line[3:] for line in at_home.rows] == [
        ["50.0 ± 7.1", "-27.0 [-65.1, +11.1]"],
        ["77.0 ± 2.8", "–"],
        ["82.0 ± 2.8", "+5.0 [+5.0, +5.0]"],
    ]
    assert [line[4] for line in on_domains.rows] == ["–", "–", "+5.0 [+5.0, +5.0]"]
    assert "points of own above FedAvg" in note
    assert first != second
    assert [title for title, _, _ in sheets(rows[1:], ["a", "b"])] == [second]
    assert home_sheet(rows, ["a"]).header == ["method", "own", "Δ"]


def test_differences_are_taken_seed_by_seed() -> None:
    fedavg, late = row("fedavg", 0.5, 0.6, 0.7), row("late", 0.9, 0.65, 0.75)
    late = replace(late, seeds=late.seeds[1:])  # its first seed failed
    assert paired_differences(late, fedavg, metric("average")) == pytest.approx([5.0, 5.0])
    assert half_width([5.0]) is None
    # scipy and a table of Student's t agree: 4.3027 with two degrees of freedom; deviation 1, √3 = 1.7321.
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 1.7321, rel=1e-4)


def test_a_report_says_where_terms_differ() -> None:
    table = {
        "tasks": {"t": {"task": {"name": "minidigits"}}},
        "methods": {
            "FedAvg": {"method": {"name": "fedavg"}},
            "SCAFFOLD": {"method": {"name": "scaffold"}},
            "uniform": {"method": {"name": "fedavg", "weighting": "uniform"}},
            "Adam": {"method": {"name": "fedavg"}, "training": {"optimizer": {"name": "adam", "lr": 0.001}}},
            "wrapped": {"method": {"name": "ga", "base": {"name": "moon", "weighting": "uniform"}}},
        },
    }
    configs = {label: seeds[0] for label, seeds in compare.parse(table, "here").runs["t"].items()}
    said = differing_terms(configs)
    assert said["uniform"] == said["wrapped"] == ["weighting uniform"]
    assert {"optimizer.name adam", "optimizer.lr 0.001"} <= set(said["Adam"])
    assert said.keys() == {"uniform", "wrapped", "Adam"}


def test_a_table_without_fedavg_has_no_gains_and_without_homes_no_such_column() -> None:
    homeless = Row("fpl", [numbers({"a": 0.5, "average": 0.5})])
    assert domain_sheet([homeless], ["a"]).rows == [["fpl", "50.0", "50.0", "–"]]


def test_averages_over_other_domains_are_not_compared() -> None:
    fedavg = Row("fedavg", [numbers({"a": 0.5, "b": 0.7, "average": 0.6})], is_reference=True)
    other = Row("other", [numbers({"a": 0.5, "c": 0.9, "average": 0.7})])
    same = Row("same", [numbers({"a": 0.7, "b": 0.7, "average": 0.7})])
    lines = domain_sheet([fedavg, other, same], ["a", "b", "c"]).rows
    assert lines[1] == ["other", "50.0", "–", "90.0", "70.0", "–"]
    assert lines[2] == ["same", "70.0", "70.0", "–", "70.0", "+10.0"]


def test_published_numbers_stand_below_ours() -> None:
    seeds = [numbers({"a": 0.5, "average": 0.5, "public.accuracy": 0.25, "personal.local_index": 0.75})]
    ours = Row("fpl", seeds, published={"average": 61.63, "public.accuracy": 55.0})
    assert domain_sheet([ours], ["a"]).rows[1] == ["*fpl, published*", "", "61.6", ""]
    personal = personal_sheet([ours])
    assert personal is not None
    assert personal.rows == [
        ["fpl", "25.0", "75.0"],
        ["*fpl, published*", "55.0", ""],
    ]
    assert personal_sheet([row("fpl", 0.5)]) is None


def test_costs_by_hand() -> None:
    seeds = [numbers({"down": 3000, "up": 1500, "seconds": 2.0, "left_out": 1, "reached": 4})] * 2
    late = [numbers({"down": 0, "up": 0, "seconds": 1.0, "left_out": 0})]
    sheet = cost_sheet([Row("fpl", seeds), Row("local", late), Row("broken", [])], target=0.805)
    assert sheet.header[-1] == "rounds to 80.5 %"
    assert sheet.rows == [
        ["fpl", "3.0", "1.5", "2.0", "2", "4, 4"],
        ["local", "0.0", "0.0", "1.0", "0", "not reached"],
        ["broken", "failed", "failed", "failed", "failed", ""],
    ]


def test_the_table_of_the_demo_fits_a_terminal_of_eighty_columns_and_a_wider_one_loses_its_deviations() -> None:
    domains = {"pen": 0.9, "ink": 0.9, "street": 0.9, "print": 0.9, "average": 0.9, "own": 0.9}
    seeds = [numbers(domains), numbers({key: value - 0.01 for key, value in domains.items()}, seed=1)]
    for label, cell in (("fedproto", "89.5±0.7"), ("a method of a rather long name", "89.5 ")):
        console = Console(file=io.StringIO(), width=80)
        sheet = domain_sheet([Row(label, seeds, uses_own_models=True)], ["pen", "ink", "street", "print"])
        console.print(sheet.rich("title", 80))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert shown.count(cell) == 6
        assert f"{label}*" in shown


def rounds(*values: float) -> list[Round]:
    return [
        Round(
            k + 1,
            2,
            {},
            "public model",
            {"a": {"accuracy": v}, "b": {"accuracy": v / 2}},
            summary={"average": 0.75 * v, "own": v},
        )
        for k, v in enumerate(values)
    ]


def test_the_picture_is_a_png_with_a_panel_for_each_domain(tmp_path: Path) -> None:
    path = tmp_path / "new" / "picture.png"
    accuracy_over_rounds({"fedavg": [rounds(0.1, 0.5), rounds(0.2, 0.6)], "fpl": [rounds(0.3, 0.7)]}, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_methods_whose_tasks_differ_share_a_picture_and_every_name_is_in_its_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    other = [replace(r, domains={"b": {"accuracy": 0.5}, "c": {"accuracy": 0.5}}) for r in rounds(0.1, 0.5)]
    accuracy_over_rounds({"one": [rounds(0.1, 0.5)], "_two": [other, other]}, tmp_path / "picture.png", "title")
    (figure,) = found
    assert [axis.get_title() for axis in figure.axes] == ["a", "b", "c", "average over the domains"]
    assert [[len(line.get_xdata()) for line in axis.lines] for axis in figure.axes] == [[2, 0], [2, 2], [0, 2], [2, 2]]
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == ["one", "_two"]


def drawn_by(table: dict[str, Any], methods: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Figure:
    """The picture in the report of runs of three rounds, of which only the last was judged by personal metrics."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    labels = [f"m{k}" for k in range(methods)]
    comparison = compare.parse(
        {
            "seeds": [0],
            "summary": "last",
            "tasks": {"t": {"task": {"name": "minidigits"}}},
            "methods": {label: {"method": {"name": "fedavg"}} for label in labels},
            **table,
        },
        "here",
    )
    lines = rounds(0.1, 0.5, 0.4)
    lines = [replace(r, traffic={"ann": {"down": 1, "up": 1}}, public={"accuracy": r.round / 10}) for r in lines]
    lines[-1] = replace(lines[-1], personal={"local_index": 0.75})
    reporting.write(comparison, [Outcome(lines, True)] * methods, tmp_path)
    return found[0]


def curves(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    axes = figure.axes
    return {axis.get_title(): [(x, y) for x, y in zip(*axis.lines[0].get_data(), strict=True)] for axis in axes}


def test_curves_are_of_the_published_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = {"t": {"columns": ["personal.local_index", "public.accuracy"], "m0": [1.0, 2.0]}}
    found = curves(drawn_by({"published": published}, 2, monkeypatch, tmp_path))
    assert found == {"GM": [(1, 10), (2, 20), (3, 30)], "I_local": [(3, 75)]}


def test_curves_of_a_table_of_domains_are_of_domains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = {"t": {"columns": ["a", "average"], "m0": [1.0, 2.0]}}
    assert list(curves(drawn_by({"published": published}, 1, monkeypatch, tmp_path))) == [
        *("a", "b", "average over the domains")
    ]


def test_a_file_may_name_the_metric_of_curves_and_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = curves(drawn_by({"metric": "public.accuracy", "target": 20}, 1, monkeypatch, tmp_path))
    assert list(found) == ["GM"]
    assert "rounds to 20 % GM |" in (tmp_path / "report.md").read_text()


def test_the_target_is_of_the_metric_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn_by({"target": 30}, 1, monkeypatch, tmp_path)
    assert (tmp_path / "report.md").read_text().splitlines()[-1].endswith("| 2 |")  # 0.75 · 50 %
    drawn_by({"metric": "public.accuracy", "target": 30}, 1, monkeypatch, tmp_path)
    assert (tmp_path / "report.md").read_text().splitlines()[-1].endswith("| 3 |")


def test_many_methods_stand_by_the_last_published_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = {"t": {"columns": ["personal.local_index", "public.accuracy"], "m0": [1.0, 2.0]}}
    figure = drawn_by({"published": published}, 9, monkeypatch, tmp_path)
    assert figure.axes[0].get_xlabel() == "I_local, %"
    assert {round(bar.get_width()) for bar in figure.axes[0].patches} == {75}


def test_a_note_is_in_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn_by({"note": "\nMomentum is not given,\nand 0.9 here.\n"}, 1, monkeypatch, tmp_path)
    head, _, _ = (tmp_path / "report.md").read_text().partition("## t")
    assert "\nMomentum is not given, and 0.9 here.\n" in head


def test_a_report_of_runs_that_were_stopped_is_marked_and_says_how_far_they_are(tmp_path: Path) -> None:
    table = {
        "seeds": [0, 1],
        "tasks": {"t": {"task": {"name": "minidigits"}}},
        "common": {"training": {"rounds": 3}},
        "methods": {label: {"method": {"name": "fedavg"}} for label in ("FedAvg", "late", "begun", "waiting", "bad")},
    }
    lines = [replace(r, traffic={"ann": {"down": 1, "up": 1}}) for r in rounds(0.1, 0.5, 0.4)]
    unjudged = [replace(r, domains={}, summary={}) for r in lines[:1]]
    done, failed = Outcome(lines, True), Outcome([], False, "no files")
    outcomes = [
        *(done, done),
        *(Outcome(lines[:1], False), Outcome(lines[:2], False)),
        *(Outcome(unjudged, False), Outcome(unjudged, False)),
        *(Outcome([], False), Outcome([], False)),
        *(failed, failed),
    ]
    comparison = compare.parse(table, "here")
    report = reporting.write(comparison, outcomes, tmp_path).read_text()
    assert report.splitlines()[2].startswith("**Partial: the comparison was stopped, and 6 of 10 runs are not done.**")
    # The late one has 10 % and 50 % on domain a so far: 30.0 ± 28.3. Nothing is compared with it.
    assert "| late (1 to 2 of 3 rounds) | 20.0 ± 14.1 | 10.0 ± 7.1 | 15.0 ± 10.6 | – |" in report
    assert "| begun (1 of 3 rounds) | – | – | – | – |" in report
    assert "| waiting (0 of 3 rounds) | – |" in report
    assert "| bad | failed |" in report
    assert "- late, seed 0: 1 of 3 rounds\n- late, seed 1: 2 of 3 rounds\n- begun, seed 0: 1 of 3 rounds" in report
    assert json.loads((tmp_path / "results.json").read_text())["partial"] is True
    whole = reporting.write(comparison, [done] * 10, tmp_path).read_text()
    assert "artial" not in whole
    assert json.loads((tmp_path / "results.json").read_text())["partial"] is False


def test_lines_say_how_far_each_of_many_runs_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress.runs(console, {"FedAvg, seed 0": 8, "FPL, seed 0": 2}) as shown:
        for done in ([0, 0], [1, 0], [1, 0], [2, 0], [3, 1], [8, 2]):
            shown.update(done)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "FedAvg, seed 0: 1 of 8 rounds",
        "FedAvg, seed 0: 2 of 8 rounds",
        "FPL, seed 0: 1 of 2 rounds",
        "FedAvg, seed 0: 8 of 8 rounds",
        "FPL, seed 0: 2 of 2 rounds",
    ]


def test_bars_are_of_the_runs_that_are_under_way() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    shown = progress.runs(console, {"FedAvg, seed 0": 8, "FPL, seed 0": 2, "MOON, seed 0": 2})
    assert isinstance(shown, progress.LiveRuns)
    with shown:
        shown.update([3, 2, 0])
        visible = {task.description: task.completed for task in shown._progress.tasks if task.visible}
    assert visible == {"rounds of all runs": 5, "FedAvg, seed 0": 3}


def test_many_methods_are_drawn_as_standings(tmp_path: Path) -> None:
    standings(
        [row(f"method {k}", 0.1 * k, 0.1 * k + 0.05) for k in range(10)] + [row("broken")], tmp_path / "a.png", "t"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plain_lines_outside_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    observer = progress.observer(console)
    assert isinstance(observer, progress.Plain)
    with observer:
        execute(small_experiment("fedavg", 2), observer=observer)
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("round 1/2  low ")
    assert second.startswith("round 2/2  low ")
    assert " average " in second


def test_a_line_names_clients_that_were_left_out() -> None:
    result = replace(rounds(0.5)[0], failures={"c1": "NON_FINITE"}, seconds={"train": 1.0, "evaluate": 0.5})
    assert progress.line(result, 9) == "round 1/9  a 50.0  b 25.0  average 37.5  left out: c1 (NON_FINITE)  1.5 s"


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_bars_on_a_terminal(method: str) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    observer = progress.observer(console)
    assert isinstance(observer, progress.Live)
    with observer:
        execute(small_experiment(method, 2), observer=observer)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "2/2" in shown
    assert ("average" if method == "fedavg" else "own") in shown
    assert "clients" in shown


ODD = ["a | b", "fedavg [/slow]", "fedavg [slow]", "$x", "one\ntwo"]


def test_names_are_names_in_every_table_and_picture(tmp_path: Path) -> None:
    """And no mark of a table, of a terminal's colours or of a formula."""
    rows = [row(name, 0.5) for name in ODD]
    sheet = domain_sheet(rows, ["a", "b"])
    lines = sheet.markdown().splitlines()
    assert len(lines) == 2 + len(ODD)
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    console = Console(file=io.StringIO(), width=120)
    console.print(sheet.rich("ours [/x]", 120))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in ["a | b", "fedavg [/slow]", "fedavg [slow]", "ours [/x]"])
    standings(rows, tmp_path / "a.png", "$ours")
    rounds = execute(small_experiment(rounds=1)).rounds
    accuracy_over_rounds({name: [rounds] for name in ODD}, tmp_path / "b.png", "$ours")
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "b.png").exists()


@pytest.mark.parametrize("width", range(40, 90))
def test_a_table_never_cuts_a_number(width: int) -> None:
    rows = [row("fedavg", 0.7, 0.74), row("fpl", 0.745, 0.755)]
    console = Console(file=io.StringIO(), width=width)
    console.print(domain_sheet(rows, ["a", "b"]).rich("t", width))
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_tasks_have_pictures_of_their_own() -> None:
    tasks = ["skew+", "skew-", "shift"]
    assert [_file_name(task, k, tasks) for k, task in enumerate(tasks)] == ["skew__1.png", "skew__2.png", "shift.png"]
