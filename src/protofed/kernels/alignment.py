"""The alignment of many clients' batches, and its gradient, in three GPU kernels, in Triton.

Angles and edges depend on the features by their distances alone. With q the squared distances, the cosine of the angle
at i between j and k is (q_ij + q_ik − q_jk) / (2 √q_ij √q_ik): a triple costs a few operations, whatever the size of
the features. The gradient at z_j is Σ_k s_jk (z_j − z_k), where s_jk is twice that at q_jk.

A program does one example of one client. It sums in float32 and in a fixed order: the same inputs give the same bits.
"""

# Triton reads the types of a kernel's arguments from the call. Names in capitals are known when it is compiled.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from protofed.methods.pfedcspc.alignment import APART, Alignment, Shape
from protofed.prototypes.contrast import ABSENT, EPS

BLOCK = 64
"""Most examples that a program looks at together."""
BLOCK_D = 32
"""Entries of a feature that it looks at together."""
NUM_SUMS = 9
"""Numbers that are kept of each example, each a sum over its pairs or triples:"""
PAIRS = tl.constexpr(0)  # how many pairs it has
DISTANCE = tl.constexpr(1)  # distances of features
WANTED = tl.constexpr(2)  # distances of prototypes
NODE_LOSS = tl.constexpr(3)
NODE_ALONG = tl.constexpr(4)  # what is taken off the gradient of the node loss, in units of the feature
TRIPLES = tl.constexpr(5)  # of how many triples it is the corner
ANGLE_LOSS = tl.constexpr(6)
EDGE_LOSS = tl.constexpr(7)
EDGE_ALONG = tl.constexpr(8)  # slopes of the smooth L1 times distances


def with_slopes(alignment: Alignment, z: Tensor, y: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The losses (K,) of batches z (K, B, D), y and weight (K, B), and their gradients (K, B, D). Each client has its
    shape, so that all tensors of `shape` have the clients in front; they may be expanded."""
    z, y, weight = z.contiguous(), y.contiguous(), weight.contiguous()
    tables = shape.unit, shape.is_known, shape.distance
    unit, is_known, distance = (table if table[0].is_contiguous() else table.contiguous() for table in tables)
    (clients, batch, dim), classes = z.shape, is_known.shape[1]

    def new(*size: int) -> Tensor:
        return torch.empty((clients, *size), dtype=torch.float32, device=z.device)

    squares, wanted, angles, nodes = new(batch, batch), new(batch, batch), new(batch, batch), new(batch, classes)
    sums, loss, slope = new(NUM_SUMS, batch), new(), new(batch, dim)
    parts = {"NODE": alignment.node, "ANGLE": alignment.angle, "EDGE": alignment.edge}
    sizes: dict[str, Any] = {"BATCH": batch, "DIM": dim, "CLASSES": classes, "NUM_SUMS": NUM_SUMS, "APART": APART}
    block, block_c = min(BLOCK, triton.next_power_of_2(batch)), triton.next_power_of_2(classes)
    sizes |= {"BLOCK": max(16, block), "BLOCK_D": BLOCK_D, "BLOCK_C": max(16, block_c)}
    _pairs_kernel[batch, clients](
        *(z, y, weight, unit, is_known, distance, squares, wanted, sums, nodes),
        *(unit.stride(0), is_known.stride(0), distance.stride(0), alignment.temperature),
        **{**parts, **sizes, "EPS": EPS, "ABSENT": ABSENT},
    )
    if alignment.angle or alignment.edge:
        _triples_kernel[batch, clients](*(squares, wanted, sums, angles), **{**parts, **sizes, "num_warps": 8})
    _slope_kernel[batch, ceil(dim / BLOCK_D), clients](
        *(z, unit, squares, wanted, sums, nodes, angles, loss, slope, unit.stride(0)), **{**parts, **sizes}
    )
    return loss, slope


# ---- kernels


@triton.jit
def _pairs_kernel(
    z, y, weight, unit, is_known, distance, squares, wanted, sums, nodes,
    unit_client, known_client, distance_client, temperature,
    NODE: tl.constexpr, ANGLE: tl.constexpr, EDGE: tl.constexpr,
    BATCH: tl.constexpr, DIM: tl.constexpr, CLASSES: tl.constexpr, NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    APART: tl.constexpr, EPS: tl.constexpr, ABSENT: tl.constexpr,
):  # fmt: skip
    """The example's squared distances to all others, the distances of their prototypes, −1 where they are no pair, and
    its node loss with the gradient at the prototypes of length 1."""
    i, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z += client * (BATCH * DIM)
    y += client * BATCH
    weight += client * BATCH
    sums += client * (NUM_SUMS * BATCH) + i
    row = client * (BATCH * BATCH) + i * BATCH
    label, own_weight = tl.load(y + i), tl.load(weight + i)
    if ANGLE or EDGE:
        pairs = tl.zeros((BLOCK,), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        target = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, BATCH, BLOCK):
            j = start + tl.arange(0, BLOCK)
            is_j = j < BATCH
            square = tl.zeros((BLOCK,), dtype=tl.float32)
            for first in range(0, DIM, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                own = tl.load(z + i * DIM + d, d < DIM, 0.0)
                other = tl.load(z + (j[:, None] * DIM + d[None, :]), is_j[:, None] & (d < DIM)[None, :], 0.0)
                gap = other - own[None, :]
                square += tl.sum(gap * gap, 1)
            far = tl.load(distance + client * distance_client + label * CLASSES + tl.load(y + j, is_j, 0), is_j, -1.0)
            far = tl.where(tl.minimum(tl.load(weight + j, is_j, 0.0), own_weight) > 0, far, -1.0)
            tl.store(squares + row + j, square, is_j)
            tl.store(wanted + row + j, far, is_j)
            pairs += tl.where(far >= 0, 1.0, 0.0)
            total += tl.where(far >= 0, tl.sqrt(square), 0.0)
            target += tl.where(far >= 0, far, 0.0)
        tl.store(sums + PAIRS * BATCH, tl.sum(pairs, 0))
        tl.store(sums + DISTANCE * BATCH, tl.sum(total, 0))
        tl.store(sums + WANTED * BATCH, tl.sum(target, 0))
    if NODE:
        c = tl.arange(0, BLOCK_C)
        is_c = c < CLASSES
        cosine = tl.zeros((BLOCK_C,), dtype=tl.float32)
        norm = 0.0
        for first in range(0, DIM, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            own = tl.load(z + i * DIM + d, d < DIM, 0.0)
            at = client * unit_client + (c[:, None] * DIM + d[None, :])
            cosine += tl.sum(tl.load(unit + at, is_c[:, None] & (d < DIM)[None, :], 0.0) * own[None, :], 1)
            norm += tl.sum(own * own, 0)
        length = tl.maximum(tl.sqrt(norm), EPS)
        cosine = cosine / length
        known = is_known + client * known_client
        score = tl.where(tl.load(known + c, is_c, 0) != 0, cosine / temperature, ABSENT)
        score = tl.where(is_c, score, -float("inf"))
        score -= tl.max(score, 0)
        powers = tl.exp(score)
        everything = tl.sum(powers, 0)
        weights = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, BATCH, BLOCK):
            j = start + tl.arange(0, BLOCK)
            weights += tl.load(weight + j, j < BATCH, 0.0)
        share = tl.where(tl.load(known + label) != 0, own_weight, 0.0) / tl.maximum(tl.sum(weights, 0), 1.0)
        own_score = tl.sum(tl.where(c == label, score, 0.0), 0)
        slope = (powers / everything - tl.where(c == label, 1.0, 0.0)) * (share / temperature)  # at the cosines
        tl.store(nodes + (client * BATCH + i) * CLASSES + c, slope / length, is_c)
        tl.store(sums + NODE_LOSS * BATCH, (tl.log(everything) - own_score) * share)
        tl.store(sums + NODE_ALONG * BATCH, tl.sum(slope * cosine, 0) / (length * length))


@triton.jit
def _triples_kernel(
    squares, wanted, sums, angles,
    NODE: tl.constexpr, ANGLE: tl.constexpr, EDGE: tl.constexpr,
    BATCH: tl.constexpr, DIM: tl.constexpr, CLASSES: tl.constexpr, NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum of the angle losses at the example's squared distances, twice, and what is summed of its
    angle and edge losses."""
    j, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    squares += client * (BATCH * BATCH)
    wanted += client * (BATCH * BATCH)
    sums += client * (NUM_SUMS * BATCH)
    row = j * BATCH
    triples = tl.zeros((BLOCK,), dtype=tl.float32)
    angle_loss = tl.zeros((BLOCK,), dtype=tl.float32)
    edge_loss = tl.zeros((BLOCK,), dtype=tl.float32)
    edge_along = tl.zeros((BLOCK,), dtype=tl.float32)
    _, _, scale, wanted_scale = _edge_means(sums, BATCH, BLOCK, APART)
    for start in range(0, BATCH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        is_k = k < BATCH
        q_jk = tl.load(squares + row + k, is_k, 0.0)
        u_jk = tl.load(wanted + row + k, is_k, -1.0)
        is_jk = u_jk >= 0
        if EDGE:
            gap, bounded = _edge_gap(q_jk, u_jk, scale, wanted_scale)
            edge_loss += tl.where(is_jk, bounded * (gap - bounded / 2), 0.0)
            edge_along += tl.where(is_jk, bounded * tl.sqrt(q_jk), 0.0)
        if ANGLE:
            r_jk, s_jk = _inverses(q_jk, u_jk, APART)
            at_jk = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            losses = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            number_of = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for first in range(0, BATCH, BLOCK):
                n = first + tl.arange(0, BLOCK)
                is_n = n < BATCH
                q_jn = tl.load(squares + row + n, is_n, 0.0)
                u_jn = tl.load(wanted + row + n, is_n, -1.0)
                r_jn, s_jn = _inverses(q_jn, u_jn, APART)
                at = k[:, None] * BATCH + n[None, :]
                q_kn = tl.load(squares + at, is_k[:, None] & is_n[None, :], 0.0)
                u_kn = tl.load(wanted + at, is_k[:, None] & is_n[None, :], -1.0)
                r_kn, s_kn = _inverses(q_kn, u_kn, APART)
                # The three angles of the triangle j, k, n. An inverse is 0 where there is no direction, and so are
                # both cosines then. Two ends that are no pair have one class: their angle does not count.
                at_j = (q_jk[:, None] + q_jn[None, :] - q_kn) * (r_jk[:, None] * r_jn[None, :]) / 2
                at_k = (q_jk[:, None] + q_kn - q_jn[None, :]) * (r_jk[:, None] * r_kn) / 2
                at_n = (q_jn[None, :] + q_kn - q_jk[:, None]) * (r_jn[None, :] * r_kn) / 2
                v_jk, v_jn, v_kn = u_jk * u_jk, u_jn * u_jn, u_kn * u_kn
                gap_j = at_j - (v_jk[:, None] + v_jn[None, :] - v_kn) * (s_jk[:, None] * s_jn[None, :]) / 2
                gap_k = at_k - (v_jk[:, None] + v_kn - v_jn[None, :]) * (s_jk[:, None] * s_kn) / 2
                gap_n = at_n - (v_jn[None, :] + v_kn - v_jk[:, None]) * (s_jn[None, :] * s_kn) / 2
                gap_j = tl.where(u_kn >= 0, gap_j, 0.0)
                gap_k = tl.where((u_jn >= 0)[None, :], gap_k, 0.0)
                gap_n = tl.where(is_jk[:, None], gap_n, 0.0)
                at_jk += _sign(gap_j) * r_jk[:, None] * (r_jn[None, :] - at_j * r_jk[:, None])
                at_jk += _sign(gap_k) * r_jk[:, None] * (r_kn - at_k * r_jk[:, None])
                at_jk -= _sign(gap_n) * r_jn[None, :] * r_kn
                losses += tl.abs(gap_j)
                number_of += tl.where((u_kn >= 0) & (r_jk[:, None] > 0) & (r_jn[None, :] > 0), 1.0, 0.0)
            tl.store(angles + client * (BATCH * BATCH) + row + k, 2 * tl.sum(at_jk, 1), is_k)
            angle_loss += tl.sum(losses, 1)
            triples += tl.sum(number_of, 1)
    tl.store(sums + TRIPLES * BATCH + j, tl.sum(triples, 0))
    tl.store(sums + ANGLE_LOSS * BATCH + j, tl.sum(angle_loss, 0))
    tl.store(sums + EDGE_LOSS * BATCH + j, tl.sum(edge_loss, 0))
    tl.store(sums + EDGE_ALONG * BATCH + j, tl.sum(edge_along, 0))


@triton.jit
def _slope_kernel(
    z, unit, squares, wanted, sums, nodes, angles, loss, slope, unit_client,
    NODE: tl.constexpr, ANGLE: tl.constexpr, EDGE: tl.constexpr,
    BATCH: tl.constexpr, DIM: tl.constexpr, CLASSES: tl.constexpr, NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A part of the gradient at the example; the first program of a client adds up the loss too."""
    j, client = tl.program_id(0), tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = d < DIM
    z += client * (BATCH * DIM)
    sums += client * (NUM_SUMS * BATCH)
    row = client * (BATCH * BATCH) + j * BATCH
    own = tl.load(z + j * DIM + d, is_d, 0.0)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    value = 0.0
    if NODE:
        c = tl.arange(0, BLOCK_C)
        at_unit = tl.load(nodes + (client * BATCH + j) * CLASSES + c, c < CLASSES, 0.0)
        at = client * unit_client + (c[:, None] * DIM + d[None, :])
        units = tl.load(unit + at, (c < CLASSES)[:, None] & is_d[None, :], 0.0)
        total += tl.sum(at_unit[:, None] * units, 0) - tl.load(sums + NODE_ALONG * BATCH + j) * own
        value += _sum_of(sums + NODE_LOSS * BATCH, BATCH, BLOCK)
    if ANGLE or EDGE:
        triples = 1.0
        if ANGLE:
            triples = tl.maximum(_sum_of(sums + TRIPLES * BATCH, BATCH, BLOCK), 1.0)
            value += _sum_of(sums + ANGLE_LOSS * BATCH, BATCH, BLOCK) / triples
        number, mean, scale, wanted_scale = _edge_means(sums, BATCH, BLOCK, APART)
        by_mean = 0.0
        if EDGE:
            value += _sum_of(sums + EDGE_LOSS * BATCH, BATCH, BLOCK) / number
            by_mean = tl.where(mean > APART, _sum_of(sums + EDGE_ALONG * BATCH, BATCH, BLOCK) / (number * scale), 0.0)
        for start in range(0, BATCH, BLOCK):
            k = start + tl.arange(0, BLOCK)
            is_k = k < BATCH
            push = tl.zeros((BLOCK,), dtype=tl.float32)
            if ANGLE:
                push += tl.load(angles + row + k, is_k, 0.0) / triples
            if EDGE:
                square = tl.load(squares + row + k, is_k, 0.0)
                far = tl.load(wanted + row + k, is_k, -1.0)
                _, bounded = _edge_gap(square, far, scale, wanted_scale)
                length = tl.sqrt(square)
                along = 2 * (bounded - by_mean) / (number * scale * tl.maximum(length, APART))
                push += tl.where((far >= 0) & (length > APART), along, 0.0)
            other = tl.load(z + (k[:, None] * DIM + d[None, :]), is_k[:, None] & is_d[None, :], 0.0)
            total += tl.sum(push[:, None] * (own[None, :] - other), 0)
    tl.store(slope + client * (BATCH * DIM) + j * DIM + d, total, is_d)
    if (j == 0) & (tl.program_id(1) == 0):
        tl.store(loss + client, value)


@triton.jit
def _sum_of(numbers, BATCH: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, BATCH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(numbers + i, i < BATCH, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _edge_means(sums, BATCH: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr):
    """How many pairs there are, their mean distance, and what distances of features and prototypes are divided by."""
    number = tl.maximum(_sum_of(sums + PAIRS * BATCH, BATCH, BLOCK), 1.0)
    mean = _sum_of(sums + DISTANCE * BATCH, BATCH, BLOCK) / number
    wanted = _sum_of(sums + WANTED * BATCH, BATCH, BLOCK) / number
    return number, mean, tl.maximum(mean, APART), tl.maximum(wanted, APART)


@triton.jit
def _edge_gap(square, wanted, scale, wanted_scale):
    """The difference of the distances, and the slope of its smooth L1."""
    gap = tl.sqrt(square) / scale - wanted / wanted_scale
    return gap, tl.minimum(tl.maximum(gap, -1.0), 1.0)


@triton.jit
def _inverses(square, wanted, APART: tl.constexpr):
    """Of both distances, 0 where there is no direction in one of them."""
    length = tl.sqrt(square)
    has_direction = (length > APART) & (wanted > APART)
    mask = tl.where(has_direction, 1.0, 0.0)
    return mask / tl.where(has_direction, length, 1.0), mask / tl.where(has_direction, wanted, 1.0)


@triton.jit
def _sign(number):
    return tl.where(number > 0, 1.0, 0.0) - tl.where(number < 0, 1.0, 0.0)
