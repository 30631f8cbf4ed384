"""Which checks of the conformance suite are slow tests.

`test_conformance.py` puts every method with its defaults to every check, and that is never slow. A method's own file
puts other settings to the checks. Fast are there the checks of what a setting is likely to change, and a third of the
others: another third for each setting. What a file repeats for the defaults is slow as a whole.
"""

from typing import Any

from methods import conformance
from methods.conformance import CHECKS
from protofed.api.method import Method
from protofed.methods import METHODS

ALWAYS = (
    conformance.check_order_of_uploads,
    conformance.check_nothing_private_is_uploaded,
    conformance.check_resuming_changes_nothing,
    conformance.check_odd_clients_are_fine,
    conformance.check_models_predict,
    conformance.check_few_clients_at_a_time,
)
"""What clients send and keep, what the server makes of few clients and odd ones, and what the models say."""
SHARE = 3
"""Of so many settings in a row, one is put to each of the other checks."""
DEFAULTS = [cls() for cls in METHODS.values()]


def is_slow(check: Any, settings: list[Any], number: int) -> bool:
    """Whether a check is left to `make test-all`, for the so many-th settings of a test."""
    if settings and all(isinstance(value, str) and value in METHODS for value in settings):
        return False  # the name of a method stands for its defaults
    if any(isinstance(value, Method) and value in DEFAULTS for value in settings):
        return True
    return check not in ALWAYS and (CHECKS.index(check) + number) % SHARE != 0
