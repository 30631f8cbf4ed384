"""The loss that holds a batch of features to the shape of the prototypes: points, angles and distances.

It leaves out rows of weight 0 and classes without a prototype, and gives no gradient to prototypes. Its gradient is
written out beside it: autograd's would take several times as many operations, most of them on all triples of a batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.nn.precision import product
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.contrast import ABSENT, EPS
from protofed.tree import record

APART = 1e-6
"""Two points nearer than this have no direction between them."""
MOST_CLASSES = 1024
"""Of the GPU's kernels, which hold the scores of all classes."""


@record
class Shape:
    """The prototypes as they are seen from each other. It is the same in every step of a round."""

    unit: Tensor  # (C, D), the prototypes at length 1
    is_known: Tensor  # (C,), whether a class has a prototype
    distance: Tensor  # (C, C), −1 where one of the two is missing or both are the same
    cosine: Tensor  # (C, C, C), of the angle at the first between the other two


@dataclass(frozen=True)
class Alignment:
    """Which parts the loss has, and the temperature of the node loss."""

    node: bool = True
    angle: bool = True
    edge: bool = True
    temperature: float = 0.5

    def loss(self, z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        """Of the features of a batch, (), Eq. (5) to (7).

        Node: the mean of −log of the share of the own prototype in the similarities to all. Angle: the mean difference
        of the cosines, over three examples of different classes. Edge: the mean smooth L1 of the difference of the
        distances, both relative to their mean, over two examples of different classes.
        """
        loss: Tensor
        tables = shape.unit, shape.is_known, shape.distance, shape.cosine
        function = _ByKernels if _has_kernels(z, shape) else _WithSlope
        loss, _ = function.apply(z, y, weight, *tables, self)  # type: ignore[no-untyped-call]
        return loss

    def with_slope(self, z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The loss and its gradient at z, (B, D)."""
        loss, slope = z.new_zeros(()), torch.zeros_like(z)
        if self.node:
            loss, slope = self._node(z, y, weight, shape)
        if not (self.angle or self.edge):
            return loss, slope
        wanted = shape.distance.flatten()[y[:, None] * len(shape.is_known) + y]  # (B, B), between prototypes
        counts = weight > 0
        is_pair = (wanted >= 0) & counts[:, None] & counts
        distance, inverse, unit = _directions(z)
        moved = torch.zeros_like(unit)  # the gradient at z_j − z_i, (B, B, D)
        if self.angle:
            side = (is_pair & (wanted > APART)) * inverse.sign()  # 1 where there is a direction in both shapes
            part, moved = _angle(y, side, unit, inverse, shape)
            loss = loss + part
        if self.edge:
            part, along = _edge(is_pair.to(z.dtype), distance, wanted)
            loss, moved = loss + part, torch.addcmul(moved, along[..., None], unit)
        return loss, slope + moved.sum(0) - moved.sum(1)

    def _node(self, z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=EPS)
        unit = z / length
        cosine = product(unit, shape.unit.T)
        logs = torch.where(shape.is_known, cosine / self.temperature, ABSENT).log_softmax(-1)
        share = (weight * shape.is_known[y] / weight.sum().clamp(min=1))[:, None]  # of an example in the mean
        own = torch.arange(len(shape.is_known), device=y.device) == y[:, None]  # (B, C)
        loss = (own * logs * share).sum().neg()
        slope = (logs.exp() - own.to(z.dtype)) * (share / self.temperature)  # at the cosines
        return loss, (product(slope, shape.unit) - (slope * cosine).sum(-1, keepdim=True) * unit) / length


class _WithSlope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, y: Tensor, weight: Tensor, *tables: Any) -> tuple[Tensor, Tensor]:
        *parts, alignment = tables
        found: tuple[Tensor, Tensor] = alignment.with_slope(z, y, weight, Shape(*parts))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, slope = output
        ctx.mark_non_differentiable(slope)
        ctx.save_for_backward(slope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, *[None] * 7


class _ByKernels(torch.autograd.Function):
    """The same on a GPU, of one client's batch, or of many with the clients in front."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, weight: Tensor, *tables: Any) -> tuple[Tensor, Tensor]:
        from protofed.kernels.alignment import with_slopes  # Triton comes with torch for GPUs only

        *parts, alignment = tables
        if z.dim() == 3:
            return with_slopes(alignment, z, y, weight, Shape(*parts))
        loss, slope = with_slopes(alignment, z[None], y[None], weight[None], Shape(*(part[None] for part in parts)))
        return loss[0], slope[0]

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        *leaves, alignment = inputs
        stacked = [
            leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
            for leaf, dim in zip(leaves, dims, strict=False)
        ]
        return _ByKernels.apply(*stacked, alignment), (0, 0)  # type: ignore[no-untyped-call]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # no zeros as gradient of the slope
        _WithSlope.setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grads[0][..., None, None] * slope, *[None] * 7


def _has_kernels(z: Tensor, shape: Shape) -> bool:
    return z.is_cuda and z.dtype == torch.float32 and shape.is_known.shape[-1] <= MOST_CLASSES


def shape_of(prototypes: Prototypes) -> Shape:
    mean, known = prototypes.mean.detach(), prototypes.is_known
    distance, _, unit = _directions(mean)
    is_pair = known[:, None] & known & ~torch.eye(len(known), dtype=torch.bool)
    normal = F.normalize(mean, dim=-1, eps=EPS)
    return Shape(normal, known, torch.where(is_pair, distance, -1.0), unit @ unit.mT)


def _angle(y: Tensor, side: Tensor, unit: Tensor, inverse: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient at the differences between examples, (B, B, D). Sums over triples i, j, k, the corner
    of the angle first, are over those with side[i, j] = side[i, k] = 1 and different classes of j and k."""
    differs = (y[:, None] != y).to(unit.dtype)
    number = ((side @ differs) * side).sum().clamp(min=1)
    expected = shape.cosine[y].gather(1, y.expand(len(y), shape.cosine.shape[-1], -1).mT)  # (B, B, C)
    gap = (unit @ unit.mT - expected.gather(2, y.expand(len(y), len(y), -1))) * differs  # (B, B, B)
    loss = ((gap.abs() @ side[..., None]).squeeze(-1) * side).sum() / number
    # With c = u·v of unit vectors, dc/du = v. What of it lies along u changes the length alone, and is taken off.
    pull = gap.sign() @ (unit * side[..., None])
    along = (pull * unit).sum(-1, keepdim=True)
    return loss, torch.addcmul(pull, along, unit, value=-1) * (side * inverse * (2 / number))[..., None]


def _edge(is_pair: Tensor, distance: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient at the distances, (B, B)."""
    share = is_pair / is_pair.sum().clamp(min=1)  # of a pair in the mean
    mean = (share * distance).sum()
    scale = mean.clamp(min=APART)
    gap = distance / scale - wanted / (share * wanted).sum().clamp(min=APART)
    bounded = gap.clamp(-1, 1)  # the gradient of the smooth L1 of the gap
    loss = (share * bounded * (gap - bounded / 2)).sum()
    along = share * bounded / scale
    return loss, along - share * ((along * distance).sum() * (mean > APART) / scale)  # the mean depends on them too


def _directions(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entry [i, j] is the distance from point i to point j, its inverse, 0 if they coincide, both (B, B), and the unit
    vector from i to j, (B, B, D)."""
    difference = points - points[:, None]
    distance = torch.linalg.vector_norm(difference, dim=-1)
    inverse = torch.where(distance > APART, distance.reciprocal(), 0.0)
    return distance, inverse, difference * inverse[..., None]
