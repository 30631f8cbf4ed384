"""`training.norm_statistics`: what becomes of the running statistics of layers of normalisation.

Where they are not averaged, uploads hold the initial ones in their place: constants, which say nothing of a client.
They are found by their names in the dicts of messages, uploads and memories, so a method must have weights of the
network there, and not differences of weights.
"""

from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Step, UsedModel
from protofed.api.requests import Request
from protofed.api.task import TaskSpec
from protofed.engine.around import Around, Keeping, Kept
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.optim.optimizers import Optimizer
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

NormStatistics = Literal["averaged", "local", "dropped"]


@dataclass(frozen=True)
class OwnStatistics(Keeping):
    """Every client keeps its statistics, trains from them and is tested with them."""

    names: tuple[str, ...]
    """Of the statistics that the base would send."""

    @property
    def clients_use(self) -> UsedModel:
        return "own models"

    def public(self, state: Tree) -> None:
        """The server has weights, but no statistics to go with them."""

    def init_memory(self, client: ClientContext, message: Tree) -> Kept:
        initial = initial_statistics(client.networks)
        own = {name: initial[name] for name in self.names if name in initial}
        return Kept(self.base.init_memory(client, message), own)

    def seen(self, message: Tree, memory: Kept | None) -> Tree:
        return message if memory is None else placed(message, memory.own)

    async def stepped(
        self, step: Step[Any, Any, Any], client: ClientContext, message: Tree, memory: Kept
    ) -> Reply[Any, Kept]:
        reply = await super().stepped(step, client, message, memory)
        found = taken(reply.upload, memory.own)
        if not found and reply.memory is memory.base:  # as after an evaluation
            return replace(reply, memory=memory)
        upload = placed(reply.upload, initial_statistics(client.networks))
        return Reply(upload, Kept(reply.memory, {**memory.own, **found}))

    def arrived(self, upload: Tree, server: ServerContext) -> Tree:
        return placed(upload, initial_statistics(server.networks))


@dataclass(frozen=True)
class NoStatistics(Around):
    """Every step begins with the initial statistics, and what it makes of them is forgotten."""

    def init_memory(self, client: ClientContext, message: Tree) -> Tree:
        initial = initial_statistics(client.networks)
        return placed(self.base.init_memory(client, placed(message, initial)), initial)

    async def stepped(
        self, step: Step[Any, Any, Any], client: ClientContext, message: Tree, memory: Tree
    ) -> Reply[Any, Any]:
        initial = initial_statistics(client.networks)
        reply = await step(client, placed(message, initial), memory)
        if reply.memory is memory:
            return replace(reply, upload=placed(reply.upload, initial))
        return Reply(placed(reply.upload, initial), placed(reply.memory, initial))

    def arrived(self, upload: Tree, server: ServerContext) -> Tree:
        return placed(upload, initial_statistics(server.networks))


def with_norm_statistics(
    method: Method[Any, Any, Any, Any], choice: NormStatistics, spec: TaskSpec, optimizer: Optimizer, seed: int
) -> Method[Any, Any, Any, Any]:
    """The method, with the statistics treated in this way."""
    if choice == "averaged":
        return method
    with torch.device("cpu"):
        kinds = (Networks(partial(method.networks, spec, client)) for client in sorted(spec.clients))
        networks = next((one for one in kinds if one.statistics), None)
        if networks is None:
            raise BadInput(
                f'training.norm_statistics = "{choice}": the network has no layers with running statistics, such as '
                "BatchNorm; leave it out"
            )
        if choice == "dropped":
            return NoStatistics(method)
        server = ServerContext(spec, networks, optimizer, 0, 1, seed, derive_seed(seed, "load", 0), _refused)
        like = method.upload_spec(method.init_server(server), server)
    names = tuple(taken(like, networks.statistics))
    return OwnStatistics(method, names) if names else method  # else clients keep them all as it is


def _refused(request: Request[Any]) -> Any:
    raise AssertionError(f"a server that only begins asks for {type(request).__name__}")


def initial_statistics(networks: Networks) -> Params:
    device = torch.get_default_device()
    return {name: leaf.to(device) for name, leaf in networks.statistics.items()}


def placed(value: Tree, statistics: Params) -> Tree:
    """The tree with these statistics in every dict that has entries of their names. A dict that holds several models,
    with entries (K, ...), gets them for each."""
    if isinstance(value, dict):
        return {key: _in_place_of(child, statistics.get(key), statistics) for key, child in value.items()}
    if isinstance(value, list | tuple):
        children = [placed(child, statistics) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{name: placed(getattr(value, name), statistics) for name in value.__dataclass_fields__})


def _in_place_of(child: Tree, statistic: Tensor | None, statistics: Params) -> Tree:
    if not isinstance(child, Tensor):
        return placed(child, statistics)
    if statistic is None or child.shape[child.dim() - statistic.dim() :] != statistic.shape:
        return child
    return statistic.to(child).expand(child.shape)  # of its dtype, and where it is


def taken(value: Tree, like: Params) -> Params:
    """The statistics of the first model in a tree."""
    found: Params = {}
    if isinstance(value, dict):
        for key, child in value.items():
            if key in like and isinstance(child, Tensor) and child.shape == like[key].shape:
                found[key] = child
    children = value.values() if isinstance(value, dict) else _children(value)
    for child in children:
        found = {**taken(child, like), **found}
    return found


def _children(value: Tree) -> list[Tree]:
    if isinstance(value, list | tuple):
        return list(value)
    is_record = is_dataclass(value) and not isinstance(value, type)
    return [getattr(value, name) for name in value.__dataclass_fields__] if is_record else []
