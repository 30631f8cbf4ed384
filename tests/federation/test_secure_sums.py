"""Secure sums over messages: the same state as in one process, bit for bit, whoever drops out where; and what each end
refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.test_secure import CASES, method_of
from federation.grids import RUN, config_of, remote, sites_of, states
from protofed import SecureSettings
from protofed.engine.federation import Federation
from protofed.federation.in_process import InProcess
from protofed.testing.federations import TASK, after, assert_same, memories

SUMS = SecureSettings(sums=True)
FAST = ("fedavg", "fpl_sums", "scaffold", "ifca", "fedpc_sums", "ccvr")
some_cases = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)


def near(case: str, masks: bool = False, **training: object) -> Federation:
    """The same federation in one process."""
    config = config_of(method_of(case), **training)
    settings = replace(SUMS, masks=masks)
    return Federation(config.method, TASK, config.training, secure=settings.made(), name=RUN)


@some_cases
def test_a_method_by_sums_over_messages_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    far = remote(InProcess(sites), config_of(method_of(case), secure=SUMS))
    there = far.finish(after(3, far))
    of = near(case)
    here = of.finish(after(3, of))
    assert not there.failures, there.failures
    assert_same(there.server, here.server, "the server's state over messages")
    assert_same(states(sites, there, far), memories(here), "what clients keep")
