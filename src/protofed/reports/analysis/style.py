"""How figures look: colours that can be told apart without red and green, markers that differ too."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from protofed.reports.figures import COLOURS, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = (
    *("#332288", "#88ccee", "#117733", "#ddcc77", "#cc6677", "#aa4499", "#44aa99", "#999933", "#882255", "#777777"),
)
"""Ten, of Paul Tol's muted scheme."""
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
FEW = 6
"""Up to so many lines can be told apart in one panel."""
SMALL = 8.5
"""Size of the letters on axes."""

__all__ = ["COLOURS", "FEW", "LINES", "MANY", "MARKERS", "SMALL", "bare", "grid_of", "label", "panels", "tidy"]


def panels(
    rows: int, columns: int, size: tuple[float, float] = (2.6, 2.6), beside: float = 0.6, **sharing: Any
) -> "tuple[Figure, list[list[Axes]]]":
    """A figure with axes in rows and columns, each of this size in inches, and so much room beside them."""
    from matplotlib.figure import Figure  # slow, and only pictures need it

    figure = Figure(figsize=(size[0] * columns + beside, size[1] * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    return figure, [list(row) for row in axes]


def grid_of(count: int, widest: int = 4) -> tuple[int, int]:
    """Rows and columns for so many panels."""
    columns = min(count, widest)
    return -(-count // columns), columns


def tidy(axis: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    axis.set_title(plain(title), fontsize=10)
    axis.set_xlabel(plain(x), fontsize=SMALL)
    axis.set_ylabel(plain(y), fontsize=SMALL)
    axis.tick_params(labelsize=SMALL - 1)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def bare(axis: "Axes", title: str = "") -> None:
    """Axes whose numbers mean nothing."""
    axis.set_title(plain(title), fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color("#999999")


def label(names: Sequence[str], longest: int = 28) -> list[str]:
    """Names that fit on an axis."""
    return [plain(name if len(name) <= longest else f"{name[: longest - 1]}…") for name in names]
