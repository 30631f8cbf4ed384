"""APFL: beside the global model each client trains one of its own, and uses a mixture of both whose share it learns.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv:2003.13461, 2020.

Sends: weights. Keeps: its own model, the statistics of the mixture and the share of the own model in it. Server: mean
weighted by the number of examples.

Departures:
1. Weights are mixed, as in the paper's Algorithm 1; the authors' code (`centered/apfl.py` of MLOPTPSU/FedTorch) mixes
   the scores of two models. PFLlib trains the own model alone and mixes it with the global one after the round.
2. Of each batch the own model takes its step first, at the global weights from before theirs, as in the paper; in the
   authors' code after.
3. The share takes one step in a round, on one batch, at the received weights; in the authors' code after the first step
   of the models. Its gradient is the paper's, ⟨v − w, ∇f(v̄)⟩; the authors' code adds 0.02 α and mixes two gradients.
   The step is one of plain gradient descent.
4. Between rounds a client uses the mixture with the newest global weights.
5. Only parameters are mixed. The mixture has statistics of BatchNorm of its own, which the client keeps.
6. A client's learning rates are as configured; the paper's analysis has them fall from step to step.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor, nn

from protofed import tree
from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.own_training import own_optimizer, own_optimizer_errors
from protofed.methods._shared.twins import as_twin, twin_of, with_twin
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model, Parts
from protofed.optim.optimizers import Optimizer
from protofed.seeds import generator
from protofed.tree import Params, record

SHARE = "mixture.share"


@record
class Mixture:
    own: Params  # v, of the parameters
    statistics: Params  # of the mixture: the other entries of the network
    share: Tensor  # (), α


class Share(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(share))


@dataclass(frozen=True)
class APFL(GlobalModel[Mixture]):
    tags = ("global", "personal")
    clients_use = "own models"
    initial_share: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """α, the share of the client's own model in the mixture, before it is learnt."""
    adaptive: bool = True
    """Whether a client learns its share."""
    share_lr: NonNegative = 0.0
    """The learning rate of the share; 0: as configured."""

    private = ("twin.*", "mixture.*")
    has_plain_classifier = False

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("share_lr", optimizer, self.share_lr, "sgd")

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return {**with_twin(spec.model(client)), "mixture": Share(self.initial_share)}

    def init_memory(self, client: ClientContext, message: Weights) -> Mixture:
        params = client.initial_params()
        own = {name: leaf for name, leaf in twin_of(params).items() if name in client.networks.trainable}
        return Mixture(own, {n: params[n] for n in message.params if n not in own}, params[SHARE])

    def local_weights(self, message: Weights, memory: Mixture) -> Params:
        mixed = {**mixture(memory.own, message.params, memory.share), **memory.statistics}
        return {**mixed, **self.kept(memory)}

    def kept(self, memory: Mixture) -> Params:
        return {**as_twin({**memory.own, **memory.statistics}), SHARE: memory.share}

    async def trained(self, client: ClientContext, message: Weights, memory: Mixture) -> Params:
        """The local updates of Algorithm 1: the share, then in every step the own model and the global one."""
        start = {**message.params, **self.kept(memory)}
        if self.adaptive:
            start[SHARE] = await self.learnt_share(client, start)
        own = Objective(mixed_loss, trains=("twin.*",))
        return await client.fit(own, Objective(cross_entropy, freezes=self.private), params=start)

    async def learnt_share(self, client: ClientContext, params: Params) -> Tensor:
        """α − η ⟨v − w, ∇f(v̄)⟩ on one batch, within 0 and 1."""
        order = torch.randperm(len(client.data), generator=generator(client.step_seed, "share"))
        params = await client.fit(
            Objective(mixed_loss, trains=(SHARE,)),
            params=params,
            data=client.data.rows(order[: client.batch_size]),
            epochs=1,
            optimizer=own_optimizer(client.optimizer, self.share_lr, "sgd", client.halvings),
        )
        return params[SHARE].clamp(0, 1)

    def remember(self, params: Params, memory: Mixture) -> Mixture:
        own = twin_of(params)
        return Mixture(tree.select(own, list(memory.own)), tree.select(own, list(memory.statistics)), params[SHARE])


def mixed_loss(model: Model, batch: Batch) -> Tensor:
    """f(v̄), the cross-entropy of the mixture. Its statistics are those of the twin."""
    own = twin_of(model.params)
    trainable = {name: leaf for name, leaf in own.items() if name in model.networks.trainable}
    weights = mixture(trainable, model.params, model.params[SHARE])
    return cross_entropy(model.at({**model.params, **own, **weights}), batch)


def mixture(own: Params, received: Params, share: Tensor) -> Params:
    """v̄ = α v + (1 − α) w, of the entries of v."""
    return {name: share * leaf + (1 - share) * received[name] for name, leaf in own.items()}
