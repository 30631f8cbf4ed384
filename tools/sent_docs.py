"""Writes docs/what-is-sent.md: what every method's uploads hold, by their roles, tried on a small federation."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from method_docs import label, table
from protofed import tree
from protofed.api.method import Method
from protofed.api.roles import Count, Label, PerClass, Prototype, Weights, roles
from protofed.audit.replay import Sent, Tap
from protofed.engine.test_sets import label_counts
from protofed.methods import METHODS
from protofed.testing.federations import TASK, federation

NOTE = "<!-- Written by `make docs`; do not edit. -->"
COLUMNS = ["method", "weights", "stay at the client", "prototypes", "counts", "other numbers", "the server needs"]
INTRO = """\
What leaves a client, for every method with its default settings. It is made from the
[roles](../src/protofed/api/roles.py) of uploads, and from one round of each method on a small federation, the setup
before it and the end after it included. Settings may change it; `protofed audit RUN` measures what a run of yours tells
([how](privacy.md#audit)).

- **Weights**: of the network that clients train. Attacks on them tell members from others, and the classifier's rows
  tell which classes a client has.
- **Stay at the client**: parts of that network that are never sent.
- **Prototypes**: means over a client's examples of a class, and of what. The mean of one example is that example's
  feature. `uploads.min_class_count` keeps back those of few.
- **Counts**: how many examples a client has, in all or of each class, or only which classes it has.
- **Other numbers**: without a role, such as control variates, losses, and scores of public examples.
- **The server needs**: with `sums`, sums over clients are enough, and with `[secure] sums = true` it sees nothing else
  ([secure sums](privacy.md#secure-sums)). With `each upload` it must see every client's.

Not in the table, since it is the same for all: who took part, how large its upload was, how long it took, and the mean
loss of its training. No method sends examples. Labels of single examples are sent by those that have `labels` there."""


def page() -> str:
    rows = [row(name) for name in METHODS]
    return f"# What is sent\n\n{NOTE}\n\n{INTRO}\n\n{table(COLUMNS, rows)}\n"


@cache
def row(name: str) -> list[str]:
    method = METHODS[name]()
    sent = uploads(method)
    networks = federation(method).networks_of("ann")
    weights = {name_of(path) for one in sent for path, role in found(one) if isinstance(role, Weights)}
    private = sorted(
        {each.partition(".")[0] for each in networks.shapes} - {each.partition(".")[0] for each in weights}
    )
    some = sorted({p.partition(".")[0] for p in networks.shapes if p not in weights} - {*private})
    stays = [*(f"`{part}`" for part in private), *(f"some of `{part}`" for part in some)]
    return [
        f"[{label(METHODS[name])}](methods/{name}.md)",
        "no" if not weights else "all" if not stays else "a part",
        ", ".join(stays) if stays else "nothing",
        joined(prototype(one, path, role) for one in sent for path, role in found(one) if isinstance(role, PerClass)),
        joined(count(one, path, sent) for one in sent for path, role in found(one) if isinstance(role, Count | Label)),
        joined(f"`{name_of(path, 0)}`{when(one)}" for one in sent for path in without_role(one)),
        "nothing" if not any(tree.leaves(one.upload) for one in sent) else "sums" if method.sums else "each upload",
    ]


def uploads(method: Method[Any, Any, Any, Any]) -> list[Sent]:
    """What one client sends in the setup, a round and the end, one upload of each kind."""
    tap, of = Tap(), federation(method, epochs=1, rounds=1)
    of = replace(of, uploads=replace(of.uploads, stages=(tap,)))
    of.finish(of.advance(of.start()))
    return [one for one in tap.sent if one.client == "ann"]


def found(one: Sent) -> Iterator[tuple[str, Any]]:
    yield from roles(one.upload).items()


def without_role(one: Sent) -> Iterator[str]:
    known = roles(one.upload)
    yield from dict.fromkeys(path.partition("/")[0] for path in tree.named_leaves(one.upload) if path not in known)


def name_of(path: str, place: int = -1) -> str:
    return path.split("/")[place]


def prototype(one: Sent, path: str, role: PerClass) -> str:
    leaf, classes = tree.named_leaves(one.upload)[path], TASK.num_classes
    rows = leaf.flatten(0, -2) if isinstance(role, Prototype) else leaf
    several = "several for each class" if len(rows) > classes else "one for each class"
    size = leaf.shape[-1]
    what = "of scores" if size == classes else "of features"
    if not isinstance(role, Prototype):
        return f"covariances{when(one)}"
    return f"{several}, {what}{when(one)}"


def count(one: Sent, path: str, sent: list[Sent]) -> str:
    leaf, role = tree.named_leaves(one.upload)[path], roles(one.upload)[path]
    own = label_counts(TASK.clients["ann"], TASK.num_classes)
    if isinstance(role, Label):
        return f"labels{when(one)}"
    if leaf.dim() == 0:
        return f"in all{when(one)}" if role.of_examples and int(leaf) == len(TASK.clients["ann"]) else f"`{path}`"
    if equal(leaf, own):
        return f"of each class{when(one)}"
    if len(leaf) == TASK.num_classes and equal(leaf.flatten(1).any(1) if leaf.dim() > 1 else leaf, own > 0):
        return f"which classes{when(one)}"
    return f"`{name_of(path)}`{when(one)}"


def equal(leaf: Tensor, other: Tensor) -> bool:
    return leaf.shape == other.shape and torch.equal(leaf.double(), other.double())


def when(one: Sent) -> str:
    return {"setup": " (once, at first)", "finish": " (once, at the end)"}.get(one.where, "")


def joined(words: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(words)) or "no"
