"""pFedCSPC: the server retrains the global head on clients' prototypes, and mixes an encoder for every client.

Meng, Qi, Wu, Du, Li, Cui, Meng: Improving Global Generalization and Local Personalization for Federated Learning,
IEEE TNNLS 2024. With `personalised = false` it is FedCSPC: Qi, Meng, Chen, Hu, Lin, Meng: Cross-Silo Prototypical
Calibration for Federated Learning with Non-IID Data, ACM MM 2023.

Sends: what the base method sends, and several prototypes of each class that it has. Keeps: what the base method keeps,
and the weights it trained last. Server: what the base method does; then projection and classifier are retrained on the
prototypes, exemplars and global prototypes are made of them, and encoders are mixed for each client.

Departures:
1. Eq. (4) is a softmax over clients; the denominator as printed has the temperature inside the loss and one index for
   two. The temperature is not given; it is 0.5 here.
2. A client that was not in the last round starts from the global encoder: its prototypes are not at hand.
3. Features and prototypes have length 1 in Eq. (5), and the outputs of the projection in Eq. (12), as in the authors'
   code.
4. Eq. (6) is the absolute difference of the cosines; the paper prints a comma. Triplets of which two points coincide
   are left out.
5. Eq. (7) compares distances relative to their mean, by a smooth L1, as in the authors' code.
6. The alignment runs the encoder a second time on each batch, with statistics of BatchNorm that are thrown away.
7. A cluster gives max(1, round(r · size)) examples to a sample; a class of fewer examples than clusters has fewer
   clusters. The authors' code has no clusters and samples 0.8 of the class with replacement.
8. Clients draw: clusters and samples come from the seed of the client's step.
9. λ of Eq. (10) is drawn for each augmented pair. A prototype without partner of its class is its own positive; a
   client of one class takes negatives from others.
10. Eq. (11) has a hinge, as in the authors' code; without one it has no lower bound.
11. The negatives and positives of Eq. (12) are those of the batch. A prototype that is the only one of its class there
    adds nothing but counts in the mean.
12. Eq. (13) leaves out classes that nobody has in a round, so that their rows of the classifier stay.
13. Eq. (14) and (16) are means over a client's prototypes of the class and then over the clients that have the class; a
    class that nobody has keeps what it had.
14. Norm in Eq. (15) is a softmax, of the cosines over τ_g for the exemplars; λ is not given and is 0.5.
15. The schedule of the calibration is that of the authors' code (the paper has none): 100 epochs, batches of 100, SGD
    with weight decay 10⁻⁵, learning rate 0.1 in the first six rounds, 0.01 up to the 41st, then 0.001, and a tenth
    after every 30 epochs.
16. Of a base that averages global models (FedASAM) the calibration takes the last one, and the average is not used.
17. In a network without projection the calibration trains the classifier, and Eq. (11) and (12) have no effect.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, Positive, SettingErrors, Uploads, UsedModel
from protofed.api.requests import Objective
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Observed, Points, Relation
from protofed.data.batches import Batch
from protofed.errors import RoundAbandoned
from protofed.methods._shared.losses import known_cross_entropy
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods._shared.models import HEAD, features, own_statistics, server_embedding
from protofed.methods._shared.wrappers import base_errors, published
from protofed.methods.fedavg import FedAvg
from protofed.methods.pfedcspc import calibration, sampling
from protofed.methods.pfedcspc.alignment import Alignment, Shape, shape_of
from protofed.methods.pfedcspc.calibration import Contrasts, Partners, Pool
from protofed.methods.pfedcspc.records import Guidance, Kept, Knowledge, Published, SampledUpload
from protofed.methods.pfedcspc.sampling import Slots
from protofed.nn.networks import Model, Parts, matching, without
from protofed.optim.optimizers import Optimizer
from protofed.prototypes import class_means
from protofed.seeds import generator
from protofed.tree import Params, Tree

Share = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class PFedCSPC(Method[Knowledge, Guidance, Kept, SampledUpload]):
    tags = ("core", "global", "personal", "prototype", "server-side", "wrapper")
    retrains_classifier = True
    base: Method[Any, Any, Any, Any] = field(default_factory=FedAvg)
    """The method whose objective is L_base in Eq. (18)."""
    personalised: bool = True
    """Whether clients have models of their own; without, the method is FedCSPC."""
    personal_initialisation: bool = True
    """Whether a client starts from an encoder mixed for it, Eq. (4) (PMI)."""
    initialisation_temperature: Positive = 0.5
    """τ_p in Eq. (4)."""
    prototypes: Literal["clustered", "class_means"] = "clustered"
    """Samples of the clusters of a class, Eq. (8) and (9) (CPM), or the mean of the class (TPG)."""
    clusters: Count = 3
    """j in Eq. (8), the number of clusters of a class."""
    repeats: Count = 5
    """n_repeat in Eq. (9), the number of samples of a cluster."""
    sampled_share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    """r in Eq. (9), the share of a cluster in a sample."""
    alignment_weight: NonNegative = 0.1
    """κ in Eq. (18), the weight of the alignment (PTA)."""
    node: bool = True
    """Whether features are held to prototypes, Eq. (5)."""
    angle: bool = True
    """Whether angles between features are held to those between prototypes, Eq. (6)."""
    edge: bool = True
    """Whether distances between features are held to those between prototypes, Eq. (7)."""
    alignment_temperature: Positive = 0.5
    """τ_l in Eq. (5)."""
    calibration: bool = True
    """Whether the server retrains projection and classifier on prototypes, Eq. (17)."""
    contrast: bool = True
    """Whether the calibration contrasts prototypes across clients, Eq. (12) (CA)."""
    augmentation: bool = True
    """Whether the calibration contrasts augmented prototypes, Eq. (10) and (11) (PA)."""
    contrast_weight: NonNegative = 0.1
    """η in Eq. (17), the weight of both contrasts."""
    temperature: Positive = 0.5
    """τ_g in Eq. (12)."""
    easy_weight: Positive = 0.5
    """σ in Eq. (12) of pairs of one class at one client, or of two classes at two clients."""
    augmentations: Count = 5
    """n_aug, the number of augmented pairs for each prototype."""
    margin: NonNegative = 1.0
    """α in Eq. (11)."""
    calibration_epochs: Count = 100
    """Passes of the calibration over the prototypes."""
    calibration_rate: Positive = 0.1
    """Learning rate of the calibration in the first rounds."""
    knowledge_weight: Share = 0.5
    """λ in Eq. (15), the weight of the exemplars in the public model's prediction (KP); 0 turns them off."""

    @property
    def clients_use(self) -> UsedModel:
        return "own models" if self.personalised else "public model"

    @property
    def needs_each_upload(self) -> str:
        return "it mixes the clients' encoders" if self.mixes_encoders else self.base.needs_each_upload

    @property
    def mixes_encoders(self) -> bool:
        return self.personalised and self.personal_initialisation

    @property
    def slots_per_class(self) -> int:
        return self.clusters * self.repeats if self.prototypes == "clustered" else 1

    # ---- the server's half

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return base_errors(self, self.base)

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        return self.base.networks(spec, client)

    def init_server(self, server: ServerContext) -> Knowledge:
        base, dim, num_classes = self.base.init_server(server), server.feature_dim, server.num_classes
        width = server_embedding(server, base.params, torch.zeros(1, dim)).shape[-1]
        everyone, none = sorted(server.spec.clients), torch.zeros(0, dtype=torch.float64)
        return Knowledge(
            base,
            matching(base.params, HEAD),
            class_means.no_prototypes(num_classes, dim),
            class_means.no_prototypes(num_classes, width),
            {name: leaf.new_zeros(0, *leaf.shape) for name, leaf in self.encoder(base.params).items()},
            {client: none for client in everyone if self.mixes_encoders},
        )

    def encoder(self, params: Params) -> Params:
        """What is mixed for clients."""
        return without(params, HEAD) if self.mixes_encoders else {}

    def message_for(self, state: Knowledge, client: ClientId) -> Guidance:
        params = {**state.base.params, **state.head}
        if client in state.mixing and state.mixing[client].any():
            weights = state.mixing[client].tolist()
            params |= weighted_mean((entry(state.encoders, k), weight) for k, weight in enumerate(weights))
        return Guidance(replace(self.base.message_for(state.base, client), params=params), state.prototypes)

    def public(self, state: Knowledge) -> tuple[Params, Guidance] | None:
        params, message = published(self.base, state.base)
        if self.calibration:
            params = {**state.base.params, **state.head}
        return params, Published(message, state.prototypes, state.exemplars)

    def public_variants(self, state: Knowledge) -> Mapping[str, tuple[Params, Guidance]]:
        """The base's averaged model as it is, with the calibrated head, and with that and the exemplars."""
        params, message = published(self.base, state.base)
        plain, calibrated = Guidance(message, state.prototypes), {**state.base.params, **state.head}
        found = {"before calibration": (params, plain), "after calibration": (calibrated, plain)}
        with_knowledge = (calibrated, Published(message, state.prototypes, state.exemplars))
        return found | ({"with exemplars": with_knowledge} if self.knowledge_weight else {}) if self.calibration else {}

    def prototype_sets(self, state: Knowledge) -> Mapping[str, Points]:
        return {"global prototypes": class_means.points(state.prototypes)}

    def relations(self, state: Knowledge, observed: Observed) -> Mapping[str, Relation]:
        """What the encoders of the last round count for its clients, Eq. (4)."""
        present = [client for client in sorted(state.mixing) if state.mixing[client].any()]
        if not present:
            return {}
        weights = torch.stack([state.mixing[client] for client in present])
        return {"whose encoders clients start from": Relation(weights, present, present, "weight")}

    def upload_spec(self, state: Knowledge, server: ServerContext) -> SampledUpload:
        slots = sampling.empty_slots(server.num_classes, self.slots_per_class, server.feature_dim)
        return SampledUpload(self.base.upload_spec(state.base, server), slots)

    def group(self, state: Knowledge, client: ClientId, upload: SampledUpload) -> Hashable:
        return self.base.group(state.base, client, upload.base)

    def aggregate(self, state: Knowledge, uploads: Uploads[SampledUpload], server: ServerContext) -> Knowledge:
        slots: dict[ClientId, Slots] = {}
        models: dict[ClientId, Params] = {}

        def of_base() -> Uploads[Tree]:
            for client, upload in uploads:
                slots[client] = upload.prototypes
                if self.mixes_encoders:
                    models[client] = upload.base.params
                yield client, upload.base

        received = replace(state.base, params={**state.base.params, **state.head})  # a base may ask how far it went
        base = self.base.aggregate(received, of_base(), server)
        present = [client for client in sorted(slots) if slots[client].count.any()]
        if not present:
            raise RoundAbandoned("no client sent a prototype: there is nothing to calibrate on.")
        pool = calibration.pooled([slots[client] for client in present], server.num_classes)
        head = self.calibrated(base.params, pool, server)
        exemplars = server_embedding(server, {**base.params, **head}, pool.mean)
        return Knowledge(
            base,
            head,
            calibration.class_centres(pool.mean, pool, state.prototypes),
            calibration.class_centres(exemplars, pool, state.exemplars),
            *self.mixture(state, {client: models[client] for client in present if client in models}, pool, server),
        )

    def mixture(
        self, state: Knowledge, models: dict[ClientId, Params], pool: Pool, server: ServerContext
    ) -> tuple[Params, dict[ClientId, Tensor]]:
        """The encoders of the round and what each counts for each client, Eq. (4)."""
        if not models:
            return {}, {}
        losses = torch.stack(
            [calibration.client_losses(params, pool, server) for params in models.values()], 1
        )  # (K, K)
        weights = dict(zip(models, calibration.mixing_weights(losses, self.initialisation_temperature), strict=True))
        encoders = stacked([tree.select(params, list(state.encoders)) for params in models.values()])
        nothing = torch.zeros(len(models), dtype=torch.float64)
        return encoders, {client: weights.get(client, nothing) for client in state.mixing}

    def calibrated(self, params: Params, pool: Pool, server: ServerContext) -> Params:
        """Projection and classifier, retrained on the prototypes."""
        if self.calibration:
            partners = calibration.drawn_partners(pool, self.augmentations, server.generator)
            is_known = pool.label.bincount(minlength=server.num_classes) > 0
            objective, context = Objective(self.calibration_loss, trains=HEAD), (pool, partners, is_known)
            steps = calibration.schedule(self.calibration_epochs, self.calibration_rate, server.round)
            params = calibration.retrained(params, objective, context, steps, server)
        return matching(params, HEAD)

    def calibration_loss(self, model: Model, batch: Batch, pool: Pool, partners: Partners, is_known: Tensor) -> Tensor:
        """The server's objective, Eq. (17)."""
        if "projection" not in model.networks.parts:  # both contrasts would be constants
            return batch.mean(known_cross_entropy(model.classifier(batch.x), batch.y, is_known))
        rows = batch.index
        if self.augmentation:
            z, pairs = calibration.embedded(model, batch.x, calibration.augmented(batch.x, rows, pool, partners))
        else:
            z = model.embedding(batch.x)
            pairs = z.new_empty(len(z), 0, z.shape[1])
        contrasts = Contrasts(
            *(self.contrast, self.augmentation, self.contrast_weight),
            *(self.temperature, self.easy_weight, self.margin),
        )
        return contrasts.objective(model.classifier(z), z, pairs, pool.client[rows], is_known, batch)

    # ---- the client's half

    def init_memory(self, client: ClientContext, message: Guidance) -> Kept:
        return Kept(self.base.init_memory(client, message.base), message.base.params if self.personalised else {})

    def starting_weights(self, message: Guidance, memory: Kept) -> Params:
        mixed: Params = message.base.params
        return mixed

    def local_weights(self, message: Guidance, memory: Kept) -> Params:
        return memory.params if self.personalised else message.base.params

    async def train(self, client: ClientContext, message: Guidance, memory: Kept) -> Reply[SampledUpload, Kept]:
        if self.alignment_weight and (self.node or self.angle or self.edge):
            client = client.with_loss_term(self.alignment, shape_of(message.prototypes))
        reply = await self.base.train(client, message.base, memory.base)
        params = reply.upload.params
        z = await client.map(features, params)
        upload = SampledUpload(reply.upload, self.sampled(z, client))
        return Reply(upload, Kept(reply.memory, params if self.personalised else {}))

    def sampled(self, z: Tensor, client: ClientContext) -> Slots:
        """The client's prototypes, from its features (n, D)."""
        is_clustered = self.prototypes == "clustered"
        clusters, repeats, share = (self.clusters, self.repeats, self.sampled_share) if is_clustered else (1, 1, 1.0)
        draws = generator(client.step_seed, "prototypes")
        return sampling.sampled_prototypes(z, client.data.labels, client.num_classes, clusters, repeats, share, draws)

    def alignment(self, model: Model, batch: Batch, shape: Shape) -> Tensor:
        """What the alignment adds to the objective of Eq. (18)."""
        z = own_statistics(model).features(batch.x)
        parts = Alignment(self.node, self.angle, self.edge, self.alignment_temperature)
        return self.alignment_weight * parts.loss(z.float(), batch.y, batch.weight, shape)

    def predict(self, model: Model, x: Tensor, message: Guidance, memory: Kept | None) -> Tensor:
        """Logits; of the public model, classifier and exemplars together, Eq. (15)."""
        z = model.embedding(model.features(x))
        logits = model.classifier(z)
        if not isinstance(message, Published) or not self.knowledge_weight:
            return logits
        knowledge = calibration.knowledge(z, message.exemplars, self.temperature)
        return (1 - self.knowledge_weight) * logits.softmax(-1) + self.knowledge_weight * knowledge

    def probabilities(self, scores: Tensor, message: Guidance) -> Tensor:
        """With exemplars, the scores are probabilities already."""
        return scores if isinstance(message, Published) and self.knowledge_weight else scores.softmax(-1)
