"""Per-FedAvg: clients train a model that is good after one step of gradient descent on their own data, and take it.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020. The authors' code is not public; the first-order version is also in CharlieDinh/pFedMe
(`userperavg.py`) and PFLlib, both versions in FL-bench (`src/client/perfedavg.py`).

Sends: weights. Keeps: the model that it adapted; nothing of that is sent. Server: mean weighted by the number of
examples.

Departures:
1. The independent batches of a step, two or with the Hessian three, are parts of one batch, of every second or third
   row. Where a part has no row of its own, as in a last batch of one, the rows that fill the batch stand in, which are
   the client's too.
2. The meta step is one of the configured optimiser, whose learning rate is β; the paper takes plain gradient descent.
3. The exact version, which needs second derivatives, is left out, as in the paper's experiments.
4. A client adapts the model that it received in every round that it takes part in, so that personal accuracy can be
   followed, and all clients adapt the final one after the last round: by steps on one batch of their data.
5. Clients count by their numbers of examples in the mean, as in all methods here; equally in the paper.
6. The statistics of BatchNorm, which the paper does not consider, are those of the part of the batch on which the
   adapted model is judged.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Clients, Positive, SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import TaskSpec
from protofed.data.batches import Batch, rows_of_batch
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.models import needs_two_rows, own_statistics
from protofed.methods.families import OwnModels, OwnWeights, Weights, WeightUpload
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.seeds import generator
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class PerFedAvg(OwnModels):
    tags = ("global", "personal")
    adaptation_lr: Positive = 0.01
    """α, the learning rate of the step by which a client adapts the model."""
    hessian: Literal["ignored", "by differences"] = "ignored"
    """Whether a step takes the Hessian for 0, Per-FedAvg (FO), or multiplies by it through the difference of two
    gradients, Per-FedAvg (HF)."""
    difference: Positive = 0.01
    """δ, how far from the weights the two gradients are taken, as a share of the gradient that is multiplied. A smaller
    one loses digits."""
    adaptation_steps: Annotated[int, Ge(1)] = 1
    """Steps by which a client adapts the model that it uses."""

    @property
    def num_parts(self) -> int:
        return 2 if self.hessian == "ignored" else 3

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if batch_size < self.num_parts:
            yield "training.batch_size", f"Per-FedAvg divides its batches: set it to {self.num_parts} or more"
        elif spec is not None:
            rows = min(rows_of_batch(enrolled.num_examples, batch_size) for enrolled in spec.clients.values())
            if rows < 2 * self.num_parts and needs_two_rows(spec, partial(self.networks, spec, min(spec.clients))):
                why = (
                    f"Per-FedAvg divides batches into {self.num_parts}, the smallest has {rows} rows, and this network"
                )
                yield "training.batch_size", f"{why} has a BatchNorm that needs two in each part"

    def loss(self, model: Model, batch: Batch, message: Weights, memory: OwnWeights) -> Tensor:
        """What has the gradient of a local step of Algorithm 1, at the weights w.

        First order: ∇f(w̃; D'), with w̃ = w − α ∇f(w; D). With the Hessian, less α times its product with that.
        """
        first, second, *third = parted(batch, self.num_parts)
        weights = {name: leaf for name, leaf in model.trainable.items() if leaf.requires_grad}
        slope = gradient(model, weights, first)
        tried = {name: leaf - self.adaptation_lr * slope[name] for name, leaf in weights.items()}
        loss = second.cross_entropy(model.at({**model.params, **tried}).logits(second.x))
        if not third:
            return loss
        found = torch.autograd.grad(loss, list(tried.values()), materialize_grads=True)
        slope_there = dict(zip(tried, found, strict=True))  # ∇f(w̃; D')
        bent = self.hessian_product(model, weights, slope_there, third[0])
        terms = [((slope_there[n] - self.adaptation_lr * bent[n]) * leaf).sum() for n, leaf in weights.items()]
        aim = torch.stack(terms).sum()
        return loss.detach() + (aim - aim.detach())  # of the value of the loss, with the gradient of `aim`

    def hessian_product(self, model: Model, weights: Params, direction: Params, batch: Batch) -> Params:
        """(∇f(w + δ g; D'') − ∇f(w − δ g; D'')) / 2δ."""
        ahead, behind = (
            gradient(model, {name: leaf + step * direction[name] for name, leaf in weights.items()}, batch)
            for step in (self.difference, -self.difference)
        )
        return {name: (ahead[name] - behind[name]) / (2 * self.difference) for name in weights}

    async def train(
        self, client: ClientContext, message: Weights, memory: OwnWeights
    ) -> Reply[WeightUpload, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message, memory))
        adapted = await self.adapt(client, message, memory)
        return Reply(WeightUpload(params, client.num_examples), adapted.memory)

    async def adapt(self, client: ClientContext, message: Weights, memory: OwnWeights) -> Reply[Nothing, OwnWeights]:
        """The client's own model: steps of gradient descent from the one that it received."""
        order = torch.randperm(len(client.data), generator=generator(client.step_seed, "adaptation"))
        params = await client.fit(
            Objective(cross_entropy),
            params=message.params,
            data=client.data.rows(order[: client.batch_size]),
            epochs=self.adaptation_steps,
            optimizer=Sgd(lr=self.adaptation_lr / 2**client.halvings),
        )
        return Reply(Nothing(), OwnWeights(params))

    def finish(self, state: Weights, clients: Clients) -> Weights:
        for _ in clients.run(self.adapt, lambda client: self.message_for(state, client), Nothing()):
            pass
        return state


def gradient(model: Model, weights: Params, batch: Batch) -> Params:
    """∇f(w; D), by name; no statistics move, and nothing flows through it."""
    loss = batch.cross_entropy(own_statistics(model.at({**model.params, **weights})).logits(batch.x))
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def parted(batch: Batch, num_parts: int) -> list[Batch]:
    """Parts of a batch, of every so many rows."""
    parts = []
    for k in range(num_parts):
        rows = slice(k, None, num_parts)
        weight = torch.where(batch.weight[rows].any(), batch.weight[rows], 1.0)
        parts.append(replace(batch, x=batch.x[rows], y=batch.y[rows], weight=weight, index=batch.index[rows]))
    return parts
