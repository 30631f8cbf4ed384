"""Accuracy on the test set of each domain.

A method with a public model is judged by that model. Where every client has its own, a domain's accuracy is the
unweighted mean over the clients' models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from protofed.api.requests import Total
from protofed.api.task import ClientId
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import RunFailed
from protofed.evaluation.metrics import top1
from protofed.nn.networks import Networks
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree


@dataclass(frozen=True)
class Scores:
    judged: Literal["public model", "clients' own models"]
    domains: Mapping[str, float]
    """Share of each domain's test set that was classified right."""
    homes: Mapping[ClientId, float]
    """The accuracy that each client that has a domain sees there."""
    everywhere: float | None
    """GM: the public model's accuracy on all test sets together; None where there is no such model."""

    @property
    def average(self) -> float:
        """The unweighted mean over the domains."""
        return fmean(self.domains.values())

    @property
    def own_domain(self) -> float | None:
        """The mean over clients of the accuracy that a client sees on its own domain; None if no client has one."""
        return fmean(self.homes.values()) if self.homes else None


def evaluate(federation: Federation, state: State) -> Scores:
    """How well the federation classifies the test set of each domain."""
    with federation.runtime.open(federation):
        return _evaluated(federation, state)


def _evaluated(federation: Federation, state: State) -> Scores:
    tests, domain_of = federation.task.tests, federation.task.domain_of
    public = federation.method.public(state.server)
    if public is not None:
        params, message = public
        networks = federation.networks_of(federation.ids[0])
        matrices = confusions(federation, [(networks, params, (message, None), data) for data in tests.values()])
        domains = {domain: top1(matrix) for domain, (matrix,) in zip(tests, matrices, strict=True)}
        by_client = dict.fromkeys(federation.ids, domains)
        everywhere = top1(torch.cat(matrices).sum(0))
    else:
        models = [_own_model(federation, state, client) for client in federation.ids]
        matrices = confusions(federation, [(*model, data) for model in models for data in tests.values()])
        found = (matrix for (matrix,) in matrices)
        by_client = {client: {domain: top1(next(found)) for domain in tests} for client in federation.ids}
        domains = {domain: fmean(own[domain] for own in by_client.values()) for domain in tests}
        everywhere = None
    homes = {client: by_client[client][domain] for client, domain in domain_of.items()}
    judged: Literal["public model", "clients' own models"] = "public model" if public else "clients' own models"
    return Scores(judged, domains, homes, everywhere)


Looking = tuple[Networks, Params, tuple[Tree, ...], Data]
"""A model, what `Method.confusion` is given besides, and the examples that it is shown."""


def _own_model(federation: Federation, state: State, client: ClientId) -> tuple[Networks, Params, tuple[Tree, ...]]:
    message = federation.method.message_for(state.server, client)
    memory = federation.memory_of(state, client, message)
    params = federation.method.local_weights(message, memory)
    return federation.networks_of(client), params, (message, memory)


def confusions(federation: Federation, models: Sequence[Looking]) -> list[Tensor]:
    """The confusion matrices of each model on its examples, as `Method.confusion` has them, in float64, on the CPU."""
    transform, statistic = federation.task.transform, federation.method.confusion
    seed = derive_seed(federation.training.seed, "evaluate")
    found = federation.runtime.answers([Total(*model, transform, seed, statistic) for model in models])
    for matrices in found:
        if matrices.dim() != 3 or matrices.shape[-2] != matrices.shape[-1]:
            where = f"{type(federation.method).__name__}.confusion"
            raise RunFailed(f"{where} gave numbers of shape {tuple(matrices.shape)}, not (1 + parts, classes, classes)")
    return list(torch.split(torch.cat(found).double().cpu(), [len(matrices) for matrices in found]))
