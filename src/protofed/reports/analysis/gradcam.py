"""Grad-CAM: which parts of an image speak for a class, several methods side by side.

Selvaraju et al.: Grad-CAM: Visual Explanations from Deep Networks via Gradient-Based Localization, ICCV 2017. The maps
of the last convolution are added up, each by the mean of the class score's slope over its pixels; what is negative is
cut off.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.reports.analysis.drawing import CannotDraw, Drawing, Options, Table, grouped
from protofed.reports.analysis.style import bare, label, panels
from protofed.reports.analysis.views import PUBLIC, View, chosen_rounds, client_view, views
from protofed.runs.loading import SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = 6
LOOKED_AT = 300
"""Test images of a domain among which those are sought on which the runs disagree."""

Image = tuple[str, int]
"""A domain, and a number in its test set."""


def gradcam(runs: Sequence[SavedRun], options: Options) -> Drawing:
    """A column for each image, a row for each run: what speaks for the class that the run names."""
    groups = grouped(runs)
    results = {}
    for group in groups:
        run = group.runs[0]
        (number,) = chosen_rounds(run, options.rounds[-1:] or run.rounds_there[-1:])
        options.tell(f"{group.label}, round {number}")
        results[group.label] = run.at(number)
    tests = [result.federation.task.tests for result in results.values()]
    first = _images_of(groups[0].runs[0])
    if any(not _are_equal(first, other) for other in tests):
        raise CannotDraw("these runs have other test images than the first: give runs on one task")
    looks = {name: _Look(result, options.clients, options.trained) for name, result in results.items()}
    images = _wanted(options.images, first) or _disagreed(looks, first, options)
    figure, axes = panels(1 + len(looks), len(images), (1.35, 1.5))
    rows = list[tuple[Any, ...]]()
    for k, (domain, number) in enumerate(images):
        data = first[domain].rows(torch.tensor([number]))
        truth = int(data.labels)
        _show(axes[0][k], data, None, f"{domain} {number}: {truth}")
        for row, (name, look) in zip(axes[1:], looks.items(), strict=True):
            options.tell(f"Grad-CAM of {name}, {domain} {number}")
            view = look.view(domain)
            heat, score, named = cam(view, data)
            is_right = named == truth
            _show(row[k], data, heat, f"{'✓' if is_right else '✗'} {named} ({score:.2f})")
            rows.append((name, view.name, domain, number, truth, named, is_right, score, *centre(heat)))
    axes[0][0].set_ylabel("image", fontsize=8.5)
    for row, name in zip(axes[1:], looks, strict=True):
        row[0].set_ylabel(label([name], 22)[0], fontsize=8.5)
    header = ("run", "model", "domain", "image", "class", "named", "is right", "probability", "centre x", "centre y")
    return Drawing({"": figure}, {"": Table(header, rows)})


class _Look:
    """The models of a run: the public one, or that of a client of the image's domain."""

    def __init__(self, result: Any, clients: Sequence[str], trained: bool) -> None:
        self._result, self._trained = result, trained
        self._all = views(result, clients[:1], trained)
        self._is_fixed = bool(clients) or self._all[0].name == PUBLIC
        self._of: dict[str, View] = {}

    def view(self, domain: str) -> View:
        if self._is_fixed:
            return self._all[0]
        if domain not in self._of:
            homes = self._result.federation.task.domain_of
            own = [client for client in self._result.federation.ids if homes.get(client) == domain]
            self._of[domain] = client_view(self._result, own[0], self._trained) if own else self._all[0]
        return self._of[domain]


def cam(view: View, data: Data, target: int | None = None) -> tuple[Tensor, float, int]:
    """The map (H, W) for a class, 0 to 1; the probability of the class that is named, and that class. The map is for
    the class that is named, unless another is the target."""
    maps: list[Tensor] = []

    def noted(module: Any, inputs: Any, output: Tensor) -> Tensor:
        maps.append(output.detach().clone().requires_grad_())
        return maps[-1] * 1  # so that a layer that works in place does not change it

    federation = view.result.federation
    x = federation.task.transform.clean(data.inputs(data.index))
    layer = last_convolution(view)
    handle = layer.register_forward_hook(noted)
    try:
        with torch.enable_grad(), federation.runtime.open(federation):
            scores = view.method.predict(view.model(), x, view.message, view.memory)
            named = int(scores.argmax())
            (slope,) = torch.autograd.grad(scores[0, named if target is None else target], maps[-1:])
    finally:
        handle.remove()
    weight = slope.mean((2, 3), keepdim=True)
    heat = (weight * maps[-1].detach()).sum(1, keepdim=True).clamp(min=0)
    heat = F.interpolate(heat, size=x.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
    shares = scores[0].detach()
    probability = shares if _are_probabilities(shares) else shares.softmax(-1)
    return heat / heat.max().clamp(min=1e-12), float(probability[named]), named


def _are_probabilities(scores: Tensor) -> bool:
    return bool((scores >= 0).all()) and abs(float(scores.sum()) - 1) < 1e-4


def last_convolution(view: View) -> torch.nn.Module:
    found = [m for m in view.networks.modules("features") if isinstance(m, torch.nn.Conv2d)]
    if not found:
        run = view.result.federation.task.name
        raise CannotDraw(f"the network for {run} has no 2-d convolution in its features, so there is no map to show")
    return found[-1]


def centre(heat: Tensor) -> tuple[float, float]:
    """The centre of mass of a map, x and y from 0 to 1; nothing speaks for a class if it is all 0, then the middle."""
    total = float(heat.sum())
    if not total:
        return 0.5, 0.5
    height, width = heat.shape
    x, y = (torch.arange(n, dtype=heat.dtype).add(0.5) / n for n in (width, height))
    return float((heat.sum(0) * x).sum() / total), float((heat.sum(1) * y).sum() / total)


# ---- which images


def _images_of(run: SavedRun) -> dict[str, Data]:
    task = run.federation.task
    if task.spec.input.kind != "image" or not task.tests:
        raise CannotDraw(f"{run.folder.path}: the task {task.name} has no test images")
    return dict(task.tests)


def _are_equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(len(a[d]) == len(b[d]) and torch.equal(a[d].labels, b[d].labels) for d in a)


def _wanted(names: Sequence[str], tests: dict[str, Data]) -> list[Image]:
    images = []
    for name in names:
        domain, _, number = name.rpartition(":")
        if domain not in tests:
            raise BadInput(
                f"--image {name!r}: there is no domain {domain!r}; write DOMAIN:NUMBER with one of {', '.join(tests)}"
            )
        if not number.isdecimal() or int(number) >= len(tests[domain]):
            raise BadInput(f"--image {name!r}: {domain} has the test images 0 to {len(tests[domain]) - 1}")
        images.append((domain, int(number)))
    return images


def _disagreed(looks: dict[str, _Look], tests: dict[str, Data], options: Options) -> list[Image]:
    """Images on which some of the runs are right and others wrong, evenly of the domains; otherwise the first ones."""
    by_domain = []
    for domain, data in tests.items():
        options.tell(f"looking for images of {domain}")
        some = data.rows(torch.arange(min(LOOKED_AT, len(data))))
        right = torch.stack([look.view(domain).predicted(some) == some.labels for look in looks.values()]).float()
        mixed = ((right.mean(0) > 0) & (right.mean(0) < 1)).nonzero().flatten().tolist()
        others = [k for k in range(len(some)) if k not in set(mixed)]
        by_domain.append([(domain, k) for k in [*mixed, *others]])
    turns = [own[k] for k in range(IMAGES) for own in by_domain if k < len(own)]
    return sorted(turns[:IMAGES], key=lambda image: list(tests).index(image[0]))


def _show(axis: "Axes", data: Data, heat: Tensor | None, title: str) -> None:
    x = data.inputs(data.index)[0].float()
    low, high = x.min(), x.max()
    x = x / 255 if data.x.dtype == torch.uint8 else (x - low) / (high - low).clamp(min=1e-12)
    image = x.expand(3, *x.shape[1:]) if len(x) == 1 else x[:3]
    axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    if heat is not None:
        shown = heat.numpy()
        axis.imshow(shown, cmap="inferno", alpha=0.8 * shown**0.7, vmin=0, vmax=1, interpolation="bilinear")
    bare(axis, title)
