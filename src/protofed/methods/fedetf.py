"""FedETF: every client trains towards the same fixed classifier, whose classes are equally far apart.

Li, Shang, He, Lin, Wu: No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier, ICCV 2023.

Sends: weights; the classifier itself is known to all and not sent. Keeps: how many examples of each class it has.
Server: mean weighted by the number of examples.

Departures:
1. The frame is drawn from a fixed seed, the same in every run: the layer before it is learnt, so that any rotation of
   the frame is as good as another.
2. In place of the task's classifier stand a linear layer and the frame. The layer reads what that classifier read: the
   output of the projection if the network has one, which is left as it is.
3. The temperature is kept positive by a softplus of what is learnt; the authors' code does not bound it.
4. A class that a client does not have counts as one example in the balanced softmax, as in the authors' code.
5. The personal phase of the paper, which fine-tunes layer and classifier at each client in turn, is not there.
"""

from dataclasses import dataclass
from math import expm1, log, sqrt
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from protofed.api.contexts import ClientContext
from protofed.api.method import NonNegative, Positive
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch
from protofed.errors import BadInput
from protofed.methods._shared.models import embedding_dim
from protofed.methods.families import GlobalModel, Weights
from protofed.nn.networks import Model, Parts
from protofed.prototypes.contrast import EPS
from protofed.seeds import generator
from protofed.tree import record


@record
class ClassCounts:
    """What a client keeps."""

    count: Tensor  # (C,), its examples of each class


class FrameClassifier(nn.Module):
    """Scores are scaled cosines between a learnt map of the input and the columns of a fixed frame."""

    frame: Tensor

    def __init__(self, width: int, num_classes: int, dim: int, scale: float) -> None:
        super().__init__()
        self.projection = nn.Linear(width, dim)
        self.raw_scale = nn.Parameter(torch.tensor(scale + log(-expm1(-scale))))
        # Everyone can make it, so it is no part of the weights.
        self.register_buffer("frame", equiangular_frame(num_classes, dim), persistent=False)  # (P, C)

    def forward(self, z: Tensor) -> Tensor:
        direction = F.normalize(self.projection(z), dim=-1, eps=EPS)
        return F.softplus(self.raw_scale) * direction @ self.frame


@dataclass(frozen=True)
class FedETF(GlobalModel[ClassCounts]):
    tags = ("global",)
    not_by_record = "its loss goes by how many examples of each class a client has"
    dimension: Annotated[int, Ge(0)] = 0
    """d, the size of the vectors of the frame, at least the number of classes; 0 is that number, as in the authors'
    code for ResNets. For its small network it has 64."""
    initial_scale: Positive = 1.0
    """The temperature that cosines are multiplied by, before training; it is learnt. The authors' code has 10 for its
    small network."""
    balance: NonNegative = 1.0
    """γ, how strongly scores are shifted by the numbers of examples of the classes while a client trains."""

    def networks(self, spec: TaskSpec, client: ClientId) -> Parts:
        parts, dim = spec.model(client), self.dimension or spec.num_classes
        head = FrameClassifier(embedding_dim(spec, parts), spec.num_classes, dim, self.initial_scale)
        return {**parts, "classifier": head}

    def init_memory(self, client: ClientContext, message: Weights) -> ClassCounts:
        return ClassCounts(client.data.labels.bincount(minlength=client.num_classes).float())

    def loss(self, model: Model, batch: Batch, message: Weights, memory: ClassCounts) -> Tensor:
        """The local objective: cross-entropy of the balanced softmax."""
        shift = memory.count.clamp(min=1).log()  # (C,)
        return batch.cross_entropy(model.logits(batch.x) + self.balance * shift)


def equiangular_frame(num_classes: int, dim: int) -> Tensor:
    """A simplex equiangular tight frame: columns (P, C) of length 1, any two of them at cosine −1/(C−1)."""
    if dim < num_classes:
        raise BadInput(f"FedETF: a frame of {num_classes} classes needs at least as many dimensions, not {dim}")
    drawn = torch.rand(dim, num_classes, dtype=torch.float64, generator=generator(0, "equiangular frame"))
    basis = torch.linalg.qr(drawn).Q  # (P, C), orthonormal columns
    frame: Tensor = sqrt(num_classes / (num_classes - 1)) * (basis - basis.mean(1, keepdim=True))
    return frame.float()
