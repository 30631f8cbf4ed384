"""What is done to an upload between the client's step and the server's method: pairs of an encoding at the client and a
decoding at the server, chained. Between the two the upload is checked, in the form in which it is sent."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from protofed import tree
from protofed.api.roles import Count, Label, roles
from protofed.api.task import ClientId
from protofed.transforms.stage import ClipToMedian, Stage
from protofed.tree import Tree

Uploads = Iterator[tuple[ClientId, Tree]]


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
class UploadSettings:
    """What happens to uploads on their way to the method. Nothing by default, bit for bit."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """What numbers travel in: bfloat16 halves the bytes. Counts and labels are never rounded."""
    clip: Literal["none", "median"] = "none"
    """How far a client's weights may go from those that it received: `median` scales longer ways down to the median of
    the round. All uploads of a round are then in memory at once."""

    def pipeline(self) -> "UploadPipeline":
        transforms: tuple[UploadTransform, ...] = (Bfloat16(),) if self.precision == "bfloat16" else ()
        return UploadPipeline(transforms, (ClipToMedian(),) if self.clip == "median" else ())


@dataclass(frozen=True)
class UploadPipeline:
    transforms: tuple[UploadTransform, ...] = ()
    stages: tuple[Stage, ...] = ()

    def spec(self, like: Tree) -> Tree:
        """What a good upload looks like on its way."""
        for transform in self.transforms:
            like = transform.spec(like)
        return like

    def encoded(self, upload: Tree) -> Tree:
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

    def staged(self, uploads: Uploads, message_for: Callable[[ClientId], Tree]) -> Uploads:
        """The uploads as the method reads them. Without stages each is read as soon as it is there."""
        if not self.stages:
            return uploads
        return self._cleaned(uploads, message_for)

    def _cleaned(self, uploads: Uploads, message_for: Callable[[ClientId], Tree]) -> Uploads:
        accepted = list(uploads)
        for stage in self.stages:
            accepted = stage.cleaned(accepted, message_for)
        yield from accepted
