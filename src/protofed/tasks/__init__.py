"""TASKS: all tasks by name."""

from typing import Protocol, runtime_checkable

from protofed.api.task import Task
from protofed.tasks.custom import Custom
from protofed.tasks.domain_shift import Digits, Hub, OfficeCaltech10, Pacs, Vlcs
from protofed.tasks.label_skew import Cifar10, Cifar100, FashionMnist, TinyImagenet, Vireofood172
from protofed.tasks.minidigits import Minidigits, MinidigitsSkewed
from protofed.tasks.natural import AmazonReviews, HeartDisease, TcgaBrca


class TaskSettings(Protocol):
    """A frozen dataclass of a task's settings."""

    def build(self) -> Task: ...


@runtime_checkable
class ReadsOwnFiles(Protocol):
    """Settings of a task that reads files which a user may change between two runs."""

    def stamp(self) -> str:
        """A hash of the files as they are now."""


TASKS: dict[str, type[TaskSettings]] = {
    "minidigits": Minidigits,
    "minidigits_skewed": MinidigitsSkewed,
    "digits": Digits,
    "office_caltech10": OfficeCaltech10,
    "pacs": Pacs,
    "vlcs": Vlcs,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "fashion_mnist": FashionMnist,
    "tiny_imagenet": TinyImagenet,
    "vireofood172": Vireofood172,
    "heart_disease": HeartDisease,
    "tcga_brca": TcgaBrca,
    "amazon_reviews": AmazonReviews,
    "hub": Hub,
    "custom": Custom,
}
