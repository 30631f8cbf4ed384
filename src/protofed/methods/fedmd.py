"""FedMD: clients of different networks learn from their mean scores on public examples, and share nothing else.

Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS 2019 workshop on Federated Learning.

Sends: scores of the classes on some public examples. Keeps: its whole model. Server: plain mean of the scores, the
consensus; draws the public examples of the next round.

A round at a client is: digest (learn the consensus of the last round), revisit (train on its own examples), score the
public examples that the server drew for this round. In the first round there is no consensus and nothing to digest.

Departures:
1. Scores are sent at the end of a round and their consensus is digested in the next one; the paper has both at the
   start of a round. The order of all steps is the same, and one exchange of a round is saved.
2. A client that takes part for the first time trains on its own examples for some more epochs, where the paper says
   until it converges. The training on labelled public examples before that is left out: here they have no labels.
3. The public examples are the task's. A task of fewer than are asked for has all of them in every round.
4. Public examples are not varied, since the consensus is of the unvaried ones. They are scored in evaluation mode.
5. Digest takes batches of the configured size, and optimisers are those configured.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import SettingErrors
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, Data
from protofed.errors import BadInput
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import Summands, SumMethod, Totals
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer
from protofed.tree import Params, record

Count = Annotated[int, Ge(1)]


@record
class Consensus:
    index: Tensor  # (A,), the public examples that the consensus is about
    scores: Tensor  # (A, C)
    exists: Tensor  # (), 0 until the first round has ended
    wanted: Tensor  # (A,), the public examples to score in this round


@record
class Scores:
    scores: Tensor  # (A, C), before the softmax


@record
class OwnModel:
    params: Params
    has_trained: Tensor  # (), 0 until the client has taken part


@dataclass(frozen=True)
class FedMD(SumMethod[Consensus, Consensus, OwnModel, Scores]):
    tags = ("personal", "heterogeneous")
    alignment_size: Count = 5000
    """N_align, the number of public examples of a round."""
    digest_epochs: Count = 1
    """Passes of a client over the consensus."""
    first_epochs: Annotated[int, Ge(0)] = 10
    """Passes of a client over its own examples before it first takes part, beside those of every round."""

    private = ("*",)

    # ---- the server's half

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        if spec is not None and spec.public is None:
            yield "name", f"FedMD needs public examples, and the task {spec.name} has none"

    def init_server(self, server: ServerContext) -> Consensus:
        size = min(self.alignment_size, len(public_of(server)))
        nothing = torch.zeros(size, server.num_classes)
        return Consensus(torch.zeros(size, dtype=torch.int64), nothing, torch.tensor(0.0), drawn(server, size))

    def message_for(self, state: Consensus, client: ClientId) -> Consensus:
        return state

    def upload_spec(self, state: Consensus, server: ServerContext) -> Scores:
        return Scores(state.scores)

    def summand(self, upload: Scores, message: Consensus) -> Summands:
        return {"scores": (upload.scores, 1.0)}

    def from_sum(self, state: Consensus, totals: Totals, server: ServerContext) -> Consensus:
        scores: Tensor = totals["scores"].value()
        return Consensus(state.wanted, scores, torch.tensor(1.0), drawn(server, len(state.wanted)))

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Consensus) -> OwnModel:
        return OwnModel(client.initial_params(), torch.tensor(0.0))

    def local_weights(self, message: Consensus, memory: OwnModel) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Consensus, memory: OwnModel) -> Reply[Scores, OwnModel]:
        params, revisit = memory.params, Objective(cross_entropy)
        if self.first_epochs and not memory.has_trained:
            params = await client.fit(revisit, params=params, epochs=self.first_epochs)
        if message.exists:
            params = await self.digested(client, message, params)
        params = await client.fit(revisit, params=params)
        scores = await client.map(scored, params, data=public_of(client).rows(message.wanted))
        return Reply(Scores(scores), OwnModel(params, torch.tensor(1.0)))

    async def digested(self, client: ClientContext, message: Consensus, params: Params) -> Params:
        """The weights after learning the consensus."""
        data = public_of(client).rows(message.index)
        place = torch.zeros(len(data.x), dtype=torch.int64)  # (N,), where in the consensus a row of the store is
        place[data.index] = torch.arange(len(data))
        still = replace(client, transform=replace(client.transform, pad=0, flip=False, rotation=0.0))
        digest, context = Objective(digest_loss), (message.scores, place)
        return await still.fit(digest, params=params, context=context, data=data, epochs=self.digest_epochs)


def digest_loss(model: Model, batch: Batch, consensus: Tensor, place: Tensor) -> Tensor:
    """The mean absolute difference between the own scores and the consensus."""
    return batch.mean((model.logits(batch.x) - consensus[place[batch.index]]).abs().mean(-1))


def scored(model: Model, batch: Batch) -> Tensor:
    return model.logits(batch.x)


def public_of(where: ServerContext | ClientContext) -> Data:
    """The task's public examples."""
    public = where.public if isinstance(where, ClientContext) else where.spec.public
    if public is None:
        raise BadInput("FedMD needs public examples, and the task has none: give it some (Task.public)")
    return public


def drawn(server: ServerContext, size: int) -> Tensor:
    """The public examples of a round, in their order."""
    order = torch.randperm(len(public_of(server)), generator=server.generator)
    return order[:size].sort().values
