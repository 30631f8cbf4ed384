"""Rows of each site for training, validation and testing, without one example or person on two sides.

The test set of a site is stratified by class. A copy of a training example in a test set, or another example of the
same person, would make the accuracy too good. So examples of a group, such as a patient, and copies within a class of a
site go to the same side. Groups and examples that occur at several sites, and examples in several classes, are used for
training only.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    groups: tuple[str, ...] = ()
    """What each example belongs to, such as a patient; none if that is not known."""


@dataclass(frozen=True)
class SplitRows:
    """Rows of a site, in ascending order."""

    train: Tensor
    test: Tensor
    validation: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def split_sites(
    examples: Mapping[str, SiteExamples], test: float, seed: int, validation: float = 0.0
) -> dict[str, SplitRows]:
    """The rows of each site. `test` and `validation` are fractions of each class."""
    places: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for site, site_examples in examples.items():
        for label, content in zip(site_examples.labels, site_examples.contents, strict=True):
            places[content].add((site, label))
    copied = {content for content, sites_and_labels in places.items() if len(sites_and_labels) > 1}
    shared = {*groups_at_several_sites(examples)}  # guard: groups-of-several-sites-train
    return {
        site: _split(rows, copied, shared, test, validation, derive_seed(seed, site)) for site, rows in examples.items()
    }


def groups_at_several_sites(examples: Mapping[str, SiteExamples]) -> dict[str, list[str]]:
    """The sites of each group that is at more than one."""
    found: dict[str, list[str]] = defaultdict(list)
    for site, site_examples in examples.items():
        for group in dict.fromkeys(site_examples.groups):
            found[group].append(site)
    return {group: names for group, names in found.items() if len(names) > 1}


def untested_classes(examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows]) -> list[str]:
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


def _split(
    examples: SiteExamples, copied: set[str], shared: set[str], test: float, validation: float, seed: int
) -> SplitRows:
    """Draws whole units. A unit with several classes counts as one of the rarest of them."""
    count, units = Counter(examples.labels), _units(examples)
    free = [
        rows
        for rows in units
        if not any(examples.contents[row] in copied for row in rows)
        and not (examples.groups and any(examples.groups[row] in shared for row in rows))
    ]
    side = torch.zeros(len(examples.labels), dtype=torch.int64)  # 0: training
    if free:
        rarest = [min((examples.labels[row] for row in rows), key=lambda name: (count[name], name)) for rows in free]
        drawn = split(class_indices(rarest, sorted_classes(examples.labels)), test, seed, validation)
        for number, chosen in ((1, drawn.test), (2, drawn.validation)):
            for unit in chosen.tolist():
                side[free[unit]] = number
    return SplitRows(*((side == number).nonzero().flatten() for number in range(3)))


def _units(examples: SiteExamples) -> list[list[int]]:
    """Rows that must stay together, because they have a content or a group in common, directly or by others. Units are
    in the order of their first rows."""
    keys: list[Sequence[tuple[str, str]]] = [[("content", content)] for content in examples.contents]
    if examples.groups:
        keys = [[*own, ("group", group)] for own, group in zip(keys, examples.groups, strict=True)]
    first: dict[tuple[str, str], int] = {}
    leader = [*range(len(keys))]

    def found(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    for row, own in enumerate(keys):
        for key in own:
            one, other = sorted((found(first.setdefault(key, row)), found(row)))
            leader[other] = one
    units: dict[int, list[int]] = defaultdict(list)
    for row in range(len(keys)):
        units[found(row)].append(row)
    return list(units.values())
