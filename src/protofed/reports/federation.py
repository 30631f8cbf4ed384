"""Pictures of a federation: which client holds how much of which class, and how the images of each domain look."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.errors import BadInput
from protofed.reports.figures import COLOURS, plain, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE, TOTALS, FOOT, LINE = 0.45, 0.65, 0.6, 0.19
"""Inches for the title, for totals at the top and the right, for the classes at the bottom, for a line of a legend."""
EVERYBODY = "all clients"
HOMELESS = "no domain"


def clients_by_domain(task: Task) -> dict[str, list[ClientId]]:
    """Names of each domain's clients in order, domains in the order of the test sets, clients of no domain last."""
    if not task.domain_of:
        return {EVERYBODY: sorted(task.clients)}
    groups: dict[str, list[ClientId]] = {domain: [] for domain in (*task.tests, HOMELESS)}
    for client in sorted(task.clients):
        groups[task.domain_of.get(client, HOMELESS)].append(client)
    return {domain: clients for domain, clients in groups.items() if clients}


def colours(domains: Sequence[str]) -> dict[str, str]:
    """A colour for each domain that colour-blind readers can tell from the others."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if len(domains) <= len(COLOURS):
        return dict(zip(domains, COLOURS, strict=False))
    # The end of the map is left out: it is too light to be seen on white.
    return {domain: to_hex(colormaps["viridis"](0.93 * k / (len(domains) - 1))) for k, domain in enumerate(domains)}


@dataclass(frozen=True)
class Holdings:
    """Who holds how many training examples of each class."""

    clients: tuple[ClientId, ...]  # one domain after the other
    domains: tuple[str, ...]  # of each client
    counts: NDArray[np.int64]  # (clients, classes)


def holdings(task: Task) -> Holdings:
    pairs = [(client, domain) for domain, clients in clients_by_domain(task).items() for client in clients]
    counts = [torch.bincount(task.clients[client].labels, minlength=task.num_classes) for client, _ in pairs]
    clients, domains = zip(*pairs, strict=True)
    return Holdings(clients, domains, torch.stack(counts).numpy())


@dataclass(frozen=True)
class Layout:
    """Measures of the picture of holdings, in inches; a cell is the square of one client and one class."""

    rows: int
    columns: int
    cell: float
    names: float
    """Width of the names of clients, left of the cells."""
    legend: tuple[float, float]
    """Width and height of the legends, right of the totals."""
    title: float
    """Width of the title."""

    @property
    def width(self) -> float:
        return max(self.names + self.columns * self.cell + TOTALS + self.legend[0], self.title)

    @property
    def height(self) -> float:
        return TITLE + TOTALS + max(self.rows * self.cell, self.legend[1]) + FOOT

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of the cells as shares of the picture."""
        width, height = self.columns * self.cell, self.rows * self.cell
        bottom = self.height - TITLE - TOTALS - height
        return self.names / self.width, bottom / self.height, width / self.width, height / self.height

    @property
    def points(self) -> float:
        """Size of the labels of rows and columns."""
        return min(10.0, max(6.0, 0.6 * 72 * self.cell))


def layout(held: Holdings, title: str) -> Layout:
    """Cells of half an inch, or smaller where there are many, but large enough for a label each."""
    rows, columns = held.counts.shape
    cell = min(0.5, max(0.13, 14 / max(rows, columns)))
    names = 0.75 + 0.09 * max(len(name) for name in held.clients)
    legend = 1.2 + 0.1 * max(len(name) for name in held.domains), _legend_of_domains(set(held.domains)) + 0.5 + 3 * cell
    return Layout(rows, columns, cell, names, legend, 0.3 + 0.11 * len(title))


def _legend_of_domains(domains: Collection[str]) -> float:
    """Its height."""
    return LINE * len(domains) + 0.5


def sizes(largest: int) -> tuple[int, ...]:
    """Up to three round numbers not above the largest, for the legend of areas, each about a quarter of the next."""
    rounds = [lead * 10**zeros for zeros in range(len(str(largest))) for lead in (1, 2, 5)]
    chosen = [max(n for n in rounds if n <= max(1, largest / part)) for part in (16, 4, 1)]
    return tuple(sorted(set(chosen)))


def who_holds_what(task: Task, path: Path) -> None:
    """Clients by classes as bubbles whose areas are numbers of training examples, in the colours of domains."""
    save_figure(picture_of_holdings(task), path)


def picture_of_holdings(task: Task) -> "Figure":
    from matplotlib.figure import Figure  # a slow import that only pictures need

    held = holdings(task)
    title = f"{task.name}: {len(held.clients)} clients, {task.num_classes} classes, {held.counts.sum():,} examples"
    plan = layout(held, title)
    tints = colours(list(dict.fromkeys(held.domains)))
    figure = Figure(figsize=(plan.width, plan.height))
    axes = figure.add_axes(plan.box)
    row, column = held.counts.nonzero()
    number = held.counts[row, column]
    paint = [tints[held.domains[k]] for k in row]
    axes.scatter(column, row, s=number * _area_of_one(held, plan), c=paint, linewidths=0, zorder=2)
    _label(axes, held, plan)
    _legends(axes, held, plan, tints)
    figure.text(0.1 / plan.width, 1 - 0.15 / plan.height, plain(title), va="top", fontsize=11, fontweight="bold")
    return figure


def _area_of_one(held: Holdings, plan: Layout) -> float:
    """Square points of a bubble for one example, so that the largest bubble just fits its cell."""
    area: float = (0.92 * 72 * plan.cell) ** 2 / held.counts.max()
    return area


def _label(axes: "Axes", held: Holdings, plan: Layout) -> None:
    """Names of clients and classes at the left and the bottom, totals at the right and the top."""
    axes.set_xlim(-0.5, plan.columns - 0.5)
    axes.set_ylim(plan.rows - 0.5, -0.5)
    every = next(step for step in (1, 2, 5) if step * plan.cell >= 0.25)
    axes.set_xticks(range(0, plan.columns, every))
    axes.set_yticks(range(plan.rows), [plain(client) for client in held.clients])
    axes.tick_params(labelsize=plan.points, length=0)
    axes.set_xlabel("class", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.5, zorder=0)
    axes.spines[:].set_visible(False)
    style: dict[str, Any] = {"fontsize": plan.points, "color": "#555555", "clip_on": False}
    for k, total in enumerate(held.counts.sum(1)):
        axes.text(plan.columns - 0.3, k, f"{total:,}", ha="left", va="center", **style)
    for k, total in enumerate(held.counts.sum(0)):
        axes.text(k, -0.7, f"{total:,}", ha="center", va="bottom", rotation=90, **style)


def _legends(axes: "Axes", held: Holdings, plan: Layout, tints: dict[str, str]) -> None:
    """Colours of domains, where there are domains, and below them what areas mean."""
    from matplotlib.lines import Line2D

    def bubble(colour: str, label: str, area: float) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker="o", color=colour, markeredgewidth=0, markersize=area**0.5, label=label
        )

    left = 1 + TOTALS / (plan.columns * plan.cell)
    style: dict[str, Any] = {"loc": "upper left", "frameon": False, "fontsize": 9, "alignment": "left"}
    top = 1.0
    if set(tints) != {EVERYBODY}:
        domains = [bubble(colour, plain(name), 60) for name, colour in tints.items()]
        axes.add_artist(axes.legend(handles=domains, title="domain", bbox_to_anchor=(left, top), **style))
        top -= _legend_of_domains(tints) / (plan.rows * plan.cell)
    areas = [bubble("#777777", f"{n:,}", n * _area_of_one(held, plan)) for n in sizes(int(held.counts.max()))]
    gap = max(0.5, 72 * plan.cell / 9 - 0.9)
    axes.legend(handles=areas, title="examples", bbox_to_anchor=(left, top), labelspacing=gap, **style)


@dataclass(frozen=True)
class Picture:
    image: Tensor  # (1 or 3, H, W), uint8, or float32 in [0, 1]
    label: int


def pictures(task: Task, per_domain: int) -> dict[str, list[Picture]]:
    """So many training images of each domain in the order of classes: a first one of each class, then second ones."""
    if per_domain < 1:
        raise BadInput(f"a contact sheet needs at least one image for each domain, not {per_domain}")
    for client, data in task.clients.items():
        if data.x.dim() != 4 or data.x.shape[1] not in (1, 3):
            raise BadInput(
                f"task {task.name}: client {client!r} holds examples of shape {tuple(data.x.shape[1:])}: a contact "
                "sheet is for images (channels, height, width) of one or three channels; draw who_holds_what instead"
            )
    return {domain: _chosen(task, clients, per_domain) for domain, clients in clients_by_domain(task).items()}


def _chosen(task: Task, clients: Iterable[ClientId], number: int) -> list[Picture]:
    held = [task.clients[client] for client in clients]
    owner = np.repeat(np.arange(len(held)), [len(data) for data in held])
    row = torch.cat([data.index for data in held]).numpy()
    labels = torch.cat([data.labels for data in held]).numpy()
    rank = np.empty_like(labels)  # how many of its class come before it
    for label in np.unique(labels):
        rank[labels == label] = np.arange(np.sum(labels == label))
    first = np.lexsort((labels, rank))[:number]
    shown = first[np.lexsort((rank[first], labels[first]))]
    return [Picture(held[owner[k]].x[row[k]], int(labels[k])) for k in shown]


def contact_sheet(task: Task, path: Path, per_domain: int = 10) -> None:
    """Training images of each domain in a row, one of each class where possible, with their classes below."""
    save_figure(picture_of_images(task, per_domain), path)


def picture_of_images(task: Task, per_domain: int) -> "Figure":
    from matplotlib.figure import Figure

    sheet = pictures(task, per_domain)
    columns = max(len(row) for row in sheet.values())
    side, gap, top = 0.75, 0.22, 0.45  # inches
    names = 0.3 + 0.1 * max(len(name) for name in sheet)
    width, height = names + columns * side + 0.1, top + len(sheet) * (side + gap)
    figure = Figure(figsize=(width, height))
    figure.text(0.1 / width, 1 - 0.12 / height, plain(f"{task.name}: training images"), va="top", fontweight="bold")
    for k, (domain, row) in enumerate(sheet.items()):
        bottom = height - top - (k + 1) * (side + gap) + gap
        figure.text((names - 0.1) / width, (bottom + side / 2) / height, plain(domain), ha="right", va="center")
        for j, picture in enumerate(row):
            left = names + j * side
            axes = figure.add_axes((left / width, bottom / height, 0.95 * side / width, 0.95 * side / height))
            axes.imshow(_shown(picture.image), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_axis_off()
            axes.set_title(str(picture.label), y=-0.05, va="top", fontsize=7, color="#555555", pad=0)
    return figure


def _shown(image: Tensor) -> NDArray[np.float32]:
    """(H, W, 3), or (H, W) in grey, in [0, 1]."""
    scaled = image.float() / 255 if image.dtype == torch.uint8 else image.clamp(0, 1)
    shown: NDArray[np.float32] = scaled.permute(1, 2, 0).squeeze(-1).numpy()
    return shown
