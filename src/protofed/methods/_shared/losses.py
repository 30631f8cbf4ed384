"""The losses that most methods start from."""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Batch
from protofed.nn.networks import Model
from protofed.prototypes.contrast import ABSENT
from protofed.tree import Tree


def cross_entropy(model: Model, batch: Batch, *context: Tree) -> Tensor:
    """The mean cross-entropy of a batch; the context of the fit is not read."""
    return batch.cross_entropy(model.logits(batch.x))


def summed_cross_entropy(model: Model, batch: Batch) -> Tensor:
    """Cross-entropy, summed over the examples: what `client.total` adds up."""
    return batch.cross_entropy(model.logits(batch.x)) * batch.weight.sum()


def known_cross_entropy(logits: Tensor, y: Tensor, is_known: Tensor) -> Tensor:
    """Cross-entropy among the classes that are known (C,), per example, (B,)."""
    return F.cross_entropy(torch.where(is_known, logits, ABSENT), y, reduction="none")
