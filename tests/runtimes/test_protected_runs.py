"""Secure sums, differential privacy and robust rules for a whole cohort, on a GPU where there is one: what `sequential`
gives on a CPU, but for rounding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from engine import test_record_sums as record_sums
from engine import test_secure as sums
from privacy import private_runs
from protofed import PrivacySettings
from protofed.engine.federation import Federation
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.transforms import robust_stage
from runtimes.test_cohort import DEVICES, difference
from transforms import test_robust_stage as robust

ROUNDS = 2
SUMMED = ("fedavg", "scaffold", "fpl, global", "fpl_sums", "fedpc_sums", "fednh")
NOISED = ("fedavg", "fedprox", "fpl", "fednh")


def secure(case: str) -> Callable[[Any], Federation]:
    return lambda runtime: sums.secure(sums.method_of(case), runtime, rounds=ROUNDS)


def by_records(name: str) -> Callable[[Any], Federation]:
    settings = PrivacySettings("record", epsilon=50.0, clip_features=2.0)
    return lambda runtime: private_runs.private(name, runtime, privacy=settings, rounds=ROUNDS)


def by_clients(name: str) -> Callable[[Any], Federation]:
    settings = PrivacySettings("client", epsilon=50.0)
    return lambda runtime: record_sums.noised(name, runtime, settings, rounds=ROUNDS)


def by_records_in_sums(base: str) -> Callable[[Any], Federation]:
    return lambda runtime: record_sums.of_base(base, runtime=runtime, rounds=ROUNDS)


def against_liars(name: str, **rules: Any) -> Callable[[Any], Federation]:
    def made(runtime: Any) -> Federation:
        of = robust.federation(name, robust_stage.RobustSettings(faulty=1, **rules), runtime=runtime)
        return replace(of, training=replace(of.training, rounds=ROUNDS))

    return made


CASES = {
    **{f"masked, {case}": secure(case) for case in SUMMED},
    **{f"noise at clients, {name}": by_records(name) for name in NOISED},
    **{f"noise in sums, {base}": by_records_in_sums(base) for base in ("fpl", "fednh")},
    "clients' noise in sums": by_clients("fedavg"),
    **{f"weights {rule}": against_liars("fedavg", weights=rule) for rule in ("trimmed", "median", "geometric")},
    **{f"prototypes {rule}": against_liars("fpl", prototypes=rule) for rule in ("clip", "median", "filter")},
    "weights nnm_trimmed": against_liars("fedpc", weights="nnm_trimmed"),
}


def ended(of: Federation) -> Any:
    state = of.start()
    for _ in range(ROUNDS):
        state = of.advance(state)
    assert state.failures == ()
    return of.finish(state)


RUNTIMES = [Cohort, *(Sequential for device in DEVICES if device != "cpu")]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("case", CASES)
def test_a_protected_run_is_the_same_on_every_device(case: str, runtime: Any) -> None:
    there = runtime(DEVICES[-1])
    try:
        found = ended(CASES[case](there))
    finally:
        there.close()
    assert difference(found, ended(CASES[case](Sequential()))) <= 1e-3
