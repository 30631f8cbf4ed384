"""The conformance suite: what every method must do. `check_method(MyMethod())` is for methods of your own."""

from typing import Any

from protofed.api.method import Method
from protofed.testing.checks import CHECKS

__all__ = ["CHECKS", "check_method"]


def check_method(method: Method[Any, Any, Any, Any]) -> None:
    """Runs every check on a small federation, in a minute or less. Raises AssertionError that says what is wrong: all
    runtimes agree, one seed gives one result, nothing private is sent, records survive the wire, resuming changes
    nothing, clients may fail, lack classes or be elsewhere, and the server reaches no client's examples."""
    for check in CHECKS:
        try:
            check(method)
        except AssertionError as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            raise AssertionError(f"{type(method).__name__}: {name}: {error}") from error
