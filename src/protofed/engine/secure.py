"""The server's half of secure sums: clients of a round who give nothing but sums.

A secure sum has five exchanges, each one an ordinary call of the clients. So whoever drops out, is late or sends
nonsense in any of them is left out as usual. Who drops out before adding is not in the sum; who has added is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protofed.api.contexts import ClientContext
from protofed.api.method import Step, Summing
from protofed.api.sums import Summand, Totals
from protofed.api.task import ClientId
from protofed.engine.around import Around, unwrapped
from protofed.engine.kept_sums import KeptSum, KeptSums
from protofed.engine.noised_sums import NoisedSums
from protofed.engine.round import RoundClients
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.state import State
from protofed.engine.upload_validation import refuse_private
from protofed.errors import BadInput, RoundAbandoned, RunFailed
from protofed.methods.families import SumMethod, in_sum_form
from protofed.privacy import exchanges, masks
from protofed.privacy.exchanges import (
    Add,
    AddMasked,
    Advertise,
    Agree,
    Announcement,
    MaskedUpload,
    ShareOut,
    Terms,
    Unmask,
)
from protofed.privacy.fixed_point import FixedPoint, flat, totals_of
from protofed.privacy.site import LEAST_SITES, SEALED_BYTES, Advert, Occasion, Roster, about, threshold, words
from protofed.privacy.unmasking import unmasked
from protofed.privacy.vault import Vault
from protofed.runtimes.jobs import Job
from protofed.tree import Nothing, Tree, leaves

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

SETTINGS_OF_STAGES = {"ClipToMedian": "uploads.clip", "MinimumOwners": "uploads.min_owners"}
"""Which settings call for stages; all others are robust rules."""


class SecureSums:
    """The secure sums of a run."""

    def __init__(self, settings: SecureSettings, terms: Terms | None = None) -> None:
        """`terms` are those of sites, or of a server whose clients are at sites; without them all clients are in this
        process or in forked ones."""
        self.settings = settings
        self.kept = KeptSums()
        """Of clients that are at sites."""
        self._terms = terms

    def keep_in(self, folder: Path) -> None:
        """From now on sums that sites have unmasked are written down here. What is there counts already."""
        if self._terms is not None:
            self.kept.keep_in(folder)

    def terms(self, federation: "Federation") -> Terms:
        """What all sites know. Identities of clients in this process are made when they are first needed."""
        if self._terms is None:
            vault = Vault.new()
            identities = {client: new_identity(vault, client) for client in federation.ids}
            self._terms = Terms(vault, identities, self.settings.threshold)
        if federation.noised_sums is None:
            return self._terms
        return replace(self._terms, least=max(LEAST_SITES, federation.noised_sums.least))

    def clients(
        self, federation: "Federation", state: State, ids: tuple[ClientId, ...], phase: str, evaluates: bool = False
    ) -> "SecureClients":
        if evaluates:
            raise BadInput(
                "secure.sums and evaluation.clients: how each client's model does would be told beside the sum"
            )
        return SecureClients(self, federation, state, ids, phase)

    def refusals(self, federation: "Federation") -> Iterator[str]:
        """What secure sums do not go with."""
        method, name = federation.method, type(unwrapped(federation.method)).__name__
        if not method.sums:  # guard: secure-only-for-sums
            yield (
                f"secure.sums and method.name: the server of {name} reads single uploads with these settings; take "
                "another method, or set secure.sums to false"
            )
        for stage in federation.uploads.stages:  # guard: secure-without-stages
            what = SETTINGS_OF_STAGES.get(type(stage).__name__, "robust.faulty")
            yield f"secure.sums and {what}: {type(stage).__name__} looks at single uploads; one of the two must go"
        reach = federation.uploads.reach
        for key, most in (("max_prototype_ratio", reach.prototypes), ("max_update_ratio", reach.updates)):
            if most:  # guard: secure-without-reach
                yield f"secure.sums and uploads.{key}: single uploads cannot be compared; set it to 0"
        for _ in federation.uploads.transforms:
            yield 'secure.sums and uploads.precision: whole numbers are summed as they are; set it to "float32"'
        if (count := len(federation.sampled(0))) < LEAST_SITES:
            yield f"secure.sums and training.fraction: {count} clients take part in a round, and it takes {LEAST_SITES}"


def new_identity(vault: Vault, client: ClientId) -> bytes:
    """The public half of what a client signs with from now on."""
    private = masks.new_identity()
    vault.keep(client, "identity", {"private": private.hex()})
    return masks.identity_of(private)


def adds_of(federation: "Federation", step: Step[Any, Any, Any], summand: Summand, round: int) -> Add:
    """What clients do to add something in a round, with noise if that is configured: at a server and at every site."""
    method, noised = in_sum_form(unwrapped(federation.method)), federation.noised_sums
    point, uploads = FixedPoint(len(federation.ids)), federation.uploads
    adds = Add(step, summand, method.public_weight, point, uploads.min_class_count)
    if noised is None:
        return adds
    return replace(adds, share=noised.noise_of(round), unchanged=method.unchanged if noised.whole_client else None)


class Told(Around):
    """The method at clients whose messages are those of secure sums."""

    def init_memory(self, client: ClientContext, message: Tree) -> Tree:
        if isinstance(message, Announcement | exchanges.RosterMessage):
            return Nothing()  # a client's first memory is made when it first trains
        return self.base.init_memory(client, message.base if isinstance(message, exchanges.Request) else message)


class SecureClients(RoundClients):
    """The clients of a round, who give sums alone."""

    def __init__(
        self, sums: SecureSums, federation: "Federation", state: State, ids: tuple[ClientId, ...], phase: str
    ) -> None:
        super().__init__(federation, state, ids, phase)
        self._sums = sums
        self._method: SumMethod[Any, Any, Any, Any] = in_sum_form(unwrapped(federation.method))

    @property
    def summing(self) -> Summing:
        return self

    def run(
        self,
        step: Step[Any, Any, Any],
        message_for: Callable[[ClientId], Tree],
        like: Tree,
        *others: Any,
        **named: Any,
    ) -> Iterator[tuple[ClientId, Tree]]:
        if leaves(like):  # guard: secure-nothing-but-sums
            name = type(self._method).__name__
            raise RunFailed(f"secure.sums: {name} asks in {self._where} for uploads one by one, which nobody gives out")
        self._questions += 1
        return super().run(step, message_for, like, *others, **named)

    def summed(
        self, step: Step[Any, Any, Any], message_for: Callable[[ClientId], Tree], like: Tree, summand: Summand
    ) -> Totals:
        """The sums over the clients that have added, exact and in no order."""
        self._questions += 1
        refuse_private(like, self._federation.method.private)
        message = self._common(message_for)
        summands = summand(like, message)
        adds = adds_of(self._federation, step, summand, self._state.round)
        like_numbers = MaskedUpload(torch.zeros(len(flat(summands)), dtype=torch.int64, device="cpu"))
        kept = self._sums.kept.get(self._occasion, exchanges.message_digest(message), self.ids)
        if kept is not None:
            survivors, total = self._restored(kept), kept.total
        elif self._sums.settings.masks:
            self._check_one()
            survivors, total = self._masked_sum(adds, message, like_numbers)
        else:
            self._check_one()
            survivors, total = added_up(super().run(adds, lambda _: message, like_numbers), like_numbers)
            self._charge(survivors, exchanges.message_digest(message))
        if not adds.point.is_sum_of(total, len(survivors)):  # guard: sums-garbage-refused
            raise RoundAbandoned(f"{self._where}: the sum is not one of what clients may add: masks were left in it.")
        decoded = adds.point.decoded(total)
        if adds.unchanged is not None:
            decoded = decoded + len(survivors) * adds.reference(like, message)
        totals = totals_of(decoded, summands)
        self._check_weights(totals, survivors, adds.point)
        return totals if self._noised is None else self._noised.cleaned(totals, self._state.round, len(survivors))

    def _check_one(self) -> None:
        """Whether another sum may be made."""
        if self._noised is not None:
            if self._phase != "round" or self._questions > 1:  # guard: one-noised-sum-a-round
                raise RunFailed(f"privacy.level: {self._where} has a sum beside that of the round's training")
            self._noised.check_budget(self.ids, self._state.round)

    @property
    def _occasion(self) -> Occasion:
        return Occasion(self._federation.name, self._phase, self._state.round, self._questions)

    def _restored(self, kept: KeptSum) -> list[ClientId]:
        """Who has added to a sum that was unmasked before the process ended, or the round was abandoned."""
        self._receipts |= kept.receipts
        self._good |= {*kept.survivors}
        known = {failure.client for failure in self._failures}
        self._failures += [failure for failure in kept.failures if failure.client not in known]
        return [*kept.survivors]

    @property
    def _noised(self) -> NoisedSums | None:
        return self._federation.noised_sums

    def _charge(self, survivors: Sequence[ClientId], digest: bytes, masked: Tensor | None = None) -> None:
        """Before the sum is known, and with fewer than whose noise is enough there is none."""
        if self._noised is not None:
            self._require(survivors, self._noised.least, "added noise")
            secret = masked is not None and self._noised.share.kind == "secret"
            about = digest + (masked.numpy().tobytes() if secret and masked is not None else b"")
            self._noised.charge(survivors, self._state.round, self._questions, about)

    def _common(self, message_for: Callable[[ClientId], Tree]) -> Tree:
        """The message, which must be the same for all: sites compare its digest."""
        messages = [message_for(client) for client in self.ids]
        first = exchanges.message_digest(messages[0])
        if any(m is not messages[0] and exchanges.message_digest(m) != first for m in messages[1:]):
            name = type(self._method).__name__
            raise RunFailed(f"secure.sums: {name} sends clients different messages with these settings")
        return messages[0]

    def _masked_sum(self, adds: Add, message: Tree, like: MaskedUpload) -> tuple[list[ClientId], Tensor]:
        """Who has added, and the sum of what they have."""
        terms, digest = self._sums.terms(self._federation), exchanges.message_digest(message)
        occasion = self._occasion
        roster = self._roster(Advertise(terms, occasion), digest)
        ids, count = roster.ids, len(roster.ids)
        needed = max(threshold(count, terms.share), terms.least)
        self._require(ids, needed, "advertised their keys")
        self._require_parties(terms, ids)

        to_all = exchanges.roster_message(roster, list(terms.identities))
        like_shares = exchanges.SharesUpload(exchanges.rows_of(count, SEALED_BYTES))
        sealed = self._exchanged(ShareOut(terms, occasion), to_all, like_shares)
        self._require(sealed, needed, "shared their secrets")
        self._require_parties(terms, sealed)

        has_shared = torch.tensor([client in sealed for client in ids], device="cpu")

        def request(client: ClientId) -> exchanges.Request:
            place, nothing = ids.index(client), torch.zeros(SEALED_BYTES, dtype=torch.uint8, device="cpu")
            rows = [sealed[other].sealed[place].cpu() if other in sealed else nothing for other in ids]
            return exchanges.Request(message, has_shared, torch.stack(rows))

        survivors, masked = added_up(super().run(AddMasked(adds, terms, occasion), request, like), like)
        self._require(survivors, needed, "added something")
        self._require_parties(terms, survivors)
        self._charge(survivors, digest, masked)
        dropped = [client for client in sealed if client not in survivors]

        agreed = self._agreed(Agree(terms, occasion), ids, survivors, dropped)
        self._require(agreed, needed, "signed who has added")
        given = self._shares(Unmask(terms, occasion), ids, agreed)
        self._require(given, needed, "helped to take the masks away")
        binding = about(occasion, digest, roster)
        total = unmasked(words(masked.numpy()), survivors, dropped, given, roster, binding, needed)
        found = torch.from_numpy(total.view("int64"))
        receipts = {client: self._receipts[client] for client in survivors if client in self._receipts}
        # guard: unmasked-sums-kept
        self._sums.kept.put(occasion, digest, KeptSum(self.ids, survivors, receipts, self._failures, found))
        return survivors, found

    def _roster(self, step: Advertise, digest: bytes) -> Roster:
        """Who takes part in a sum over what is made of a message with this digest, with the keys of each."""
        adverts = self._exchanged(step, Announcement(exchanges.octets(digest)), exchanges.LIKE_ADVERT)
        keys = {c: Advert(*map(exchanges.text_of, (a.sealing, a.masking, a.signature))) for c, a in adverts.items()}
        return Roster(keys)

    def _agreed(
        self, step: Agree, ids: Sequence[ClientId], survivors: Sequence[ClientId], dropped: Sequence[ClientId]
    ) -> dict[ClientId, Tensor]:
        """The signatures below who has added and who has dropped out."""
        marks = (torch.tensor([client in some for client in ids], device="cpu") for some in (survivors, dropped))
        answers = self._exchanged(step, exchanges.Standing(*marks), exchanges.LIKE_AGREEMENT)
        return {client: answer.signature.cpu() for client, answer in answers.items()}

    def _shares(
        self, step: Unmask, ids: Sequence[ClientId], agreed: dict[ClientId, Tensor]
    ) -> dict[ClientId, dict[ClientId, bytes]]:
        """From each site that helps a share of each one's secret."""
        none = torch.zeros_like(exchanges.LIKE_AGREEMENT.signature)
        message = exchanges.Agreed(torch.stack([agreed.get(client, none) for client in ids]))
        like = exchanges.UnmaskingUpload(exchanges.rows_of(len(ids), masks.KEY_BYTES))
        answers = self._exchanged(step, message, like)
        return {c: dict(zip(ids, map(exchanges.text_of, u.shares), strict=True)) for c, u in answers.items()}

    def _exchanged(self, step: Step[Any, Any, Any], message: Tree, like: Tree) -> dict[ClientId, Any]:
        """An exchange that is not of the method's: it changes nothing of what clients remember."""
        receipts = dict(self._receipts)
        answers = dict(super().run(step, lambda _: message, like))
        self._receipts = receipts
        return answers

    def _require(self, clients: Any, needed: int, what: str) -> None:
        if len(clients) < needed:
            raise RoundAbandoned(f"{self._where}: {len(clients)} clients have {what}, and the sum needs {needed}.")

    def _require_parties(self, terms: Terms, clients: Iterable[ClientId]) -> None:
        parties = {terms.party_of.get(client, client) for client in clients}
        if len(parties) < LEAST_SITES:
            raise RoundAbandoned(
                f"{self._where}: clients of {len(parties)} sites are left. With fewer than {LEAST_SITES}, a site can "
                "work out what another one has added."
            )

    def _check_weights(self, totals: Totals, survivors: Sequence[ClientId], point: FixedPoint) -> None:
        """What clients count is public, so its sum is known: another one comes of a lie, or of masks that are left."""
        enrolled = self._federation.task.spec.clients
        expected = sum(self._method.public_weight(enrolled[client].num_examples) for client in survivors)
        allowed, found = (expected, float(len(survivors))), {name: mean.weight for name, mean in totals.items()}
        if self._method.adds_to_one and totals:
            found = {"all models together": sum(found.values())}
        for name, weight in found.items():
            if min(abs(weight - one) for one in allowed) > len(survivors) * point.error:  # guard: sums-weights-known
                raise RoundAbandoned(
                    f"{self._where}: {name} counts {weight:g} in the sum, and clients together {expected:g}."
                )

    def _job(self, client: ClientId, call: Any, halvings: int = 0) -> Job:
        job = super()._job(client, call, halvings)
        return replace(job, method=Told(job.method))


def added_up(uploads: Iterator[tuple[ClientId, MaskedUpload]], like: MaskedUpload) -> tuple[list[ClientId], Tensor]:
    """Who has added, and the sum modulo 2⁶⁴, made as uploads arrive."""
    survivors, total = [], torch.zeros_like(like.numbers)
    for client, upload in uploads:
        survivors.append(client)
        total += upload.numbers.cpu()
    return survivors, total
