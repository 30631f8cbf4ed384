"""A pretended device: tensors whose memory is the CPU's, on a device that is not. What a GPU would refuse is refused.

A tensor there is a `There`, which wraps one on the CPU. Every operation of ATen, below autograd and `torch.func`, goes
through `Elsewhere`, which refuses those whose tensors are on both devices. It does not try what depends on
`device.type` or `is_cuda`, such as kernels for CUDA, graphs and streams, nor does it know which operations of CUDA are
not deterministic. An operation on each element may have several scalars of the CPU here, of which CUDA takes one.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from protofed import wire

THERE = torch.device("cpu", 1)
"""No machine has a second CPU for torch. The index -1, or none, is the CPU's."""
CPU = torch.device("cpu")
aten = torch.ops.aten

MOVES = {aten._to_copy.default, aten.copy_.default, aten.copy.default, aten._copy_from.default}
"""Operations between devices."""
INDEXINGS = {
    aten.index.Tensor,
    *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor),
}
"""Their indices may be on the CPU where what they index is not."""


class OnTwoDevices(RuntimeError):
    """What a GPU would refuse."""


class There(Tensor):
    """A tensor on the pretended device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return done(func, args, kwargs or {})

    # What C++ would read from memory that is not the CPU's:

    def tolist(self) -> Any:
        return self.here.tolist()

    def new_tensor(self, data: Any, *, device: Any = THERE, **kwargs: Any) -> Tensor:
        return self.here.new_tensor(data, **kwargs).to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "There":
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "here"})
            memo[id(self)] = made
        found: There = memo[id(self)]
        return found

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self.here!r})"


class Elsewhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return done(func, args, kwargs or {})


def done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, done on the CPU, with results where they belong."""
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        leaves += value if isinstance(value, list | tuple) else [value]
    is_there = any(isinstance(leaf, There) for leaf in leaves)
    asked = kwargs.get("device")
    if not is_there and asked != THERE:
        return func(*args, **kwargs)
    if is_there and func not in MOVES:
        check(func, args, leaves)
    if kwargs.get("generator") is not None:
        raise OnTwoDevices(f"{func} elsewhere with a generator of the CPU")
    found = func(*each(here, args), **{name: each(here, value) for name, value in kwargs.items()})
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the wrapper's own shape
    goes = asked is None or asked == THERE
    own = {id(here(leaf)): leaf for leaf in leaves if isinstance(leaf, Tensor)}  # in place, an operation gives this one

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not goes:
            return leaf
        return own[id(leaf)] if id(leaf) in own else There(leaf)

    return each(placed, found)


def here(leaf: Any) -> Any:
    return leaf.here if isinstance(leaf, There) else CPU if isinstance(leaf, torch.device) and leaf == THERE else leaf


def each(function: Any, value: Any) -> Any:
    """What operations of ATen take and give is nested in lists and tuples alone."""
    return type(value)(each(function, one) for one in value) if type(value) in (list, tuple) else function(value)


def check(func: Any, args: Any, leaves: list[Any]) -> None:
    allowed: set[int] = set()
    if func in INDEXINGS and isinstance(args[0], There):
        allowed = {id(index) for index in args[1] if isinstance(index, Tensor)}
    takes_scalars = torch.Tag.pointwise in func.tags or func in INDEXINGS
    for leaf in leaves:
        is_here = isinstance(leaf, Tensor) and not isinstance(leaf, There) and id(leaf) not in allowed
        if is_here and not (takes_scalars and leaf.dim() == 0):
            raise OnTwoDevices(
                f"Expected all tensors to be on the same device, but {func} got one on the CPU, {tuple(leaf.shape)}, "
                f"and one elsewhere"
            )


def _made_from_data(make: Any) -> Any:
    """`torch.tensor` and its like move what they make to the device behind the mode's back."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        place = torch.empty(0).device if device is None else torch.device(device)
        if isinstance(data, Tensor) and make is not torch_tensor:
            return data.to(place, *args, **kwargs)
        found: Tensor = make(data, *args, device=CPU, **kwargs)
        return found.to(place)

    return made


torch_tensor = torch.tensor


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Within this there is the device `THERE`."""
    unfit, fork, swaps = wire.unfit, torch.random.fork_rng, torch.__future__.get_swap_module_params_on_conversion()

    def fit_here(leaf: Any) -> str:
        return unfit(leaf.here if type(leaf) is There else leaf)

    def forked(devices: Any = None, **_: Any) -> Any:
        return fork(devices=[])

    with contextlib.ExitStack() as stack:
        for name in ("tensor", "as_tensor", "asarray"):
            stack.enter_context(mock.patch.object(torch, name, _made_from_data(getattr(torch, name))))
        stack.enter_context(mock.patch.object(wire, "unfit", fit_here))
        stack.enter_context(mock.patch.object(torch.random, "fork_rng", forked))
        stack.enter_context(mock.patch.object(torch.cuda, "manual_seed"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", return_value=torch.get_rng_state()))
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` makes a `There` of a Parameter
        stack.enter_context(mock.patch.object(weakref, "getweakrefs", return_value=[]))  # they stay with the Parameter
        stack.enter_context(Elsewhere())
        yield
