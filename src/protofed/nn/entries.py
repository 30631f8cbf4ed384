"""The tensors of networks: their names and kinds, where modules hold them, and what makes two networks equal."""

import hashlib
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from protofed.errors import BadInput
from protofed.tree import Params, select

Parts = dict[str, nn.Module]

Slot = tuple[dict[str, Any], str, str, bool]
"""Where a tensor is put before a call: the dict of its module, its name there, its name in `Params`, whether it is a
buffer."""

Watched = tuple[str, dict[str, Any], str, Tensor, int]
"""A tensor that no call may change: its name, where it is, its name there, itself, its version."""

_CONSTANTS: WeakValueDictionary[tuple[str, torch.device], nn.Parameter] = WeakValueDictionary()
"""Frozen parameters of all networks of this process, by digest and device."""


@dataclass(frozen=True)
class Entries:
    """Parameters and persistent buffers of all parts. A tensor that modules hold several times, as tied weights are, is
    one entry under its first name."""

    leaves: Params
    first_names: dict[str, str]
    """Of every name in the modules, the first name of its tensor."""
    trainable: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def params(self) -> Params:
        """All but the constants."""
        return {name: leaf for name, leaf in self.leaves.items() if name not in self.constants}


def entries_of(parts: Parts) -> Entries:
    leaves: Params = {}
    first_names: dict[str, str] = {}
    known: dict[int, str] = {}
    constants = []
    for part, module in parts.items():
        for name, leaf in module.state_dict(keep_vars=True).items():
            full = f"{part}.{name}"
            first_names[full] = known.setdefault(id(leaf), full)
            if first_names[full] == full:
                leaves[full] = leaf
                if not leaf.requires_grad and _is_parameter(module, name):
                    constants.append(full)
    trainable = tuple(name for name, leaf in leaves.items() if leaf.requires_grad)
    return Entries(leaves, first_names, trainable, tuple(constants))


def _is_parameter(module: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in module.get_submodule(path)._parameters


def share_constants(parts: Parts) -> dict[str, str]:
    """Puts frozen parameters that the process has already in the place of equal ones. Gives the digest of each."""
    entries, device = entries_of(parts), torch.get_default_device()
    for name in entries.constants:
        if not isinstance(entries.leaves[name], nn.Parameter):
            raise BadInput(f"{name} is in use by other networks: the model must be built anew in every call, or copied")
    digests = {name: repr(_fact(leaf)) for name, leaf in select(entries.leaves, entries.constants).items()}
    for full, first in entries.first_names.items():
        if first in digests:
            part, _, name = full.partition(".")
            path, _, last = name.rpartition(".")
            shared = _shared(entries.leaves[first], digests[first], device)
            parts[part].get_submodule(path)._parameters[last] = shared
    return digests


def _shared(leaf: Tensor, digest: str, device: torch.device) -> nn.Parameter:
    shared = _CONSTANTS.get((digest, device))
    if shared is None:
        shared = nn.Parameter(leaf.detach().to(device), requires_grad=False)
        _CONSTANTS[digest, device] = shared
    return shared


def slots(part: str, module: nn.Module, entries: Entries) -> list[Slot]:
    places: list[Slot] = []
    for name in module.state_dict(keep_vars=True):
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        is_buffer, first = last in owner._buffers, entries.first_names[f"{part}.{name}"]
        if first not in entries.constants:
            places.append((owner._buffers if is_buffer else owner._parameters, last, first, is_buffer))
    return places


def normalising(part: str, module: nn.Module, entries: Entries) -> list[str]:
    """Names in `Params` of the weights and statistics of layers of normalisation."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)]
    names = [".".join(filter(None, (part, name, leaf))) for name, layer in layers for leaf in layer.state_dict()]
    return [first for first in map(entries.first_names.__getitem__, names) if first not in entries.constants]


def watched(part: str, module: nn.Module, entries: Entries) -> list[Watched]:
    """What is not part of `Params`: constants, and buffers that are not persistent."""
    found: list[Watched] = []
    for path, layer in module.named_modules():
        prefix = ".".join(filter(None, (part, path)))
        for name, leaf in [*layer._parameters.items(), *layer._buffers.items()]:
            full, store = f"{prefix}.{name}", layer._buffers if name in layer._buffers else layer._parameters
            is_constant = entries.first_names.get(full) in entries.constants
            if leaf is not None and (is_constant or name in layer._non_persistent_buffers_set):
                found.append((full, store, name, leaf, leaf._version))
    return found


def check_unchanged(leaves: list[Watched]) -> None:
    """Refuses networks that keep state where it is neither saved nor sent."""
    for name, store, last, leaf, version in leaves:
        if store[last] is not leaf or leaf._version != version:
            hint = "it is frozen" if isinstance(leaf, nn.Parameter) else "register it with persistent=True"
            raise ValueError(f"the network changed {name}, which is not saved: {hint}")


def drop_batch_counters(module: nn.Module) -> None:
    """Removes BatchNorm's `num_batches_tracked`: with a fixed momentum it is never read, and it has no mean."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            if layer.momentum is None:
                raise BadInput("BatchNorm with momentum=None counts batches, which cannot be averaged")
            layer.num_batches_tracked = None


def hash_of(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def signature(parts: Parts, entries: Entries, constants_hash: str) -> str:
    """A digest of everything but the values of weights: kinds of layers, their settings, shapes, ties, buffers and
    constants."""
    facts: list[Any] = [constants_hash, list(entries.first_names.items())]
    for part, module in parts.items():
        for name, layer in module.named_modules():
            attributes = {k: v for k, v in vars(layer).items() if k not in {"_parameters", "_modules"}}
            shapes = {k: (v.shape, v.requires_grad) for k, v in layer._parameters.items() if v is not None}
            facts.append((part, name, id(type(layer)), _fact(attributes), shapes))
    return hash_of(facts)


def _fact(value: Any) -> Any:
    """Something whose repr is equal only for equal values; what cannot be compared is equal only to itself."""
    match value:
        case None | bool() | int() | float() | str() | torch.dtype() | torch.Size():
            return value
        case Tensor():
            data: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            return value.dtype, value.shape, hashlib.sha256(data).hexdigest()
        case dict():
            return [(_fact(k), _fact(v)) for k, v in value.items()]
        case list() | tuple():
            return [_fact(item) for item in value]
        case set() | frozenset():
            return sorted(repr(_fact(item)) for item in value)
    return type(value).__name__, id(value)
