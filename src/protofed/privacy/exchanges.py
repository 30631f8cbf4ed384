"""What goes to and fro in a secure sum, as records, and the steps in which clients answer."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext, MainTraining, Reply
from protofed.api.method import Step
from protofed.api.private import NotPrivate, Unreleased
from protofed.api.roles import Count, roles
from protofed.api.sums import Summand, Summands
from protofed.api.task import ClientId
from protofed.privacy.fixed_point import FixedPoint, TooLarge, by_name, flat, weight_places
from protofed.privacy.masks import KEY_BYTES, SIGNATURE_BYTES, framed
from protofed.privacy.shares import NoiseShare, OwnSums, RecordNoise
from protofed.privacy.site import LEAST_SITES, SEALED_BYTES, Advert, Occasion, Roster, Site, words
from protofed.privacy.vault import Aborted, Vault
from protofed.transforms.by_class import too_few, with_paths, withheld
from protofed.tree import Tree, named_leaves, record

log = logging.getLogger(__name__)


@record
class Announcement:
    """To a client, first: what all sites will be sent."""

    digest: Tensor  # (32,), of the method's message


@record
class AdvertUpload:
    sealing: Tensor  # (32,)
    masking: Tensor  # (32,)
    signature: Tensor  # (64,)


@record
class RosterMessage:
    """To every site, second: who takes part, and their keys."""

    place: Tensor  # (n,), among all sites that there are, in canonical order
    sealing: Tensor  # (n, 32)
    masking: Tensor  # (n, 32)
    signature: Tensor  # (n, 64)


@record
class SharesUpload:
    sealed: Tensor  # (n, S), for each site of the roster; zeros for the sender


@record
class Request:
    """To every site that has shared, third: the method's message, and what the others have sealed for it."""

    base: Tree
    has_shared: Tensor  # (n,)
    sealed: Tensor  # (n, S), from each site of the roster


@record
class MaskedUpload:
    numbers: Tensor  # (P,), int64


@record
class Standing:
    """To every site that has added, fourth: who has added and who dropped out between."""

    survived: Tensor  # (n,)
    dropped: Tensor  # (n,)


@record
class AgreementUpload:
    signature: Tensor  # (64,)


@record
class Agreed:
    """To every site that has signed who has added, last: what all have signed."""

    signature: Tensor  # (n, 64), zeros for those that have not


@record
class UnmaskingUpload:
    shares: Tensor  # (n, 32), one of each site that survived or dropped out


def octets(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # on the CPU, as all of these records


def text_of(octets: Tensor) -> bytes:
    return bytes(octets.tolist())


def message_digest(message: Tree) -> bytes:
    """SHA-256 of a message: names, types, shapes and all bits."""
    found = hashlib.sha256()
    for path, leaf in by_name(message):
        found.update(framed(path.encode(), repr((leaf.dtype, tuple(leaf.shape))).encode()))
        found.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()


def roster_message(roster: Roster, everyone: Sequence[ClientId]) -> RosterMessage:
    adverts = list(roster.adverts.values())
    return RosterMessage(
        torch.tensor([everyone.index(client) for client in roster.ids], device="cpu"),
        torch.stack([octets(a.sealing) for a in adverts]),
        torch.stack([octets(a.masking) for a in adverts]),
        torch.stack([octets(a.signature) for a in adverts]),
    )


def roster_of(message: RosterMessage, everyone: Sequence[ClientId]) -> Roster:
    places = message.place.tolist()
    if places != sorted(set(places)) or not all(0 <= place < len(everyone) for place in places):
        raise Aborted("the server names sites that there are not, or one of them twice")
    columns = (message.sealing, message.masking, message.signature)
    rows = zip(*columns, strict=True)
    return Roster({everyone[k]: Advert(*map(text_of, row)) for k, row in zip(places, rows, strict=True)})


# ---- the clients' steps


@dataclass(frozen=True)
class Terms:
    """What every site knows of the secure sums of a run, and has not from the server alone."""

    vault: Vault | None
    """None at a server whose clients are at sites."""
    identities: Mapping[ClientId, bytes]
    """The public halves of what sites sign with, in canonical order."""
    share: float
    """The least part of the sites that must stay."""
    least: int = LEAST_SITES
    """And so many in any case."""
    party_of: Mapping[ClientId, str] = field(default_factory=dict)
    """The site that a client is at, where several may be at one."""

    def site(self, client: ClientId) -> Site:
        assert self.vault is not None, "what a client knows in a secure sum is at its site"
        return Site(self.vault, client, self.identities, self.share, self.least, self.party_of)


@dataclass(frozen=True)
class Advertise:
    terms: Terms
    occasion: Occasion
    exchange: ClassVar = "advertise"
    """By this name an order asks for it, as for the others."""

    async def __call__(self, client: ClientContext, message: Announcement, memory: Tree) -> Reply[AdvertUpload, Tree]:
        advert = self.terms.site(client.id).advertise(self.occasion, text_of(message.digest))
        return Reply(AdvertUpload(*map(octets, (advert.sealing, advert.masking, advert.signature))), memory)


@dataclass(frozen=True)
class ShareOut:
    terms: Terms
    occasion: Occasion
    exchange: ClassVar = "share"

    async def __call__(self, client: ClientContext, message: RosterMessage, memory: Tree) -> Reply[SharesUpload, Tree]:
        roster = roster_of(message, list(self.terms.identities))
        sealed = self.terms.site(client.id).share_out(self.occasion, roster)
        rows = [octets(sealed.get(other, bytes(SEALED_BYTES))) for other in roster.ids]
        return Reply(SharesUpload(torch.stack(rows)), memory)


@dataclass(frozen=True)
class Add:
    """The method's own step, and what the client adds of it as whole numbers, without a mask."""

    step: Step[Any, Any, Any]
    summand: Summand
    public_weight: Callable[[int], float]
    point: FixedPoint
    min_class_count: int = 0
    """A client adds nothing of a class of which it has fewer examples."""
    share: NoiseShare | RecordNoise | None = None
    """The noise that a client adds under differential privacy."""
    unchanged: Callable[[Any, Any], Tree] | None = None
    """What a client sends that has learnt nothing from a message: clients add how they differ from it."""

    async def __call__(self, client: ClientContext, message: Tree, memory: Tree) -> Reply[MaskedUpload, Tree]:
        numbers, memory = await self.added(client, message, memory)
        return Reply(MaskedUpload(numbers), memory)

    async def added(self, client: ClientContext, message: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        # The loss of its training stays with the client: it would be told beside the sum.
        sums = OwnSums(self.share, message) if isinstance(self.share, RecordNoise) else None
        reply = await self._stepped(replace(client, main=MainTraining(), sums=sums), message, memory)
        upload = reply.upload if self.unchanged is None else uncounted(reply.upload)
        if self.min_class_count:
            few = too_few(client.data.labels, client.num_classes, self.min_class_count)
            upload = withheld(upload, few)  # guard: rare-classes-not-in-sums
        summands = self.summand(upload, message)
        self._check_weights(summands, self.public_weight(len(client.data)))
        numbers = flat(summands)
        if sums is not None:
            numbers = sums.with_noise(summands, client.step_seed)  # guard: record-sums-with-noise
        elif isinstance(self.share, NoiseShare):
            values = ~weight_places(summands)
            numbers = numbers if self.unchanged is None else numbers - self.reference(upload, message)
            numbers[values] = self.share.added(numbers[values], client.step_seed)  # guard: sums-with-noise
        return self._encoded(numbers), reply.memory

    def _encoded(self, numbers: Tensor) -> Tensor:
        try:
            return self.point.encoded(numbers)
        except TooLarge:
            if self.share is None:  # guard: no-size-of-noised-numbers
                raise
            # Its size would be one more release, under one share of the noise alone.
            raise Aborted(
                "what the client adds is too large for the whole numbers of a sum: clip at a smaller length"
            ) from None

    async def _stepped(self, client: ClientContext, message: Tree, memory: Tree) -> Reply[Any, Tree]:
        """The step. Where it has to be private, the text of an error, which may hold values, stays here."""
        try:
            return await self.step(client, message, memory)
        except Exception as error:
            if self.share is None or isinstance(error, Aborted | NotPrivate | Unreleased):
                raise
            log.debug("the step of client %s failed", client.id, exc_info=error)
            raise Aborted("the step failed; the log at level DEBUG says why") from None  # guard: no-text-of-errors

    def reference(self, upload: Tree, message: Tree) -> Tensor:
        """What a client adds that has learnt nothing, (P,), with 0 in the place of weights."""
        assert self.unchanged is not None
        summands = self.summand(self.unchanged(upload, message), message)
        return flat(summands) * ~weight_places(summands)

    def _check_weights(self, summands: Summands, public: float) -> None:
        for name, (_, weight) in summands.items():
            if weight not in (0.0, 1.0, public):  # guard: sums-weights-public
                raise Aborted(f"{name} would count {weight:g}, and what a client counts in a secure sum must be public")


def uncounted(upload: Tree) -> Tree:
    """The upload without numbers of examples, by which clients that count alike are not weighed."""
    role_of, leaves = roles(upload), named_leaves(upload)
    counts = {path: leaf for path, leaf in leaves.items() if isinstance(role_of.get(path), Count) and not leaf.dim()}
    return with_paths(upload, {path: torch.zeros_like(leaf) for path, leaf in counts.items()})


@dataclass(frozen=True)
class AddMasked:
    adds: Add
    terms: Terms
    occasion: Occasion
    exchange: ClassVar = "add"

    async def __call__(self, client: ClientContext, message: Request, memory: Tree) -> Reply[MaskedUpload, Tree]:
        site, digest = self.terms.site(client.id), message_digest(message.base)
        ids = site.roster_ids(self.occasion)
        numbers, memory = await self.adds.added(client, message.base, memory)
        marks = message.has_shared.tolist()
        sealed = {other: text_of(message.sealed[k]) for k, other in enumerate(ids) if marks[k] and other != client.id}
        masked = site.mask(self.occasion, digest, sealed, words(numbers.cpu().numpy()))
        return Reply(MaskedUpload(torch.from_numpy(masked.view("int64"))), memory)


@dataclass(frozen=True)
class Agree:
    terms: Terms
    occasion: Occasion
    exchange: ClassVar = "agree"

    async def __call__(self, client: ClientContext, message: Standing, memory: Tree) -> Reply[AgreementUpload, Tree]:
        site = self.terms.site(client.id)
        ids = site.roster_ids(self.occasion)
        survivors, dropped = (
            [other for other, mark in zip(ids, marks.tolist(), strict=True) if mark]
            for marks in (message.survived, message.dropped)
        )
        return Reply(AgreementUpload(octets(site.agree(self.occasion, survivors, dropped))), memory)


@dataclass(frozen=True)
class Unmask:
    terms: Terms
    occasion: Occasion
    exchange: ClassVar = "unmask"

    async def __call__(self, client: ClientContext, message: Agreed, memory: Tree) -> Reply[UnmaskingUpload, Tree]:
        site = self.terms.site(client.id)
        ids = site.roster_ids(self.occasion)
        shares = site.unmask(self.occasion, dict(zip(ids, map(text_of, message.signature), strict=True)))
        rows = [octets(shares.get(other, bytes(KEY_BYTES))) for other in ids]
        return Reply(UnmaskingUpload(torch.stack(rows)), memory)


LIKE_ADVERT = AdvertUpload(*map(octets, map(bytes, (KEY_BYTES, KEY_BYTES, SIGNATURE_BYTES))))
LIKE_AGREEMENT = AgreementUpload(octets(bytes(SIGNATURE_BYTES)))


def rows_of(count: int, size: int) -> Tensor:
    return torch.zeros(count, size, dtype=torch.uint8, device="cpu")


def message_like(exchange: str, base: Tree) -> Tree:
    """A message with the structure of those that clients are sent in an exchange; `base` is one of the method's."""
    marks = torch.zeros(0, dtype=torch.bool, device="cpu")
    keys, signatures = rows_of(0, KEY_BYTES), rows_of(0, SIGNATURE_BYTES)
    likes: dict[str, Tree] = {
        Advertise.exchange: Announcement(rows_of(0, 0)),
        ShareOut.exchange: RosterMessage(marks, keys, keys, signatures),
        AddMasked.exchange: Request(base, marks, rows_of(0, SEALED_BYTES)),
        Agree.exchange: Standing(marks, marks),
        Unmask.exchange: Agreed(signatures),
    }
    return likes[exchange]
