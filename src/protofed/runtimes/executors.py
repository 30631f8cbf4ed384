"""Two ways to run the loops of many clients together on one device.

`Streams`: each client's step is recorded once as a CUDA graph, and the graphs of different clients run side by side on
streams. `Stacked`: one step of all clients is one function under vmap on stacked weights, recorded likewise. On a CPU
nothing is recorded, and the same steps are taken one by one.

A step finds its batch by a counter on the device, so a whole loop is replayed without a word from the CPU. A client
whose loop is shorter than others' leaves early.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.data import Batch, Data, Draws
from protofed.runtimes.loops import Loop, by_autograd, by_transform
from protofed.runtimes.placement import on
from protofed.tree import Tree

NUM_STREAMS = 32
NARROWER = 0.75
"""When no more than this part of the stacked clients are still at work, a narrower step takes over."""

ExecutorName = Literal["streams", "stacked"]


class Stage:
    """Everything that the loops of up to K clients read and change, on the device, where it stays put."""

    def __init__(self, loops: Sequence[Loop], store: Data | None, device: torch.device, interleaved: bool) -> None:
        self.size = len(loops)
        self.steps = max(loop.num_steps for loop in loops)
        self.rows = max(len(loop.data) for loop in loops)
        self.device = device
        first, shape = loops[0], (self.size, self.steps, loops[0].batch_size)
        self.transform, self.body = first.transform, first.body
        self.store = store
        self.shared = tuple(_is_shared(leaves) for leaves in _columns(loop.known for loop in loops))
        with torch.device(device):
            self.x, self.y = (store.x, store.y) if store else self._own_store(first)
            self.row = torch.zeros(shape, dtype=torch.int64)  # in the store
            self.index = torch.zeros(shape, dtype=torch.int64)  # in the client's own store
            self.weight = torch.zeros(shape)
            self.is_last_epoch = torch.zeros(shape[:2], dtype=torch.bool)
            self.number = torch.zeros(shape[:2], dtype=torch.int64)
            self.draws = Draws(
                *(d if d is None else torch.zeros((*shape, *d.shape[2:]), dtype=d.dtype) for d in _draws(first))
            )
            self.num_steps = torch.zeros(self.size, dtype=torch.int64)
            self.counter = torch.zeros(self.size, dtype=torch.int64)  # steps taken, by client
            self.carry, self.carry_like = self._buffers(first.carry, interleaved)
            self.outputs = [
                torch.zeros((*shape[:2], *leaf.shape[:0], shape[2], *leaf.shape[1:]), dtype=leaf.dtype)
                for leaf in _leaves(first.example)
            ]
            known, self.known_like = pytree.tree_flatten(first.known)
            self.known: list[Any] = [
                _alike(leaf, interleaved) if is_shared else _stacked(leaf, self.size, interleaved)
                for leaf, is_shared in zip(known, self.shared, strict=True)
            ]
        self.output_like = pytree.tree_structure(first.example)

    def _own_store(self, first: Loop) -> tuple[Tensor, Tensor]:
        x = torch.zeros((self.size * self.rows, *first.data.x.shape[1:]), dtype=first.data.x.dtype)
        return x, torch.zeros(self.size * self.rows, dtype=torch.int64)

    def _buffers(self, value: Tree, interleaved: bool) -> tuple[list[Tensor], Any]:
        leaves, structure = pytree.tree_flatten(value)
        return [_stacked(leaf, self.size, interleaved) for leaf in leaves], structure

    def takes(self, loops: Sequence[Loop]) -> bool:
        """Whether these loops, alike in key, fit in."""
        return (
            len(loops) <= self.size
            and max(loop.num_steps for loop in loops) <= self.steps
            and max(len(loop.data) for loop in loops) <= self.rows
            and all(
                not mine or _is_shared(leaves)
                for mine, leaves in zip(self.shared, _columns(loop.known for loop in loops), strict=True)
            )
        )

    def load(self, loops: Sequence[Loop]) -> None:
        """Puts these loops at their beginning, the longest first."""
        self._load_plans(loops)
        targets, sources = [], []
        for k, loop in enumerate(loops):
            targets += [buffer[k] for buffer in self.carry]
            sources += pytree.tree_leaves(loop.carry)
            for buffer, leaf, is_shared in zip(self.known, pytree.tree_leaves(loop.known), self.shared, strict=True):
                if leaf is None:
                    continue
                if not is_shared:
                    targets.append(buffer[k])
                    sources.append(leaf)
                elif k == 0:
                    targets.append(buffer)
                    sources.append(leaf)
        _copy(targets, sources)
        self.counter.zero_()

    def _load_plans(self, loops: Sequence[Loop]) -> None:
        """One transfer for each kind of numbers, however many the clients."""
        for name in ("weight", "is_last_epoch", "number"):
            self._fill(getattr(self, name), [getattr(loop.plan, name) for loop in loops])
        for buffer, parts in zip(self.draws_buffers, zip(*(_draws(loop) for loop in loops), strict=True), strict=True):
            if buffer is not None:
                self._fill(buffer, list(parts))
        self._fill(self.index, [loop.plan.index for loop in loops])  # positions, for now
        self.num_steps.zero_()
        self.num_steps[: len(loops)].copy_(torch.tensor([loop.num_steps for loop in loops], device="cpu"))
        for k, loop in enumerate(loops):
            self._locate(k, loop)

    def _locate(self, k: int, loop: Loop) -> None:
        """Positions become rows: of the client's own store for contexts, of the common store for the batch."""
        data, steps = loop.data, loop.num_steps
        position = self.index[k, :steps]
        if self.store is not None:
            own = data.index[position]
            self.row[k, :steps] = own + offset_in(self.store, data)
        else:
            begin, n = k * self.rows, len(data)
            self.x[begin : begin + n].copy_(data.inputs(data.index))
            self.y[begin : begin + n].copy_(data.labels)
            own, self.row[k, :steps] = data.index[position], position + begin
        self.index[k, :steps] = own

    def _fill(self, buffer: Tensor, parts: list[Tensor]) -> None:
        host = torch.zeros((len(parts), self.steps, *buffer.shape[2:]), dtype=buffer.dtype, device="cpu")
        for k, part in enumerate(parts):
            host[k, : len(part)] = part
        buffer[: len(parts)].copy_(host)

    @property
    def draws_buffers(self) -> tuple[Tensor | None, ...]:
        return self.draws.offset, self.draws.flip, self.draws.angle

    def batch(self, clients: slice, counter: Tensor) -> Batch:
        """The next batch of these clients: tensors (k, B, ...)."""

        def now(plan: Tensor) -> Tensor:
            return plan[clients].index_select(1, counter).squeeze(1)

        row = now(self.row)
        draws = Draws(*(d if d is None else now(d).flatten(0, 1) for d in self.draws_buffers))
        flat = row.flatten()
        x = self.transform.normalise(self.transform.vary(self.transform.scale(self.x[flat]), draws))
        return Batch(
            x=x.view(*row.shape, *x.shape[1:]),
            y=self.y[flat].view(row.shape),
            weight=now(self.weight),
            index=now(self.index),
            is_last_epoch=now(self.is_last_epoch),
            number=now(self.number),
        )

    def result(self, k: int, loop: Loop) -> Any:
        """The answer to a client's request, apart from what the next loops will overwrite."""
        carry = pytree.tree_unflatten([leaf[k] for leaf in self.carry], self.carry_like)
        outputs = [leaf[k, : loop.num_steps] for leaf in self.outputs]
        answer = loop.answer(carry, pytree.tree_unflatten(outputs, self.output_like) if outputs else None)
        leaves, structure = pytree.tree_flatten(answer)
        own = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        _copy(own, leaves)
        return pytree.tree_unflatten(own, structure)


class Streams:
    interleaved = True

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._streams = _Lanes(stage.device, min(stage.size, NUM_STREAMS))
        self._steps: list[Callable[[], None]] = []

    def prepare(self, num_steps: Sequence[int]) -> None:
        """Records what loops of so many steps need. What they read must be loaded afterwards."""
        while len(self._steps) < len(num_steps):
            k = len(self._steps)
            self._steps.append(self._streams.recorded(k, partial(self._step, k), is_new=k == 0))

    def run(self, num_steps: Sequence[int]) -> None:
        with self._streams:
            for step in range(max(num_steps)):
                for k, steps in enumerate(num_steps):
                    if step < steps:
                        self._streams.call(k, self._steps[k])

    def _step(self, k: int) -> None:
        stage, counter = self.stage, self.stage.counter[k : k + 1]
        batch = tree.map(lambda leaf: leaf[0], stage.batch(slice(k, k + 1), counter))
        carry = [leaf[k] for leaf in stage.carry]
        known = [leaf if shared else leaf[k] for leaf, shared in zip(stage.known, stage.shared, strict=True)]
        new, output = stage.body(
            pytree.tree_unflatten(carry, stage.carry_like),
            pytree.tree_unflatten(known, stage.known_like),
            batch,
            by_autograd,
            in_place=stage.device.type == "cuda",
        )
        changed = [(old, leaf) for old, leaf in zip(carry, pytree.tree_leaves(new), strict=True) if leaf is not old]
        _copy([old for old, _ in changed], [leaf for _, leaf in changed])
        for buffer, leaf in zip(stage.outputs, _leaves(output), strict=True):
            buffer[k].index_copy_(0, counter, leaf[None])
        counter += 1


class Stacked:
    interleaved = False

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._lane = _Lanes(stage.device, 1)
        self._steps: dict[tuple[int, bool], Callable[[], None]] = {}

    def prepare(self, num_steps: Sequence[int]) -> None:
        for width, masked, _ in _phases(num_steps):
            if (width, masked) not in self._steps:
                self._steps[width, masked] = self._lane.recorded(0, partial(self._step, width, masked), is_new=True)

    def run(self, num_steps: Sequence[int]) -> None:
        """`num_steps` must not rise."""
        with self._lane:
            for width, masked, times in _phases(num_steps):
                for _ in range(times):
                    self._lane.call(0, self._steps[width, masked])

    def _step(self, width: int, masked: bool) -> None:
        stage, counter = self.stage, self.stage.counter[:1]
        batch = stage.batch(slice(0, width), counter)
        carry = [leaf[:width] for leaf in stage.carry]
        known = [leaf if shared else leaf[:width] for leaf, shared in zip(stage.known, stage.shared, strict=True)]
        dims = [None if shared else 0 for shared in stage.shared]

        def one(carry: list[Tensor], known: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            new, output = stage.body(
                pytree.tree_unflatten(carry, stage.carry_like),
                pytree.tree_unflatten(known, stage.known_like),
                Batch(*batch),
                by_transform,
            )
            return pytree.tree_leaves(new), _leaves(output)

        parts = [batch.x, batch.y, batch.weight, batch.index, batch.is_last_epoch, batch.number]
        new, outputs = torch.vmap(one, in_dims=(0, dims, 0))(carry, known, parts)
        if masked:
            is_active = counter < stage.num_steps[:width]
            new = [
                torch.where(is_active.view(-1, *[1] * (leaf.dim() - 1)), leaf, old)
                for leaf, old in zip(new, carry, strict=True)
            ]
        _copy(carry, new)
        for buffer, leaf in zip(stage.outputs, outputs, strict=True):
            buffer[:width].index_copy_(1, counter, leaf[:, None])
        counter += 1


class _Lanes:
    """Streams of a device, and one pool of memory for the graphs of each: they never run at the same time."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream
        self._streams = [new_stream(device) for _ in range(count)] if self._is_cuda else []
        self._pools = [torch.cuda.graph_pool_handle() for _ in self._streams]
        self._home: Any = None

    def recorded(self, lane: int, step: Callable[[], None], is_new: bool) -> Callable[[], None]:
        """The step as a graph. A step that is new to the device is also taken, to warm up."""
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
            with _no_collection(), torch.cuda.graph(graph, pool=self._pools[lane], stream=stream):
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


def offset_in(store: Data, data: Data) -> int:
    """Where the examples of a set begin in the store that they are a view of."""
    return data.x.storage_offset() // max(1, store.x.stride(0))


@contextmanager
def _no_collection() -> Iterator[None]:
    """No old graph is thrown away, as the garbage collector might do, while a new one is recorded: CUDA forbids it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _phases(num_steps: Sequence[int]) -> list[tuple[int, bool, int]]:
    """How many clients take a step, whether some of them are done already, and how often; from first to last."""
    phases: list[tuple[int, bool, int]] = []
    for step in range(num_steps[0]):
        active = sum(steps > step for steps in num_steps)
        width = _width(active, len(num_steps))
        phase = (width, active < width)
        times = phases.pop()[2] if phases and phases[-1][:2] == phase else 0
        phases.append((*phase, times + 1))
    return phases


def _width(active: int, count: int) -> int:
    """The narrowest of a few widths that holds the active clients."""
    width = count
    while width > 1 and (narrower := int(width * NARROWER)) >= active:
        width = narrower
    return width


def _leaves(value: Tree) -> list[Tensor]:
    return [] if value is None else pytree.tree_leaves(value)


def _draws(loop: Loop) -> tuple[Tensor | None, ...]:
    draws = loop.plan.draws
    return draws.offset, draws.flip, draws.angle


def _columns(values: Any) -> list[tuple[Tensor, ...]]:
    """The leaves of trees that are alike, leaf by leaf."""
    return list(zip(*(pytree.tree_leaves(value) for value in values), strict=True))


def _is_shared(leaves: Sequence[Tensor]) -> bool:
    return all(leaf is leaves[0] for leaf in leaves)


def _alike(leaf: Tensor | None, interleaved: bool) -> Tensor | None:
    """A buffer for a leaf that all share, which may be None."""
    return None if leaf is None else _stacked(leaf, 1, interleaved)[0]


def _stacked(leaf: Tensor, size: int, interleaved: bool) -> Tensor:
    """A buffer for such a leaf of each client; with channels last in memory for convolutions, which are faster so."""
    if interleaved and leaf.dim() == 4:
        outputs, inputs, height, width = leaf.shape
        return torch.zeros((size, outputs, height, width, inputs), dtype=leaf.dtype).permute(0, 1, 4, 2, 3)
    return torch.zeros((size, *leaf.shape), dtype=leaf.dtype)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
