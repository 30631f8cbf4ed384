"""Networks whose weights are an argument.

A client's networks are named *parts* (`features`, `classifier`, ...). All their tensors live in one flat `Params`
(`features.0.weight`), statistics of BatchNorm included, so weights can be sent, averaged, kept and differentiated.
"""

import copy
import hashlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from protofed.errors import BadInput
from protofed.nn.fusion import channels_last, fuse, is_torch_module, pools
from protofed.nn.precision import Precision
from protofed.tree import Params, select

Parts = dict[str, nn.Module]
Patterns = tuple[str, ...]
"""Shell patterns of names in `Params`, such as `("features.*",)`."""

Slot = tuple[dict[str, Any], str, str, bool]
"""Where a tensor is put before a call: the dict of its module, its name there, its name in `Params`, whether it is a
buffer."""


def matching(params: Params, patterns: Patterns) -> Params:
    """The entries whose name matches one of the patterns."""
    return {name: leaf for name, leaf in params.items() if any(fnmatchcase(name, p) for p in patterns)}


def without(params: Params, patterns: Patterns) -> Params:
    """The entries whose name matches none of the patterns."""
    return {name: leaf for name, leaf in params.items() if not any(fnmatchcase(name, p) for p in patterns)}


class Networks:
    """The architecture of one client: parts without weights."""

    def __init__(self, build: Callable[[], Parts]) -> None:
        self._build = build
        self._feature_dim: int | None = None
        parts = self._seeded_parts(seed=0)
        _refuse_unusable(parts)
        self.signature = _signature(parts)
        """Equal only for networks that differ in nothing but weights."""
        torchs = {part for part, module in parts.items() if is_torch_module(module)}
        for part, module in parts.items():
            if part in torchs:
                fuse(module)
            module.to(torch.get_default_device())
        self._modes = {False: copy.deepcopy(parts), True: parts}
        for training, modules in self._modes.items():
            for module in modules.values():
                module.train(training)
        self._slots = {
            mode: {part: _slots(part, module) for part, module in modules.items()}
            for mode, modules in self._modes.items()
        }
        self._constants = [_constants(module) for modules in self._modes.values() for module in modules.values()]
        self._pooling = {part for part in torchs if pools(parts[part])}
        state = _state(parts)
        self.shapes = {name: leaf.shape for name, leaf in state.items()}
        """Of all entries of `Params`."""
        self.trainable = tuple(name for name, leaf in state.items() if leaf.requires_grad)
        """Names of the parameters that may train; every other entry of `Params` is called a buffer."""
        self.initial_buffers = {n: t.detach().clone() for n, t in state.items() if n not in self.trainable}
        self.normalisation = tuple(name for part, module in parts.items() for name in _normalising(part, module))
        """Names of the entries of `Params` that belong to layers of normalisation, weights and statistics."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._modes[True])

    def init(self, seed: int) -> Params:
        """Fresh weights. A part's weights depend on the seed and on the parts built before it."""
        state = _state(self._seeded_parts(seed))
        device = torch.get_default_device()
        return {
            name: leaf.detach().to(device).clone(memory_format=torch.contiguous_format) for name, leaf in state.items()
        }

    def check(self, params: Params) -> None:
        """Refuses weights of other networks."""
        for name, shape in self.shapes.items():
            if name not in params:
                raise ValueError(f"weights of other networks: {name} is missing")
            if params[name].shape != shape:
                raise ValueError(
                    f"weights of other networks: {name} is {tuple(params[name].shape)}, not {tuple(shape)}"
                )

    def model(self, params: Params, *, training: bool = False, precision: "Precision" = "float32") -> "Model":
        return Model(self, params, training=training, precision=precision)

    def call(self, part: str, params: Params, training: bool, *inputs: Any) -> Any:
        """What a part gives at these weights; buffers of `params` change in place if it changes them."""
        slots = self._slots[training][part]
        for store, name, key, _ in slots:
            store[name] = params[key]
        if part in self._pooling:
            inputs = tuple(map(channels_last, inputs))
        output = self._modes[training][part](*inputs)
        for store, name, key, is_buffer in slots:
            if is_buffer and store[name] is not params[key]:  # assigned anew, not changed in place
                params[key].copy_(store[name].detach())
        return output

    def own_buffers(self, params: Params) -> Params:
        """Copies of the buffers, for a call that may change them."""
        return {name: leaf.clone() for name, leaf in params.items() if name not in self.trainable}

    def check_constants(self) -> None:
        """Refuses networks that keep state where it is neither saved nor sent."""
        for constants in self._constants:
            for name, store, last, leaf, version in constants:
                if store[last] is not leaf or leaf._version != version:
                    raise ValueError(
                        f"the network changed {name}, which is not saved: register it with persistent=True"
                    )

    def _seeded_parts(self, seed: int) -> Parts:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # the same weights wherever they are used
            torch.default_generator.manual_seed(seed)
            parts = self._build()
        for module in parts.values():
            _drop_batch_counters(module)
        return parts

    def feature_dim(self, example: Tensor) -> int:
        """Size of a feature vector, found by asking."""
        if self._feature_dim is None:
            with torch.no_grad():
                self._feature_dim = self.model(self.init(0)).features(example).shape[-1]
        return self._feature_dim


class Model:
    """Networks at given weights: `model.features(x)`, `model.classifier(z)`, and any other part by its name."""

    def __init__(self, networks: Networks, params: Params, *, training: bool, precision: Precision = "float32") -> None:
        self.networks = networks
        self.params = params
        self.training = training
        self.precision = precision
        self._known: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __getattr__(self, part: str) -> Callable[..., Tensor]:
        if part.startswith("_") or part not in self.networks.parts:
            raise AttributeError(f"no part {part!r}; the parts are {', '.join(self.networks.parts)}")
        return partial(self._call, part)

    def _call(self, part: str, *inputs: Any) -> Any:
        """What a part gives. In training, features of one batch are computed once, however many terms of a loss ask for
        them: so they are the same for all, and statistics of BatchNorm see the batch once."""
        if part != "features" or not self.training or len(inputs) != 1:
            return self._computed(part, *inputs)
        (x,) = inputs
        known = self._known.get((part, id(x)))
        if known is None:  # the input is kept with the output, or another tensor could be given its place
            known = self._known[part, id(x)] = x, self._computed(part, x)
        return known[1]

    def _computed(self, part: str, *inputs: Any) -> Any:
        """With bf16, layers that gain by it work in it; what a part gives is float32 again, and so are all losses."""
        if self.precision != "bf16":
            return self.networks.call(part, self.params, self.training, *inputs)
        with torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False):
            output = self.networks.call(part, self.params, self.training, *inputs)
        return pytree.tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) else leaf, output)

    def embedding(self, z: Tensor) -> Tensor:
        """What the classifier reads: the features, through the part `projection` if there is one."""
        return self.projection(z) if "projection" in self.networks.parts else z

    def scores(self, z: Tensor) -> Tensor:
        """Scores of the classes, from features."""
        return self.classifier(self.embedding(z))

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the classes, from inputs."""
        return self.scores(self.features(x))

    @property
    def trainable(self) -> Params:
        """The parameters, without the buffers."""
        return select(self.params, self.networks.trainable)

    def at(self, params: Params) -> "Model":
        """The same networks at other weights."""
        return Model(self.networks, params, training=self.training, precision=self.precision)

    def frozen(self, params: Params) -> "Model":
        """The same networks at other weights, as a teacher: evaluation mode, no gradient into its weights."""
        detached = {name: leaf.detach() for name, leaf in params.items()}
        return Model(self.networks, detached, training=False, precision=self.precision)


RESERVED = {name for name in dir(Model) if not name.startswith("__")} | {"networks", "params", "training", "precision"}


def _drop_batch_counters(module: nn.Module) -> None:
    """Removes BatchNorm's `num_batches_tracked`: with a fixed momentum it is never read, and it has no mean."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            if layer.momentum is None:
                raise ValueError("BatchNorm with momentum=None counts batches, which cannot be averaged")
            layer.num_batches_tracked = None


def _refuse_unusable(parts: Parts) -> None:
    for part in parts:
        if not part.isidentifier() or part in RESERVED or part.startswith("_"):
            raise BadInput(f"a part of a network cannot be called {part!r}")
    names: dict[int, str] = {}
    for name, leaf in _state(parts).items():
        other = names.setdefault(id(leaf), name)
        if other != name:
            raise BadInput(f"{name} and {other} are one tensor: tied weights cannot be averaged apart; untie them")


def _state(parts: Parts) -> Params:
    """Parameters and persistent buffers of all parts."""
    return {f"{p}.{n}": leaf for p, m in parts.items() for n, leaf in m.state_dict(keep_vars=True).items()}


def _slots(part: str, module: nn.Module) -> list[Slot]:
    slots: list[Slot] = []
    for name in module.state_dict(keep_vars=True):
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        is_buffer = last in owner._buffers
        slots.append((owner._buffers if is_buffer else owner._parameters, last, f"{part}.{name}", is_buffer))
    return slots


def _normalising(part: str, module: nn.Module) -> list[str]:
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)]
    return [".".join(filter(None, (part, name, own))) for name, layer in layers for own in layer.state_dict()]


def _constants(module: nn.Module) -> list[tuple[str, dict[str, Any], str, Tensor, int]]:
    """Buffers that are not part of the state, with the version that they must keep."""
    return [
        (f"{path}.{name}", layer._buffers, name, leaf, leaf._version)
        for path, layer in module.named_modules()
        for name, leaf in layer._buffers.items()
        if leaf is not None and name in layer._non_persistent_buffers_set
    ]


def _signature(parts: Parts) -> str:
    """A digest of everything but the values of parameters: kinds of layers, their settings, shapes, buffers."""
    digest = hashlib.sha256()
    for part, module in parts.items():
        for name, layer in module.named_modules():
            own = {k: v for k, v in vars(layer).items() if k not in {"_parameters", "_modules"}}
            shapes = {k: (v.shape, v.requires_grad) for k, v in layer._parameters.items() if v is not None}
            digest.update(repr((part, name, id(type(layer)), _fact(own), shapes)).encode())
    return digest.hexdigest()


def _fact(value: Any) -> Any:
    """Something whose repr is equal only for equal values; what cannot be compared is equal only to itself."""
    match value:
        case None | bool() | int() | float() | str() | torch.dtype() | torch.Size():
            return value
        case Tensor():
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, hashlib.sha256(data).hexdigest()
        case dict():
            return [(_fact(k), _fact(v)) for k, v in value.items()]
        case list() | tuple():
            return [_fact(item) for item in value]
        case set() | frozenset():
            return sorted(repr(_fact(item)) for item in value)
    return type(value).__name__, id(value)
