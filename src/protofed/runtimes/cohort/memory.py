"""How many clients fit on the device at the same time, known before anything is allocated."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from protofed import tree
from protofed.runtimes.cohort.bodies import FitBody
from protofed.runtimes.cohort.buffers import are_common, leaves_of
from protofed.runtimes.cohort.lowering import Loop
from protofed.tree import Tree

log = logging.getLogger(__name__)

SHARE = 0.8
"""Of the free memory. The rest is for the server and for what an estimate misses."""
MOST_BYTES_TO_JUDGE = 4 << 30
"""For work that does not train. More clients at once would not be faster."""


def clients_at_once(loops: Sequence[Loop], device: torch.device) -> int:
    """How many of these clients, whose loops are alike, may be at work together."""
    if device.type != "cuda" or are_common(loops):  # the latter share the examples, and mostly the features
        return len(loops)
    each = bytes_of(loops[0])
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = int(SHARE * free)
    if not isinstance(loops[0].body, FitBody):
        room = min(room, MOST_BYTES_TO_JUDGE)
    count = max(1, min(len(loops), room // max(1, each)))
    log.debug("%d of %d clients at once: %.2f GiB each, %.1f GiB free", count, len(loops), each / 2**30, free / 2**30)
    return count


def bytes_of(loop: Loop) -> int:
    """What one client needs: its buffers, and the memory that a step of it took in its trial."""
    rows = loop.num_steps * loop.batch_size
    outputs = sum(leaf[:1].nbytes for leaf in leaves_of(loop.example))  # of one example
    buffers = 2 * _bytes(loop.carry) + _bytes(loop.inputs) + _bytes(loop.plan) + rows * outputs  # carry and its copy
    return buffers + loop.step_bytes


def _bytes(value: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, Tensor))
