"""A task from the examples of each site."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.tasks.custom.split import SiteExamples, SplitRows, class_indices, classes_of, untested_classes
from protofed.tasks.models import network

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

MAX_REPEATS = 10
"""How often one example may be seen in a pass over the data."""

log = logging.getLogger(__name__)


def assemble(
    examples: Mapping[str, SiteExamples],
    rows: Mapping[str, SplitRows],
    inputs: Mapping[str, Tensor],
    parts: Callable[[int], Parts],
    transform: Transform,
    settings: "Custom",
) -> Task:
    """A client and a domain for each site. A site whose test set would be empty only trains."""
    classes, hold_out = classes_of(examples), settings.hold_out
    _check_tests(examples, rows, classes)
    _check_held_out(examples, rows, hold_out)
    stores = {site: Data.of(inputs[site], class_indices(examples[site].labels, classes)) for site in examples}
    training = {site: store.rows(rows[site].train) for site, store in stores.items()}
    tests = {site: store.rows(rows[site].test) for site, store in stores.items() if len(rows[site].test)}
    return Task(
        name="custom",
        clients={site: _balanced(data) if settings.balance else data for site, data in training.items()},
        tests=tests,
        num_classes=len(classes),
        model=network(parts, len(classes)),
        domain_of={site: site for site in tests},
        local_tests=tests,
        transform=transform,
        validation={
            site: store.rows(rows[site].validation)
            for site, store in stores.items()
            if len(rows[site].validation) and site not in hold_out
        },
        held_out=tuple(hold_out),
        class_names=classes,
    )


def _balanced(data: Data) -> Data:
    """Examples of rare classes repeated as a whole: each class that has less than half of what the most frequent one
    has gets between a quarter and a half of that, but at most MAX_REPEATS times what it had."""
    count = torch.bincount(data.labels)
    wanted = count.max().item() // 2
    repeats = (wanted // count.clamp(min=1)).clamp(min=1, max=MAX_REPEATS)
    return data.rows(torch.arange(len(data)).repeat_interleave(repeats[data.labels]))


def training_sites(examples: Mapping[str, SiteExamples], hold_out: Sequence[str]) -> list[str]:
    """The sites that are not held out. Refuses to hold out one that is not there, or all."""
    for site in hold_out:
        if site not in examples:
            raise BadInput(f"task custom: hold_out names {site!r}; the sites are {', '.join(examples)}")
    left = [site for site in examples if site not in hold_out]
    if not left:
        raise BadInput("task custom: hold_out names all sites; one must be left to train")
    return left


def _check_held_out(
    examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows], hold_out: Sequence[str]
) -> None:
    """Refuses what cannot be tested, and says which classes of a held-out site nobody learns."""
    left = training_sites(examples, hold_out)
    trained = {label for site in left for label in examples[site].labels}
    if len(trained) < 2:
        raise BadInput(
            f"task custom: without {', '.join(hold_out)} all examples are of class {next(iter(trained))!r}; at least "
            "two classes are needed"
        )
    for site in hold_out:
        if not len(rows[site].test):
            raise BadInput(f"task custom: hold_out names {site!r}, which has no example for testing")
        missing = sorted({*examples[site].labels} - trained)
        if missing:
            log.warning("task custom: only %s, which is held out, has class %s", site, ", ".join(missing))


def _check_tests(examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows], classes: Sequence[str]) -> None:
    """Warns about what cannot be tested, and refuses what cannot be learnt."""
    if len(classes) < 2:
        raise BadInput(f"task custom: all examples are of class {classes[0]!r}; at least two classes are needed")
    if not any(len(site_rows.test) for site_rows in rows.values()):
        raise BadInput(
            "task custom: no site has an example for testing. Every class has a single example at each site, or copies "
            "at several sites; remove copies, or raise test_fraction"
        )
    for name in untested_classes(examples, rows):
        log.warning("task custom: class %r is in no test set: it has too few examples at each site", name)
    for site in (site for site, site_rows in rows.items() if not len(site_rows.test)):
        log.warning("task custom: %s has too few examples for a test set and only trains", site)
