"""Combinations of which the fast tests are a part that leaves no value out."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def covering(**factors: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """A test of all combinations of the factors' values. Fast are so many as the longest factor has values, so that
    each value of each factor is in one; `make test-all` runs the others too. A mapping gives the values their names."""
    named = [
        [*factor.items()] if isinstance(factor, Mapping) else [(str(v), v) for v in factor]
        for factor in factors.values()
    ]
    fast = {tuple(k % len(values) for values in named) for k in range(max(map(len, named)))}
    combinations = []
    for place in product(*(range(len(values)) for values in named)):
        names, values = zip(*(own[k] for own, k in zip(named, place, strict=True)), strict=True)
        marks = () if place in fast else pytest.mark.slow
        combinations.append(pytest.param(*values, marks=marks, id="-".join(names)))
    return pytest.mark.parametrize(tuple(factors), combinations)
