"""Which executor runs a group of loops: the one that a short trial finds fastest."""

import logging
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Literal

import torch

from protofed.nn.networks import Networks
from protofed.runtimes.cohort.bodies import FitBody
from protofed.runtimes.cohort.buffers import are_common
from protofed.runtimes.cohort.executors import ExecutorName
from protofed.runtimes.cohort.lowering import Loop

log = logging.getLogger(__name__)

MOST_CHOICES = 128
"""Choices that are kept, so that no second trial is needed."""
LONG_STEP = 5e-4
"""Seconds. A step of training on streams that takes longer is bound by arithmetic, not by launches. Stacking does not
help there, and a trial of it may take long."""
SMALL_STEP = 48 << 20
"""Bytes. A step that needs less is not bound by arithmetic, however long it takes on a GPU that others use too."""
SHORTEST_ON_STREAMS = 5e-5
"""Seconds. A client's step on streams is a launch of its own with tens of kernels; the fastest that was measured took
0.07 ms, on an H200. A stack that is faster than this needs no comparison, for which all clients' steps would be
recorded."""
TRIES = 3


class Choice:
    def __init__(self, executor: Literal["auto"] | ExecutorName) -> None:
        self._executor = executor
        self._choices: dict[Hashable, ExecutorName] = {}
        self._fitting: dict[Networks, ExecutorName] = {}
        """What was chosen for training these networks. It serves for other work with them."""

    def forget(self) -> None:
        self._choices.clear()
        self._fitting.clear()

    def of(self, loops: Sequence[Loop], seconds_of: Callable[[ExecutorName], float]) -> ExecutorName:
        """`seconds_of` takes a few steps and tells how long one of a client takes. It is asked in turns about all
        executors, so that what else the GPU does slows down all of them."""
        key = (loops[0].key, are_common(loops))
        if key not in self._choices:
            if len(self._choices) == MOST_CHOICES:
                self._choices.clear()
            self._choices[key] = self._chosen(loops, seconds_of)
        return self._choices[key]

    def _chosen(self, loops: Sequence[Loop], seconds_of: Callable[[ExecutorName], float]) -> ExecutorName:
        if self._executor != "auto":
            return self._executor
        if len(loops) == 1:
            return "streams"
        body = loops[0].body
        if not isinstance(body, FitBody) and not are_common(loops) and body.networks in self._fitting:
            return self._fitting[body.networks]  # a trial would take longer than the work
        is_small = loops[0].step_bytes <= SMALL_STEP
        names: list[ExecutorName] = ["stacked", "streams"] if is_small else ["streams", "stacked"]
        seconds = dict.fromkeys(names, inf)
        for name in names * TRIES:
            if name not in seconds or (name == "stacked" and _is_long(loops[0], seconds.get("streams", 0.0))):
                continue
            if name == "streams" and seconds.get("stacked", inf) < SHORTEST_ON_STREAMS:
                continue
            try:
                seconds[name] = min(seconds[name], seconds_of(name))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # vmap has no rule for every operation
                log.info("executor %s cannot do this: %s: %s", name, type(error).__name__, error)
                del seconds[name]
        seconds = {name: value for name, value in seconds.items() if value < inf}
        if not seconds:
            raise RuntimeError("no executor can do this")
        best = min(seconds, key=lambda name: seconds[name])
        times = ", ".join(f"{name} {1000 * value:.3f} ms" for name, value in seconds.items())
        log.info("%s for %d clients: %s a client step (%s)", best, len(loops), type(body).__name__, times)
        if isinstance(body, FitBody):
            self._fitting[body.networks] = best
        return best


def _is_long(loop: Loop, on_streams: float) -> bool:
    """Whether a step is bound by arithmetic, so that stacking cannot make it faster. Work that does not train is always
    tried both ways: clients may share a part of it, which a stack computes once."""
    return isinstance(loop.body, FitBody) and on_streams > LONG_STEP and loop.step_bytes > SMALL_STEP
