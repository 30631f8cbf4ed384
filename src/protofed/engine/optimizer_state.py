"""`training.optimizer_state`: whether a client's optimiser goes on from where its last round left it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from protofed.api.contexts import Carried, ClientContext, Reply
from protofed.api.method import Method, Step
from protofed.api.task import TaskSpec
from protofed.engine.around import Keeping, Kept, unwrapped
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.optim.kept import why_not_kept
from protofed.optim.optimizers import Optimizer
from protofed.tree import Tree, select

OptimizerState = Literal["fresh", "kept"]


@dataclass(frozen=True)
class KeptOptimizer(Keeping):
    """Every client keeps the optimiser's state of its main training, for all weights that may train."""

    def init_memory(self, client: ClientContext, message: Tree) -> Kept:
        weights = select(client.initial_params(), client.networks.trainable)
        return Kept(self.base.init_memory(client, message), client.optimizer.init(weights))

    async def train(self, client: ClientContext, message: Tree, memory: Kept) -> Reply[Any, Kept]:
        carried = Carried(memory.own)
        reply = await self.base.train(replace(client, carried=carried), message, memory.base)
        return replace(reply, memory=Kept(reply.memory, carried.state))

    async def stepped(
        self, step: Step[Any, Any, Any], client: ClientContext, message: Tree, memory: Kept
    ) -> Reply[Any, Kept]:
        """Any other step trains afresh."""
        reply = await super().stepped(step, client, message, memory)
        return replace(reply, memory=memory if reply.memory is memory.base else Kept(reply.memory, memory.own))


def with_optimizer_state(
    method: Method[Any, Any, Any, Any], choice: OptimizerState, spec: TaskSpec, optimizer: Optimizer
) -> Method[Any, Any, Any, Any]:
    """The method, whose clients keep the state of their optimiser if that is chosen."""
    if choice == "fresh":
        return method
    why = method.needs_fresh_optimizer
    if why:
        why = f"{type(unwrapped(method)).__name__} needs a fresh one in every round: {why}"
    else:
        with torch.device("cpu"):
            networks = Networks(partial(method.networks, spec, min(spec.clients)))
            why = why_not_kept(optimizer, select(networks.init(0), networks.trainable))
    if why:
        raise BadInput(f'training.optimizer_state = "kept": {why}')
    return KeptOptimizer(method)
