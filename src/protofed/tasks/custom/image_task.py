"""The task `custom` for images."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.task import Task
from protofed.data.transforms import Transform
from protofed.datasets import sites
from protofed.datasets.images import DEEP_BITS, check_memory
from protofed.datasets.preprocessing import ImageFiles
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.tasks.custom.assembly import assemble
from protofed.tasks.custom.split import SiteExamples, split_sites

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

log = logging.getLogger(__name__)

MAX_LISTED = 100
"""Damaged files that are named one by one."""


def image_task(settings: "Custom", root: Path, parts: Callable[[int], Parts]) -> Task:
    listing = sites.image_sites(root)
    if not listing.count:
        sites.kind_of(root)
        raise BadInput(f'task custom: {root} contains tables, not images; set kind = "tables"')
    check_memory(listing.count, settings.pixels, str(root))
    bits = _bits(listing, settings)
    examples, inputs = _read_sites(listing.files, settings, bits)
    half = (0.5,) * settings.channels
    rows = split_sites(examples, settings.test_fraction, settings.seed, settings.validation_fraction)
    task = assemble(examples, rows, inputs, parts, Transform(half, half), settings)
    return replace(task, preprocessing=ImageFiles(settings.pixels, settings.channels, bits))


def _bits(listing: sites.ImageSites, settings: "Custom") -> int:
    """How many bits deep grey uses: the same for all sites, so that equal values stay equal."""
    found = sites.most_bits(listing.paths) if settings.bits is None else settings.bits  # guard: bits-of-all-files
    if found is None:
        return DEEP_BITS
    if settings.bits is None:
        log.warning(
            "task custom: 16-bit grey images use %d bits: 0 to %d become 0 to 255. Write bits = %d into [task] to keep "
            "this rule when files are added",
            found,
            2**found - 1,
            found,
        )
    return found


def _read_sites(
    files: Mapping[str, Mapping[str, Sequence[Path]]], settings: "Custom", bits: int
) -> tuple[dict[str, SiteExamples], dict[str, Tensor]]:
    """The examples and pixels (N, C, H, W) of every site that has an image."""
    examples, inputs = {}, {}
    damaged: list[str] = []
    for site, classes in files.items():
        labelled = [(path, name) for name, paths in classes.items() for path in paths]
        site_examples, x = _read_site(labelled, settings, bits, damaged)
        if len(x):
            examples[site], inputs[site] = site_examples, torch.from_numpy(x)
        else:
            log.warning("task custom: %s has no images and is left out", site)
    _check_damage(damaged, sum(len(paths) for classes in files.values() for paths in classes.values()), settings)
    return examples, inputs


def _read_site(
    labelled: Sequence[tuple[Path, str]], settings: "Custom", bits: int, damaged: list[str]
) -> tuple[SiteExamples, NDArray[np.uint8]]:
    """The images of one site, decoded one at a time into one array. Errors of skipped files are added to `damaged`."""
    x = np.empty((len(labelled), settings.channels, settings.pixels, settings.pixels), np.uint8)
    labels: list[str] = []
    digests: list[str] = []
    groups: list[str] = []
    group_of = sites.group_finder(settings.group)
    for path, label in labelled:
        try:
            digest, x[len(labels)] = sites.read_image(path, settings.pixels, settings.channels, bits)
        except BadInput as error:
            if not settings.skip_damaged:
                raise BadInput(
                    f"{error}; or set skip_damaged = true in [task] to leave out such files. "
                    "`protofed data inspect` lists all of them"
                ) from error
            damaged.append(str(error))
            continue
        labels.append(label)
        digests.append(digest)
        groups += group_of(path)
    return SiteExamples(tuple(labels), tuple(digests), tuple(groups)), x[: len(labels)]


def _check_damage(damaged: Sequence[str], count: int, settings: "Custom") -> None:
    """Warns about the damaged files that are left out; refuses to continue if they are too many."""
    if not damaged:
        return
    listed = "".join(f"\n  {fault}" for fault in damaged[:MAX_LISTED])
    if len(damaged) > MAX_LISTED:
        listed += f"\n  and {len(damaged) - MAX_LISTED} more, which `protofed data inspect` lists"
    summary = f"task custom: {len(damaged)} of {count} files are damaged"
    if len(damaged) > settings.max_damaged * count:  # guard: few-images-may-be-damaged
        raise BadInput(
            f"{summary}, more than the share max_damaged = {settings.max_damaged:g}. Get them again, remove them, or "
            f"raise max_damaged in [task]:{listed}"
        )
    log.warning("%s and left out:%s", summary, listed)
