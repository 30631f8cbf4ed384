"""TASKS: all tasks by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from protofed.api.registry import Registry

if TYPE_CHECKING:
    from protofed.api.task import Task


class TaskSettings(Protocol):
    """A frozen dataclass of a task's settings."""

    def build(self) -> "Task": ...


@runtime_checkable
class ReadsOwnFiles(Protocol):
    """Settings of a task that reads files which a user may change between two runs."""

    def stamp(self) -> str:
        """A hash of the files as they are now."""


TASKS: Registry[TaskSettings] = Registry(
    __name__,
    Path(__file__).parent,
    {
        "minidigits": "minidigits:Minidigits",
        "minidigits_skewed": "minidigits:MinidigitsSkewed",
        "digits": "domain_shift:Digits",
        "office_caltech10": "domain_shift:OfficeCaltech10",
        "pacs": "domain_shift:Pacs",
        "vlcs": "domain_shift:Vlcs",
        "cifar10": "label_skew:Cifar10",
        "cifar100": "label_skew:Cifar100",
        "fashion_mnist": "label_skew:FashionMnist",
        "tiny_imagenet": "label_skew:TinyImagenet",
        "vireofood172": "label_skew:Vireofood172",
        "heart_disease": "natural:HeartDisease",
        "tcga_brca": "natural:TcgaBrca",
        "amazon_reviews": "natural:AmazonReviews",
        "hub": "domain_shift:Hub",
        "custom": "custom.settings:Custom",
    },
)
