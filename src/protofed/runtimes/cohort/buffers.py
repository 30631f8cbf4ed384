"""The tensors that the loops of many clients work on. They keep their addresses, as recorded CUDA graphs require."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from protofed import tree
from protofed.data.batches import Batch, Data
from protofed.data.transforms import Draws
from protofed.runtimes.cohort.lowering import Loop
from protofed.tree import Tree


class Buffers:
    """Everything that the loops of up to K clients read and change, at fixed addresses on the device."""

    def __init__(
        self, loops: Sequence[Loop], store: Data | None, device: torch.device, interleaved: bool, common: bool
    ) -> None:
        self.size = len(loops)
        self.common = common
        """Whether all clients see the same batches: those of the first."""
        self.steps = max(loop.num_steps for loop in loops)
        self.rows = max(len(loop.data) for loop in loops)
        self.device = device
        first, shape = loops[0], (self.size, self.steps, loops[0].batch_size)
        self.transform, self.body = first.transform, first.body
        self.store = store
        self.shared = tuple(_is_shared(leaves) for leaves in _columns(loop.inputs for loop in loops))
        with torch.device(device):
            self.x, self.y = (store.x, store.y) if store else self._new_store(first)
            self.row = torch.zeros(shape, dtype=torch.int64)  # in the store
            self.label = torch.zeros(shape, dtype=torch.int64)
            self.index = torch.zeros(shape, dtype=torch.int64)  # in the client's own store
            self.weight = torch.zeros(shape)
            self.is_last_epoch = torch.zeros(shape[:2], dtype=torch.bool)
            self.number = torch.zeros(shape[:2], dtype=torch.int64)
            self.draws = Draws(
                *(d if d is None else torch.zeros((*shape, *d.shape[2:]), dtype=d.dtype) for d in _draws(first))
            )
            self.counter = torch.zeros(self.size, dtype=torch.int64)  # steps taken, by client
            self.carry, self.carry_like = self._buffers(first.carry, interleaved)
            self._kept: list[Tensor] = []
            """The final carry of clients that finished before others: of client `_first_kept` and all behind it."""
            self._first_kept = self.size
            self.outputs = [
                torch.zeros((*shape, *leaf.shape[1:]), dtype=leaf.dtype) for leaf in leaves_of(first.example)
            ]
            inputs, self.inputs_like = pytree.tree_flatten(first.inputs)
            self.inputs: list[Any] = [
                _one(leaf, interleaved) if is_shared else _stacked(leaf, self.size, interleaved)
                for leaf, is_shared in zip(inputs, self.shared, strict=True)
            ]

    def _new_store(self, first: Loop) -> tuple[Tensor, Tensor]:
        rows = self.rows if self.common else self.size * self.rows
        x = torch.zeros((rows, *first.data.x.shape[1:]), dtype=first.data.x.dtype)
        return x, torch.zeros(rows, dtype=torch.int64)

    def _buffers(self, value: Tree, interleaved: bool) -> tuple[list[Tensor], Any]:
        leaves, structure = pytree.tree_flatten(value)
        return [_stacked(leaf, self.size, interleaved) for leaf in leaves], structure

    def takes(self, loops: Sequence[Loop]) -> bool:
        """Whether there is room for these loops, whose keys are equal."""
        return (
            len(loops) <= self.size
            and max(loop.num_steps for loop in loops) <= self.steps
            and max(len(loop.data) for loop in loops) <= self.rows
            and all(
                not mine or _is_shared(leaves)
                for mine, leaves in zip(self.shared, _columns(loop.inputs for loop in loops), strict=True)
            )
        )

    def load(self, loops: Sequence[Loop]) -> None:
        """Copies these loops in, to be run from their beginning. The longest comes first."""
        self._load_plans(loops)
        targets, sources = [], []
        carried = zip(self.carry, _columns(loop.carry for loop in loops), strict=True)
        inputs = zip(self.inputs, _columns(loop.inputs for loop in loops), self.shared, strict=True)
        for buffer, leaves in [*carried, *((buffer, leaves) for buffer, leaves, is_shared in inputs if not is_shared)]:
            mine = buffer[: len(loops)]
            if _is_shared(leaves):  # one copy for all clients
                targets.append(mine)
                sources.append(leaves[0].expand_as(mine))
            else:
                targets += mine.unbind()
                sources += leaves
        for buffer, leaf, is_shared in zip(self.inputs, tree.leaves(loops[0].inputs), self.shared, strict=True):
            if is_shared and leaf is not None:
                targets.append(buffer)
                sources.append(leaf)
        copy(targets, sources)
        self.counter.zero_()
        self._first_kept = self.size

    def _load_plans(self, loops: Sequence[Loop]) -> None:
        """One transfer to the device for each field, for all clients together."""
        loops = loops[:1] if self.common else loops
        for name in ("weight", "is_last_epoch", "number"):
            self._fill(getattr(self, name), [getattr(loop.plan, name) for loop in loops])
        for buffer, parts in zip(self.draws_buffers, zip(*(_draws(loop) for loop in loops), strict=True), strict=True):
            if buffer is not None:
                self._fill(buffer, list(parts))
        self._fill(self.index, [loop.plan.index for loop in loops])  # positions, for now
        for k, loop in enumerate(loops):
            self._locate(k, loop)

    def _locate(self, k: int, loop: Loop) -> None:
        """Turns positions into rows: `index` of the client's own store, for contexts; `row` of the common store."""
        data, steps = loop.data, loop.num_steps
        position = self.index[k, :steps]
        if self.store is not None:
            self.row[k, :steps] = data.index[position] + offset_in(self.store, data)
        else:
            begin, n = k * self.rows, len(data)
            self.x[begin : begin + n].copy_(data.inputs(data.index))
            self.y[begin : begin + n].copy_(data.labels)
            self.row[k, :steps] = position + begin
        self.label[k, :steps] = self.y[self.row[k, :steps]]
        self.index[k, :steps] = data.index[position]

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

        plan = self.label, self.weight, self.index, self.is_last_epoch, self.number
        if self.x.is_cuda:
            from protofed.runtimes.cohort.kernels import planned  # Triton comes with torch for GPUs only

            fields = planned([field[clients] for field in plan], counter)
        else:
            fields = [now(field) for field in plan]
        return Batch(self._inputs(clients, counter, now), *fields)

    def _inputs(self, clients: slice, counter: Tensor, now: Callable[[Tensor], Tensor]) -> Tensor:
        if self.x.is_cuda and self.transform.is_lookup(self.x, self.draws):
            from protofed.runtimes.cohort.kernels import fetched  # Triton comes with torch for GPUs only

            offset, flip = (d if d is None else d[clients] for d in (self.draws.offset, self.draws.flip))
            return fetched(
                self.x,
                self.row[clients],
                offset,
                flip,
                counter,
                self.transform.table(self.x.device),
                self.transform.pad,
            )
        row = now(self.row)
        draws = Draws(*(d if d is None else now(d).flatten(0, 1) for d in self.draws_buffers))
        x = self.transform.varied(self.x[row.flatten()], draws)
        return x.view(*row.shape, *x.shape[1:])

    def keep(self, clients: slice) -> None:
        """Saves what these clients carry. Their buffers may be changed by steps of others."""
        if not self._kept:
            self._kept = [torch.empty_like(leaf) for leaf in self.carry]
        self._first_kept = clients.start
        copy([leaf[clients] for leaf in self._kept], [leaf[clients] for leaf in self.carry])

    def result(self, k: int, loop: Loop) -> Any:
        """The answer to a client's request, in new tensors: the next loops overwrite the buffers."""
        carry = tree.with_leaves(loop.carry, [leaf[k] for leaf in (self.carry if k < self._first_kept else self._kept)])
        outputs = [leaf[k, : loop.num_steps] for leaf in self.outputs]
        answer = loop.answer(carry, tree.with_leaves(loop.example, outputs) if outputs else None)
        leaves = tree.leaves(answer)
        copies = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        copy(copies, leaves)
        return tree.with_leaves(answer, copies)


def are_common(loops: Sequence[Loop]) -> bool:
    """Whether all loops read the same examples in the same order."""
    return len(loops) > 1 and all(loop.data is loops[0].data and loop.plan is loops[0].plan for loop in loops)


def offset_in(store: Data, data: Data) -> int:
    """Where the examples of a set begin in the store that they are a view of."""
    return data.x.storage_offset() // max(1, store.x.stride(0))


def leaves_of(value: Tree) -> list[Tensor]:
    return [] if value is None else tree.leaves(value)


def _draws(loop: Loop) -> tuple[Tensor | None, ...]:
    draws = loop.plan.draws
    return draws.offset, draws.flip, draws.angle


def _columns(values: Iterable[Tree]) -> list[tuple[Tensor, ...]]:
    """The leaves of trees of one structure, leaf by leaf."""
    return list(zip(*(tree.leaves(value) for value in values), strict=True))


def _is_shared(leaves: Sequence[Tensor | None]) -> bool:
    first = leaves[0]
    return all(leaf is first or identity(leaf) == identity(first) for leaf in leaves)


def identity(leaf: Tensor | None) -> Hashable:
    """Equal for tensors that view the same memory in the same way."""
    if leaf is None or leaf.numel() == 0:
        return id(leaf)
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()


def _one(leaf: Tensor | None, interleaved: bool) -> Tensor | None:
    """A buffer for a leaf that all clients share; it may be None."""
    return None if leaf is None else _stacked(leaf, 1, interleaved)[0]


def _stacked(leaf: Tensor, size: int, interleaved: bool) -> Tensor:
    """A buffer for this leaf of each client. Weights of convolutions are channels-last if `interleaved`, for speed."""
    if interleaved and leaf.dim() == 4:
        outputs, inputs, height, width = leaf.shape
        return torch.zeros((size, outputs, height, width, inputs), dtype=leaf.dtype).permute(0, 1, 4, 2, 3)
    return torch.zeros((size, *leaf.shape), dtype=leaf.dtype)


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
