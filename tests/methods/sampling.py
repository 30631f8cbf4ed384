"""Which checks of the conformance suite are slow tests.

`test_conformance.py` puts every method with its defaults to every check, and that is never slow. Other tests put other
settings to the checks. Fast are there the checks of what a setting is likely to change, and a sixth of the others:
another sixth for each setting. What repeats the defaults is slow as a whole. `make test-all` leaves nothing out.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from protofed.api.method import Method
from protofed.methods import METHODS
from protofed.testing import CHECKS, checks

ALWAYS = (
    checks.check_order_of_uploads,
    checks.check_nothing_private_is_uploaded,
    checks.check_resuming_changes_nothing,
    checks.check_odd_clients_are_fine,
    checks.check_models_predict,
    checks.check_few_clients_at_a_time,
)
"""What clients send and keep, what the server makes of few clients and odd ones, and what the models say."""
SHARE = 6
"""Of so many settings in a row, one is put to each of the other checks."""
DEFAULTS = [cls() for cls in METHODS.values()]
WHOLE = "test_every_method_conforms"
"""The test of all defaults."""
NUMBERS = pytest.StashKey[dict[tuple[Path, str], dict[tuple[int, ...], int]]]()
"""The numbers of the settings of each test, in the order in which they are listed."""


OF_EACH_KIND = ("fedavg", "local", "scaffold", "fpl", "fedproto", "fedpc", "pfedcspc", "fedmd", "ifca", "fedopt")
"""Methods that differ in what is sent and kept."""
assert set(OF_EACH_KIND) <= set(METHODS)
some_methods = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.slow) for name in METHODS]
)
"""For tests of what a check of the suite shows of every method in another way: the other methods are slow."""


def is_slow(check: Any, settings: Collection[Any], number: int) -> bool:
    """Whether a check is left to `make test-all`, for the so many-th settings of a test."""
    if any(isinstance(value, Method) and value in DEFAULTS for value in settings):
        return True
    return check not in ALWAYS and (CHECKS.index(check) + number) % SHARE != 0


def mark(item: pytest.Function) -> None:
    """Marks a test that is slow. Tests of the suite are known by their argument `check`."""
    params: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if (check := params.pop("check", None)) not in CHECKS or item.originalname == WHOLE:
        return
    known = item.session.stash.setdefault(NUMBERS, {}).setdefault((item.path, item.originalname), {})
    number = known.setdefault(tuple(map(id, params.values())), len(known))
    if is_slow(check, [_resolved(item.module, value) for value in params.values()], number):
        item.add_marker(pytest.mark.slow)


def _resolved(module: Any, value: Any) -> Any:
    """The settings themselves, where a test names them."""
    named = getattr(module, "SETTINGS", None)
    return named[value] if isinstance(named, dict) and isinstance(value, str) and value in named else value
