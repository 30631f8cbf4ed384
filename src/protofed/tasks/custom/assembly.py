"""A task from the examples of each site."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput
from protofed.tasks.custom.shares import Agreed
from protofed.tasks.custom.split import SiteExamples, SplitRows, class_indices
from protofed.tasks.models import Network

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

MAX_REPEATS = 10
"""How often one example may be seen in a pass over the data."""


def assemble(
    examples: Mapping[str, SiteExamples],
    rows: Mapping[str, SplitRows],
    inputs: Mapping[str, Tensor],
    agreed: Agreed,
    model: Network,
    transform: Transform,
    settings: "Custom",
) -> Task:
    """A client and a domain for each site. A site whose test set would be empty only trains."""
    classes, hold_out = agreed.classes, settings.hold_out
    for site, own in examples.items():
        if unknown := sorted({*own.labels} - {*classes}):  # guard: classes-are-those-agreed
            raise BadInput(f"task custom: {site} has examples of {', '.join(unknown)}, which is none of the classes")
    stores = {site: Data.of(inputs[site], class_indices(examples[site].labels, classes)) for site in examples}
    training = {site: store.rows(rows[site].train) for site, store in stores.items()}
    tests = {site: store.rows(rows[site].test) for site, store in stores.items() if len(rows[site].test)}
    return Task(
        name="custom",
        clients={site: _balanced(data) if settings.balance else data for site, data in training.items()},
        tests=tests,
        num_classes=len(classes),
        model=model,
        domain_of={site: site for site in tests},
        local_tests=tests,
        transform=transform,
        validation={
            site: store.rows(rows[site].validation)
            for site, store in stores.items()
            if len(rows[site].validation) and site not in hold_out
        },
        held_out=tuple(site for site in hold_out if site in examples),
        class_names=classes,
        preprocessing=agreed.files,
    )


def _balanced(data: Data) -> Data:
    """Examples of rare classes repeated as a whole: each class that has less than half of what the most frequent one
    has gets between a quarter and a half of that, but at most MAX_REPEATS times what it had."""
    count = torch.bincount(data.labels)
    wanted = count.max().item() // 2
    repeats = (wanted // count.clamp(min=1)).clamp(min=1, max=MAX_REPEATS)
    return data.rows(torch.arange(len(data)).repeat_interleave(repeats[data.labels]))
