"""FedAMP: the server mixes a model for each client from all models, more of those near its own, and holds it there.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021. The
authors' code is not public; the method is also in PFLlib (`clientamp.py`, `serveramp.py`) and easyFL (`fedamp.py`).

Sends: weights. Keeps: its own model. Server: keeps the last model of every client; sends each client a mean of all,
weighted by how near they are to its own.

Departures:
1. A client trains from the mixed model that it receives, as in easyFL; the paper leaves the start open. PFLlib trains
   on from the client's own model, and its penalty has no gradient, so that its clients learn alone.
2. Where the weights of the others add up to more than 1, they are divided by their sum; the paper takes α small enough.
3. α stays as it is; easyFL divides it by 10 every 30 rounds.
4. A client that does not take part in a round is represented by the model that it sent last, one that never has by the
   initial weights. One that the server does not know is sent the plain mean.
5. Distances and cosines are over parameters. Statistics of BatchNorm, which the paper does not consider, are averaged
   with the same weights; the penalty leaves them alone.
6. The weight of a client's own model in the heuristic version is a setting; the paper does not give its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Positive, Uploads
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.api.views import Observed, Relation
from protofed.data.batches import Batch
from protofed.methods._shared.mixing import weighted_mean
from protofed.methods.families import OwnWeights, Weights
from protofed.nn.networks import Model
from protofed.tree import Params, record


@record
class AttentiveModels:
    models: dict[ClientId, Params]  # what each client sent last
    attention: Tensor  # (N, N), float64, ξ: how much of each model the mixed one of a client has; rows have sum 1


@dataclass(frozen=True)
class FedAMP(Method[AttentiveModels, Weights, OwnWeights, Weights]):
    tags = ("personal",)
    proximal_weight: NonNegative = 1.0
    """λ. A client's model is held to the mixed one by λ / α; the learning rate times that must be below 1."""
    mixing_rate: Positive = 1.0
    """α, how much the mixed model has of others."""
    attention: Literal["distance", "cosine"] = "distance"
    """What the weights of others go by: α exp(−distance² / σ) / σ, FedAMP, or the softmax of σ times the cosine of the
    weights, HeurFedAMP."""
    scale: Positive = 10.0
    """σ, the squared distance beyond which models count little, or what cosines are multiplied by."""
    own_weight: Annotated[float, Interval(ge=0, le=1)] = 0.2
    """ξ of the client's own model where attention goes by cosines."""

    def init_server(self, server: ServerContext) -> AttentiveModels:
        models = dict.fromkeys(sorted(server.spec.clients), server.initial_params())
        return AttentiveModels(models, self.attention_of(models, server))

    def message_for(self, state: AttentiveModels, client: ClientId) -> Weights:
        """u, the mixed model of a client."""
        ids, models = list(state.models), state.models.values()
        row = state.attention[ids.index(client)].tolist() if client in ids else [1.0] * len(ids)
        return Weights(weighted_mean(zip(models, row, strict=True)))

    def upload_spec(self, state: AttentiveModels, server: ServerContext) -> Weights:
        return Weights(next(iter(state.models.values())))

    def aggregate(self, state: AttentiveModels, uploads: Uploads[Weights], server: ServerContext) -> AttentiveModels:
        models = {**state.models, **{client: upload.params for client, upload in uploads}}
        return AttentiveModels(models, self.attention_of(models, server))

    def attention_of(self, models: Mapping[ClientId, Params], server: ServerContext) -> Tensor:
        products = inner_products(list(models.values()), server.networks.trainable)
        if len(models) == 1:
            return torch.ones(1, 1, dtype=torch.float64)
        if self.attention == "cosine":
            return by_cosine(products, self.scale, self.own_weight)
        return by_distance(products, self.scale, self.mixing_rate)

    def relations(self, state: AttentiveModels, observed: Observed) -> Mapping[str, Relation]:
        ids = list(state.models)
        return {"how much of each model is sent to clients": Relation(state.attention, ids, ids, "weight")}

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(message.params)

    def local_weights(self, message: Weights, memory: OwnWeights) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Weights, memory: OwnWeights) -> Reply[Weights, OwnWeights]:
        params = await client.fit(Objective(self.loss), params=message.params, context=(message.params,))
        return Reply(Weights(params), OwnWeights(params))

    def loss(self, model: Model, batch: Batch, mixed: Params) -> Tensor:
        """F(w) + λ/2α ‖w − u‖², what a client minimises in Algorithm 1."""
        proximal = tree.squared_distance(model.trainable, mixed)
        weight = self.proximal_weight / self.mixing_rate
        return batch.cross_entropy(model.logits(batch.x)) + weight / 2 * proximal


def inner_products(models: list[Params], names: tuple[str, ...]) -> Tensor:
    """⟨w_i, w_j⟩ of the parameters of any two models, (N, N), float64."""
    rows = (torch.stack([params[name].flatten() for params in models]).double() for name in names)
    return torch.stack([row @ row.T for row in rows]).sum(0)


def by_distance(products: Tensor, scale: float, rate: float) -> Tensor:
    """ξ_ij = α A'(‖w_i − w_j‖²) with A(x) = 1 − exp(−x/σ), and the rest for the own model."""
    squares = products.diagonal()
    distances = (squares[:, None] + squares - 2 * products).clamp(min=0)
    others = (rate / scale * (-distances / scale).exp()).fill_diagonal_(0)
    others = others / others.sum(-1, keepdim=True).clamp(min=1)
    return others + torch.diag(1 - others.sum(-1))


def by_cosine(products: Tensor, scale: float, own: float) -> Tensor:
    """ξ_ii as given, and for the others its complement times the softmax of σ cos(w_i, w_j), the paper's heuristic."""
    norms = products.diagonal().sqrt().clamp(min=torch.finfo(products.dtype).tiny)
    cosines = products / norms[:, None] / norms
    others = F.softmax((scale * cosines).fill_diagonal_(-torch.inf), dim=-1)
    return (1 - own) * others + own * torch.eye(len(products), dtype=products.dtype)
