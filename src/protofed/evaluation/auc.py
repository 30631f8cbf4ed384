"""The area under the ROC curve on the test set of each domain, for tasks of two classes.

The area is the chance that an example of class 1 has a higher score than one of class 0, ties counted half. The score
of an example is how much higher class 1 stands than class 0 by the method's own `predict`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.api.method import Method
from protofed.api.requests import Map
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput
from protofed.nn.networks import Model, Networks
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

Areas = Mapping[str, float | None]
"""Of each domain; None where the test set has only one class, or the scores are not numbers."""


@dataclass(frozen=True)
class AreaScores:
    judged: Literal["public model", "clients' own models"]
    domains: Areas
    """The public model's areas, or the unweighted means over the clients' models."""
    own_domain: Mapping[ClientId, float | None]
    """The area that each client with a domain sees there."""


def evaluate_areas(federation: Federation, state: State) -> AreaScores:
    """How well the federation ranks the test set of each domain."""
    classes = federation.task.num_classes
    if classes != 2:
        raise BadInput(f"task {federation.task.name}: areas under the curve need 2 classes, not {classes}")
    with federation.runtime.open(federation):
        return _evaluated(federation, state)


def _evaluated(federation: Federation, state: State) -> AreaScores:
    domain_of = federation.task.domain_of
    public = federation.method.public(state.server)
    if public is not None:
        params, message = public
        shared = _areas(federation, federation.networks_of(federation.ids[0]), params, (message, None))
        return AreaScores("public model", shared, {client: shared[domain] for client, domain in domain_of.items()})
    by_client = {client: client_areas(federation, state, client) for client in federation.ids}
    domains = {domain: _mean(own[domain] for own in by_client.values()) for domain in federation.task.tests}
    own_domain = {client: by_client[client][domain] for client, domain in domain_of.items()}
    return AreaScores("clients' own models", domains, own_domain)


def client_areas(federation: Federation, state: State, client: ClientId) -> Areas:
    """How well a client's own model ranks the test set of each domain."""
    message = federation.method.message_for(state.server, client)
    memory = federation.memory_of(state, client, message)
    params = federation.method.local_weights(message, memory)
    return _areas(federation, federation.networks_of(client), params, (message, memory))


def area(scores: Tensor, labels: Tensor) -> float | None:
    """The area for scores (N,) and labels 0 and 1 (N,); None where it has no meaning."""
    positive, negative = scores[labels == 1].double(), scores[labels == 0].double()
    if not len(positive) or not len(negative) or scores.isnan().any():
        return None
    negative = negative.sort().values
    below = torch.searchsorted(negative, positive)  # (P,), negatives with a lower score
    up_to = torch.searchsorted(negative, positive, right=True)
    wins = (below + up_to).sum().item() / 2
    return wins / (len(positive) * len(negative))


def _areas(federation: Federation, networks: Networks, params: Params, context: tuple[Tree, ...]) -> Areas:
    answer, transform = federation.runtime.answer, federation.task.transform
    seed = derive_seed(federation.training.seed, "evaluate")
    margin = _Margin(federation.method)
    requests = {
        domain: Map(networks, params, context, data, transform, seed, margin)
        for domain, data in federation.task.tests.items()
    }
    return {domain: area(answer(request), request.data.labels) for domain, request in requests.items()}


@dataclass(frozen=True)
class _Margin:
    """How much higher class 1 stands than class 0, for each example."""

    method: Method[Any, Any, Any, Any]

    def __call__(self, model: Model, batch: Batch, message: Any, memory: Any) -> Tensor:
        low, high = self.method.predict(model, batch.x, message, memory).double().unbind(-1)
        # Two classes that are both ruled out, at −∞, are equal; their difference would not be a number.
        return torch.where(low == high, 0.0, high - low)


def _mean(areas: Iterable[float | None]) -> float | None:
    known = [value for value in areas if value is not None]
    return fmean(known) if known else None
