"""Networks whose weights are an argument.

A client's networks are named *parts* (`features`, `classifier`, ...). Their weights and statistics live in one flat
`Params` (`features.0.weight`), so that they can be sent, averaged, kept and differentiated.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from protofed.errors import BadInput
from protofed.nn.entries import (
    Entries,
    check_unchanged,
    drop_batch_counters,
    entries_of,
    hash_of,
    normalising,
    share_constants,
    signature,
    slots,
    watched,
)
from protofed.nn.fusion import channels_last, fuse, is_torch_module, pools
from protofed.nn.precision import Precision
from protofed.one_run import only_run
from protofed.tree import Params, select

Parts = dict[str, nn.Module]
Patterns = tuple[str, ...]
"""Shell patterns of names in `Params`, such as `("features.*",)`."""


def matching(params: Params, patterns: Patterns) -> Params:
    """The entries whose name matches one of the patterns."""
    if "*" in patterns:  # of most objectives
        return dict(params)
    return {name: leaf for name, leaf in params.items() if any(fnmatchcase(name, p) for p in patterns)}


def without(params: Params, patterns: Patterns) -> Params:
    """The entries whose name matches none of the patterns."""
    if not patterns:
        return dict(params)
    return {name: leaf for name, leaf in params.items() if not any(fnmatchcase(name, p) for p in patterns)}


class Networks:
    """The architecture of one client: parts without weights.

    Its tensors are of three kinds. *Trainable*: parameters with requires_grad. *State*: persistent buffers, such as the
    statistics of BatchNorm. Both are entries of `Params`; tied weights are one entry, by their first name. *Constants*:
    parameters with requires_grad=False. They are no part of `Params`, so they are never copied, sent, averaged or
    saved. Equal constants are in memory once for all networks of a process.

    Constants do not depend on the seed of `init`: they have the values that `build` gives them when the networks are
    made, with torch's generator at seed 0. A `build` that loads fixed weights gives those.
    """

    def __init__(self, build: Callable[[], Parts], built: "_Built | None" = None) -> None:
        self._build = build
        self._feature_dim: int | None = None
        self._initial: tuple[int, Params] | None = None
        built = built or _built(build)
        parts, entries = built.parts, built.entries
        self.constants_hash = built.constants_hash
        """SHA-256 of the constants: names, types, shapes and values."""
        self.signature = built.signature
        """Equal only for networks that differ in nothing but weights."""
        torchs = {part for part, module in parts.items() if is_torch_module(module)}
        for part, module in parts.items():
            if part in torchs:
                fuse(module)
            module.to(torch.get_default_device())
        constants = select(entries.leaves, entries.constants)
        self.constants = {name: leaf.detach() for name, leaf in constants.items()}
        """The frozen parameters, for methods that want them."""
        self._modes = {False: copy.deepcopy(parts, {id(leaf): leaf for leaf in constants.values()}), True: parts}
        for training, modules in self._modes.items():
            for module in modules.values():
                module.train(training)
        self._slots = {
            mode: {part: slots(part, module, entries) for part, module in modules.items()}
            for mode, modules in self._modes.items()
        }
        self._watched = [
            leaf
            for modules in self._modes.values()
            for part, module in modules.items()
            for leaf in watched(part, module, entries)
        ]
        self._pooling = {part for part in torchs if pools(parts[part])}
        self.shapes = {name: leaf.shape for name, leaf in entries.params.items()}
        """Of all entries of `Params`."""
        self.trainable = entries.trainable
        """Names of the parameters that may train; every other entry of `Params` is a buffer, its state."""
        self.initial_buffers = {n: t.detach().clone() for n, t in entries.params.items() if n not in self.trainable}
        self.normalisation = tuple(name for p, module in parts.items() for name in normalising(p, module, entries))
        """Names of the entries of `Params` that belong to layers of normalisation, weights and statistics."""
        self.statistics = {n: self.initial_buffers[n] for n in self.normalisation if n in self.initial_buffers}
        """The running statistics of these layers, as they are initially."""

    @classmethod
    def one_of(cls, known: Iterable["Networks"], build: Callable[[], Parts]) -> "Networks":
        """The first of the known networks that equal what is built, or new ones."""
        built = _built(build)
        return next((own for own in known if own.signature == built.signature), None) or cls(build, built)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._modes[True])

    def layer_names(self) -> dict[nn.Module, str]:
        """Every layer of every part, by the name that the names of its weights begin with."""
        parts = [item for modules in self._modes.values() for item in modules.items()]
        return {layer: ".".join(filter(None, (part, path))) for part, m in parts for path, layer in m.named_modules()}

    def modules(self, part: str) -> Iterator[nn.Module]:
        """The layers of a part as it is evaluated, in the order in which they are defined, for whoever wants to look at
        their outputs. They have no weights of their own."""
        return self._modes[False][part].modules()

    def init(self, seed: int) -> Params:
        """Fresh weights. A part's weights depend on the seed and on the parts built before it."""
        if self._initial is not None and self._initial[0] == seed:
            leaves = self._initial[1]
        else:
            leaves = select(entries_of(_seeded_parts(self._build, seed)).leaves, tuple(self.shapes))
            if self.constants:  # to build frozen parts may take long, and clients ask for the same weights again
                self._initial = seed, {name: leaf.detach().clone() for name, leaf in leaves.items()}
        device = torch.get_default_device()
        return {
            name: leaf.detach().to(device).clone(memory_format=torch.contiguous_format) for name, leaf in leaves.items()
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
        """The output of a part at these weights. Buffers that it changes are changed in `params`, in place."""
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

    def modules_at(self, params: Params, parts: Collection[str]) -> Parts:
        """New modules of these parts that have these weights as their own, in evaluation mode."""
        made = _seeded_parts(self._build, seed=0)
        entries = entries_of(made)
        with torch.no_grad():
            for name, leaf in entries.params.items():
                if name.partition(".")[0] in parts:
                    leaf.copy_(params[name])
        return {part: module.eval() for part, module in made.items() if part in parts}

    def buffer_copies(self, params: Params) -> Params:
        """Copies of the buffers, for a call that may change them."""
        return {name: leaf.clone() for name, leaf in params.items() if name not in self.trainable}

    def check_unchanged(self) -> None:
        """Refuses networks that keep state where it is neither saved nor sent."""
        check_unchanged(self._watched)

    def feature_dim(self, example: Tensor) -> int:
        """Size of a feature vector, found by one call."""
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
        self._features: dict[int, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, part: str) -> Callable[..., Tensor]:
        if part.startswith("_") or part not in self.networks.parts:
            raise AttributeError(f"no part {part!r}; the parts are {', '.join(self.networks.parts)}")
        return partial(self._call, part)

    def _call(self, part: str, *inputs: Any) -> Any:
        """The output of a part. In training, the features of a batch are computed once, however many terms of a loss
        read them. So they are the same for all, and the statistics of BatchNorm see the batch once."""
        if part != "features" or not self.training or len(inputs) != 1:
            return self._computed(part, *inputs)
        (x,) = inputs
        if id(x) not in self._features:
            self._features[id(x)] = x, self._computed(part, x)  # keep x alive: a new tensor may reuse its id()
        return self._features[id(x)][1]

    def _computed(self, part: str, *inputs: Any) -> Any:
        """With bf16, autocast chooses the layers that work in it. Outputs are float32 again, and so are all losses."""
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


def _refuse_unusable(parts: Parts) -> None:
    for part in parts:
        if not part.isidentifier() or part in RESERVED or part.startswith("_"):
            raise BadInput(f"a part of a network cannot be called {part!r}")


@dataclass(frozen=True)
class _Built:
    """What a `build` gave at seed 0, and what makes it equal to another."""

    parts: Parts
    entries: Entries
    constants_hash: str
    signature: str


def _built(build: Callable[[], Parts]) -> _Built:
    parts = _seeded_parts(build, seed=0)
    _refuse_unusable(parts)
    constants_hash = hash_of(share_constants(parts))
    entries = entries_of(parts)
    return _Built(parts, entries, constants_hash, signature(parts, entries, constants_hash))


def _seeded_parts(build: Callable[[], Parts], seed: int) -> Parts:
    with only_run(), torch.device("cpu"), torch.random.fork_rng(devices=[]):  # the same weights wherever they are used
        torch.default_generator.manual_seed(seed)
        parts = build()
    for module in parts.values():
        drop_batch_counters(module)
    return parts
