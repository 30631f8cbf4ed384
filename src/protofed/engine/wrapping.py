"""What settings of a run put around its method."""

from typing import TYPE_CHECKING, Any

from protofed.api.method import Method
from protofed.engine.around import unwrapped
from protofed.engine.norm_statistics import with_norm_statistics
from protofed.engine.optimizer_state import with_optimizer_state
from protofed.engine.private import Privately

if TYPE_CHECKING:
    from protofed.engine.federation import Federation


def wrapped(federation: "Federation") -> Method[Any, Any, Any, Any]:
    """The method of a federation with all that goes around it."""
    t, method = federation.training, unwrapped(federation.method)  # a copy of a federation has been here before
    if federation.private is not None and federation.secure is None:
        return Privately(method)  # the two below are refused with it
    if t.norm_statistics == "averaged" and t.optimizer_state == "fresh":
        return federation.method
    method = with_norm_statistics(method, t.norm_statistics, federation.spec, t.optimizer, t.seed)
    return with_optimizer_state(method, t.optimizer_state, federation.spec, t.optimizer)
