"""What a site needs for secure sums with other sites: what its clients sign with, and whose signatures it believes.

Each client of a site has a key of its own (Ed25519), which the site makes and signs with the key that it was enrolled
with. The server passes both on. A site keeps the other sites' keys from the first run on, and takes part with no other
ones. So a server that wants to put a site of its own in the place of a real one has to do so before the first run, and
not even then where a site's policy names the keys that it believes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from protofed.api.task import ClientId
from protofed.engine.message import printable
from protofed.engine.secure import new_identity
from protofed.errors import BadInput
from protofed.federation import keys
from protofed.federation.keys import PrivateKey
from protofed.federation.messages import ClientKey, Refusal, SiteKeys
from protofed.federation.site_store import RUN
from protofed.privacy import masks
from protofed.privacy.exchanges import Terms
from protofed.privacy.masks import KEY_BYTES, framed
from protofed.privacy.site import LEAST_SITES
from protofed.privacy.vault import Vault
from protofed.runs.store import disk, opening

FOLDER = "peers"
"""Where a site keeps the keys of the others."""
PURPOSE = b"protofed key of a client 1"
"""Begins what a site signs here, so that it passes for nothing else that it signs."""
DIGEST = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Keyring:
    """A site's own keys, and those of others that it believes."""

    federation: str
    site: str
    private: PrivateKey
    """That it was enrolled with."""
    state: Path
    """The site's folder."""
    believed: tuple[str, ...] = ()
    """Fingerprints of the other sites' keys. None: each is believed when it is first seen."""

    @property
    def vault(self) -> Vault:
        """What must not leave the site. It is in no run's folder: what was unmasked is never forgotten."""
        return Vault(self.state / "vault")

    def own(self, clients: Sequence[ClientId]) -> SiteKeys:
        """What the others are told: the keys of this site's clients, signed."""
        found = []
        for client in clients:
            kept = self.vault.read(client, "identity")
            key = (
                new_identity(self.vault, client) if kept is None else masks.identity_of(bytes.fromhex(kept["private"]))
            )
            signature = self.private.sign(_signed_text(self.federation, self.site, client, key), DIGEST)
            found.append(ClientKey(client, key.hex(), signature.hex()))
        return SiteKeys(self.site, keys.public_text(self.private.public_key()), tuple(found))

    def terms(self, given: Sequence[SiteKeys], share: float) -> Terms:
        identities, party_of = identities_of(given)
        return Terms(self.vault, identities, share, party_of=party_of)

    def refusals(
        self, given: Sequence[SiteKeys], everyone: Collection[ClientId], clients: Sequence[ClientId]
    ) -> Iterator[tuple[Refusal, str]]:
        """Why the keys that the server passes on are not believed. `everyone` are the clients of all sites, `clients`
        those of this one."""
        try:
            identities, _ = identities_of(given)
        except BadInput as error:
            yield Refusal.OTHER_KEYS, str(error)
            return
        if identities.keys() != {*everyone}:
            yield Refusal.OTHER_KEYS, "the server has not given a key for each client, and for no other"
        if len(given) < LEAST_SITES:  # guard: sums-of-three-sites
            what = f"{len(given)} sites take part, and a secure sum takes {LEAST_SITES}"
            yield Refusal.FEW_SITES, f"{what}: of two, each can tell what the other one added"
        ours = {one.client: one.key for one in self.own(clients).clients}
        for one in given:
            told = {client.client: client.key for client in one.clients}
            is_own = one.site == self.site
            if is_own != bool({*told} & {*ours}) or (is_own and told != ours):  # guard: own-keys-in-sums
                yield Refusal.OTHER_KEYS, "the keys that the server gives out for this site's clients are not its own"
            elif not is_own:
                yield from self._refused(one)

    def _refused(self, one: SiteKeys) -> Iterator[tuple[Refusal, str]]:
        """Why another site's keys are not believed."""
        key = keys.public_key(one.key, f"the key of {one.site}")
        mark = keys.fingerprint(key)
        for client in one.clients:
            text = _signed_text(self.federation, one.site, client.client, bytes.fromhex(client.key))
            try:
                key.verify(bytes.fromhex(client.signature), text, DIGEST)
            except InvalidSignature:  # guard: keys-of-clients-signed
                what = f"the key of {printable(client.client)} is not signed by the key of {one.site} ({mark})"
                yield Refusal.OTHER_KEYS, what
        if self.believed and _bare(mark) not in {*map(_bare, self.believed)}:  # guard: policy-names-keys
            what = f"the policy's believed_keys has no key {mark}, which the server says is that of {one.site}"
            yield Refusal.OTHER_KEYS, what
        known = self.known().get(one.site)
        if known is not None and known != mark:  # guard: keys-of-sites-kept
            what = (
                f"the key of {one.site} was {known}, and the server says that it is {mark}. If {one.site} says so too, "
                f"by telephone, remove {self.state / FOLDER / one.site}.pub"
            )
            yield Refusal.OTHER_KEYS, what

    def known(self) -> dict[str, str]:
        """The fingerprints of the keys that were believed before, by site."""
        folder = self.state / FOLDER
        names = sorted(name.removesuffix(".pub") for name in opening.names_in(folder) if name.endswith(".pub"))
        return {name: keys.fingerprint(keys.read_public_key(folder / f"{name}.pub")) for name in names}

    def keep(self, given: Sequence[SiteKeys]) -> None:
        """From now on no other keys are believed."""
        new = [one for one in given if one.site != self.site and one.site not in self.known()]
        if not new:
            return
        disk.make(self.state)
        disk.make(self.state / FOLDER)
        with opening.folder(self.state / FOLDER) as handle:
            for one in new:
                disk.put(handle, f"{one.site}.pub", one.key.encode())


def identities_of(given: Sequence[SiteKeys]) -> tuple[dict[ClientId, bytes], dict[ClientId, str]]:
    """What each client signs with, in canonical order, and the site that it is at. Raises BadInput."""
    found: dict[ClientId, bytes] = {}
    party_of: dict[ClientId, str] = {}
    marks: set[str] = set()
    for one in given:
        if not RUN.fullmatch(one.site):
            raise BadInput("the name of a site is not one of letters, digits, - and _")
        marks.add(keys.fingerprint(keys.public_key(one.key, f"the key of {one.site}")))
        for client in one.clients:
            if client.client in found:
                raise BadInput(f"two keys are given for {printable(client.client)}")
            found[client.client], party_of[client.client] = _octets(client), one.site
    if len(marks) < len(given) or len({one.site for one in given}) < len(given):
        raise BadInput("two sites have one name, or one key")
    return dict(sorted(found.items())), party_of


def fingerprints(given: Sequence[SiteKeys]) -> Mapping[str, str]:
    """Of the sites' keys, for people to compare."""
    return {one.site: keys.fingerprint(keys.public_key(one.key, f"the key of {one.site}")) for one in given}


def _octets(client: ClientKey) -> bytes:
    try:
        found, _ = bytes.fromhex(client.key), bytes.fromhex(client.signature)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise BadInput(f"the key of {printable(client.client)} is none")
    return found


def _signed_text(federation: str, site: str, client: ClientId, key: bytes) -> bytes:
    return framed(PURPOSE, federation.encode(), site.encode(), client.encode(), key)


def _bare(fingerprint: str) -> str:
    return "".join(fingerprint.split()).lower()
