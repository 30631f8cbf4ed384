"""TASKS: every task by name."""

from typing import Protocol

from protofed.method import Task
from protofed.tasks.minidigits import Minidigits


class TaskSettings(Protocol):
    """A frozen dataclass of a task's settings."""

    def build(self) -> Task: ...


TASKS: dict[str, type[TaskSettings]] = {"minidigits": Minidigits}
