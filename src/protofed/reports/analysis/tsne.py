"""t-SNE of test features by class and by domain, with the server's prototypes on top, over rounds.

One embedding is made of all that belongs to one run, so that its panels can be compared; in each panel the points of
the others are grey. Features of two runs lie in spaces that have nothing in common, so each run has an embedding of its
own. Features and prototypes are scaled to length 1: a mean is shorter than what it is the mean of, and features grow
from round to round, which would be all that one sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.data.batches import Data
from protofed.reports.analysis.drawing import CannotDraw, Drawing, Group, Options, Table, grouped
from protofed.reports.analysis.style import MANY, MARKERS, SMALL, bare, label, panels
from protofed.reports.analysis.views import chosen_rounds, sampled, views
from protofed.runs.loading import SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLASSES = 10
"""More classes cannot be told apart by colour: of these the first are shown."""
AROUND = 10
"""Points that decide whether a class can be named where its middle is."""
ABOVE = {"cluster prototypes": "D", "unbiased prototypes": "*", "global prototypes": "P"}

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Cloud:
    """Some points of one panel."""

    round: int
    model: str
    kind: str
    """`test example`, or what kind of prototypes they are."""
    domain: str
    """Empty for prototypes."""
    label: Numbers  # (n,)
    row: Numbers  # (n,), in the domain's test set; −1 for prototypes
    values: Numbers  # (n, D), features of length 1; later (n, 2), where they are drawn

    @property
    def is_prototype(self) -> bool:
        return not self.domain


def tsne(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """One row of panels for each run, one column for each round."""
    groups = grouped(runs)
    placed, scores = {}, []
    for group in groups:
        clouds = clouds_of(group, options)
        scores += [(group.label, *line) for line in separations(clouds)]
        options.tell(f"t-SNE of {sum(len(c.label) for c in clouds)} points of {group.label}")
        placed[group.label] = embedded(clouds)
    points = [
        (name, c.round, c.model, c.kind, c.domain, int(c.label[i]), int(c.row[i]), *map(float, c.values[i]))
        for name, clouds in placed.items()
        for c in clouds
        for i in range(len(c.label))
    ]
    header = ("run", "round", "model", "kind", "domain", "class", "row", "x", "y")
    figures = {"by class": _drawn(placed, scores, "class")}
    if len({c.domain for clouds in placed.values() for c in clouds if c.domain}) > 1:
        figures["by domain"] = _drawn(placed, scores, "domain")
    if len(options.clients) > 1:
        figures["by client"] = _drawn(placed, scores, "client")
    head = ("run", "round", "model", "silhouette by class", "silhouette by domain")
    return Drawing(figures, {"": Table(header, points), "separation": Table(head, scores)})


def clouds_of(group: Group, options: Options) -> list[Cloud]:
    """Features of the same test examples in every round, and the prototypes of that round."""
    run = group.runs[0]
    task, clouds = run.federation.task, list[Cloud]()
    if not task.tests:
        raise CannotDraw(f"{run.folder.path}: the task {task.name} has no test sets")
    classes = list(range(min(task.num_classes, CLASSES)))
    tests = dict(sampled(task.tests, options.examples, classes))
    for number in chosen_rounds(run, options.rounds):
        options.tell(f"features of {group.label}, round {number}")
        result = run.at(number)
        seen = views(result, options.clients, options.trained)
        for view in seen:
            for domain, data in tests.items():
                values = unit(view.features(data).numpy())
                clouds.append(_examples(number, view.name, domain, data, values))
        for kind, points in result.federation.method.prototype_sets(result.state.server).items():
            shown = points.label < len(classes)
            values, labels = unit(points.values[shown].cpu().numpy()), points.label[shown].cpu().numpy()
            if len(labels):
                _refuse_other_space(group.label, kind, values, clouds[-1].values)
                clouds += [Cloud(number, v.name, kind, "", labels, np.full(len(labels), -1), values) for v in seen]
    return clouds


def _refuse_other_space(name: str, kind: str, prototypes: Numbers, features: Numbers) -> None:
    of, have = prototypes.shape[1], features.shape[1]
    if of != have:
        what = f"the {kind} of {name} have {of} numbers and its features {have}"
        raise CannotDraw(f"{what}: the method's `shown_features` must give what they are means of")


def unit(values: Numbers) -> Numbers:
    """Rows of length 1; rows of zeros stay."""
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    scaled: Numbers = values / np.where(lengths > 0, lengths, 1.0)
    return scaled


def _examples(number: int, model: str, domain: str, data: Data, values: Numbers) -> Cloud:
    return Cloud(number, model, "test example", domain, data.labels.numpy(), data.index.numpy(), values)


def embedded(clouds: Sequence[Cloud]) -> list[Cloud]:
    """The clouds in a plane that is one for all of them."""
    from sklearn.manifold import TSNE  # slow, and only this needs it

    values = np.concatenate([cloud.values for cloud in clouds]).astype(np.float32)
    perplexity = max(1.0, min(30.0, (len(values) - 1) / 3))
    plane = TSNE(init="pca", learning_rate="auto", perplexity=perplexity, random_state=0).fit_transform(values)
    ends = np.cumsum([len(cloud.label) for cloud in clouds])[:-1]
    return [
        Cloud(c.round, c.model, c.kind, c.domain, c.label, c.row, part)
        for c, part in zip(clouds, np.split(plane, ends), strict=True)
    ]


def separations(clouds: Sequence[Cloud]) -> list[tuple[Any, ...]]:
    """How well classes, and domains, are apart in the features themselves: the mean silhouette of each panel, -1 to 1.
    Empty where there is but one."""
    found = []
    for number, model in dict.fromkeys((c.round, c.model) for c in clouds):
        own = [c for c in clouds if (c.round, c.model) == (number, model) and not c.is_prototype]
        values, labels = np.concatenate([c.values for c in own]), np.concatenate([c.label for c in own])
        domains = np.concatenate([np.full(len(c.label), k) for k, c in enumerate(own)])
        found.append((number, model, silhouette(values, labels), silhouette(values, domains)))
    return found


def silhouette(values: Numbers, labels: Numbers) -> float | str:
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(labels.tolist())) < len(labels):
        return ""
    return float(silhouette_score(values, labels))


# ---- pictures


def _drawn(placed: dict[str, list[Cloud]], scores: Sequence[tuple[Any, ...]], by: str) -> "Figure":
    """Panels of one run share their axes."""
    rounds = {name: list(dict.fromkeys(c.round for c in clouds)) for name, clouds in placed.items()}
    figure, axes = panels(len(placed), max(map(len, rounds.values())), (2.75, 2.75), beside=2.1)
    clouds = [c for own in placed.values() for c in own]
    names = _names(clouds, by)
    for row, (name, own) in zip(axes, placed.items(), strict=True):
        everything = np.concatenate([c.values for c in own])
        low, high = everything.min(0), everything.max(0)
        margin = 0.05 * (high - low)
        for axis in row[len(rounds[name]) :]:
            axis.set_axis_off()
        for axis, number in zip(row, rounds[name], strict=False):
            others = [c.values for c in own if c.round != number and not c.is_prototype]
            if others:
                x, y = np.concatenate(others).T
                axis.scatter(x, y, s=3, c="#e4e4e4", linewidths=0, zorder=0)
            _panel(axis, [c for c in own if c.round == number], names, by)
            bare(axis, f"round {number}{_score(scores, name, number, by)}")
            axis.set_xlim(low[0] - margin[0], high[0] + margin[0])
            axis.set_ylim(low[1] - margin[1], high[1] + margin[1])
        row[0].set_ylabel(label([name], 40)[0], fontsize=10)
    _legend(figure, clouds, names, by)
    return figure


def _names(clouds: Sequence[Cloud], by: str) -> dict[Any, str]:
    """What is told apart by colour, in order, with the colour."""
    of: dict[str, Callable[[Cloud], Any]] = {"domain": lambda c: c.domain, "client": lambda c: c.model}
    if by == "class":
        keys: list[Any] = sorted({int(y) for c in clouds for y in c.label})
    else:
        keys = list(dict.fromkeys(of[by](c) for c in clouds if not c.is_prototype))
    return {key: MANY[k % len(MANY)] for k, key in enumerate(keys)}


def _panel(axis: "Axes", clouds: Sequence[Cloud], colours: dict[Any, str], by: str) -> None:
    domains = list(dict.fromkeys(c.domain for c in clouds if c.domain))
    dot = min(22.0, max(6.0, 4000 / sum(len(c.label) for c in clouds)))
    for c in clouds:
        x, y = c.values.T
        if c.is_prototype:
            shown = [colours[int(k)] for k in c.label] if by == "class" else ["white"]
            marker = ABOVE.get(c.kind, "*")
            size = {"*": 80, "P": 48}.get(marker, 30)
            axis.scatter(x, y, s=size, marker=marker, c=shown, edgecolors="black", linewidths=0.8, zorder=3)
            continue
        key = c.domain if by == "domain" else c.model
        shown = [colours[int(k)] for k in c.label] if by == "class" else [colours[key]]
        marker = MARKERS[domains.index(c.domain) % len(MARKERS)]
        axis.scatter(x, y, s=dot, marker=marker, c=shown, alpha=0.75, linewidths=0)
    if by == "class":
        _name_classes(axis, [c for c in clouds if not c.is_prototype])


def _name_classes(axis: "Axes", clouds: Sequence[Cloud]) -> None:
    """A number in the middle of each class, where that class is the most of what lies there."""
    from matplotlib.patheffects import withStroke

    values, labels = np.concatenate([c.values for c in clouds]), np.concatenate([c.label for c in clouds])
    for y in sorted(set(labels.tolist())):
        x0, y0 = middle = np.median(values[labels == y], axis=0)
        around = labels[np.linalg.norm(values - middle, axis=1).argsort()[:AROUND]]
        if (around == y).mean() < 0.6:
            continue
        outline = [withStroke(linewidth=2.5, foreground="white")]
        name = axis.annotate(str(y), (x0, y0), (0, 8), textcoords="offset points", ha="center", va="center", zorder=4)
        name.set(fontsize=SMALL, fontweight="bold", path_effects=outline)


def _score(scores: Sequence[tuple[Any, ...]], name: str, number: int, by: str) -> str:
    own = [line for line in scores if line[:2] == (name, number)]
    values = [line[4 if by == "domain" else 3] for line in own]
    return f": {values[0]:.2f}" if len(values) == 1 and values[0] != "" else ""


def _legend(figure: "Figure", clouds: Sequence[Cloud], colours: dict[Any, str], by: str) -> None:
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, name: str, size: float, edge: str = "none") -> Line2D:
        return Line2D([], [], color=colour, marker=marker, ls="", ms=size, mec=edge, mew=0.8, label=label([name])[0])

    domains = list(dict.fromkeys(c.domain for c in clouds if c.domain))
    shapes = {domain: MARKERS[k % len(MARKERS)] for k, domain in enumerate(domains)}
    if by == "domain":
        marks = [mark(shapes[domain], colours[domain], domain, 6) for domain in domains]
    elif by == "client":
        marks = [mark("o", colour, name, 6) for name, colour in colours.items()]
    else:
        marks = [mark("o", colour, f"class {name}", 6) for name, colour in colours.items()]
        marks += [mark(shapes[d], "#555555", d, 5) for d in domains] if len(domains) > 1 else []
    kinds = list(dict.fromkeys(c.kind for c in clouds if c.is_prototype))
    marks += [
        mark(ABOVE.get(kind, "*"), "white", kind, {"*": 9, "P": 8}.get(ABOVE.get(kind, "*"), 6), "black")
        for kind in kinds
    ]
    figure.legend(handles=marks, loc="outside right center", fontsize=SMALL, frameon=False)
    more = "" if by == "client" else "; after the round: their mean silhouette"
    figure.suptitle(f"t-SNE of test features by {by}{more}", fontsize=10)
