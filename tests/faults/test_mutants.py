"""Every guard has a test that fails without it."""

import pytest

from faults.guards import GUARDS, Guard
from faults.mutants import is_missed, text_of

every_guard = pytest.mark.parametrize("guard", GUARDS, ids=[guard.name for guard in GUARDS])


@every_guard
def test_a_guard_is_where_the_list_says(guard: Guard) -> None:
    assert text_of(guard).count(guard.old) == 1


@pytest.mark.slow
@every_guard
def test_a_guard_that_is_gone_is_missed(guard: Guard) -> None:
    assert is_missed(guard)
