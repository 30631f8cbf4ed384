"""Every equation that the code cites has tests, and every equation with tests is cited: no gap in either direction.

Run as a script, it prints the list.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "protofed"
PAPERS: dict[str, dict[str, Any]] = tomllib.loads((TESTS / "equations.toml").read_text(encoding="utf-8"))

CITED = re.compile(r"Eqs?\.\s+((?:\(\d+\)(?:,\s+|\s+and\s+|\s+or\s+|\s+to\s+)?)+)")


def cited(text: str) -> set[int]:
    """The numbers in `Eq. (3)`, `Eq. (8) and (9)`, `Eq. (3) to (6)`."""
    found: set[int] = set()
    for run in CITED.findall(text):
        numbers = [int(number) for number in re.findall(r"\d+", run)]
        found |= set(numbers)
        for first, last in re.findall(r"\((\d+)\)\s+to\s+\((\d+)\)", run):
            found |= set(range(int(first), int(last) + 1))
    return found


def table_of(paper: str) -> dict[int, list[str]]:
    return {int(key): names for key, names in PAPERS[paper].items() if key != "modules"}


def functions(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_citations_are_read_as_they_are_written() -> None:
    text = "Eq. (3) and Eq. (8) and (9); by Eq. (10) to (12), as in Eq. (4), (5)\nand (7). Not Eq. 13 nor (14)."
    assert cited(text) == {3, 4, 5, 7, 8, 9, 10, 11, 12}


@pytest.mark.parametrize("paper", PAPERS)
def test_what_the_code_cites_has_tests_and_what_has_tests_is_cited(paper: str) -> None:
    in_code = set().union(
        *(cited((SOURCE / module).read_text(encoding="utf-8")) for module in PAPERS[paper]["modules"])
    )
    assert in_code == set(table_of(paper))


@pytest.mark.parametrize("paper", PAPERS)
def test_the_tests_are_there(paper: str) -> None:
    for number, names in table_of(paper).items():
        assert names, f"equation {number} has no test"
        for name in names:
            file, _, function = name.partition("::")
            assert function in functions(TESTS / file), f"equation {number}: there is no {name}"


if __name__ == "__main__":
    for paper in PAPERS:
        print(f"\n{paper}: {', '.join(PAPERS[paper]['modules'])}")
        for number, names in sorted(table_of(paper).items()):
            print(f"  Eq. ({number})\n    " + "\n    ".join(names))
