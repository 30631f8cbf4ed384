"""METHODS: every method by name, found in this folder. A module here with a method in it is all that one takes."""

from protofed.api.registry import MethodClass, MethodRegistry
from protofed.methods.families import GlobalModel

METHODS = MethodRegistry(__name__, __path__)


def bases_of(method: MethodClass) -> list[str]:
    """The methods that this one can go around; none unless it is a wrapper."""
    if "wrapper" not in method.tags:
        return []
    every = {name: cls for name, cls in METHODS.items() if issubclass(cls, GlobalModel)}
    return [name for name, cls in every.items() if cls.has_plain_classifier or not method.retrains_classifier]
