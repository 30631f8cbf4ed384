"""The server's objective on a batch of prototypes, Eq. (17), and its gradient, in two GPU kernels, in Triton.

A program does one prototype. It sums in float32 and in a fixed order: the same inputs give the same bits.
"""

# Triton reads the types of a kernel's arguments from the call. Names in capitals are known when it is compiled.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from math import ceil, log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from protofed.methods.pfedcspc.calibration import Contrasts
from protofed.prototypes.contrast import ABSENT, EPS

BLOCK_D = 32
"""Entries of an embedding that a program looks at together."""

Slopes = tuple[Tensor, Tensor, Tensor]


def with_slopes(
    contrasts: Contrasts,
    logits: Tensor,
    z: Tensor,
    pairs: Tensor,
    y: Tensor,
    client: Tensor,
    weight: Tensor,
    is_known: Tensor,
) -> tuple[Tensor, Slopes]:
    """The objective (), of logits (B, C), embeddings z (B, P) and embedded pairs (B, 2 · A, P), and its gradients."""
    logits, z, pairs = logits.contiguous(), z.contiguous(), pairs.contiguous()
    y, client, weight, is_known = y.contiguous(), client.contiguous(), weight.contiguous(), is_known.contiguous()
    (batch, dim), classes, count = z.shape, logits.shape[1], pairs.shape[1] // 2
    slopes = torch.empty_like(logits), torch.empty_like(z), torch.empty_like(pairs)
    losses, lengths, loss = z.new_empty(batch), z.new_empty(batch), z.new_empty(())
    cosines, at_cosines = z.new_empty(batch, batch), z.new_empty(batch, batch)
    sizes: dict[str, Any] = {"BATCH": batch, "DIM": dim, "BLOCK": _power(batch), "BLOCK_D": BLOCK_D}
    sizes |= {"CONTRAST": contrasts.across, "HINGE": contrasts.augmented}
    _rows_kernel[(batch,)](
        *(logits, z, pairs, y, client, weight, is_known, *slopes, losses, lengths, cosines, at_cosines),
        *(contrasts.weight, contrasts.temperature, log(contrasts.easy_weight), contrasts.margin),
        **{**sizes, "CLASSES": classes, "COUNT": count, "BLOCK_C": _power(classes), "BLOCK_A": _power(count)},
        EPS=EPS,
        ABSENT=ABSENT,
    )
    _embeddings_kernel[batch, ceil(dim / BLOCK_D)](*(z, losses, lengths, cosines, at_cosines, loss, slopes[1]), **sizes)
    return loss, slopes


def _power(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit
def _rows_kernel(
    logits, z, pairs, y, client, weight, is_known, of_logits, of_z, of_pairs, losses, lengths, cosines, at_cosines,
    contrast_weight, temperature, log_easy, margin,
    CONTRAST: tl.constexpr, HINGE: tl.constexpr,
    BATCH: tl.constexpr, DIM: tl.constexpr, CLASSES: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_A: tl.constexpr,
    EPS: tl.constexpr, ABSENT: tl.constexpr,
):  # fmt: skip
    """The loss of one prototype, and its gradient at the logits, at the embedded pairs, at the cosines to the other
    prototypes, and, of the hinge alone, at its embedding."""
    i = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    is_j = j < BATCH
    weights = tl.load(weight + j, is_j, 0.0)
    label = tl.load(y + i)
    share = tl.load(weight + i) / tl.maximum(tl.sum(weights, 0), 1.0)  # of the prototype in the mean

    c = tl.arange(0, BLOCK_C)
    is_c = c < CLASSES
    score = tl.where(tl.load(is_known + c, is_c, 0) != 0, tl.load(logits + i * CLASSES + c, is_c, 0.0), ABSENT)
    score = tl.where(is_c, score, -float("inf"))
    score -= tl.max(score, 0)
    powers = tl.exp(score)
    total = tl.sum(powers, 0)
    loss = tl.log(total) - tl.sum(tl.where(c == label, score, 0.0), 0)
    tl.store(of_logits + i * CLASSES + c, (powers / total - tl.where(c == label, 1.0, 0.0)) * share, is_c)

    if CONTRAST:
        products = tl.zeros((BLOCK,), dtype=tl.float32)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        square = 0.0
        for first in range(0, DIM, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            own = tl.load(z + i * DIM + d, d < DIM, 0.0)
            other = tl.load(z + (j[:, None] * DIM + d[None, :]), is_j[:, None] & (d < DIM)[None, :], 0.0)
            products += tl.sum(other * own[None, :], 1)
            squares += tl.sum(other * other, 1)
            square += tl.sum(own * own, 0)
        length = tl.maximum(tl.sqrt(square), EPS)
        cosine = products / (length * tl.maximum(tl.sqrt(squares), EPS))
        is_class = tl.load(y + j, is_j, -1) == label
        is_hard = is_class != (tl.load(client + j, is_j, -1) == tl.load(client + i))
        is_other = (weights > 0) & (j != i)
        score = tl.where(is_other, cosine / temperature + tl.where(is_hard, 0.0, log_easy), ABSENT)
        score = tl.where(is_j, score, -float("inf"))
        score -= tl.max(score, 0)
        powers = tl.exp(score)
        total = tl.sum(powers, 0)
        positive = tl.where(is_class & is_other, 1.0, 0.0)
        number = tl.sum(positive, 0)
        positive = positive / tl.maximum(number, 1.0)
        loss += contrast_weight * tl.sum(positive * (tl.log(total) - tl.where(positive > 0, score, 0.0)), 0)
        slope = tl.where(number > 0, powers / total, 0.0) - positive
        slope = tl.where(is_other, slope * (contrast_weight * share / temperature), 0.0)
        tl.store(cosines + i * BATCH + j, cosine, is_j)
        tl.store(at_cosines + i * BATCH + j, slope, is_j)
        tl.store(lengths + i, length)

    if HINGE:
        a = tl.arange(0, BLOCK_A)
        is_a = a < COUNT
        near = tl.zeros((BLOCK_A,), dtype=tl.float32)
        far = tl.zeros((BLOCK_A,), dtype=tl.float32)
        pairs += i * (2 * COUNT * DIM)
        of_pairs += i * (2 * COUNT * DIM)
        for first in range(0, DIM, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            own = tl.load(z + i * DIM + d, d < DIM, 0.0)[None, :]
            at, is_at = a[:, None] * DIM + d[None, :], is_a[:, None] & (d < DIM)[None, :]
            to_positive = own - tl.load(pairs + at, is_at, 0.0)
            to_negative = own - tl.load(pairs + COUNT * DIM + at, is_at, 0.0)
            near += tl.sum(to_positive * to_positive, 1)
            far += tl.sum(to_negative * to_negative, 1)
        gap = tl.where(is_a, near - far + margin, 0.0)
        loss += contrast_weight * tl.sum(tl.where(gap < 0, 0.0, gap), 0) / COUNT
        push = tl.where(gap > 0, 2 * contrast_weight * share / COUNT, 0.0)
        for first in range(0, DIM, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            own = tl.load(z + i * DIM + d, d < DIM, 0.0)[None, :]
            at, is_at = a[:, None] * DIM + d[None, :], is_a[:, None] & (d < DIM)[None, :]
            of_positive = push[:, None] * (tl.load(pairs + at, is_at, 0.0) - own)
            of_negative = push[:, None] * (own - tl.load(pairs + COUNT * DIM + at, is_at, 0.0))
            tl.store(of_pairs + at, of_positive, is_at)
            tl.store(of_pairs + COUNT * DIM + at, of_negative, is_at)
            tl.store(of_z + i * DIM + d, -tl.sum(of_positive + of_negative, 0), d < DIM)
    tl.store(losses + i, loss * share)


@triton.jit
def _embeddings_kernel(
    z, losses, lengths, cosines, at_cosines, loss, of_z,
    CONTRAST: tl.constexpr, HINGE: tl.constexpr,
    BATCH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A part of the gradient at one embedding, to which that of the contrast across clients is added; the first
    program adds up the loss too."""
    i = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK)
    is_d, is_j = d < DIM, j < BATCH
    slope = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if HINGE:
        slope += tl.load(of_z + i * DIM + d, is_d, 0.0)
    if CONTRAST:
        at_cosine = tl.load(at_cosines + i * BATCH + j, is_j, 0.0) + tl.load(at_cosines + j * BATCH + i, is_j, 0.0)
        along = tl.sum(at_cosine * tl.load(cosines + i * BATCH + j, is_j, 0.0), 0)
        length = tl.load(lengths + i)
        own = tl.load(z + i * DIM + d, is_d, 0.0)
        other = tl.load(z + (j[:, None] * DIM + d[None, :]), is_j[:, None] & is_d[None, :], 0.0)
        towards = tl.sum((at_cosine / tl.load(lengths + j, is_j, 1.0))[:, None] * other, 0)
        slope += (towards - along * own / length) / length
    tl.store(of_z + i * DIM + d, slope, is_d)
    if (i == 0) & (tl.program_id(1) == 0):
        tl.store(loss, tl.sum(tl.load(losses + j, is_j, 0.0), 0))
