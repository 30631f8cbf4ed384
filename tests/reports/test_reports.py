"""Tables, pictures and progress, on numbers worked out by hand."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiment_doubles import small_experiment
from protofed.experiments.run import Round, execute
from protofed.reports import progress
from protofed.reports.figures import accuracy_over_rounds
from protofed.reports.tables import Comparison, Row


def row(method: str, *averages: float, public: bool = True) -> Row:
    seeds = [{"a": v - 0.1, "b": v + 0.1, "average": v, "own_domain": v + 0.05} for v in averages]
    return Row(method, public, seeds)


def test_cells_are_mean_and_sample_deviation_in_percent() -> None:
    # 0.70, 0.72, 0.74: mean 0.72, deviation sqrt((0.02² + 0 + 0.02²) / 2) = 0.02
    assert row("fpl", 0.70, 0.72, 0.74).cell("average") == "72.0 ± 2.0"
    assert row("fpl", 0.70).cell("average") == "70.0"


def test_the_table_has_the_papers_layout() -> None:
    table = Comparison([row("local", 0.4, 0.5, public=False), row("fedavg", 0.7, 0.74), row("fpl", 0.745, 0.755)])
    assert table.header == ["method", "a", "b", "AVG", "Δ", "own"]
    names, gains = [cells[0] for cells in table.cells()], [cells[4] for cells in table.cells()]
    assert names == ["local*", "fedavg", "fpl"]
    assert gains == ["-27.0", "–", "+3.0"]  # 0.45 − 0.72, and 0.75 − 0.72
    assert table.markdown().splitlines()[0] == "| method | a | b | AVG | Δ | own |"
    assert table.markdown().splitlines()[4].startswith("| fpl | 65.0 ± 0.7 | 85.0 ± 0.7 | 75.0 ± 0.7 | +3.0 |")


def test_a_table_without_fedavg_has_no_gains_and_without_homes_no_such_column() -> None:
    homeless = Row("fpl", True, [{"a": 0.5, "average": 0.5}])
    assert Comparison([homeless]).cells() == [["fpl", "50.0", "50.0", "–"]]


def test_the_table_of_the_demo_fits_a_terminal_of_eighty_columns() -> None:
    domains = {"pen": 0.9, "ink": 0.9, "street": 0.9, "print": 0.9, "average": 0.9, "own_domain": 0.9}
    seeds = [domains, {key: value - 0.01 for key, value in domains.items()}]
    console = Console(file=io.StringIO(), width=80)
    console.print(Comparison([Row("fedproto", False, seeds)]).rich("title"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("89.5±0.7") == 6
    assert "fedproto*" in console.file.getvalue()


def rounds(*values: float) -> list[Round]:
    return [Round(k + 1, 2, {}, "public model", {"a": v, "b": v / 2}, 0.75 * v, v, {}) for k, v in enumerate(values)]


def test_the_picture_is_a_png_with_a_panel_for_each_domain(tmp_path: Path) -> None:
    path = tmp_path / "new" / "picture.png"
    accuracy_over_rounds({"fedavg": [rounds(0.1, 0.5), rounds(0.2, 0.6)], "fpl": [rounds(0.3, 0.7)]}, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


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
    assert "average" in shown
    assert "clients" in shown
