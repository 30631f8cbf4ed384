"""Examples of a client, and the seeded plan by which training reads them.

A plan is drawn once per fit and fixes everything: which rows form each batch, and how each row is cropped, flipped and
turned. All batches of a plan have one shape. A batch with fewer rows is filled with copies of them, at weight 0: these
count in no loss, and change the statistics of BatchNorm little or not at all (docs/training.md says how much).
"""

from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.transforms import Draws, Transform
from protofed.seeds import normal
from protofed.tree import record

EVALUATION_BATCH = 256
FEWEST_ROWS = 4
"""Rows of the smallest batch, if `batch_size` allows it. BatchNorm may need two, and a method may halve a batch."""


@record
class Batch:
    x: Tensor  # (B, ...)
    y: Tensor  # (B,)
    weight: Tensor  # (B,), 0 for rows that fill the batch
    index: Tensor  # (B,), rows of the store; a context may hold more about an example by row
    is_last_epoch: Tensor  # (), whether this is the last pass of the fit over the data
    number: Tensor  # (), int64, the seed of the batch's draws

    def normal(self, *shape: int) -> Tensor:
        """Standard normal draws of this batch. Losses must not draw in any other way."""
        return normal(self.number, *shape)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows that count."""
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        return self.mean(F.cross_entropy(logits, self.y, reduction="none"))


@record
class Data:
    """Rows `index` of a store of examples, which many clients may share."""

    x: Tensor  # (N, ...), uint8 images, float32, or tokens (int32 or int64)
    y: Tensor  # (N,), int64
    index: Tensor  # (n,), int64

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Data":
        return cls(x, y, torch.arange(len(y)))

    def rows(self, index: Tensor) -> "Data":
        """The examples at these positions of this set."""
        return Data(self.x, self.y, self.index[index])

    @property
    def labels(self) -> Tensor:
        return self.y[self.index]

    def inputs(self, index: Tensor) -> Tensor:
        """Rows of the store, on the device of the index. The store may be too large for that device."""
        return self.x.index_select(0, index.to(self.x.device)).to(index.device)

    def __len__(self) -> int:
        return len(self.index)


@record
class Plan:
    index: Tensor  # (S, B), rows of the store
    weight: Tensor  # (S, B)
    is_last_epoch: Tensor  # (S,), bool
    number: Tensor  # (S,), int64
    draws: Draws


def training_plan(data: Data, size: int, epochs: int, transform: Transform, generator: torch.Generator) -> Plan:
    """`epochs` shuffled passes over the data in batches of `size` examples."""
    n, size = len(data), rows_of_batch(len(data), size)
    steps, source = ceil(n / size), sources(n, size)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(epochs)]).index_select(1, source)
    weight = (torch.arange(steps * size) < n).float().view(steps, size)
    weight = weight if epochs == 1 else weight.repeat(epochs, 1)
    last = torch.arange(epochs * steps) >= (epochs - 1) * steps
    draws = transform.draw(generator, epochs * steps, size).copied(source, n)  # guard: copies-varied-alike
    number = torch.randint(2**62, (epochs * steps,), generator=generator)
    return Plan(data.index[order].view(-1, size), weight, last, number, draws)


def rows_of_batch(n: int, size: int) -> int:
    """`size`, or the next power of two if all n examples fit into it. So a batch is less than twice as large as the
    data, and clients of many sizes have few shapes, which a GPU records one by one."""
    return min(size, max(FEWEST_ROWS, 1 << (n - 1).bit_length()))  # guard: batches-as-large-as-data


def sources(n: int, size: int) -> Tensor:
    """Which of an epoch's n examples stands at each place of its batches. The last batch repeats its own rows in turn.
    A single row would give BatchNorm a variance of 0, so rows from the start of the epoch follow it."""
    if n % size == 0:
        return torch.arange(n)
    begin = 0 if n % size == 1 else n - n % size  # guard: last-batch-of-its-rows, no-batch-of-one-row
    return torch.cat([torch.arange(n), begin + torch.arange(-n % size) % (n - begin)])


def evaluation_plan(data: Data, size: int = EVALUATION_BATCH) -> Plan:
    """One pass in order, without augmentation."""
    n = len(data)
    if not n:
        raise ValueError("there are no examples to evaluate")
    size = min(size, n)
    steps = ceil(n / size)
    position = torch.arange(steps * size)
    weight = (position < n).float().view(steps, size)
    index = data.index[position % n].view(steps, size)
    return Plan(index, weight, torch.ones(steps, dtype=torch.bool), torch.arange(steps), Draws(None, None, None))


def batch_at(data: Data, plan: Plan, step: int, transform: Transform) -> Batch:
    index = plan.index[step]
    x = transform.varied(data.inputs(index), plan.draws.at(step))
    return Batch(
        x,
        data.y.index_select(0, index.to(data.y.device)),
        plan.weight[step],
        index,
        plan.is_last_epoch[step],
        plan.number[step],
    )
