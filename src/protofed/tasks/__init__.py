"""TASKS: every task by name."""

from typing import Protocol

from protofed.method import Task
from protofed.tasks.minidigits import Minidigits, MinidigitsSkewed
from protofed.tasks.natural import AmazonReviews, HeartDisease, TcgaBrca


class TaskSettings(Protocol):
    """A frozen dataclass of a task's settings."""

    def build(self) -> Task: ...


TASKS: dict[str, type[TaskSettings]] = {
    "minidigits": Minidigits,
    "minidigits_skewed": MinidigitsSkewed,
    "heart_disease": HeartDisease,
    "tcga_brca": TcgaBrca,
    "amazon_reviews": AmazonReviews,
}
