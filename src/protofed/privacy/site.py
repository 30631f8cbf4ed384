"""The client's half of a secure sum (Bonawitz et al. 2017): five exchanges, and what a site refuses in each.

1. `advertise`: two fresh public keys, signed by the site together with the run, the round and the message.
2. `share`: shares of both secrets, sealed for each of the others, once all signatures are right.
3. `mask`: what the site adds, under a mask of its own and one with each of the others.
4. `agree`: the site signs who has added and who has dropped out, as it was told.
5. `unmask`: of each site one share: of its own mask if it has added, of its key if it has dropped out. Never both, and
   only if enough sites have signed the same.

The server is not trusted: it passes everything on, and may ask for anything. Without the fourth exchange it could name
others as dropped out to each site. Then it gets the keys of more sites than may drop out, and the sum of few others.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from protofed.api.task import ClientId
from protofed.privacy import masks
from protofed.privacy.masks import KEY_BYTES, Forged, Words, framed
from protofed.privacy.vault import Aborted, Vault

LEAST_SITES = 3
"""Of two, each knows what the other one added."""
SEALED_BYTES = masks.NONCE_BYTES + 2 * KEY_BYTES + masks.TAG_BYTES


def threshold(count: int, share: float) -> int:
    """How many of so many sites must stay to the end. With more than two thirds, as many sites cannot have signed two
    different accounts of who has added, even if just under a third of them sign everything."""
    return max(2 * count // 3 + 1, ceil(share * count - 1e-9))


@dataclass(frozen=True)
class Occasion:
    """What a secure sum is for. In each phase of a round there is a first one, a second one and so on."""

    run: str
    phase: str
    round: int
    number: int = 1

    @property
    def text(self) -> bytes:
        return framed(self.run.encode(), self.phase.encode(), str(self.round).encode(), str(self.number).encode())


@dataclass(frozen=True)
class Advert:
    """A site's public keys of one round."""

    sealing: bytes
    masking: bytes
    signature: bytes


@dataclass(frozen=True)
class Roster:
    """All sites that take part, in canonical order, with their public keys."""

    adverts: Mapping[ClientId, Advert]

    @property
    def ids(self) -> list[ClientId]:
        return list(self.adverts)

    @property
    def digest(self) -> bytes:
        rows = (framed(c.encode(), a.sealing, a.masking) for c, a in self.adverts.items())
        return hashlib.sha256(framed(*rows)).digest()


def advert_text(occasion: Occasion, digest: bytes, client: ClientId, sealing: bytes, masking: bytes) -> bytes:
    """What a site signs: who it is, its keys, and what they are for."""
    return framed(b"protofed advert", occasion.text, digest, client.encode(), sealing, masking)


def pair_mask(private: bytes, public: bytes, about: bytes, pair: tuple[ClientId, ClientId], count: int) -> Words:
    """The mask that two sites have in common. Whoever comes first adds it, the other one subtracts it."""
    first, second = sorted(pair)
    purpose = framed(b"protofed pair mask", about, first.encode(), second.encode())
    return masks.stream(masks.agreed_key(private, public, purpose), count)


def self_mask(seed: bytes, about: bytes, client: ClientId, count: int) -> Words:
    """A site's own mask: without it, one whose key is recovered although it has added would be seen."""
    return masks.stream(masks.derived(seed, framed(b"protofed self mask", about, client.encode())), count)


def about(occasion: Occasion, digest: bytes, roster: Roster) -> bytes:
    """What all keys of a round depend on: sites that were told different things have nothing in common."""
    return framed(occasion.text, digest, roster.digest)


def agreement_text(binding: bytes, survivors: Sequence[ClientId], dropped: Sequence[ClientId]) -> bytes:
    """What a site signs before it gives shares: who has added, and who has dropped out."""
    lists = (framed(*(client.encode() for client in sorted(ids))) for ids in (survivors, dropped))
    return framed(b"protofed agreement", binding, *lists)


@dataclass(frozen=True)
class Site:
    """One client in secure sums. What it knows between two exchanges is in the vault."""

    vault: Vault
    client: ClientId
    identities: Mapping[ClientId, bytes]
    """What each site's signatures are checked with; known before, and not from the server."""
    share: float
    """The least part of the sites that must stay."""
    least: int = LEAST_SITES
    """And so many in any case: the noise of so many is enough."""
    party_of: Mapping[ClientId, str] = field(default_factory=dict)
    """To whom a client belongs that has not a house of its own: what is at one site has one owner, who knows all of
    it."""

    def needed(self, count: int) -> int:
        """How many of so many sites must stay to the end."""
        return max(threshold(count, self.share), self.least)  # guard: noise-of-enough-sites

    def advertise(self, occasion: Occasion, digest: bytes) -> Advert:
        """The first exchange. Whatever the site knew of an earlier one is forgotten."""
        if occasion.text.hex() in self._unmasked(occasion):  # guard: sums-unmasked-once
            raise Aborted("this sum has been unmasked already: a second one would tell what one client added")
        sealing, masking, seed = masks.new_secret(), masks.new_secret(), masks.new_secret()
        public = masks.public_key(sealing), masks.public_key(masking)
        kept = {"sealing": sealing, "masking": masking, "seed": seed, "digest": digest}
        self._keep("advertised", occasion, {name: value.hex() for name, value in kept.items()})
        identity = bytes.fromhex((self.vault.read(self.client, "identity") or {})["private"])
        return Advert(*public, masks.signed(identity, advert_text(occasion, digest, self.client, *public)))

    def share_out(self, occasion: Occasion, roster: Roster) -> dict[ClientId, bytes]:
        """The second exchange: for each of the others, sealed, its shares of this site's two secrets."""
        kept = self._kept("advertised", occasion)
        digest = bytes.fromhex(kept["digest"])
        own = roster.adverts.get(self.client)
        secrets = {name: bytes.fromhex(kept[name]) for name in ("sealing", "masking", "seed")}
        if own is None or (own.sealing, own.masking) != tuple(map(masks.public_key, list(secrets.values())[:2])):
            raise Aborted("the keys that the server gives out for this site are not its own")
        if len(roster.ids) < max(LEAST_SITES, self.least):  # guard: sums-of-three
            needed = max(LEAST_SITES, self.least)
            raise Aborted(f"{len(roster.ids)} sites are too few for a secure sum: it takes {needed}")
        self._check_parties(roster.ids)
        for client, advert in roster.adverts.items():
            text = advert_text(occasion, digest, client, advert.sealing, advert.masking)
            if client not in self.identities:
                raise Aborted(f"nobody knows the site {client}")
            # guard: sums-keys-signed
            self._checked(masks.check_signature, self.identities[client], advert.signature, text)
        count = len(roster.ids)
        of_seed, of_key = (masks.shares_of(secrets[name], self.needed(count), count) for name in ("seed", "masking"))
        sent, binding = {}, about(occasion, digest, roster)
        for client, seed_share, key_share in zip(roster.ids, of_seed, of_key, strict=True):
            if client != self.client:
                key = self._seal_key(secrets["sealing"], roster, client, binding)
                sent[client] = masks.sealed(key, seed_share + key_share, _route(binding, self.client, client))
        own_place = roster.ids.index(self.client)
        adverts = {c: [a.sealing.hex(), a.masking.hex(), a.signature.hex()] for c, a in roster.adverts.items()}
        own_shares = [of_seed[own_place].hex(), of_key[own_place].hex()]
        self._keep("shared", occasion, {**kept, "adverts": adverts, "own": own_shares})
        return sent

    def mask(self, occasion: Occasion, digest: bytes, sealed: Mapping[ClientId, bytes], numbers: Words) -> Words:
        """The third exchange: what the site adds, masked for those that have shared their secrets with it. `digest` is
        that of the message that the numbers were made of."""
        kept = self._kept("shared", occasion)
        if digest.hex() != kept["digest"]:  # guard: sums-one-message
            raise Aborted("the message is not the one that was announced to all sites")
        roster, others = _roster(kept), sorted(sealed)
        if not set(others) <= set(roster.ids) - {self.client}:
            raise Aborted("the server names sites that do not take part")
        if len(others) + 1 < self.needed(len(roster.ids)):  # guard: sums-threshold
            raise Aborted(f"{len(others) + 1} of {len(roster.ids)} sites are too few to hide what one of them adds")
        self._check_parties([self.client, *others])
        binding = about(occasion, digest, roster)
        shares = {}
        for client in others:
            key = self._seal_key(bytes.fromhex(kept["sealing"]), roster, client, binding)
            text = self._checked(masks.opened, key, sealed[client], _route(binding, client, self.client))
            shares[client] = [text[:KEY_BYTES].hex(), text[KEY_BYTES:].hex()]
        # guard: sums-own-mask
        masked = numbers + self_mask(bytes.fromhex(kept["seed"]), binding, self.client, len(numbers))
        for client in others:
            public = roster.adverts[client].masking
            mask = self._checked(
                pair_mask, bytes.fromhex(kept["masking"]), public, binding, (self.client, client), len(numbers)
            )
            masked = masked + mask if self.client < client else masked - mask  # guard: sums-masks-cancel
        # From here on the site's own keys are of no use to it: what is left to do takes shares alone.
        own = {"adverts": kept["adverts"], "digest": kept["digest"], "shares": {**shares, self.client: kept["own"]}}
        self._keep("masked", occasion, own)
        return masked

    def agree(self, occasion: Occasion, survivors: Sequence[ClientId], dropped: Sequence[ClientId]) -> bytes:
        """The fourth exchange: the site's signature below who has added and who has dropped out. It gives one."""
        kept = self._kept("masked", occasion)
        if set(survivors) & set(dropped):  # guard: sums-never-both-shares
            raise Aborted("the server asks for both shares of one site, which would show what it added")
        if {*survivors, *dropped} != set(kept["shares"]) or self.client not in survivors:  # guard: sums-of-all-shared
            raise Aborted("the server names other sites than those that have shared their secrets")
        if len(survivors) < self.needed(len(kept["adverts"])):  # guard: sums-threshold-at-the-end
            raise Aborted(
                f"{len(survivors)} of {len(kept['adverts'])} sites are too few to hide what one of them added"
            )
        self._check_parties(survivors)
        self._keep("agreed", occasion, {**kept, "survivors": sorted(survivors), "dropped": sorted(dropped)})
        identity = bytes.fromhex((self.vault.read(self.client, "identity") or {})["private"])
        return masks.signed(identity, self._agreement(occasion, kept, survivors, dropped))

    def unmask(self, occasion: Occasion, signatures: Mapping[ClientId, bytes]) -> dict[ClientId, bytes]:
        """The last exchange: of each survivor a share of its own mask, of each that dropped out one of its key. The
        signatures are those of the survivors."""
        kept = self._kept("agreed", occasion)
        survivors, dropped = kept["survivors"], kept["dropped"]
        text = self._agreement(occasion, kept, survivors, dropped)
        agreed = [c for c in survivors if c in signatures and self._has_signed(c, signatures[c], text)]
        if len(agreed) < self.needed(len(kept["adverts"])):  # guard: sums-agreed
            raise Aborted(f"{len(agreed)} of {len(survivors)} sites were told that the same ones have added: too few")
        done = [*self._unmasked(occasion), occasion.text.hex()]
        self.vault.keep(self.client, _of_run(occasion), {"occasions": done})
        self.vault.forget(self.client, "secrets")  # guard: sums-secrets-forgotten
        chosen = {**dict.fromkeys(survivors, 0), **dict.fromkeys(dropped, 1)}
        return {client: bytes.fromhex(kept["shares"][client][which]) for client, which in chosen.items()}

    def _agreement(
        self, occasion: Occasion, kept: Mapping[str, Any], survivors: Sequence[ClientId], dropped: Sequence[ClientId]
    ) -> bytes:
        return agreement_text(about(occasion, bytes.fromhex(kept["digest"]), _roster(kept)), survivors, dropped)

    def _has_signed(self, client: ClientId, signature: bytes, text: bytes) -> bool:
        try:
            masks.check_signature(self.identities[client], signature, text)
        except Forged:
            return False
        return True

    def roster_ids(self, occasion: Occasion) -> list[ClientId]:
        """Who takes part, as the site was told."""
        kept = self.vault.read(self.client, "secrets")
        if kept is None or kept["occasion"] != occasion.text.hex() or "adverts" not in kept:
            raise Aborted("this exchange is not the next one of this round")
        return list(kept["adverts"])

    def _unmasked(self, occasion: Occasion) -> list[str]:
        """The sums of the same run that this site has helped to unmask."""
        found: list[str] = (self.vault.read(self.client, _of_run(occasion)) or {"occasions": []})["occasions"]
        return found

    def _check_parties(self, clients: Sequence[ClientId]) -> None:
        parties = {self.party_of.get(client, client) for client in clients}
        if len(parties) < LEAST_SITES:  # guard: sums-of-three-houses
            raise Aborted(
                f"clients of {len(parties)} sites are too few: with fewer than {LEAST_SITES}, a site can work out what "
                "another one has added"
            )

    def _seal_key(self, private: bytes, roster: Roster, other: ClientId, binding: bytes) -> bytes:
        purpose = framed(b"protofed shares", binding, *(c.encode() for c in sorted((self.client, other))))
        key: bytes = self._checked(masks.agreed_key, private, roster.adverts[other].sealing, purpose)
        return key

    def _checked(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Forged as error:
            raise Aborted(str(error)) from error

    def _keep(self, stage: str, occasion: Occasion, secrets: Mapping[str, Any]) -> None:
        self.vault.keep(self.client, "secrets", {**secrets, "stage": stage, "occasion": occasion.text.hex()})

    def _kept(self, stage: str, occasion: Occasion) -> dict[str, Any]:
        """What the site knows, if it is at this stage of this round: an exchange is made once, and in its turn."""
        kept = self.vault.read(self.client, "secrets")
        if kept is None or (kept["stage"], kept["occasion"]) != (stage, occasion.text.hex()):
            raise Aborted("this exchange is not the next one of this round")
        return kept


def _of_run(occasion: Occasion) -> str:
    """Where the vault has what was unmasked in a run."""
    return f"unmasked-{hashlib.sha256(occasion.run.encode()).hexdigest()[:32]}"


def _route(binding: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    return framed(binding, sender.encode(), receiver.encode())


def _roster(kept: Mapping[str, Any]) -> Roster:
    return Roster({c: Advert(*map(bytes.fromhex, keys)) for c, keys in kept["adverts"].items()})


def words(numbers: Any) -> Words:
    """Whole numbers of 64 bits, as they are added modulo 2⁶⁴."""
    found: Words = np.ascontiguousarray(numbers, dtype=np.int64).view(np.uint64)
    return found
