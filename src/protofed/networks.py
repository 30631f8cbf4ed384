"""Networks whose weights are an argument.

A client's networks are named *parts* (`features`, `classifier`, ...). All their tensors live in one flat `Params`
(`features.0.weight`), statistics of BatchNorm included, so weights can be sent, averaged, kept and differentiated.
"""

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from protofed.tree import Params, select

Parts = dict[str, nn.Module]
Patterns = tuple[str, ...]
"""Shell patterns of names in `Params`, such as `("features.*",)`."""

Slot = tuple[dict[str, Any], str, str]
"""Where a tensor is put before a call: the dict of its module, its name there, its name in `Params`."""


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
        for part in parts:
            if part in RESERVED or "." in part:
                raise ValueError(f"a part cannot be called {part!r}")
        self._modes = {False: copy.deepcopy(parts), True: parts}
        for training, modules in self._modes.items():
            for module in modules.values():
                module.train(training)
        self._slots = {
            mode: {part: _slots(part, module) for part, module in modules.items()}
            for mode, modules in self._modes.items()
        }
        self.trainable = tuple(f"{p}.{name}" for p, m in parts.items() for name, _ in m.named_parameters())
        """Names of the parameters; every other entry of `Params` is a buffer."""
        self.initial_buffers = {
            f"{p}.{n}": t.clone() for p, m in parts.items() for n, t in _state(m) if f"{p}.{n}" not in self.trainable
        }
        self.signature = repr([(p, str(m), [(n, t.shape) for n, t in _state(m)]) for p, m in parts.items()])
        """Equal for networks that differ in nothing but weights."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._modes[True])

    def init(self, seed: int) -> Params:
        """Fresh weights. A part's weights depend on the seed and on the parts built before it."""
        parts = self._seeded_parts(seed)
        return {f"{p}.{n}": t.detach().clone() for p, module in parts.items() for n, t in _state(module)}

    def model(self, params: Params, *, training: bool = False) -> "Model":
        return Model(self, params, training=training)

    def call(self, part: str, params: Params, training: bool, *inputs: Any) -> Any:
        for store, name, key in self._slots[training][part]:
            store[name] = params[key]
        return self._modes[training][part](*inputs)

    def _seeded_parts(self, seed: int) -> Parts:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
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

    def __init__(self, networks: Networks, params: Params, *, training: bool) -> None:
        self.networks = networks
        self.params = params
        self.training = training

    def __getattr__(self, part: str) -> Callable[..., Tensor]:
        if part not in self.networks.parts:
            raise AttributeError(f"no part {part!r}; the parts are {', '.join(self.networks.parts)}")
        return lambda *inputs: self.networks.call(part, self.params, self.training, *inputs)

    def logits(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))

    @property
    def trainable(self) -> Params:
        """The parameters, without the buffers."""
        return select(self.params, self.networks.trainable)

    def frozen(self, params: Params) -> "Model":
        """The same networks at other weights, as a teacher: evaluation mode, no gradient into its weights."""
        return Model(self.networks, {name: leaf.detach() for name, leaf in params.items()}, training=False)


RESERVED = {name for name in dir(Model) if not name.startswith("__")} | {"networks", "params", "training"}


def _drop_batch_counters(module: nn.Module) -> None:
    """Removes BatchNorm's `num_batches_tracked`: with a fixed momentum it is never read, and it has no mean."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            if layer.momentum is None:
                raise ValueError("BatchNorm with momentum=None counts batches, which cannot be averaged")
            layer.num_batches_tracked = None


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers."""
    return list(module.state_dict(keep_vars=True).items())


def _slots(part: str, module: nn.Module) -> list[Slot]:
    slots: list[Slot] = []
    for name, _ in _state(module):
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        slots.append((owner._parameters if last in owner._parameters else owner._buffers, last, f"{part}.{name}"))
    return slots
