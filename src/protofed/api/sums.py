"""Sums over clients: all that the server of most methods reads."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from protofed.api.task import ClientId
from protofed.tree import Mean, Tree

Summands = Mapping[str, tuple[Tree, float]]
"""What one client adds to the sums of a round: trees, each with its weight."""
Totals = Mapping[str, Mean]
"""The sums over clients of weight · tree and of the weights, by the names of the summands."""

Summand = Callable[[Any, Any], Summands]
"""What a client adds, made of its upload and of the message that it was sent."""


def folded(
    uploads: Iterable[tuple[ClientId, Tree]], message_for: Callable[[ClientId], Tree], summand: Summand
) -> Totals:
    """The sums, in float64 and in the order of the uploads."""
    totals: defaultdict[str, Mean] = defaultdict(Mean)
    for client, upload in uploads:
        for name, (value, weight) in summand(upload, message_for(client)).items():
            totals[name].add(value, weight)
    return totals
