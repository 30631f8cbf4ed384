"""Training and test rows of each site, without copies of one example on both sides.

The test set of a site is stratified by class. A copy of a training example in a test set would make the accuracy too
good. So copies within a class of a site go to the same side, and examples that occur at several sites or in several
classes are used for training only.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.datasets.sites import sorted_classes
from protofed.seeds import derive_seed
from protofed.tasks.partition import split


@dataclass(frozen=True)
class SiteExamples:
    """The examples of a site in a fixed order, before they are split."""

    labels: tuple[str, ...]
    contents: tuple[str, ...]
    """A key for the content of each example. Copies have the same key."""


@dataclass(frozen=True)
class TrainTestRows:
    """Rows of a site, in ascending order."""

    train: Tensor
    test: Tensor


def split_sites(examples: Mapping[str, SiteExamples], test: float, seed: int) -> dict[str, TrainTestRows]:
    """The training and test rows of each site. `test` is the fraction of each class for testing."""
    places = defaultdict(set)
    for site, site_examples in examples.items():
        for label, content in zip(site_examples.labels, site_examples.contents, strict=True):
            places[content].add((site, label))
    shared = {content for content, sites_and_labels in places.items() if len(sites_and_labels) > 1}
    return {site: _split(rows, shared, test, derive_seed(seed, site)) for site, rows in examples.items()}


def untested_classes(examples: Mapping[str, SiteExamples], rows: Mapping[str, TrainTestRows]) -> list[str]:
    """The classes that are in no test set."""
    tested = {examples[site].labels[row] for site, site_rows in rows.items() for row in site_rows.test.tolist()}
    return [name for name in classes_of(examples) if name not in tested]


def classes_of(examples: Mapping[str, SiteExamples]) -> tuple[str, ...]:
    """The classes of all sites."""
    return sorted_classes(label for site_examples in examples.values() for label in site_examples.labels)


def class_indices(labels: Sequence[str], classes: Sequence[str]) -> Tensor:
    """The labels as indices into the classes."""
    index = {name: k for k, name in enumerate(classes)}
    return torch.tensor([index[label] for label in labels])


def _split(examples: SiteExamples, shared: set[str], test: float, seed: int) -> TrainTestRows:
    """Draws test rows among the first copies of contents that are not shared; their other copies follow them."""
    first = {content: row for row, content in reversed([*enumerate(examples.contents)]) if content not in shared}
    rows = sorted(first.values())
    tested = set()
    if rows:
        labels = class_indices(examples.labels, sorted_classes(examples.labels))
        tested = {examples.contents[rows[k]] for k in split(labels[rows], test, seed).test.tolist()}
    is_test = torch.tensor([content in tested for content in examples.contents])
    return TrainTestRows((~is_test).nonzero().flatten(), is_test.nonzero().flatten())
