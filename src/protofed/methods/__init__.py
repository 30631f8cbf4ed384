"""METHODS: every method by name, found in this folder. A module here with a method in it is all that one takes."""

from pathlib import Path
from typing import TYPE_CHECKING

from protofed.api.registry import MethodRegistry

if TYPE_CHECKING:
    from protofed.api.registry import MethodClass

METHODS = MethodRegistry(__name__, Path(__file__).parent)


def bases_of(method: "MethodClass") -> list[str]:
    """The methods that this one can go around: those with a public model; none unless it is a wrapper."""
    if "wrapper" not in method.tags:
        return []
    from protofed.api.method import Method  # not above: METHODS is listed without importing torch

    public = {n: cls for n, cls in METHODS.items() if cls.public is not Method.public and "wrapper" not in cls.tags}
    public = {n: cls for n, cls in public.items() if not cls.has_more_exchanges}
    if method.releases_gradient_sums:
        from protofed.methods._shared.one_step import OneStep

        public = {n: cls for n, cls in public.items() if issubclass(cls, OneStep)}
    return [n for n, cls in public.items() if cls.has_plain_classifier or not method.retrains_classifier]
