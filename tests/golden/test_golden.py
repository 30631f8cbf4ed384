"""No method's numbers change unless somebody means them to."""

import pytest

from golden.states import CASES, TASKS, golden, processor, recorded


@pytest.mark.parametrize("task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.slow) for task in TASKS[1:])])
@pytest.mark.parametrize("case", CASES)
def test_three_rounds_end_in_the_recorded_states(case: str, task: str) -> None:
    kept = recorded()
    then, now = kept["states"][f"{task}: {case}"], golden(case, task)
    assert now.server_norm == pytest.approx(then["server_norm"], rel=1e-3)
    assert now.clients_norm == pytest.approx(then["clients_norm"], rel=1e-3)
    if kept["processor"] == processor():  # other processors round the last bits otherwise
        assert now.server == then["server"]
        assert now.clients == then["clients"]


def test_every_recorded_state_is_compared() -> None:
    assert set(recorded()["states"]) == {f"{task}: {case}" for task in TASKS for case in CASES}
