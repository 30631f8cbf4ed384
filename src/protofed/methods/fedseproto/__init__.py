"""FedSeProto: clients split features into semantic and domain ones, and share only what is semantic.

Lai, Fu, Liao, Chen, Zheng: FedSeProto: Learning Semantic Prototype in Federated Learning, ECAI 2024.

Sends: the weights of features, semantic encoder and classifier, semantic class prototypes, and which classes it has; or
the last two only (a setting). Keeps: its domain encoder and decoder, or its whole model. Server: mean of the weights by
the number of examples; unweighted mean of each class's prototypes over the clients that own it.

Departures:
1. Eq. (11) as printed raises s₁ and lowers s₂, against the text around it; its sign is turned: softplus(s₁ − s₂).
2. The KL divergence of Eq. (10) needs a distribution where the encoders give a vector z: it is taken as N(z, 1), whose
   divergence is half the square of z.
3. Squares and errors of Eq. (10) and (13) are averaged over dimensions (the paper leaves it open), so that α, β and λ
   mean the same for any size.
4. Eq. (13) is taken within the batch, over the classes that are in it and have a global prototype.
5. The text has two phases, Algorithm 1 one loop, and when phases alternate is not said: by default on every batch (a
   setting). The second moves the general encoder too, since only the head is said to be fixed.
6. The soft labels come from the second phase's own pass over the batch, in training mode, without a gradient.
7. The decoder is not described: a linear layer and three transposed convolutions for images, one hidden layer for
   vectors. It rebuilds the input as the network sees it, varied and normalised.
8. α, β and λ are not given; the defaults are ours.
9. A class that no reply of a round holds keeps its prototype.
10. Where only prototypes travel, the upload says 0 for the number of examples, which weighs nothing there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import NonNegative, UsedModel
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.models import CLASSIFIER, embedded
from protofed.methods.families import (
    Averages,
    OwnWeights,
    PrototypeUpload,
    Summands,
    SumMethod,
    Totals,
    WeightsAndPrototypes,
)
from protofed.methods.fedseproto.losses import balanced_pull, divergence, preference, shared_information
from protofed.methods.fedseproto.networks import with_decoupling
from protofed.nn.networks import Model, Parts, Patterns, matching, without
from protofed.prototypes import class_means
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.tree import Params

DECOUPLING: Patterns = ("semantic.*", "domain.*", "decoder.*")

Shared = WeightsAndPrototypes[Prototypes]


@dataclass(frozen=True)
class FedSeProto(Averages, SumMethod[Shared, Shared, OwnWeights, PrototypeUpload]):
    tags = ("core", "global", "prototype", "heterogeneous")
    distillation_weight: NonNegative = 0.1
    """α in Eq. (15): the weight of the distillation."""
    information_weight: NonNegative = 0.01
    """β in Eq. (15): the weight of the mutual information."""
    prototype_weight: NonNegative = 1.0
    """λ in Eq. (15): the weight of the alignment with the global prototypes."""
    distillation: bool = True
    """Whether L_KD, Eq. (11), is on: semantic features keep what the basic model knows, domain features lose it."""
    information: bool = True
    """Whether L_MI, Eq. (10), is on: semantic and domain features share little, and together rebuild the input."""
    alignment: bool = True
    """Whether L_Proto, Eq. (13), is on: semantic features are pulled to the global prototype of their class."""
    phase_mode: Literal["batch", "epoch", "round", "joint"] = "batch"
    """When the two phases of Sec. 3.3.2 alternate: on every batch, every epoch, once a round, or not at all (one step
    for both together, one pass fewer)."""
    shares: Literal["weights", "prototypes"] = "weights"
    """What travels: weights and prototypes, or prototypes only, so that networks may differ (Sec. 3.4)."""

    private = ("domain.*", "decoder.*")
    has_plain_classifier = False

    @property
    def stays(self) -> Patterns:
        """The weights that never leave a client with these settings."""
        return self.private if self.shares == "weights" else ("*",)

    @property
    def needs_fresh_optimizer(self) -> str:
        return "" if self.phase_mode == "joint" else "phases take turns, each with an optimiser (method.phase_mode)"

    # ---- the server's half

    @property
    def clients_use(self) -> UsedModel:
        return "public model" if self.shares == "weights" else "own models"

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return with_decoupling(spec, spec.model(client))

    def init_server(self, server: ServerContext) -> Shared:
        params = server.initial_params()
        prototypes = class_means.no_prototypes(server.num_classes, len(params["semantic.weight"]))
        return WeightsAndPrototypes(without(params, self.stays), prototypes)

    def message_for(self, state: Shared, client: ClientId) -> Shared:
        return state

    def public(self, state: Shared) -> tuple[Params, Shared] | None:
        return (state.params, state) if self.shares == "weights" else None

    def upload_spec(self, state: Shared, server: ServerContext) -> PrototypeUpload:
        return PrototypeUpload(state.params, state.prototypes, torch.tensor(0))

    def summand(self, upload: PrototypeUpload, message: Shared) -> Summands:
        prototypes = {"prototypes": (class_means.of_owner(upload.prototypes), 1.0)}
        if self.shares == "prototypes":
            return prototypes
        return {"params": (upload.params, self.weight_of(upload.num_examples)), **prototypes}

    def from_sum(self, state: Shared, totals: Totals, server: ServerContext) -> Shared:
        """The global model, Eq. (16), and the global prototypes, Eq. (3)."""
        params: Params = totals["params"].value() if self.shares == "weights" else state.params
        return WeightsAndPrototypes(params, class_means.mean_of(totals["prototypes"].total, state.prototypes))

    def prototype_sets(self, state: Shared) -> Mapping[str, Points]:
        return {"global prototypes": class_means.points(state.prototypes)}

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Shared) -> OwnWeights:
        return OwnWeights(matching(client.initial_params(), self.stays))

    def local_weights(self, message: Shared, memory: OwnWeights) -> Params:
        return {**message.params, **memory.params}

    async def train(
        self, client: ClientContext, message: Shared, memory: OwnWeights
    ) -> Reply[PrototypeUpload, OwnWeights]:
        params = await self.trained(client, self.local_weights(message, memory), message.prototypes)
        sums = await client.total(semantic_sums, params, (torch.zeros(client.num_classes),))
        prototypes = class_means.ownership(sums.prototypes())
        num_examples = client.num_examples if self.shares == "weights" else torch.tensor(0)
        upload = PrototypeUpload(without(params, self.stays), prototypes, num_examples)
        return Reply(upload, OwnWeights(matching(params, self.stays)))

    async def trained(self, client: ClientContext, params: Params, prototypes: Prototypes) -> Params:
        """The weights after both phases of Sec. 3.3.2: the basic model learns, then features are taken apart."""
        phases = (Objective(self.basic_loss, freezes=DECOUPLING), Objective(self.loss, freezes=CLASSIFIER))
        if self.phase_mode == "joint":
            return await client.fit(Objective(self.joint_loss), params=params, context=(prototypes,))
        if self.phase_mode == "batch":
            return await client.fit(*phases, params=params, context=(prototypes,))
        turns, epochs = (client.epochs, 1) if self.phase_mode == "epoch" else (1, client.epochs)
        for phase in phases * turns:
            params = await client.fit(phase, params=params, context=(prototypes,), epochs=epochs)
        return params

    def basic_loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """The first phase: the classifier learns on general features."""
        return batch.cross_entropy(model.classifier(embedded(model, batch.x)))

    def loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """The second phase: L of Eq. (15)."""
        return self.decoupled(model, embedded(model, batch.x), batch, prototypes)

    def joint_loss(self, model: Model, batch: Batch, prototypes: Prototypes) -> Tensor:
        """Both phases at once, in one pass."""
        z = embedded(model, batch.x)
        return batch.cross_entropy(model.classifier(z)) + self.decoupled(model, z, batch, prototypes)

    def decoupled(self, model: Model, z: Tensor, batch: Batch, prototypes: Prototypes) -> Tensor:
        """L_CE of Eq. (14) and the terms that are on, Eq. (15); no gradient reaches the classifier."""
        head = model.frozen(matching(model.params, CLASSIFIER)).classifier
        semantic, domain = model.semantic(z), model.domain(z)  # (B, D)
        loss = batch.cross_entropy(head(semantic))
        if self.distillation:
            teacher = head(z)  # (B, C)
            kept, lost = divergence(teacher, head(semantic)), divergence(teacher, head(domain))
            loss = loss + self.distillation_weight * batch.mean(preference(kept, lost))
        if self.information:
            rebuilt = model.decoder(torch.cat([semantic, domain], -1))
            loss = loss + self.information_weight * batch.mean(shared_information(semantic, domain, batch.x, rebuilt))
        if self.alignment:
            loss = loss + self.prototype_weight * balanced_pull(semantic, batch, prototypes)
        return loss

    def shown_features(self, model: Model, x: Tensor) -> Tensor:
        """Semantic features, of which prototypes are means."""
        return model.semantic(embedded(model, x))

    def predict(self, model: Model, x: Tensor, message: Shared, memory: OwnWeights | None) -> Tensor:
        """The classifier on semantic features."""
        return model.classifier(model.semantic(embedded(model, x)))


def semantic_sums(model: Model, batch: Batch, per_class: Tensor) -> ClassSums:
    """What the prototypes of Eq. (12) are the means of."""
    z = model.semantic(embedded(model, batch.x))
    return class_means.class_sums(z, batch.y, batch.weight, len(per_class))
