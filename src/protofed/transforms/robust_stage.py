"""`[robust]`: what the method reads in the place of uploads of which some may be anything.

A rule for weights makes one tree of those of a group, and hands it on under every client's name with one example each:
every method that averages then gets this tree, and no method changes. A rule for prototypes works class by class, over
the clients of a group that have the class.
"""

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.method import Method, Weighting, weighting_of
from protofed.api.roles import Count, Label, PerClass, counted_by, roles
from protofed.api.task import ClientId
from protofed.transforms.by_class import ClassRows, class_rows, with_paths, without_classes
from protofed.transforms.robust import CENTRES, Centre, CentreRule, coordinate_median, distances_to, geometric_median
from protofed.transforms.stage import Exchange, Stage, Uploads, has_weights
from protofed.tree import Tree

log = logging.getLogger(__name__)

REACH = 2.0
"""A prototype that is farther from the middle of its class than so many times the median distance is left out."""
ROUNDING = 1e-6
"""Distances below this part of the middle's length are rounding."""


@dataclass(frozen=True)
class RobustSettings:
    """What is done about clients that send plausible lies. Nothing by default, bit for bit."""

    faulty: Annotated[int, Ge(0)] = 0
    """How many of the clients that reply in a round may be bad. The rules below bear so many, and a round needs more
    than twice as many good replies. 0: no rule is applied."""
    weights: Literal["mean", CentreRule] = "trimmed"
    """What takes the place of the clients' weights: nothing (`mean`); for each coordinate the mean without the `faulty`
    smallest and largest values (`trimmed`), or the median; the point that is nearest to all (`geometric`); or the
    trimmed mean after each client's weights were replaced by the mean of those nearest to them (`nnm_trimmed`)."""
    prototypes: Literal["mean", "clip", "median", "filter"] = "filter"
    """What is done to prototypes, class by class: nothing (`mean`); those longer than the median are scaled down to it
    (`clip`); all become the median of each coordinate (`median`); or those far from the geometric median are left out
    (`filter`)."""

    @property
    def is_on(self) -> bool:
        return self.faulty > 0

    @property
    def least_replies(self) -> int:
        """With fewer, bad clients could be the majority."""
        return 2 * self.faulty + 1

    def stages(self) -> tuple[Stage, ...]:
        if not self.is_on:
            return ()
        weights = () if self.weights == "mean" else (RobustWeights(self.weights, self.faulty),)
        prototypes = () if self.prototypes == "mean" else (RobustPrototypes(self.prototypes, self.faulty),)
        return (*weights, *prototypes)

    def conflicts(
        self, method: Method[Any, Any, Any, Any], weighting: Weighting, minimum_replies: int
    ) -> Iterator[tuple[str, str, str]]:
        """Settings that these cannot go with: the key of one of these, why, and the other key."""
        if not self.is_on:
            return
        if minimum_replies < self.least_replies:  # guard: robust-needs-replies
            why = f"is {self.faulty}, and then training.minimum_replies must be at least {self.least_replies}"
            yield "robust.faulty", f"{why}, not {minimum_replies}", "training.minimum_replies"
        if self.weights == "mean":
            return
        name = type(method).__name__
        if method.needs_each_upload:  # guard: robust-needs-averaging
            why = f'"{self.weights}" is not for {name}: {method.needs_each_upload}; set it to "mean"'
            yield "robust.weights", why, "method.name"
        if weighting_of(method, weighting) == "examples":  # guard: robust-needs-equal-weights
            why = f'"{self.weights}" lets clients count equally: set training.weighting to "uniform"'
            yield "robust.weights", f"{why}, and that of {name} if it has its own", "training.weighting"

    def refusal(self, like: Tree) -> str | None:
        """Why nothing of uploads like this one is protected; None if something is."""
        if not self.is_on or (self.weights != "mean" and has_weights(like)):
            return None
        if self.prototypes != "mean" and any(rows.is_shared for rows in class_rows(like)):
            return None
        return (
            f'robust.faulty = {self.faulty}: with robust.weights = "{self.weights}" and robust.prototypes = '
            f'"{self.prototypes}" nothing that the method sends is protected: set other rules, or robust.faulty = 0'
        )


@dataclass(frozen=True)
class RobustWeights:
    """All numbers of the uploads of a group but prototypes, counts and labels become one robust mean of them."""

    rule: CentreRule
    faulty: int

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        return None

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        """Holds of each client what is left to it, and of each group what its rule holds."""
        centres: dict[Hashable, Centre] = {}
        held: list[tuple[ClientId, Hashable, Tree]] = []
        shapes: dict[str, Tensor] = {}
        for client, upload in uploads:
            if not has_weights(upload):
                yield client, upload  # as in an exchange of losses
                continue
            leaves, group = tree.named_leaves(upload), exchange.group(client, upload)
            shapes = shapes or {
                path: leaves[path].new_empty(leaves[path].shape, device="meta") for path in _centred(upload)
            }
            centres.setdefault(group, CENTRES[self.rule](self.faulty)).add(_flat([leaves[path] for path in shapes]))
            held.append((client, group, _rest(upload, shapes)))
        protected = [group for group, centre in centres.items() if centre.is_protected]  # guard: small-groups-left-out
        values = {group: _parts(centres[group].value(), shapes) for group in protected}
        for group in [group for group in centres if group not in values]:
            clients = ", ".join(client for client, of, _ in held if of == group)
            log.warning("%s: GROUP_UNDERPROTECTED: %s are averaged with each other, too few for %d bad ones: left out",
                        exchange.where, clients, self.faulty)  # fmt: skip
        for client, group, rest in held:
            if group in values:
                yield client, with_paths(rest, values[group])


def _centred(upload: Tree) -> list[str]:
    """What a rule for weights reads: the weights, and what travels beside them, such as their changes."""
    role_of = roles(upload)
    return [path for path in tree.named_leaves(upload) if not isinstance(role_of.get(path), Count | Label | PerClass)]


def _rest(upload: Tree, centred: dict[str, Tensor]) -> Tree:
    """The upload without its weights, with one example wherever its client counted some: reported numbers of examples
    would weigh, and belong to other weights."""
    leaves, role_of = tree.named_leaves(upload), roles(upload)
    behind_rows = {counted_by(path, role) for path, role in role_of.items() if isinstance(role, PerClass)}

    def kept(path: str, leaf: Tensor) -> Tensor:
        if path in centred:
            return leaf.new_empty(0)
        is_weight = isinstance(role_of.get(path), Count) and path not in behind_rows
        if not is_weight:
            return leaf
        return leaf.clamp(max=1) if leaf.dim() else torch.ones_like(leaf)

    return tree.with_leaves(upload, [kept(path, leaf) for path, leaf in leaves.items()])


def _flat(leaves: list[Tensor]) -> Tensor:
    """All numbers in one row, (P,)."""
    return torch.cat([leaf.flatten() if leaf.is_floating_point() else leaf.flatten().double() for leaf in leaves])


def _parts(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row of numbers as leaves like these. Whole numbers, such as an index in a buffer, are rounded."""
    rows = torch.split(vector, [leaf.numel() for leaf in like.values()])
    return {
        path: (row if leaf.is_floating_point() else row.round()).to(leaf.dtype).reshape(leaf.shape)
        for row, (path, leaf) in zip(rows, like.items(), strict=True)
    }


@dataclass(frozen=True)
class RobustPrototypes:
    """Prototypes of a class that are unlike those of other clients are shortened, replaced or left out. A class of too
    few clients is left out as a whole, so that the server keeps what it knew of it."""

    rule: Literal["clip", "median", "filter"]
    faulty: int

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        leaves = tree.named_leaves(like)
        if all(len(leaves[rows.count]) == num_classes for rows in class_rows(like) if rows.is_shared):
            return None
        return (
            f'robust.prototypes = "{self.rule}" is for methods that send one prototype of a class, and this one sends '
            'several: set it to "mean"'
        )

    def cleaned(self, uploads: Uploads, exchange: Exchange) -> Iterator[tuple[ClientId, Tree]]:
        accepted = list(uploads)
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for i, (client, upload) in enumerate(accepted):
            groups[exchange.group(client, upload)].append(i)
        for members in groups.values():
            cleaned = [accepted[i][1] for i in members]
            for rows in class_rows(cleaned[0]):
                if rows.is_shared:
                    with torch.device("cpu"):  # many small steps, for which launches on a GPU would take longer
                        cleaned = self._of_rows(cleaned, rows, exchange)
            for i, upload in zip(members, cleaned, strict=True):
                accepted[i] = accepted[i][0], upload
        yield from accepted

    def _of_rows(self, uploads: list[Tree], rows: ClassRows, exchange: Exchange) -> list[Tree]:
        """The uploads of a group, after the rule was applied to the prototypes of one record."""
        leaves = [tree.named_leaves(upload) for upload in uploads]
        has = torch.stack([own[rows.count].cpu() != 0 for own in leaves])  # (K, C)
        means = {path: torch.stack([own[path].cpu() for own in leaves]) for path in rows.prototypes}  # (K, C, D)
        dropped, unprotected = torch.zeros_like(has), list[str]()
        for c in range(exchange.num_classes):
            owners = has[:, c].nonzero().flatten()
            if not len(owners):
                continue
            if len(owners) <= 2 * self.faulty:  # guard: classes-of-too-few-owners-keep-prototypes
                dropped[:, c] = True
                unprotected.append(f"{c} ({len(owners)})")
                continue
            for path in rows.prototypes:
                found = means[path][owners, c]  # (n, D)
                if self.rule == "filter":
                    dropped[owners, c] |= far_ones(found)
                elif self.rule == "clip":
                    means[path][owners, c] = shortened(found)
                else:
                    means[path][owners, c] = coordinate_median([*found]).to(found.dtype)
        if unprotected:
            log.warning("%s: CLASS_UNDERPROTECTED: too few clients for %d bad ones have the classes %s (clients): what "
                        "was known of them stays", exchange.where, self.faulty, ", ".join(unprotected))  # fmt: skip
        changed = [
            with_paths(upload, {path: means[path][i].to(own[path].device) for path in means})
            for i, (upload, own) in enumerate(zip(uploads, leaves, strict=True))
        ]
        return [without_classes(upload, rows, dropped[i]) for i, upload in enumerate(changed)]


def far_ones(found: Tensor) -> Tensor:
    """Which of these vectors (n, D) are farther from their geometric median than twice the median distance."""
    vectors = [*found]
    middle = geometric_median(vectors)
    distances = distances_to(middle, vectors)
    limit = max(REACH * median(distances.tolist()), ROUNDING * middle.norm().item())
    return distances.gt(limit)


def shortened(found: Tensor) -> Tensor:
    """These vectors (n, D), none of them longer than the median one."""
    lengths = found.double().norm(dim=-1)
    limit = median(lengths.tolist())
    too_long = lengths > limit
    share = torch.where(too_long, limit / lengths, 1.0)
    return found.mul(share[:, None]).to(found.dtype)
