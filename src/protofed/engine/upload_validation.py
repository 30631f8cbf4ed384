"""The check that every upload passes before any method sees it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median_high
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from protofed import tree, wire
from protofed.api.roles import Count, Label, Role, Weights, roles
from protofed.api.task import ClientId
from protofed.engine.message import Refused, WireMessage, bounds, digest, opened, printable
from protofed.errors import RunFailed
from protofed.nn.networks import Patterns, matching
from protofed.runtimes.jobs import Failure, Reason
from protofed.transforms.by_class import class_rows, of_classes
from protofed.transforms.chain import Reach
from protofed.transforms.stage import Exchange, length, sent_weights
from protofed.tree import Tree

T = TypeVar("T")

LEAST_COMPARED = 3
"""Of two clients nobody can say which is out of reach."""
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
Found = tuple[Reason, str] | None


@dataclass(frozen=True)
class Limits:
    """What no good upload exceeds."""

    num_classes: int
    max_norm: float = inf
    """Of all numbers of an upload together."""
    enrolled: Mapping[ClientId, int] = field(default_factory=dict)
    """How many examples each client has; nobody can have counted more."""
    withheld: Callable[[ClientId], Tensor | None] = lambda client: None
    """The classes (C,) that a client says nothing of, since it has too few examples of them."""


class UploadValidator(Generic[T]):
    """Lets uploads in that are like one that is given."""

    def __init__(self, like: T, limits: Limits) -> None:
        self._like = like
        self._limits = limits
        self._expected = tree.named_leaves(like)
        self._roles = roles(like)
        self._rows = class_rows(like)
        self._counted = [(path, rows.count) for rows in self._rows for path in rows.paths if path != rows.count]
        self._variances = [path for path, role in self._roles.items() if _is_variance(path, role)]
        self.model, self.bounds = digest(self._expected), bounds(self._expected)

    def validated(self, client: ClientId, upload: Tree | WireMessage) -> T | Failure:
        """The upload in the structure of `like`, or why it cannot be aggregated."""
        try:
            given = opened(upload, self._expected) if isinstance(upload, WireMessage) else tree.named_leaves(upload)
        except Refused as refused:
            return Failure(client, refused.reason, refused.detail)
        except (TypeError, ValueError) as error:
            return Failure(client, Reason.KEY_UNEXPECTED, printable(str(error)))
        except RecursionError:  # guard: deep-nesting-refused
            return Failure(client, Reason.UNDECODABLE, "it is nested too deeply")  # guard: deep-nesting-refused
        found = self._unlike(given)
        if found is None and self._is_doubtful(client, given):  # guard: values-looked-at
            found = self._bad_values(client, given)
        if found is not None:
            return Failure(client, *found)
        return tree.with_leaves(self._like, [given[path] for path in self._expected])

    def _unlike(self, given: Mapping[str, Any]) -> Found:
        """What its names, types and shapes have wrong."""
        for path in self._expected:
            if path not in given:
                return Reason.KEY_MISSING, f"{path} is missing"
        for path in given:
            if path not in self._expected:  # guard: unexpected-names-refused
                return Reason.KEY_UNEXPECTED, f"{printable(path)} was not asked for"
        for path, leaf in self._expected.items():
            found = _mismatch(given[path], leaf)
            if found:
                return found[0], f"{path}: {found[1]}"
        return None

    def _is_doubtful(self, client: ClientId, given: Mapping[str, Tensor]) -> bool:
        """Whether any value needs a closer look, in one look at each device: asking for each value would make the
        device wait for each."""
        devices = {leaf.device for leaf in given.values()}
        return any(self._is_doubtful_on(device, client, given) for device in devices)

    def _is_doubtful_on(self, device: torch.device, client: ClientId, given: Mapping[str, Tensor]) -> bool:
        enrolled = self._limits.enrolled.get(client, inf)
        here = {path: leaf for path, leaf in given.items() if leaf.device == device}
        norms = tree.norms(here.values())
        limit = min(self._limits.max_norm, FLOAT32_MAX) / max(1, len(norms))  # an overflow is looked at closely too
        flags = [(~(norms <= limit)).any()] if len(norms) else []  # guard: closer-look-for-what-too-large-for-float32
        for path, role in self._roles.items():
            leaf = given[path]
            if path in here and isinstance(role, Count) and not leaf.ndim and device.type == "cpu":
                number = leaf.item()  # quicker than an operation for each question
                if not (0 <= number <= _most(role, enrolled) and number % 1 == 0):
                    return True
            elif path in here and isinstance(role, Count):
                flags += [(leaf < 0).any(), (leaf > _most(role, enrolled)).any()]
                flags += [(leaf != leaf.floor()).any()] if leaf.is_floating_point() else []
            elif path in here and isinstance(role, Label):
                flags.append(((leaf < 0) | (leaf >= self._limits.num_classes)).any())
        flags += [_uncounted(given[path], given[counted]).any() for path, counted in self._counted if path in here]
        if self._rows and (dropped := self._limits.withheld(client)) is not None:
            flags += [_says_of(given[rows.count], dropped).any() for rows in self._rows if rows.count in here]
        flags += [(given[path] < 0).any() for path in self._variances if path in here]
        if device.type == "cpu":  # nothing waits there
            return any(map(bool, flags))
        return bool(flags) and bool(torch.stack(flags).any())

    def _bad_values(self, client: ClientId, given: Mapping[str, Tensor]) -> Found:
        """The first thing that is wrong with the values, one after another."""
        for path in self._expected:
            found = self._bad_leaf(given[path], self._roles.get(path), self._limits.enrolled.get(client, inf))
            if found:
                return found[0], f"{path}: {found[1]}"
        dropped = self._limits.withheld(client) if self._rows else None
        for rows in self._rows:
            if dropped is not None and _says_of(given[rows.count], dropped).any():  # guard: below-min-count-refused
                return (
                    Reason.BELOW_MIN_COUNT,
                    f"{rows.count}: tells of a class of which the client has too few examples",
                )
        for path, counted in self._counted:
            if _uncounted(given[path], given[counted]).any():  # guard: prototype-has-count
                return Reason.PROTO_WITHOUT_COUNT, f"{path}: holds a prototype of a class that {counted} says is absent"
        for path in self._variances:
            if (given[path] < 0).any():  # guard: variances-not-negative
                return Reason.NEGATIVE_VARIANCE, f"{path}: holds the variance {given[path].min().item():g}"
        floats = [leaf.double() for leaf in given.values() if leaf.is_floating_point()]
        norm = sum(float(leaf.square().sum()) for leaf in floats) ** 0.5
        if norm > self._limits.max_norm:  # guard: norm-bounded
            return Reason.NORM_TOO_LARGE, f"has norm {norm:g}, above training.max_norm = {self._limits.max_norm:g}"
        return None

    def _bad_leaf(self, leaf: Tensor, role: Role | None, enrolled: float) -> Found:
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():  # guard: finite-check
            return Reason.NON_FINITE, f"holds {int((~torch.isfinite(leaf)).sum())} values that are not finite"
        if isinstance(role, Count) and (leaf < 0).any():  # guard: counts-not-negative
            return Reason.NEGATIVE_COUNT, f"holds {leaf.min().item():g}"
        if isinstance(role, Count) and (leaf != leaf.floor()).any():  # guard: counts-whole
            return Reason.NON_INTEGER_COUNT, "holds a count that is not a whole number"
        if isinstance(role, Count) and (leaf > _most(role, enrolled)).any():  # guard: counts-at-most-enrolled
            return Reason.COUNT_TOO_LARGE, f"holds {leaf.max().item():g}, and the client has {enrolled} examples"
        if isinstance(role, Label) and ((leaf < 0) | (leaf >= self._limits.num_classes)).any():  # guard: labels-classes
            return Reason.UNKNOWN_CLASS, f"holds a class outside 0..{self._limits.num_classes - 1}"
        return None


def _mismatch(leaf: Any, like: Tensor) -> Found:
    if why := wire.unfit(leaf):
        return Reason.DTYPE_MISMATCH, why
    if leaf.dtype != like.dtype:  # guard: type-check
        return Reason.DTYPE_MISMATCH, f"is {leaf.dtype}, not {like.dtype}"
    if leaf.shape != like.shape:  # guard: shape-check
        return Reason.SHAPE_MISMATCH, f"has shape {tuple(leaf.shape)}, not {tuple(like.shape)}"
    return None


def _is_variance(path: str, role: Role) -> bool:
    """Whether a leaf is the running variance of a layer of normalisation, which torch calls by this name."""
    return isinstance(role, Weights) and path.rpartition("/")[2].endswith(".running_var")


def _uncounted(rows: Tensor, count: Tensor) -> Tensor:
    """Which rows (C, ...) say something of a class without examples."""
    return (rows != 0).reshape(*count.shape, -1).any(-1) & (count == 0)


def _says_of(leaf: Tensor, dropped: Tensor) -> Tensor:
    """Which of the dropped classes (C,) a leaf says something of."""
    return (of_classes(leaf, len(dropped)) != 0).any(-1) & dropped.to(leaf.device)


def _most(role: Count, enrolled: float) -> float:
    """The largest count that a client can have."""
    return enrolled if role.of_examples else inf


def out_of_reach(
    uploads: Sequence[tuple[ClientId, Tree]], message_for: Callable[[ClientId], Tree], reach: Reach
) -> dict[ClientId, Failure]:
    """Why uploads are too far from the others of their round to count. Each client weighs the same in the medians, and
    of two in the middle the larger one counts, which half of the clients cannot make too small."""
    found: dict[ClientId, Failure] = {}
    if reach.updates:
        pairs = {client: (upload, message_for(client)) for client, upload in uploads}
        distances = {client: [length(*pair)] for client, pair in pairs.items() if sent_weights(*pair)}
        for client, ratio in _beyond(distances, reach.updates):  # guard: updates-within-reach
            detail = f"its weights are {ratio:.3g} times as far from those it received as the median of the round"
            found[client] = Failure(client, Reason.UPDATE_TOO_LARGE, f"{detail}: above uploads.max_update_ratio")
    if reach.prototypes:
        leaves = {client: tree.named_leaves(upload) for client, upload in uploads}
        for path in [path for _, upload in uploads[:1] for rows in class_rows(upload) for path in rows.prototypes]:
            lengths = {client: _row_lengths(own[path]) for client, own in leaves.items()}
            for client, ratio in _beyond(lengths, reach.prototypes):  # guard: prototypes-within-reach
                detail = f"{path}: holds a prototype {ratio:.3g} times as long as the median of the round"
                found[client] = Failure(client, Reason.PROTO_TOO_LARGE, f"{detail}: above uploads.max_prototype_ratio")
    return found


def out_of_reach_of_groups(
    uploads: Sequence[tuple[ClientId, Tree]], exchange: Exchange, reach: Reach
) -> dict[ClientId, Failure]:
    """The same of clients that a method keeps apart: features of other models may be of another size."""
    groups: dict[Hashable, list[tuple[ClientId, Tree]]] = {}
    for client, upload in uploads:
        groups.setdefault(exchange.group(client, upload), []).append((client, upload))
    found: dict[ClientId, Failure] = {}
    for members in groups.values():
        found |= out_of_reach(members, exchange.message_for, reach)
    return found


def _beyond(sizes: Mapping[ClientId, Sequence[float]], most: float) -> list[tuple[ClientId, float]]:
    """Who has a size above so many times the median of the clients' own medians, and how many times it is."""
    medians = [median_high(own) for own in sizes.values() if own]
    middle = median_high(medians) if len(medians) >= LEAST_COMPARED else 0.0
    return [(c, max(own) / middle) for c, own in sizes.items() if middle and own and max(own) > most * middle]


def _row_lengths(rows: Tensor) -> list[float]:
    """The lengths of the rows (C, D) that are not zero."""
    lengths = rows.double().flatten(1).norm(dim=-1)
    return [length for length in lengths.tolist() if length]


def refuse_private(like: Tree, private: Patterns) -> None:
    """A method that asks for what it calls private is wrong about one of the two."""
    asked = [path.rpartition("/")[2] for path in tree.named_leaves(like)]
    leaked = matching(dict.fromkeys(asked, torch.empty(0)), private) if private else {}
    names = {name for name in leaked if "." in name}  # entries of Params, not fields of records
    if names:
        raise RunFailed(
            f"the method calls {', '.join(private)} private, but its uploads hold {', '.join(sorted(names))}"
        )
