"""What a method can show of itself, for figures. Nothing here takes part in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.task import ClientId
from protofed.tree import Params, Tree


@dataclass(frozen=True)
class Points:
    """Points in the space of features, each of a class."""

    values: Tensor  # (M, D)
    label: Tensor  # (M,)


@dataclass(frozen=True)
class Relation:
    """Who takes how much from whom, or how alike they are: a matrix with names."""

    values: Tensor  # (R, K)
    rows: Sequence[str]
    columns: Sequence[str]
    says: str
    """What a value is, for the legend, such as `weight`."""
    by: str = ""
    """What the columns are, such as `layer`; empty if rows and columns are of one kind."""
    groups: Sequence[int] = ()
    """The cluster of each row."""
    layout: Tensor | None = None  # (R, 2)
    """Where each row lies in a plane."""
    axes: tuple[str, str] = ("", "")
    """What the axes of that plane are."""


class Observed(Protocol):
    """A federation between two rounds, of which an observer sees everything."""

    @property
    def server(self) -> ServerContext: ...

    @property
    def ids(self) -> Sequence[ClientId]:
        """The clients that have taken part, in canonical order."""

    def memory(self, client: ClientId) -> Tree:
        """What a client keeps."""

    def class_means(self, client: ClientId, params: Params) -> Any:
        """The prototypes of a client's examples under these weights, in evaluation mode."""
