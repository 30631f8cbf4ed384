"""Nothing mixes tensors of the runtime's device with those of the CPU: protected runs and all methods on a pretended
device, where a GPU's refusals are seen without a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from elsewhere import THERE, pretended
from protofed import METHODS
from protofed.runtimes.sequential import Sequential
from runtimes.test_cohort import after, difference
from runtimes.test_protected_runs import CASES, ended


@pytest.mark.parametrize("case", CASES)
def test_a_protected_run_works_elsewhere(case: str) -> None:
    with pretended():
        found = ended(CASES[case](Sequential(str(THERE))))
    assert difference(found, ended(CASES[case](Sequential()))) == 0


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_elsewhere(name: str) -> None:
    with pretended():
        found = after(METHODS[name](), Sequential(str(THERE)), rounds=2, epochs=1, batch_size=8)
    assert found.failures == ()
    expected = after(METHODS[name](), Sequential(), rounds=2, epochs=1, batch_size=8)
    assert difference(found, expected) == 0
