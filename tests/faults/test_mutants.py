"""Every guard has a test that fails without it."""

import ast
from functools import cache

import pytest

from faults.guards import GUARDS, Guard
from faults.mutants import changed, is_missed, marks, shown

MARKS = marks()
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=[guard.id for guard in GUARDS])


@cache
def code_of(text: str) -> str:
    """The same for texts that differ in comments and layout alone."""
    return ast.dump(ast.parse(text))


def test_every_mark_is_of_a_guard_and_every_guard_has_one() -> None:
    assert set(MARKS) == {guard.id for guard in GUARDS}
    assert len({guard.id for guard in GUARDS}) == len(GUARDS)


@every_guard
def test_the_source_without_a_guard_is_other_code_that_parses(guard: Guard) -> None:
    place = MARKS[guard.id]
    text = place.path.read_text(encoding="utf-8")
    without = changed(guard, text.split("\n"), place.lines)
    assert code_of("\n".join(without)) != code_of(text)


@pytest.mark.slow
@every_guard
def test_a_guard_that_is_gone_is_missed(guard: Guard) -> None:
    assert is_missed(guard)


def test_a_guard_is_shown_as_the_lines_that_its_absence_changes() -> None:
    (lock,) = [guard for guard in GUARDS if guard.id == "lock"]
    diff = shown(lock).split("\n")
    assert any(line.startswith("-") and line.endswith("# guard: lock") for line in diff)
    assert [line.strip("+ ") for line in diff if line.startswith("+") and not line.startswith("+++")] == [lock.new]
