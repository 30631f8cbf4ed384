"""What methods ask of a network beyond its scores."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from protofed.api.contexts import ServerContext
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch
from protofed.nn.networks import Model, Parts, Patterns
from protofed.tree import Params

CLASSIFIER: Patterns = ("classifier.*",)
HEAD: Patterns = ("projection.*", "classifier.*")
"""All that lies behind the features."""


def embedded(model: Model, x: Tensor) -> Tensor:
    """What the classifier reads: the features, through the projection if the network has one."""
    return model.embedding(model.features(x))


def features(model: Model, batch: Batch) -> Tensor:
    return model.features(batch.x)


def embedding_dim(spec: TaskSpec, parts: Parts) -> int:
    """P, the size of what the classifier reads, found by running the network once."""
    with torch.no_grad():
        z = parts["features"].eval()(spec.input.blank())
        if "projection" in parts:
            z = parts["projection"].eval()(z)
    dim: int = z.shape[-1]
    return dim


@torch.no_grad()
def needs_two_rows(spec: TaskSpec, build: Callable[[], Parts], behind_features: bool = False) -> bool:
    """Whether a network, or what lies behind its features, cannot train on a batch of one row. BatchNorm cannot where
    it sees one value of a channel in each row."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        parts, x = build(), spec.input.blank()
        layers = [parts[part] for part in ("features", "projection", "classifier") if part in parts]
        if behind_features:
            x = layers.pop(0).eval()(x)
        network = nn.Sequential(*layers).train()
        return not _takes(network, x) and _takes(network, x.repeat_interleave(2, 0))


def _takes(network: nn.Module, x: Tensor) -> bool:
    try:
        network(x)
    except ValueError:
        return False
    return True


@torch.no_grad()
def server_embedding(server: ServerContext, params: Params, z: Tensor) -> Tensor:
    """What the classifier reads of these features, computed at the server."""
    return server.networks.model(params).embedding(z)


def own_statistics(model: Model) -> Model:
    """The same model with copies of its buffers, so that running it once more does not move statistics twice. Without
    buffers it is the model itself, which computes the features of a batch only once."""
    copies = model.networks.buffer_copies(model.params)
    return model.at({**model.params, **copies}) if copies else model
