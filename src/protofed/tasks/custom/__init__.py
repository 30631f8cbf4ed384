"""The task `custom`: the user's own images or tables. Every site is a client, and a domain with its own test set."""

from protofed.tasks.custom.settings import IMAGE_NETWORKS, ONLY_SIDE, TABLE_NETWORKS, Custom
from protofed.tasks.custom.split import SiteExamples, SplitRows, groups_at_several_sites, split_sites, untested_classes
from protofed.tasks.custom.table_task import examples_of

__all__ = [
    "IMAGE_NETWORKS",
    "ONLY_SIDE",
    "TABLE_NETWORKS",
    "Custom",
    "SiteExamples",
    "SplitRows",
    "examples_of",
    "groups_at_several_sites",
    "split_sites",
    "untested_classes",
]
