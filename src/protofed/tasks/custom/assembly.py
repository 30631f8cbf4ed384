"""A task from the examples of each site."""

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.tasks.custom.split import SiteExamples, TrainTestRows, class_indices, classes_of, untested_classes
from protofed.tasks.models import network

log = logging.getLogger(__name__)


def assemble(
    examples: Mapping[str, SiteExamples],
    rows: Mapping[str, TrainTestRows],
    inputs: Mapping[str, Tensor],
    parts: Callable[[int], Parts],
    transform: Transform,
) -> Task:
    """A client and a domain for each site. A site whose test set would be empty only trains."""
    classes = classes_of(examples)
    _check_tests(examples, rows, classes)
    stores = {site: Data.of(inputs[site], class_indices(examples[site].labels, classes)) for site in examples}
    tests = {site: store.rows(rows[site].test) for site, store in stores.items() if len(rows[site].test)}
    return Task(
        name="custom",
        clients={site: store.rows(rows[site].train) for site, store in stores.items()},
        tests=tests,
        num_classes=len(classes),
        model=network(parts, len(classes)),
        class_names=classes,
        domain_of={site: site for site in tests},
        local_tests=tests,
        transform=transform,
    )


def _check_tests(
    examples: Mapping[str, SiteExamples], rows: Mapping[str, TrainTestRows], classes: Sequence[str]
) -> None:
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
