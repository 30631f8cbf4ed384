"""FedPAC: features are aligned to global class centroids, and each client's head is the best combination of all heads.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.

Sends: weights, how many examples of each class it has, the class means of its features before and after training, and
one variance. Keeps: nothing. Server: mean of the weights by the number of examples, but for the head; mean of the class
means by the number of examples of the class; for each client the combination of heads that a quadratic program finds.

Written from the authors' code, `methods/fedpac.py` and `tools.py` of github.com/JianXu95/FedPAC.

Departures:
1. The head is all that lies behind the features: the classifier, and the part `projection` where there is one. In the
   authors' networks it is one linear layer.
2. The head trains with the configured rate by default; the authors' code has SGD at rate 0.1 for it (a setting).
3. The quadratic program is solved exactly, by least squares without negative weights. The authors' code has a general
   solver, drops small eigenvalues of a matrix that rounding made indefinite, and keeps the own head where it finds no
   solution. A ridge of 1e-9 makes the solution the only one.
4. All class means are in evaluation mode.
5. The server holds the heads, where the authors' clients hold them. A client that the server does not know starts from
   the mean of the heads.
6. A class that no reply of a round holds keeps its centroid.
7. While the head trains, the statistics of BatchNorm in the body move.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, NonNegative, SettingErrors, Uploads
from protofed.api.requests import Objective
from protofed.api.roles import Count, Prototype
from protofed.api.roles import Weights as WeightsRole
from protofed.api.task import ClientId, TaskSpec
from protofed.api.views import Points
from protofed.data.batches import Batch
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.mixing import weighted_mean
from protofed.methods._shared.models import HEAD
from protofed.methods._shared.own_training import OwnOptimizer, own_optimizer, own_optimizer_errors
from protofed.methods.families import Averages
from protofed.nn.networks import Model, matching
from protofed.optim.optimizers import Optimizer
from protofed.prototypes import class_means, contrast
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.tree import Mean, Nothing, Params, record

SMALLEST_WEIGHT = 1e-3
"""Weights of a combination up to this are taken as 0."""
RIDGE = 1e-9
"""What is added to the program's diagonal, as a share of its mean."""


@record
class Combined:
    params: Params  # the mean of all weights
    heads: dict[ClientId, Params]  # the combined head of each client
    centroids: Prototypes  # the global class means


@record
class Message:
    params: Params  # the mean body and the client's own head
    centroids: Prototypes


@record
class Upload:
    params: Annotated[Params, WeightsRole()]
    num_examples: Annotated[Tensor, Count()]  # ()
    count: Annotated[Tensor, Count()]  # (C,), examples of each class
    mean: Annotated[Tensor, Prototype()]  # (C, D), class means under the trained body
    received_mean: Annotated[Tensor, Prototype()]  # (C, D), class means under the received body
    variance: Tensor  # (), V of the features under the received body


@record
class Moments:
    sums: ClassSums
    squares: Tensor  # (), Σ ‖z‖²


@dataclass(frozen=True)
class FedPAC(Averages, Method[Combined, Message, Nothing, Upload]):
    tags = ("personal", "prototype", "server-side")
    alignment_weight: NonNegative = 1.0
    """λ, how strongly features are pulled to the centroid of their class."""
    head_epochs: Annotated[int, Ge(1)] = 1
    """Epochs that the head trains for before the body does."""
    head_lr: NonNegative = 0.0
    """The learning rate of the head; 0: as configured."""
    head_optimizer: OwnOptimizer = "configured"
    """What the head trains with: the configured optimiser, or "sgd", without momentum and weight decay."""
    combination: bool = True
    """Whether heads are combined; if not, every client goes on from its own."""

    def validate(self, optimizer: Optimizer, batch_size: int, spec: TaskSpec | None) -> SettingErrors:
        return own_optimizer_errors("head_lr", optimizer, self.head_lr, self.head_optimizer)

    # ---- the server's half

    def init_server(self, server: ServerContext) -> Combined:
        params = server.initial_params()
        heads = dict.fromkeys(sorted(server.spec.clients), matching(params, HEAD))
        return Combined(params, heads, class_means.no_prototypes(server.num_classes, server.feature_dim))

    def message_for(self, state: Combined, client: ClientId) -> Message:
        return Message({**state.params, **state.heads.get(client, {})}, state.centroids)

    def upload_spec(self, state: Combined, server: ServerContext) -> Upload:
        none, zero = state.centroids, torch.tensor(0.0)
        return Upload(state.params, torch.tensor(0), none.count, none.mean, none.mean, zero)

    def aggregate(self, state: Combined, uploads: Uploads[Upload], server: ServerContext) -> Combined:
        """The mean body, the centroids, and the head of each client that replied (running.py, train_round_fedpac)."""
        mean, sent = Mean(), dict(uploads)
        sent = {client: sent[client] for client in sorted(sent)}
        for upload in sent.values():
            mean.add(upload.params, self.weight_of(upload.num_examples))
        sums = class_means.summed(class_means.by_count(Prototypes(u.mean, u.count)) for u in sent.values())
        centroids = class_means.mean_of(sums, state.centroids)
        heads = dict(zip(sent, self.combined(list(sent.values())), strict=True))
        known = {client: heads.get(client, head) for client, head in state.heads.items()}
        return Combined(mean.value(), known, centroids)

    def combined(self, sent: list[Upload]) -> list[Params]:
        """The head of each client that sent something (tools.py, agg_classifier_weighted_p)."""
        heads = [matching(upload.params, HEAD) for upload in sent]
        if not self.combination:
            return heads
        reference = torch.stack([upload.received_mean * shares(upload.count)[:, None] for upload in sent])  # (N, C, D)
        with torch.device("cpu"):  # small programs, which a GPU would only be slow at
            weights = combination_weights(reference.cpu(), torch.stack([upload.variance for upload in sent]).cpu())
        return [weighted_mean((head, w) for head, w in zip(heads, row, strict=True) if w) for row in weights.tolist()]

    # ---- the client's half

    def local_weights(self, message: Message, memory: Nothing) -> Params:
        return message.params

    async def train(self, client: ClientContext, message: Message, memory: Nothing) -> Reply[Upload, Nothing]:
        """Statistics, the head, the body, the class means (methods/fedpac.py, local_training)."""
        before: Moments = await client.total(moments, message.params, (message.centroids.count,))
        received = before.sums.prototypes()
        head_optimizer = own_optimizer(client.optimizer, self.head_lr, self.head_optimizer, client.halvings)
        params = await client.fit(
            Objective(cross_entropy, trains=HEAD),
            params=message.params,
            epochs=self.head_epochs,
            optimizer=head_optimizer,
        )
        context = (targets(message.centroids, received),)
        params = await client.fit(Objective(self.loss, freezes=HEAD), params=params, context=context)
        after = await class_means.of_client(client, params)
        variance = feature_variance(before.squares, received)
        return Reply(Upload(params, client.num_examples, after.count, after.mean, received.mean, variance), memory)

    def loss(self, model: Model, batch: Batch, aim: Prototypes) -> Tensor:
        """The objective of the body: cross-entropy, and the squared error to the class's centroid."""
        z = model.features(batch.x)
        pull = contrast.pull(z, batch.y, aim.mean, aim.is_known)
        return batch.cross_entropy(model.scores(z)) + self.alignment_weight * batch.mean(pull)

    def prototype_sets(self, state: Combined) -> dict[str, Points]:
        return {"global centroids": class_means.points(state.centroids)}


def moments(model: Model, batch: Batch, per_class: Tensor) -> Moments:
    """Sums of the features of each class, and of all their squares."""
    z = model.features(batch.x)
    sums = class_means.class_sums(z, batch.y, batch.weight, len(per_class))
    return Moments(sums, (z.square().sum(-1) * batch.weight).sum())


def targets(centroids: Prototypes, own: Prototypes) -> Prototypes:
    """What features are pulled to: the centroid of their class, or the own class mean if there is no such centroid;
    nothing while there are no centroids at all."""
    mean = torch.where(centroids.is_known[:, None], centroids.mean, own.mean)
    return Prototypes(mean, own.count * centroids.is_known.any())


def shares(count: Tensor) -> Tensor:
    """p, the share of each class in a client's examples, (C,)."""
    return count / count.sum().clamp(min=1)


def feature_variance(squares: Tensor, received: Prototypes) -> Tensor:
    """V = (E‖z‖² − Σ_c p_c² ‖μ_c‖²) / n, () (methods/fedpac.py, statistics_extraction)."""
    n = received.count.sum()
    reference = received.mean * shares(received.count)[:, None]  # h, (C, D)
    return (squares / n - reference.square().sum()).clamp(min=0) / n


def combination_weights(reference: Tensor, variance: Tensor) -> Tensor:
    """α, what each client (a row) takes of each head, (N, N); from h (N, C, D) and V (N,). A row minimises
    Σ_j α_j² V_j + ‖Σ_j α_j (h_i − h_j)‖², with weights that are not negative and sum to 1 (tools.py,
    get_head_agg_weight)."""
    reference, variance = reference.double().flatten(1), variance.double()
    # guard: no-negative-variance
    programs = [torch.diag(variance.clamp(min=0)) + gram(own - reference) for own in reference]
    weights = torch.stack([least_on_simplex(program) for program in programs])
    weights = torch.where(weights > SMALLEST_WEIGHT, weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def gram(rows: Tensor) -> Tensor:
    return rows @ rows.T


def least_on_simplex(program: Tensor) -> Tensor:
    """The weights that are not negative, sum to 1 and make αᵀ P α least, (N,); P is positive semidefinite, (N, N).

    They are, up to their sum, those that make ‖P^½ α‖² + s² (Σ α − 1)² least for any s, since its least value over the
    length of α grows with αᵀ P α of its direction.
    """
    from scipy.optimize import nnls  # a slow import that few runs need

    size = program.diagonal().mean().item() or 1.0
    values, vectors = torch.linalg.eigh(program + RIDGE * size * torch.eye(len(program), dtype=program.dtype))
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # rootᵀ root = P
    row = torch.full((1, len(program)), size**0.5, dtype=program.dtype)
    aim = np.zeros(len(program) + 1)
    aim[-1] = size**0.5
    found, _ = nnls(torch.cat([root, row]).numpy(), aim, maxiter=100 * len(program))
    weights = torch.from_numpy(found)
    return weights / weights.sum()
