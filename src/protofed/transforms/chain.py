"""What is done to an upload between the client's step and the server's method: pairs of an encoding at the client and a
decoding at the server, chained. Between the two the upload is checked, in the form in which it is sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from protofed import tree
from protofed.api.roles import Count, Label, roles
from protofed.api.task import ClientId
from protofed.transforms.by_class import class_rows, too_few, withheld
from protofed.transforms.robust_stage import RobustSettings
from protofed.transforms.stage import ClipToMedian, Exchange, MinimumOwners, Stage, has_weights, sent_weights
from protofed.tree import Tree

Uploads = Iterator[tuple[ClientId, Tree]]

NOT_ROBUST = RobustSettings()
OWN_DATA_MINIMUM = 5
"""The examples of a class from which on a client of a user's own data says something of it."""
OWN_DATA_REACH = 10.0
"""How many times the median of the round a prototype may be long where the data are a user's own."""


class UploadTransform(Protocol):
    def spec(self, like: Tree) -> Tree:
        """What is sent in the place of an upload like this one: names, shapes, dtypes and roles."""

    def encode(self, upload: Tree) -> Tree:
        """At the client."""

    def decode(self, sent: Tree, like: Tree) -> Tree:
        """At the server: an upload like this one again."""


class Bfloat16:
    """Numbers travel in bfloat16, which halves an upload. Counts and labels stay as they are."""

    def spec(self, like: Tree) -> Tree:
        return self.encode(like)

    def encode(self, upload: Tree) -> Tree:
        role_of = roles(upload)
        leaves = tree.named_leaves(upload)
        return tree.with_leaves(upload, [_rounded(leaf, role_of.get(path)) for path, leaf in leaves.items()])

    def decode(self, sent: Tree, like: Tree) -> Tree:
        return tree.map(lambda leaf, wanted: leaf.to(wanted.dtype), sent, like)


def _rounded(leaf: Tensor, role: object) -> Tensor:
    is_number = leaf.dtype == torch.float32 and not isinstance(role, Count | Label)
    return leaf.to(torch.bfloat16) if is_number else leaf


@dataclass(frozen=True)
class Reach:
    """How far an upload may be from the others of its round."""

    prototypes: float = 0.0
    """Times the median length of the round; 0: any length."""
    updates: float = 0.0
    """Times the round's median distance between sent and received weights; 0: any distance."""

    def compares(self, like: Tree) -> bool:
        """Whether uploads like this one must all be there before any of them counts."""
        return bool((self.prototypes and any(rows.prototypes for rows in class_rows(like)))
                    or (self.updates and has_weights(like)))  # fmt: skip


@dataclass(frozen=True)
class UploadSettings:
    """What happens to uploads on their way to the method."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """What numbers travel in: bfloat16 halves the bytes. Counts and labels are never rounded."""
    clip: Literal["none", "median"] = "none"
    """How far a client's weights may go from those that it received: `median` scales longer ways down to the median of
    the round. All uploads of a round are then in memory at once."""
    max_prototype_ratio: Annotated[float, Ge(0)] | None = None
    """Uploads with a prototype longer than so many times the median of the round are refused, from three clients
    on; 0: never. All uploads of a round that hold prototypes are then in memory at once. Not set: 10 for your own data,
    0 for the tasks that protofed brings."""
    max_update_ratio: Annotated[float, Ge(0)] = 0.0
    """Uploads whose weights went farther than so many times the median of the round are refused, from
    three clients on; 0: never. All uploads of a round are then in memory at once."""
    min_class_count: Annotated[int, Ge(0)] | None = None
    """A client says nothing of a class of which it has fewer examples: it sends no prototype and no count of it. Not
    set: 5 for your own data, 0 for the tasks that protofed brings."""
    min_owners: Annotated[int, Ge(1)] = 1
    """A class that fewer clients have is left out of what the server makes of prototypes, so that nobody is told of it.
    All uploads of a round are then in memory at once."""

    def pipeline(self, robust: RobustSettings = NOT_ROBUST, is_own_data: bool = False) -> "UploadPipeline":
        clip: tuple[Stage, ...] = (ClipToMedian(),) if self.clip == "median" else ()
        owners: tuple[Stage, ...] = (MinimumOwners(self.min_owners),) if self.min_owners > 1 else ()
        return UploadPipeline(
            (Bfloat16(),) if self.precision == "bfloat16" else (),
            (*clip, *robust.stages(), *owners),
            Reach(
                (OWN_DATA_REACH if is_own_data else 0)
                if self.max_prototype_ratio is None
                else self.max_prototype_ratio,
                self.max_update_ratio,
            ),
            (OWN_DATA_MINIMUM if is_own_data else 0) if self.min_class_count is None else self.min_class_count,
            robust,
        )


@dataclass(frozen=True)
class UploadPipeline:
    transforms: tuple[UploadTransform, ...] = ()
    stages: tuple[Stage, ...] = ()
    reach: Reach = Reach()
    min_class_count: int = 0
    robust: RobustSettings = NOT_ROBUST

    def spec(self, like: Tree) -> Tree:
        """What a good upload looks like on its way."""
        for transform in self.transforms:
            like = transform.spec(like)
        return like

    def encoded(self, upload: Tree, labels: Tensor, num_classes: int) -> Tree:
        """What leaves a client that has examples with these labels."""
        if self.min_class_count:
            # guard: rare-classes-never-leave
            upload = withheld(upload, too_few(labels, num_classes, self.min_class_count))
        for transform in self.transforms:
            upload = transform.encode(upload)
        return upload

    def decoded(self, sent: Tree, like: Tree) -> Tree:
        likes = [like]
        for transform in self.transforms[:-1]:
            likes.append(transform.spec(likes[-1]))
        for transform, before in zip(reversed(self.transforms), reversed(likes), strict=False):
            sent = transform.decode(sent, before)
        return sent

    def refusals(self, like: Tree, message: Tree, num_classes: int) -> list[str]:
        """Why settings cannot be for a method whose uploads and messages are like these."""
        found = [stage.refusal(like, message, num_classes) for stage in self.stages]
        if self.reach.updates and not sent_weights(like, message):
            what = "is for methods that send weights and whose clients receive one model"
            found.append(f"uploads.max_update_ratio = {self.reach.updates:g} {what}: set it to 0")
        return [why for why in (*found, self.robust.refusal(like)) if why]

    def staged(self, uploads: Uploads, exchange: Exchange) -> Uploads:
        """The uploads as the method reads them. Without stages each is read as soon as it is there."""
        for stage in self.stages:
            uploads = stage.cleaned(uploads, exchange)
        return uploads
