"""Settings that depend on how many examples there are."""

from collections.abc import Mapping
from dataclasses import replace

from protofed.inspection.findings import is_unbalanced
from protofed.tasks.custom import Custom, SiteExamples, SplitRows, split_sites

VALIDATION = 0.15
LEAST_VALIDATED = 30
"""With fewer validation examples than this, a round would be chosen by luck."""


def proposed(settings: Custom, examples: Mapping[str, SiteExamples]) -> tuple[Custom, dict[str, SplitRows]]:
    """The settings with a validation share and balancing where the data ask for them, and the rows of each site."""
    total = sum(len(site_examples.labels) for site_examples in examples.values())
    fraction = VALIDATION if VALIDATION * total >= LEAST_VALIDATED else 0.0
    settings = replace(settings, validation_fraction=fraction, balance=is_unbalanced(examples))
    return settings, split_sites(examples, settings.test_fraction, settings.seed, fraction)
