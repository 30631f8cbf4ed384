"""Where tensors live: the runtime's device. Methods do not mention devices.

Within `on(device)` new tensors are made there. Draws from a seeded generator are made on the CPU and copied there, so
they are equal on every device. A draw from a tensor, such as `multinomial`, is where that tensor is.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protofed import tree
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.nn.precision import Precision
from protofed.tree import Tree

CPU = torch.device("cpu")
SHARE_FOR_DATA = 0.6
"""The share of a device's free memory that the task's data may take; what does not fit stays on the CPU."""

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1",  # cuDNN takes longer to choose its algorithms, and chooses better
}
"""Libraries read these once, when they are first used on a GPU. What a user has set is kept."""

_DRAWN = {torch.rand, torch.randn, torch.randint, torch.randperm}


class _SeededDraws(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None:
            return func(*args, **kwargs)
        given = next(iter((*args, *kwargs.values())))
        place = given.device if isinstance(given, Tensor) else kwargs.get("device") or torch.get_default_device()
        args, kwargs = pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if func in _DRAWN:
            kwargs["device"] = CPU
        drawn = func(*args, **kwargs)
        if func.__name__.endswith("_"):  # in place, as `normal_` and `nn.init` work
            with torch.no_grad():
                return given.copy_(drawn)
        return drawn.to(place)


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """New tensors are made on this device."""
    if device == CPU:
        yield
        return
    with torch.device(device), _SeededDraws():
        yield


@contextlib.contextmanager
def working(device: torch.device, precision: Precision, deterministic: bool) -> Iterator[None]:
    """New tensors are made on the device, which works in this precision, deterministically or not."""
    if device == CPU:
        yield
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    wanted = {
        (torch.backends.cuda.matmul, "allow_tf32"): precision == "tf32",  # with bf16, losses stay in float32
        (torch.backends.cudnn, "allow_tf32"): precision == "tf32",
        (torch.backends.cudnn, "deterministic"): deterministic,
        (torch.backends.cudnn, "benchmark"): not deterministic,
        (torch.utils.deterministic, "fill_uninitialized_memory"): False,  # a debugging aid that costs time
    }
    before = {(owner, name): getattr(owner, name) for owner, name in wanted}
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    _set(wanted)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with on(device):
            yield
    finally:
        _set(before)
        torch.use_deterministic_algorithms(was_deterministic)


def _set(settings: Mapping[tuple[Any, str], bool]) -> None:
    for (owner, name), value in settings.items():
        setattr(owner, name, value)


class unplaced(contextlib.AbstractContextManager[None]):  # noqa: N801, used as a function
    """Out of `on`, for code that names the device itself: the mode slows down every operation. Every client passes here
    several times, so it is written for speed."""

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        pop: Any = torch._C._pop_torch_function_stack
        self._modes = [pop() for _ in range(torch._C._len_torch_function_stack())]

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            torch._C._push_on_torch_function_stack(mode)


def moved(value: Tree, device: torch.device) -> Tree:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def moved_together(trees: Sequence[Tree], device: torch.device) -> list[Tree]:
    """Trees of one structure and dtypes on the device: one transfer for each of their leaves."""
    columns = zip(*map(tree.leaves, trees), strict=True)
    there = [torch.split(torch.cat(leaves).to(device), [len(leaf) for leaf in leaves]) for leaves in columns]
    rows = zip(*there, strict=True)
    return [tree.with_leaves(one, row) for one, row in zip(trees, rows, strict=True)]


@dataclass
class Residence:
    """The task's examples on a device: one store for all sets of the same type and shape, of which theirs are views."""

    device: torch.device
    _placed: dict[int, tuple[Task, Task]] = field(default_factory=dict)
    _stores: dict[int, Data] = field(default_factory=dict)

    def placed(self, task: Task) -> Task:
        """The task with its data on the device. The same task gives the same result again."""
        if id(task) not in self._placed:
            new = self._moved(task)
            self._placed |= {id(task): (task, new), id(new): (new, new)}  # keep it alive: a new task may reuse its id()
        return self._placed[id(task)][1]

    def store_of(self, data: Data) -> Data | None:
        """The store that holds a set's examples and labels as rows; None if no store does."""
        store = self._stores.get(id(data.x._base))
        return store if store is not None and _are_rows(data, store) else None

    def _moved(self, task: Task) -> Task:
        public = {} if task.public is None else {"public": task.public}
        kinds: list[Mapping[str, Data]] = [task.clients, task.tests, task.local_tests, task.validation, public]
        stores: dict[tuple[int, int], Data] = {}
        for data in (data for kind in kinds for data in kind.values()):
            stores.setdefault(_identity(data), data)
        views = self._views(stores)

        def there(data: Data) -> Data:
            x, y = views[_identity(data)]
            return Data(x, y, data.index.to(self.device))

        clients, tests, local_tests, validation, shared = (
            {name: there(data) for name, data in kind.items()} for kind in kinds
        )
        return replace(
            task,
            clients=clients,
            tests=tests,
            local_tests=local_tests,
            validation=validation,
            public=shared.get("public"),
        )

    def _views(self, stores: Mapping[tuple[int, int], Data]) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        alike: dict[Any, list[tuple[int, int]]] = {}
        for key, data in stores.items():
            alike.setdefault((data.x.dtype, data.x.shape[1:]), []).append(key)
        views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for keys in alike.values():
            sets = [stores[key] for key in keys]
            fits = self._fits(sum(data.x.numel() * data.x.element_size() for data in sets))
            x, y = [data.x for data in sets], _joined([data.y for data in sets], self.device)
            if fits:
                x = _joined(x, self.device)
                store = Data.of(_whole(x[0]), _whole(y[0]))
                self._stores[id(store.x)] = store
            views |= dict(zip(keys, zip(x, y, strict=True), strict=True))
        return views

    def _fits(self, num_bytes: int) -> bool:
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        return num_bytes <= SHARE_FOR_DATA * free


def _are_rows(data: Data, store: Data) -> bool:
    """Whether a set's examples and labels are the same contiguous rows of the store. A method may have changed the
    labels, or taken every second example."""
    x, y, all_x, all_y = data.x, data.y, store.x, store.y
    is_slice = (x.dtype, x.shape[1:], x.stride(), y.stride()) == (all_x.dtype, all_x.shape[1:], all_x.stride(), (1,))
    return is_slice and y._base is all_y and x.storage_offset() == y.storage_offset() * all_x.stride(0)


def _whole(view: Tensor) -> Tensor:
    assert view._base is not None
    return view._base


def _identity(data: Data) -> tuple[int, int]:
    return id(data.x), id(data.y)


def _joined(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of the parts on the device, as views of one tensor."""
    store = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    views = list(torch.split(store, [len(part) for part in parts]))
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return views
