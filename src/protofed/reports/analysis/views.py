"""Models of finished runs, and what an observer sees of a federation between two rounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.requests import Map, Total
from protofed.api.task import ClientId
from protofed.data.batches import Batch, Data
from protofed.errors import BadInput
from protofed.nn.networks import Model, Networks
from protofed.prototypes.class_means import FeatureSums, Prototypes
from protofed.reports.analysis.drawing import CannotDraw
from protofed.runs.loading import SavedRun
from protofed.runs.results import Result
from protofed.runtimes.jobs import Job
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params, Tree

PUBLIC = "public model"


@dataclass(frozen=True)
class View:
    """One model at one moment, as the method predicts with it."""

    result: Result
    name: str
    """Of the client, or "public model"."""
    networks: Networks
    params: Params
    message: Tree
    memory: Tree

    @property
    def method(self) -> Any:
        return self.result.federation.method

    def features(self, data: Data) -> Tensor:
        """(n, D)"""
        found: Tensor = self._mapped(self._features, data)
        return found

    def predicted(self, data: Data) -> Tensor:
        """(n,), the classes that the method names."""
        found: Tensor = self._mapped(self._outcomes, data).predicted
        return found

    def model(self) -> Model:
        return self.networks.model({**self.params, **self.networks.buffer_copies(self.params)})

    def _features(self, model: Model, batch: Batch, *known: Tree) -> Tensor:
        shown: Tensor = self.method.shown_features(model, batch.x)
        return shown.flatten(1)

    def _outcomes(self, model: Model, batch: Batch, *known: Tree) -> Any:
        return self.method.outcomes(model, batch, self.message, self.memory)

    def _mapped(self, function: Any, data: Data) -> Any:
        federation = self.result.federation
        with federation.runtime.open(federation):
            request = Map(self.networks, self.params, (), data, federation.task.transform, 0, function, to_cpu=True)
            (answer,) = federation.runtime.answers([request])
        return answer


def views(result: Result, clients: Sequence[ClientId] = (), trained: bool = False) -> list[View]:
    """The models of these clients. With none named, the public model if clients use that, or the first client's."""
    federation, state = result.federation, result.state
    public = federation.method.public(state.server)
    if not (clients or trained) and public is not None and federation.clients_use == PUBLIC:
        params, message = public
        return [View(result, PUBLIC, federation.networks_of(federation.ids[0]), params, message, None)]
    return [client_view(result, client, trained) for client in clients or federation.ids[:1]]


def client_view(result: Result, client: ClientId, trained: bool = False) -> View:
    """The model that a client uses, or as its next training would leave it."""
    federation = result.federation
    if client not in federation.ids:
        raise BadInput(f"no client {client!r}; the clients are {', '.join(federation.ids)}")
    message = federation.method.message_for(result.state.server, client)
    memory = federation.client_state(result.state, client, message)
    if trained:
        context = federation.client_context(client, min(result.state.round, federation.training.rounds - 1))
        with federation.runtime.open(federation):
            job = Job(client, federation.method.train, context, message, None, federation.method)
            reply = Sequential().reply(job, memory)
        params, memory = federation.method.trained_weights(reply.upload, reply.memory), reply.memory
    else:
        params = federation.method.local_weights(message, memory)
    return View(result, client, federation.networks_of(client), params, message, memory)


@dataclass(frozen=True)
class Observer:
    """What a method's `relations` may look at."""

    result: Result

    @property
    def server(self) -> ServerContext:
        return self.result.federation.server_context(self.result.state.round, "look")

    @property
    def ids(self) -> Sequence[ClientId]:
        return [client for client in self.result.federation.ids if client in self.result.state.receipts]

    def memory(self, client: ClientId) -> Tree:
        federation, state = self.result.federation, self.result.state
        return federation.client_state(state, client, federation.method.message_for(state.server, client))

    def class_means(self, client: ClientId, params: Params) -> Prototypes:
        federation = self.result.federation
        task, statistic = federation.task, FeatureSums(federation.task.num_classes)
        request = Total(federation.networks_of(client), params, (), task.clients[client], task.transform, 0, statistic)
        with federation.runtime.open(federation):
            (sums,) = federation.runtime.answers([request])
        prototypes: Prototypes = sums.prototypes()
        return prototypes


def chosen_rounds(run: SavedRun, wanted: Sequence[int], most: int = 5) -> list[int]:
    """The rounds whose states are looked at: those that are wanted and there, or some of all that are there."""
    there = run.rounds_there
    if not there:
        raise CannotDraw(f"{run.folder.path} has no state that is whole")
    missing = [number for number in wanted if number not in there]
    if missing:
        raise CannotDraw(
            f"{run.folder.path} has no state of round {missing[0]}, but those of {', '.join(map(str, there))}: a run "
            f"with [saving] keep = [{missing[0]}] keeps it"
        )
    if wanted:
        return sorted(wanted)
    if len(there) <= most:
        return there
    picked = torch.linspace(0, len(there) - 1, most).round().int().tolist()
    return [there[k] for k in picked]


def sampled(tests: Mapping[str, Data], count: int, classes: Sequence[int]) -> Iterator[tuple[str, Data]]:
    """About `count` test examples of these classes, as many of each domain and class as there are, drawn by a fixed
    seed: the same for every run on these data."""
    share = max(1, round(count / (len(tests) * len(classes))))
    for domain, data in tests.items():
        draws, rows = torch.Generator().manual_seed(0), []
        for c in classes:
            own = (data.labels == c).nonzero().flatten()
            rows.append(own[torch.randperm(len(own), generator=draws)[:share]])
        yield domain, data.rows(torch.cat(rows).sort().values)
