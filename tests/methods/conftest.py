"""Marks the checks of the conformance suite that are slow, in every file of this folder: `sampling.py` says which."""

from typing import Any

import pytest

from methods.conformance import CHECKS
from methods.sampling import is_slow

KNOWN = pytest.StashKey[dict[str, dict[tuple[int, ...], int]]]()
"""Of a file: the numbers of the settings of each test, in the order in which they are listed."""


def pytest_itemcollected(item: pytest.Item) -> None:
    params = dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if (check := params.pop("check", None)) in CHECKS:
        known = item.parent.stash.setdefault(KNOWN, {}).setdefault(item.originalname, {})
        number = known.setdefault(tuple(map(id, params.values())), len(known))
        if is_slow(check, [_resolved(item, value) for value in params.values()], number):
            item.add_marker(pytest.mark.slow)


def _resolved(item: Any, value: Any) -> Any:
    """The settings themselves, where a test names them."""
    named = getattr(item.module, "SETTINGS", None)
    return named[value] if isinstance(named, dict) and isinstance(value, str) and value in named else value
