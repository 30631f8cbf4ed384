"""Accuracy on the test set of each domain.

A method with a public model is judged by that model. Where every client has its own, a domain's accuracy is the
unweighted mean over the clients' models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from protofed.data import Data
from protofed.evaluation.metrics import top1
from protofed.method import ClientId, Total
from protofed.networks import Networks
from protofed.runtimes.federation import Federation, State
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
    tests, domain_of = federation.task.tests, federation.task.domain_of
    public = federation.method.public(state.server)
    if public is not None:
        params, message = public
        networks = federation.networks_of(federation.ids[0])
        shared = {d: confusion(federation, networks, params, (message, None), data) for d, data in tests.items()}
        domains = {domain: top1(matrix) for domain, matrix in shared.items()}
        by_client = dict.fromkeys(federation.ids, domains)
        everywhere = top1(torch.stack(list(shared.values())).sum(0))
    else:
        by_client = {client: _own_accuracies(federation, state, client) for client in federation.ids}
        domains = {domain: fmean(own[domain] for own in by_client.values()) for domain in tests}
        everywhere = None
    homes = {client: by_client[client][domain] for client, domain in domain_of.items()}
    judged: Literal["public model", "clients' own models"] = "public model" if public else "clients' own models"
    return Scores(judged, domains, homes, everywhere)


def _own_accuracies(federation: Federation, state: State, client: ClientId) -> dict[str, float]:
    message = federation.method.message_for(state.server, client)
    memory = federation.memory_of(state, client, message)
    params = federation.method.local_weights(message, memory)
    networks, tests = federation.networks_of(client), federation.task.tests
    return {d: top1(confusion(federation, networks, params, (message, memory), data)) for d, data in tests.items()}


def confusion(
    federation: Federation, networks: Networks, params: Params, context: tuple[Tree, ...], *tests: Data
) -> Tensor:
    """The confusion matrix (C, C) of a model on these test sets together, in float64."""
    answer, transform = federation.runtime.answer, federation.task.transform
    seed = derive_seed(federation.training.seed, "evaluate")
    requests = (Total(networks, params, context, data, transform, seed, federation.method.confusion) for data in tests)
    return torch.stack([answer(request).double() for request in requests]).sum(0)
