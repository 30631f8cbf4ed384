"""Own images: read, split, and made a task by what was agreed."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.task import Task
from protofed.data.transforms import Transform
from protofed.datasets import sites
from protofed.datasets.images import check_memory
from protofed.datasets.preprocessing import ImageFiles
from protofed.errors import BadInput
from protofed.tasks.custom.assembly import assemble
from protofed.tasks.custom.shares import Agreed, ImageShare, bits_of_all
from protofed.tasks.custom.split import SiteExamples, SplitRows, split_sites
from protofed.tasks.models import Network

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

log = logging.getLogger(__name__)

MAX_LISTED = 100
"""Damaged files that are named one by one."""


@dataclass(frozen=True)
class OwnImages:
    """The images of some sites."""

    settings: "Custom"
    root: Path
    only: Collection[str]
    """The sites that are read; none are named: all."""
    bits: Mapping[str, int | None]
    """How many bits the deep grey of each site uses."""
    read_with: int
    """How many bits deep grey was read with."""
    damaged: Mapping[str, Sequence[str]]
    """What is wrong with files that are left out, by site."""
    files: Mapping[str, int]
    examples: Mapping[str, SiteExamples]
    inputs: Mapping[str, Tensor]
    rows: Mapping[str, SplitRows]

    @classmethod
    def read(cls, settings: "Custom", root: Path, only: Collection[str] = (), bits: int | None = None) -> "OwnImages":
        """All sites of a folder, or only some. `bits` of deep grey are given once they are agreed."""
        listing = sites.image_sites(root)
        if not listing.count:
            sites.kind_of(root)
            raise BadInput(f'task custom: {root} contains tables, not images; set kind = "tables"')
        listing = replace(listing, files={site: own for site, own in listing.files.items() if not only or site in only})
        check_memory(listing.count, settings.pixels, str(root))
        found = _bits(listing, settings)
        read_with = bits_of_all(found.values(), settings.bits) if bits is None else bits
        damaged: dict[str, list[str]] = {}
        examples, inputs = _read_sites(listing.files, settings, read_with, damaged)
        files = {site: sum(map(len, classes.values())) for site, classes in listing.files.items()}
        rows = split_sites(examples, settings.test_fraction, settings.seed, settings.validation_fraction)
        return cls(settings, root, only, found, read_with, damaged, files, examples, inputs, rows)

    @property
    def shares(self) -> dict[str, ImageShare]:
        return {
            site: ImageShare(
                classes=sites.sorted_classes(own.labels),
                tests=len(self.rows[site].test),
                files=self.files[site],
                damaged=len(self.damaged[site]),
                bits=self.bits[site],
            )
            for site, own in self.examples.items()
        }

    def tell_damaged(self) -> str:
        """Warns about the damaged files that are left out; their list."""
        all_files = [fault for faults in self.damaged.values() for fault in faults]
        if not all_files:
            return ""
        listed = "".join(f"\n  {fault}" for fault in all_files[:MAX_LISTED])
        if len(all_files) > MAX_LISTED:
            listed += f"\n  and {len(all_files) - MAX_LISTED} more, which `protofed data inspect` lists"
        count = sum(self.files.values())
        log.warning("task custom: %d of %d files are damaged and left out:%s", len(all_files), count, listed)
        return listed

    def refuse_many_damaged(self) -> None:
        """Warns about the damaged files that are left out; refuses to continue if they are too many."""
        listed, damaged, files = self.tell_damaged(), sum(map(len, self.damaged.values())), sum(self.files.values())
        if damaged > self.settings.max_damaged * files:  # guard: few-images-may-be-damaged
            raise BadInput(
                f"task custom: {damaged} of {files} files are damaged, more than the share max_damaged = "
                f"{self.settings.max_damaged:g}. Get them again, remove them, or raise max_damaged in [task]:{listed}"
            )

    def task(self, agreed: Agreed, model: Network) -> Task:
        assert isinstance(agreed.files, ImageFiles), "images are prepared as images"
        if agreed.files.bits != self.read_with and any(self.bits.values()):
            again = OwnImages.read(self.settings, self.root, self.only, agreed.files.bits)
            return again.task(agreed, model)
        half = (0.5,) * self.settings.channels
        return assemble(self.examples, self.rows, self.inputs, agreed, model, Transform(half, half), self.settings)


def _bits(listing: sites.ImageSites, settings: "Custom") -> dict[str, int | None]:
    """How many bits the deep grey of each site uses. Files are not opened for it if the settings say so."""
    if settings.bits is not None:
        return dict.fromkeys(listing.files)
    found = {
        site: sites.most_bits(path for paths in classes.values() for path in paths)
        for site, classes in listing.files.items()
    }
    if any(found.values()):
        most = bits_of_all(found.values(), None)
        log.warning(
            "task custom: 16-bit grey images use %d bits: 0 to %d become 0 to 255. Write bits = %d into [task] to keep "
            "this rule when files are added",
            most,
            2**most - 1,
            most,
        )
    return found


def _read_sites(
    files: Mapping[str, Mapping[str, Sequence[Path]]], settings: "Custom", bits: int, damaged: dict[str, list[str]]
) -> tuple[dict[str, SiteExamples], dict[str, Tensor]]:
    """The examples and pixels (N, C, H, W) of every site that has an image. Errors of skipped files are added to
    `damaged`."""
    examples, inputs = {}, {}
    for site, classes in files.items():
        labelled = [(path, name) for name, paths in classes.items() for path in paths]
        site_examples, x = _read_site(labelled, settings, bits, damaged.setdefault(site, []))
        if len(x):
            examples[site], inputs[site] = site_examples, torch.from_numpy(x)
        else:
            log.warning("task custom: %s has no images and is left out", site)
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
