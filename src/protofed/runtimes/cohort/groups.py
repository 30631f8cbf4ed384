"""Which requests are run together."""

from collections.abc import Hashable, Sequence
from typing import Any

from protofed.api.requests import Fit, Request
from protofed.runtimes.cohort.buffers import identity
from protofed.runtimes.cohort.lowering import Loop


def divided(requests: Sequence[Request[Any]], group: Sequence[tuple[int, Loop]]) -> list[Sequence[tuple[int, Loop]]]:
    """The group in parts that read the same examples with the same feature extractor, if these parts are few. Clients'
    models often differ only behind the features, which are then computed once for all."""
    if isinstance(requests[group[0][0]], Fit):
        return [group]
    parts: dict[Hashable, list[tuple[int, Loop]]] = {}
    for i, loop in group:
        features = [identity(leaf) for name, leaf in requests[i].params.items() if name.startswith("features.")]
        parts.setdefault((id(loop.data), *features), []).append((i, loop))
    return sorted(parts.values(), key=len, reverse=True) if 2 * len(parts) <= len(group) else [group]
