"""GA: the server's weights of clients follow who loses by the averaging, around any method with a global model.

Zhang, Xu, Yao, Zhang, Tian, Wang: Federated Domain Generalization with Generalization Adjustment, CVPR 2023.

Sends: what the base method sends, and the loss of the weights that it trained on its validation data; in a second
exchange of the round the loss of the new global model. Keeps: what the base method keeps. Server: what the base method
does, with a weight for each client in place of the number of examples; then clients that lost more than the mean by the
averaging gain weight, the others lose it.

Departures:
1. The weights start as the base's `weighting` says: from the numbers of examples, or equal, as in the paper.
2. The gap is one of losses, less the mean gap of the round, as in the paper; the authors' code takes accuracies, and
   does not subtract the mean (settings).
3. The step shrinks linearly from the first round to the last; in the authors' code the first factor is above 1. It is
   divided by the number of clients, where the authors' code has its three.
4. Where all gaps are 0 the weights stay, since there is nothing to divide by.
5. Clients that do not take part in a round keep their weights but for the normalisation, which is over all clients.
6. Validation data are a tenth of a client's examples, drawn once, on which it does not train; a client of fewer than
   100 trains and is judged on all.
7. The base is handed the weights times the number of all examples, so that they are of the size that it expects, and
   never quite 0, so that there is a mean when only clients of weight 0 take part.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Clients, Method, Uploads, weighting_of
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods._shared.validation import held_out
from protofed.methods._shared.wrappers import StatefulWrapper
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Model
from protofed.tree import Params, Tree, record

NEVER_ZERO = 1e-12
"""The least weight that the base is handed: lost in rounding beside any other."""
ROUNDING = 1e-9
"""Gaps that differ by no more are equal: losses are sums in float32."""


@record
class Adjusted:
    base: Tree  # the server's record of the base method
    share: dict[ClientId, Tensor]  # (), float64, the weight of each client: not negative, and 1 together


@record
class Judged:
    base: Tree  # the upload of the base method
    loss: Tensor  # (), of the weights that it holds on the validation data


@record
class Loss:
    loss: Tensor  # (), of the global weights on the validation data


@dataclass(frozen=True)
class GA(StatefulWrapper):
    tags = ("global", "server-side", "wrapper")
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method whose mean is weighted. Its `weighting` decides what the weights start from."""
    step: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """d, how far weights move in the first round, in parts of 1/N."""
    measure: Literal["loss", "error"] = "loss"
    """What is compared before and after the averaging: the mean loss, or the share of examples that are wrong."""
    centred: bool = True
    """Whether the mean gap of the round is subtracted from each gap."""

    needs_each_upload = "it weighs clients by what each loses by the averaging"

    # ---- the server's half

    def init_server(self, server: ServerContext) -> Adjusted:
        is_uniform = weighting_of(self.base, "examples") == "uniform"
        sizes = {c: 1 if is_uniform else e.num_examples for c, e in server.spec.clients.items()}
        total = sum(sizes.values())
        shares = {c: torch.tensor(sizes[c] / total, dtype=torch.float64) for c in sorted(sizes)}
        return Adjusted(self.base.init_server(server), shares)

    def round(self, state: Any, clients: Clients) -> Any:
        server, before = clients.server, dict[ClientId, float]()

        def noted(uploads: Uploads[Judged]) -> Iterator[tuple[ClientId, Judged]]:
            for client, upload in uploads:
                before[client] = upload.loss.item()
                yield client, upload

        like = self.upload_spec(state, server)
        uploads = clients.run(self.train, partial(self.message_for, state), like, partial(self.group, state))
        state = self.aggregate(state, noted(uploads), server)
        judgements = clients.run(self.judge, partial(self.message_for, state), Loss(torch.tensor(0.0)))
        after = {client: upload.loss.item() for client, upload in judgements}
        gaps = {client: after[client] - before[client] for client in sorted(before.keys() & after.keys())}
        size = self.step / len(state.share) * (1 - server.round / server.num_rounds)
        return replace(state, share=adjusted(state.share, gaps, size, self.centred))

    def upload_spec(self, state: Any, server: ServerContext) -> Judged:
        return Judged(super().upload_spec(state, server), torch.tensor(0.0))

    def group(self, state: Any, client: ClientId, upload: Judged) -> Hashable:
        return self.base.group(state.base, client, upload.base)

    def aggregate(self, state: Any, uploads: Uploads[Judged], server: ServerContext) -> Any:
        total = server.spec.num_examples
        weights = {client: total * share.clamp(min=NEVER_ZERO) for client, share in state.share.items()}
        weighted = ((client, replace(upload.base, num_examples=weights[client])) for client, upload in uploads)
        base: Any = self.base
        by_weight = replace(base, weighting="examples") if hasattr(base, "weighting") else base
        return replace(state, base=by_weight.aggregate(state.base, weighted, server))

    # ---- the client's half

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Judged, Any]:
        training, validation = held_out(client)
        reply = await self.base.train(replace(client, data=training), message, memory)
        params = {**self.base.trained_weights(reply.upload, reply.memory), **reply.upload.params}  # what it sends
        loss = await client.total(self.badness, params, (message, reply.memory), data=validation)
        return Reply(Judged(reply.upload, loss / len(validation)), reply.memory)

    async def judge(self, client: ClientContext, message: Any, memory: Any) -> Reply[Loss, Any]:
        _, validation = held_out(client)
        params = {
            **self.base.local_weights(message, memory),
            **message.params,
        }  # a base may predict with parts it keeps
        loss = await client.total(self.badness, params, (message, memory), data=validation)
        return Reply(Loss(loss / len(validation)), memory)

    def trained_weights(self, upload: Judged, memory: Any) -> Params:
        return self.base.trained_weights(upload.base, memory)

    def badness(self, model: Model, batch: Batch, message: Any, memory: Tree) -> Tensor:
        """The sum of the losses, or of the errors, of a batch."""
        scores = self.base.predict(model, batch.x, message, memory)
        each = F.cross_entropy(scores, batch.y, reduction="none")
        return ((each if self.measure == "loss" else (scores.argmax(-1) != batch.y).float()) * batch.weight).sum()


def adjusted(
    share: Mapping[ClientId, Tensor], gaps: Mapping[ClientId, float], size: float, centred: bool
) -> dict[ClientId, Tensor]:
    """The weights after a step along the gaps, the largest of which counts `size`; clipped, and 1 together."""
    mean = sum(gaps.values()) / max(len(gaps), 1) if centred else 0.0
    largest = max((abs(gap - mean) for gap in gaps.values()), default=0.0)
    if largest <= ROUNDING or not size:
        return dict(share)
    moved = {c: old + size * (gaps[c] - mean) / largest if c in gaps else old for c, old in share.items()}
    clipped = {client: new.clamp(0, 1) for client, new in moved.items()}
    total = torch.stack(list(clipped.values())).sum()
    return {client: new / total for client, new in clipped.items()}
