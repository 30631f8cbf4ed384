"""A trained model as a plain `nn.Module`: it can be called, saved, traced, copied, and needs no federation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from protofed import tree
from protofed.api.method import Method
from protofed.api.task import InputSpec
from protofed.api.views import Points
from protofed.data.transforms import Transform
from protofed.nn.networks import Model, Networks, Parts
from protofed.tree import Params, Tree

AnyMethod = Method[Any, Any, Any, Any]


class TrainedModel(nn.Module):
    """Maps inputs, as the task's transform gives them, to scores of the classes by the method's own rule.

    Its submodules are the parts of the network that predicting needs, so that the names of its weights are those of the
    federation, such as `features.0.weight`. What else the method predicts with, such as prototypes, are buffers.
    """

    def __init__(
        self,
        method: AnyMethod,
        parts: Parts,
        context: "Context",
        *,
        classes: tuple[str, ...],
        input: InputSpec,
        transform: Transform,
        prototypes: Mapping[str, Points] | None = None,
    ) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)
        self.part_names = tuple(parts)
        """The parts of the network that predicting needs."""
        self._method = method
        self._records = context.records
        self.known = {path: f"known_{k}" for k, path in enumerate(context.used)}
        """The buffers that hold what the method predicts with, by path in message and memory."""
        for path, name in self.known.items():
            self.register_buffer(name, context.used[path].detach().clone())
        self.classes = classes
        """The names of the classes, in the order of the scores."""
        self.input_shape, self.input_dtype = input.shape, input.dtype
        self._mean, self._std = transform.mean, transform.std
        self.prototypes = dict(prototypes or {})
        """The prototypes that the server has, by kind, in the space of `embed`."""
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes, (B, C)."""
        message, memory = self._known()
        return self._method.predict(self._model(), x, message, memory)

    def embed(self, x: Tensor) -> Tensor:
        """The features in whose space prototypes are, (B, D)."""
        return self._method.shown_features(self._model(), x)

    def probabilities(self, x: Tensor) -> Tensor:
        """Probabilities of the classes, (B, C)."""
        return self.as_probabilities(self(x))

    def as_probabilities(self, scores: Tensor) -> Tensor:
        """The same, of scores that the model has given."""
        return self._method.probabilities(scores, self._known()[0])

    def transform(self, x: Tensor) -> Tensor:
        """Examples as they are stored, such as images of bytes, as inputs."""
        return Transform(self._mean, self._std).clean(x)

    def blank(self, size: int = 1) -> Tensor:
        """Inputs of zeros."""
        return InputSpec(self.input_shape, self.input_dtype).blank(size)

    def with_context(self, parts: Parts, context: "Context") -> "TrainedModel":
        """A model of these parts that predicts by the same rule, with something else known."""
        spec, transform = InputSpec(self.input_shape, self.input_dtype), Transform(self._mean, self._std)
        return TrainedModel(self._method, parts, context, classes=self.classes, input=spec, transform=transform)

    def _model(self) -> Model:
        here = _Here({name: self.get_submodule(name) for name in self.part_names})
        return Model(cast(Networks, here), here.params, training=self.training)

    def _known(self) -> tuple[Tree, Tree]:
        """The message and the memory that the method predicts with."""
        leaves = tree.named_leaves(self._records) | {path: self.get_buffer(name) for path, name in self.known.items()}
        records = tree.with_leaves(self._records, [*leaves.values()])
        return records.get("message"), records.get("memory")

    def extra_repr(self) -> str:
        return f"{type(self._method).__name__}, {len(self.classes)} classes"


class WithFeatures(nn.Module):
    """What is exported: scores and features of inputs."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(x), self.model.embed(x)


Records = dict[str, Tree]
"""The `message` and the `memory` that a method predicts with; a record that is None is left out."""


@dataclass(frozen=True)
class Context:
    """What a method predicts with beside weights."""

    records: Records
    """Their structure: no leaf has values of its own."""
    used: Mapping[str, Tensor]
    """The leaves that a prediction reads, by path."""


@dataclass(frozen=True)
class _Here:
    """Modules with weights of their own, in the place of `Networks`."""

    modules: Parts

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.modules)

    @property
    def params(self) -> Params:
        return {f"{part}.{name}": leaf for part, module in self.modules.items() for name, leaf in _entries(module)}

    @property
    def trainable(self) -> tuple[str, ...]:
        parts = self.modules.items()
        return tuple(f"{part}.{name}" for part, m in parts for name, leaf in m.named_parameters() if leaf.requires_grad)

    def call(self, part: str, params: Params, training: bool, *inputs: Any) -> Any:
        module = self.modules[part]
        own = dict(_entries(module))
        given = {name: params[f"{part}.{name}"] for name in own if f"{part}.{name}" in params}
        if all(leaf is own[name] for name, leaf in given.items()):
            return module(*inputs)
        return torch.func.functional_call(module, given, inputs)


def _entries(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


# ---- what a prediction reads


class _Recording(Model):
    """Notes the parts that are called."""

    def __init__(self, networks: Networks, params: Params) -> None:
        super().__init__(networks, params, training=False)
        self.called: dict[str, None] = {}

    def _call(self, part: str, *inputs: Any) -> Any:
        self.called[part] = None
        return super()._call(part, *inputs)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operations read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def needed(
    method: AnyMethod, networks: Networks, params: Params, records: Records, x: Tensor
) -> tuple[tuple[str, ...], Context]:
    """The parts and the values of the records that predictions and `embed` read. The rest is left behind: what a client
    keeps for training is not part of its model."""
    records = tree.map(lambda leaf: leaf.detach().clone(), records)
    recording, reads = _Recording(networks, params), _Reads()
    with reads:
        method.predict(recording, x, records.get("message"), records.get("memory"))
        method.shown_features(recording, x)
    used = {path: leaf for path, leaf in tree.named_leaves(records).items() if id(leaf) in reads.read}
    return tuple(part for part in networks.parts if part in recording.called), Context(hollow(records), used)


def hollow(records: Records) -> Records:
    """The records with leaves of the same shapes and no values."""
    return tree.map(lambda leaf: leaf.new_zeros(()).expand(leaf.shape), records)
