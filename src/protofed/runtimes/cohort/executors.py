"""Two ways to run the loops of many clients together on one device.

`Streams`: each client's step is recorded once as a CUDA graph, and the graphs of different clients run side by side on
streams. `Stacked`: one step of all clients is one function under vmap on stacked weights, recorded likewise. On a CPU
nothing is recorded, and the same steps are taken one by one.

A step finds its batch by a counter on the device, so a whole loop is replayed without work on the CPU. A client whose
loop is shorter than those of others stops early.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.data.batches import Batch
from protofed.runtimes.cohort.bodies import FitBody, by_autograd, by_transform, by_vmap
from protofed.runtimes.cohort.buffers import Buffers, copy, leaves_of
from protofed.runtimes.device import on

NUM_STREAMS = 32
NARROWER = 0.75
"""When at most this share of the stacked clients is still at work, a narrower step takes over."""

ExecutorName = Literal["streams", "stacked"]


class Streams:
    interleaved = True

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._streams = _Lanes(buffers.device, min(buffers.size, NUM_STREAMS))
        self._steps: list[Callable[[], None]] = []

    def prepare(self, num_steps: Sequence[int]) -> None:
        """Records what loops of so many steps need. Load the buffers afterwards: recording takes steps."""
        while len(self._steps) < len(num_steps):
            k = len(self._steps)
            self._steps.append(self._streams.recorded(k, partial(self._step, k), is_new=k == 0))

    def run(self, num_steps: Sequence[int]) -> None:
        """Clients' steps are interleaved so that all end together, and the device is busy until the end."""
        turns = sorted((step / steps, k) for k, steps in enumerate(num_steps) for step in range(steps))
        with self._streams:
            for _, k in turns:
                self._streams.call(k, self._steps[k])

    def _step(self, k: int) -> None:
        buffers, counter = self.buffers, self.buffers.counter[k : k + 1]
        batch = tree.map(lambda leaf: leaf[0], buffers.batch(slice(k, k + 1), counter))
        carry = [leaf[k] for leaf in buffers.carry]
        inputs = [leaf if shared else leaf[k] for leaf, shared in zip(buffers.inputs, buffers.shared, strict=True)]
        new, output = buffers.body(
            pytree.tree_unflatten(carry, buffers.carry_like),
            pytree.tree_unflatten(inputs, buffers.inputs_like),
            batch,
            by_autograd,
            in_place=buffers.device.type == "cuda",
        )
        changed = [(old, leaf) for old, leaf in zip(carry, pytree.tree_leaves(new), strict=True) if leaf is not old]
        copy([old for old, _ in changed], [leaf for _, leaf in changed])
        for buffer, leaf in zip(buffers.outputs, leaves_of(output), strict=True):
            buffer[k].index_copy_(0, counter, leaf[None])
        counter += 1


class Stacked:
    interleaved = False

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._lane = _Lanes(buffers.device, 1)
        self._steps: dict[int, Callable[[], None]] = {}

    def prepare(self, num_steps: Sequence[int]) -> None:
        for phase in _phases(num_steps, self.buffers.size):
            if phase.width not in self._steps:
                # guard: step-recorded-late-has-batch
                self.buffers.counter.zero_()  # recording takes a step, and there may be no batch left
                self._steps[phase.width] = self._lane.recorded(0, partial(self._step, phase.width), is_new=True)

    def run(self, num_steps: Sequence[int]) -> None:
        """`num_steps` must not rise. A client that is done may go on beside others, but its results are kept as they
        were."""
        with self._lane:
            for phase in _phases(num_steps, self.buffers.size):
                for _ in range(phase.times):
                    self._lane.call(0, self._steps[phase.width])
                if phase.finished.start:  # others go on
                    self.buffers.keep(phase.finished)

    def _step(self, width: int) -> None:
        buffers, counter = self.buffers, self.buffers.counter[:1]
        batch = buffers.batch(slice(0, 1 if buffers.common else width), counter)
        if buffers.common:  # vmap then computes once for all what depends on the batch and shared weights alone
            batch = tree.map(lambda part: part[0], batch)
        carry = [leaf[:width] for leaf in buffers.carry]
        inputs = [leaf if shared else leaf[:width] for leaf, shared in zip(buffers.inputs, buffers.shared, strict=True)]
        with _layers(buffers.device):
            step = self._descended if self._is_elementwise else self._mapped
            new, outputs = step(carry, inputs, batch, in_place=buffers.device.type == "cuda")
        changed = [(old, leaf) for old, leaf in zip(carry, new, strict=True) if leaf is not old]
        copy([old for old, _ in changed], [leaf for _, leaf in changed])
        for buffer, leaf in zip(buffers.outputs, outputs, strict=True):
            buffer[:width].index_copy_(1, counter, leaf[:, None])
        counter += 1

    @property
    def _is_elementwise(self) -> bool:
        """Whether the optimiser treats stacked weights as it treats one client's, so that it needs no vmap."""
        body, buffers = self.buffers.body, self.buffers
        if not isinstance(body, FitBody) or not getattr(body.optimizer, "is_elementwise", False):
            return False
        return not buffers.common and (not body.has_rate or buffers.shared[0])  # the rate is the first input

    def _descended(
        self, carry: list[Tensor], inputs: list[Tensor], batch: Batch, in_place: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients under vmap, then one step of the optimiser on the stacked weights: in few kernels, in place."""
        buffers = self.buffers
        shared = {id(leaf) for leaf, is_shared in zip(inputs, buffers.shared, strict=True) if is_shared}
        new, _ = buffers.body(
            pytree.tree_unflatten(carry, buffers.carry_like),
            pytree.tree_unflatten(inputs, buffers.inputs_like),
            batch,
            by_vmap(lambda leaf: not isinstance(leaf, Tensor) or id(leaf) in shared),
            in_place,
        )
        return pytree.tree_leaves(new), []

    def _mapped(
        self, carry: list[Tensor], inputs: list[Tensor], batch: Batch, in_place: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The whole step under vmap, which changes nothing in place."""
        buffers = self.buffers
        dims = [None if shared else 0 for shared in buffers.shared]

        def one(carry: list[Tensor], inputs: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            new, output = buffers.body(
                pytree.tree_unflatten(carry, buffers.carry_like),
                pytree.tree_unflatten(inputs, buffers.inputs_like),
                Batch(*batch),
                by_transform,
            )
            return pytree.tree_leaves(new), leaves_of(output)

        found: tuple[list[Tensor], list[Tensor]]
        parts = [batch.x, batch.y, batch.weight, batch.index, batch.is_last_epoch, batch.number]
        found = torch.vmap(one, in_dims=(0, dims, None if buffers.common else 0))(carry, inputs, parts)
        return found


def _layers(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    from protofed.runtimes.cohort.layers import StackedLayers  # Triton comes with torch for GPUs only

    return StackedLayers()


class _Lanes:
    """Streams of a device. The graphs of one stream share a memory pool, since they never run at the same time."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream
        self._streams = [new_stream(device) for _ in range(count)] if self._is_cuda else []
        self._pools = [torch.cuda.graph_pool_handle() for _ in self._streams]
        self._home: Any = None

    def recorded(self, lane: int, step: Callable[[], None], is_new: bool) -> Callable[[], None]:
        """The step as a graph. A new kind of step is first taken once, to warm up."""
        if not self._is_cuda:
            return torch.no_grad()(step)
        lane %= len(self._streams)
        stream, graph = self._streams[lane], torch.cuda.CUDAGraph()
        with on(self._device), torch.no_grad():
            if is_new:
                stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.synchronize(self._device)
            # The thread that saves the last round's state may use the device meanwhile, hence the mode.
            with (
                _no_collection(),
                torch.cuda.graph(graph, self._pools[lane], stream, capture_error_mode="thread_local"),
            ):
                step()
        return graph.replay

    def __enter__(self) -> None:
        if self._is_cuda:
            self._home = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                stream.wait_stream(self._home)

    def __exit__(self, *error: object) -> None:
        if self._is_cuda:
            torch.cuda.set_stream(self._home)
            for stream in self._streams:
                self._home.wait_stream(stream)

    def call(self, lane: int, step: Callable[[], None]) -> None:
        if self._is_cuda:
            torch.cuda.set_stream(self._streams[lane % len(self._streams)])
        step()


EXECUTORS: dict[ExecutorName, type[Streams] | type[Stacked]] = {"streams": Streams, "stacked": Stacked}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stops garbage collection while a graph is recorded: CUDA forbids to free another graph meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that the same clients take."""

    width: int
    """How many clients take these steps."""
    times: int
    finished: slice
    """The clients that are done after them."""


def _phases(num_steps: Sequence[int], size: int) -> list[Phase]:
    """The phases of a run, in order. `size` is the number of clients that there is room for."""
    phases: list[Phase] = []
    taken = 0
    for end in sorted(set(num_steps)):
        longer, active = sum(steps > end for steps in num_steps), sum(steps >= end for steps in num_steps)
        phases.append(Phase(_width(active, size), end - taken, slice(longer, active)))
        taken = end
    return phases


def _width(active: int, count: int) -> int:
    """The narrowest of a few widths that holds the active clients."""
    width = count
    while width > 1 and (narrower := int(width * NARROWER)) >= active:
        width = narrower
    return width
