"""No method's numbers change unless somebody means them to."""

from typing import Any

import pytest

from golden.states import CASES, TASKS, golden, processor, recorded


def close(case: str) -> float:
    """How far norms may differ between processors. In FPL's clustering the last bits decide who is whose neighbour:
    1.1e-2 was seen there, and at most 7e-5 elsewhere."""
    return 3e-2 if case.startswith("fpl") else 1e-3


FAST = ("fedavg", "scaffold", "fpl", "fedpc", "pfedcspc")


def marked(case: str, task: str) -> Any:
    """All cases take some four minutes: the fast ones are one method of each kind on one task."""
    is_fast = case in FAST and task == TASKS[0]
    return pytest.param(case, task, marks=() if is_fast else pytest.mark.slow, id=f"{task}-{case}")


@pytest.mark.parametrize(("case", "task"), [marked(case, task) for task in TASKS for case in CASES])
def test_three_rounds_end_in_the_recorded_states(case: str, task: str) -> None:
    then, now = recorded()[f"{task}: {case}"], golden(case, task)
    assert now.server_norm == pytest.approx(then["server_norm"], rel=close(case))
    assert now.clients_norm == pytest.approx(then["clients_norm"], rel=close(case))
    if then["processor"] == processor():  # other processors round the last bits otherwise
        assert now.server == then["server"]
        assert now.clients == then["clients"]


def test_every_recorded_state_is_compared() -> None:
    assert set(recorded()) == {f"{task}: {case}" for task in TASKS for case in CASES}
