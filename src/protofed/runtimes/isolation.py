"""Keeps a client's step from changing what other clients of the same process work with.

A step works on copies of its message and of its memory. Examples and the networks' constants are too large to be copied
for every step: whether they changed is seen from the version that torch counts for a tensor, and from its memory. So a
change through `.data`, numpy or another alias is not seen. In copies for one step alone it does no harm to others.
"""

import signal
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext
from protofed.errors import RunFailed
from protofed.nn.networks import Networks
from protofed.runtimes.device import unplaced
from protofed.tree import Tree

SETS = ("its examples", "the public examples", "the test sets", "its test set")
MOST_KEPT_BYTES = 256 * 2**20
"""Of examples, so that they can be put back. What is beyond ends the run when a client changes it."""


@dataclass
class _Shared:
    """A tensor that several clients may see."""

    tensor: Tensor
    stamp: tuple[Any, ...]
    backup: Tensor | None

    @property
    def has_changed(self) -> bool:
        return _stamp(self.tensor) != self.stamp


class SharedTensors:
    """The tensors that the steps of a runtime share, and copies of them as far as there is room."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES, puts_back: bool = True) -> None:
        self._most = self._room = most_bytes
        self._known: dict[int, _Shared] = {}
        self._networks: dict[int, tuple[Networks, list[tuple[str, _Shared]]]] = {}
        self.puts_back = puts_back
        """False in a process that ends when a client has changed something in it."""

    def note(self, context: ClientContext) -> list[tuple[str, _Shared]]:
        """Those that a step with this context sees, each with a name."""
        tests, found = context.tests, list(self._of_networks(context.networks))
        sets = (context.data, context.public, tests.pooled, tests.own)
        for name, data in zip(SETS, sets, strict=True):
            if data is not None:
                found += [(name, self._of(data.x)), (name, self._of(data.y))]
        return found

    def _of_networks(self, networks: Networks) -> list[tuple[str, _Shared]]:
        """Those that all clients with these networks see."""
        if id(networks) not in self._networks:
            buffers = [(name, self._of(leaf)) for name, leaf in networks.initial_buffers.items()]
            constants = [(name, self._of(leaf, keeps=False)) for name, leaf in networks.constants.items()]
            shared = [(f"the networks' {name}", one) for name, one in (*buffers, *constants)]
            self._networks[id(networks)] = networks, shared  # it keeps them alive: others may reuse their id()
        return self._networks[id(networks)][1]

    def _of(self, leaf: Tensor, keeps: bool = True) -> _Shared:
        """What is known of a tensor, or of what it is a view of: all views of a tensor count their changes together."""
        leaf = leaf if leaf._base is None else leaf._base
        return self._known.get(id(leaf)) or self._new(leaf, keeps)

    def forget(self) -> None:
        self._known.clear()
        self._networks.clear()
        self._room = self._most

    def _new(self, leaf: Tensor, keeps: bool) -> _Shared:
        fits = keeps and leaf.nbytes <= self._room
        self._room -= leaf.nbytes if fits else 0
        shared = _Shared(leaf, _stamp(leaf), leaf.detach().clone() if fits else None)
        self._known[id(leaf)] = shared  # it keeps the tensor alive: a new one may reuse its id()
        return shared


def _copy(leaf: Any) -> Any:
    """A copy, whose version is 0 until it is changed."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone() if leaf.requires_grad else leaf.clone()


Copies = dict[Hashable, _Shared]
"""What was lent, by the memory that it is a copy of."""


def _memory(leaf: Tensor) -> Hashable:
    """Equal for tensors that view the same memory in the same way."""
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) if leaf.numel() else id(leaf)


def _stamp(leaf: Tensor) -> tuple[Any, ...]:
    """Other after a change in place, or when the tensor was given other memory."""
    return leaf._version, leaf.data_ptr(), leaf.shape, leaf.untyped_storage().nbytes()


class Watch:
    """What one client's step is given, and what it changed of it."""

    def __init__(self, shared: SharedTensors, context: ClientContext) -> None:
        self._client = context.id
        self._puts_back = shared.puts_back
        self._settings = _settings()
        with unplaced():
            self._shared = shared.note(context)
        self._own: list[tuple[str, list[Any]]] = []
        self._lent: list[tuple[str, _Shared]] = []

    def lent(self, value: Tree, name: str) -> Tree:
        """The tree with copies of its tensors, for this step alone."""
        leaves: list[Any] = []
        self._own.append((name, leaves))

        def copy(leaf: Any) -> Any:
            leaves.append(own := _copy(leaf))
            return own

        with unplaced():
            return tree.map(copy, value)

    def given(self, value: Tree, name: str) -> Tree:
        """The tree as it is: it consists of copies already, for this step alone."""
        self._own.append((name, tree.leaves(value)))
        return value

    def lent_to_many(self, value: Tree, name: str, copies: Copies) -> Tree:
        """The tree with copies of its tensors, which trees that are lent with the same `copies` share."""

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if _memory(leaf) not in copies:
                own = _copy(leaf)
                copies[_memory(leaf)] = _Shared(own, _stamp(own), leaf)  # it keeps the original alive, and its memory
            self._lent.append((name, copies[_memory(leaf)]))
            return copies[_memory(leaf)].tensor

        with unplaced():
            return tree.map(copy, value)

    def change(self) -> str:
        """What the step changed, which has been put back; empty if nothing. To be asked before another client goes
        on."""
        changed = self._changed_settings()
        with unplaced():
            return next(filter(None, [changed, *self._changed_copies(), *self._changed_tensors()]), "")

    def _changed_settings(self) -> str:
        if _settings() == self._settings:  # guard: torch-settings-put-back
            return ""
        dtype, has_gradients, threads, is_deterministic, modes = self._settings
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)
        if torch._C._len_torch_function_stack() != modes:
            torch.set_default_device(None)
        return "it changed a setting of torch"

    def _changed_copies(self) -> Iterator[str]:
        for name, leaves in self._own:
            if any(leaf._version for leaf in leaves if isinstance(leaf, Tensor)):  # guard: copies-watched
                yield f"it changed {name} in place"
        for name, shared in self._lent:
            if shared.has_changed:  # guard: lent-copies-watched
                assert shared.backup is not None
                shared.tensor.data = _copy(shared.backup)  # guard: copies-put-back
                shared.stamp = _stamp(shared.tensor)
                yield f"it changed {name} in place"

    def _changed_tensors(self) -> Iterator[str]:
        for name, shared in self._shared:
            if shared.has_changed:  # guard: shared-tensors-watched
                if self._puts_back:
                    self._put_back(name, shared)
                yield f"it changed {name} in place"

    def _put_back(self, name: str, shared: _Shared) -> None:
        has_own_memory = _stamp(shared.tensor)[1:] == shared.stamp[1:]
        if shared.backup is None or not has_own_memory:  # guard: what-cannot-be-put-back-ends-run
            raise RunFailed(
                f"client {self._client} changed {name} in place, and that cannot be put back; what was saved is "
                "intact. A step must not change what it is given (the runtime workers would leave this client out)"
            )
        with torch.no_grad():
            shared.tensor.copy_(shared.backup)  # guard: shared-tensors-put-back
        shared.stamp = _stamp(shared.tensor)


def _settings() -> tuple[Any, ...]:
    """What torch keeps for the whole process and decides numbers."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_function_stack(),  # a default device is a mode
    )


def let_pass(error: BaseException) -> None:
    """Raises again what is no client's failure: Ctrl-C, and what a handler of a signal raised."""
    if isinstance(error, KeyboardInterrupt) or _is_of_handler(error.__traceback__):  # guard: handlers-not-clients
        raise error


def _is_of_handler(trace: TracebackType | None) -> bool:
    codes = set(_handlers())
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> Iterable[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if isinstance(code, CodeType):
            yield code
