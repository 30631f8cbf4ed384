"""An exchange of its own from which a server needs sums over clients alone."""

from collections.abc import Callable
from typing import Any

from protofed.api.method import Clients, Step
from protofed.api.sums import Summand, Totals, folded
from protofed.api.task import ClientId
from protofed.tree import Tree


def sums_over(
    clients: Clients,
    step: Step[Any, Any, Any],
    message_for: Callable[[ClientId], Tree],
    like: Tree,
    summand: Summand,
) -> Totals:
    """What the server learns in it."""
    if clients.summing is not None:
        return clients.summing.summed(step, message_for, like, summand)
    return folded(clients.run(step, message_for, like), message_for, summand)
