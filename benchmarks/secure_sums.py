"""What a secure sum costs: seconds of one client and of the server, by clients, numbers and drop-outs, and bytes.

All five exchanges of one site are timed, with real keys, signatures and shares, and all that the server computes. There
is no training and no network. What the other sites would send is made up where it costs the timed ones the same: so the
sum itself is not looked at here, but in tests/privacy. The fastest of three sites is shown, since other work on a
machine only adds; the server's work is done once.

    python benchmarks/secure_sums.py                          all cells, about 15 minutes
    python benchmarks/secure_sums.py --clients 12 --limit 10  some of them

A cell is left out if its masks alone would take longer than `--limit` seconds, by the time that one mask has taken.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from protofed.privacy import masks
from protofed.privacy.masks import KEY_BYTES, SIGNATURE_BYTES
from protofed.privacy.site import (
    SEALED_BYTES,
    Occasion,
    Roster,
    Site,
    _of_run,
    _route,
    about,
    agreement_text,
    threshold,
    words,
)
from protofed.privacy.unmasking import unmasked
from protofed.privacy.vault import Vault

CLIENTS = (12, 100, 1000)
NUMBERS = (19_000, 115_306, 4_900_000)
SHARE = 0.67
OCCASION, DIGEST = Occasion("benchmark", "round", 0), bytes(32)


class Sites:
    """The sites of a round that have advertised their keys."""

    def __init__(self, count: int, folder: Path) -> None:
        self.vault = Vault(folder)
        self.names = [f"c{k:04d}" for k in range(count)]
        self.identities = private = {name: masks.new_identity() for name in self.names}
        for name in self.names:
            self.vault.keep(name, "identity", {"private": private[name].hex()})
        public = {name: masks.identity_of(key) for name, key in private.items()}
        self.sites = {name: Site(self.vault, name, public, SHARE) for name in self.names}
        self.roster = Roster({name: site.advertise(OCCASION, DIGEST) for name, site in self.sites.items()})
        self.binding = about(OCCASION, DIGEST, self.roster)
        self.needed = threshold(count, SHARE)
        kept = {name: self.vault.read(name, "secrets") or {} for name in self.names}
        self.sealing = {name: bytes.fromhex(kept[name]["sealing"]) for name in self.names}
        self.masking = {name: bytes.fromhex(kept[name]["masking"]) for name in self.names}

    def sealed_for(self, client: str) -> dict[str, bytes]:
        """What all others seal for a site: shares that are random, as real ones are to whoever has one of them."""
        key = {c: self.sites[c]._seal_key(self.sealing[c], self.roster, client, self.binding) for c in self.names}
        texts = {c: masks.new_secret() + masks.new_secret() for c in self.names if c != client}
        return {c: masks.sealed(key[c], text, _route(self.binding, c, client)) for c, text in texts.items()}

    def client_seconds(self, client: str, numbers: int) -> float:
        """All five exchanges of one site."""
        site, values = self.sites[client], words(np.arange(numbers))
        self.vault.forget(client, _of_run(OCCASION))
        begin = time.perf_counter()
        site.advertise(OCCASION, DIGEST)
        seconds = time.perf_counter() - begin
        self._with_old_keys(client)
        sealed = self.sealed_for(client)
        begin = time.perf_counter()
        site.share_out(OCCASION, self.roster)
        site.mask(OCCASION, DIGEST, sealed, values)
        site.agree(OCCASION, self.names, [])
        seconds += time.perf_counter() - begin
        signatures = self.signatures()
        begin = time.perf_counter()
        site.unmask(OCCASION, signatures)
        return seconds + time.perf_counter() - begin

    def signatures(self) -> dict[str, bytes]:
        """Everybody's below that all have added."""
        text = agreement_text(self.binding, self.names, [])
        return {name: masks.signed(self.identities[name], text) for name in self.names}

    def _with_old_keys(self, client: str) -> None:
        """The keys of the roster again, in the place of those that were made for the clock."""
        keys = {"sealing": self.sealing[client], "masking": self.masking[client], "seed": masks.new_secret()}
        kept = {name: value.hex() for name, value in {**keys, "digest": DIGEST}.items()}
        self.sites[client]._keep("advertised", OCCASION, kept)

    def server_seconds(self, numbers: int, drops: int) -> float:
        """Adding up what arrives, and taking the masks away."""
        dropped, survivors = self.names[:drops], self.names[drops:]
        shares = {c: {other: masks.new_secret() for other in survivors} for c in survivors}
        for client in dropped:
            of_key = masks.shares_of(self.masking[client], self.needed, len(self.names))
            for c in survivors:
                shares[c][client] = of_key[self.names.index(c)]
        upload = words(np.arange(numbers))
        begin = time.perf_counter()
        total = np.zeros_like(upload)
        for _ in survivors:
            total += upload
        unmasked(total, survivors, dropped, shares, self.roster, self.binding, self.needed)
        return time.perf_counter() - begin


def one_mask(numbers: int) -> float:
    begin = time.perf_counter()
    masks.stream(masks.new_secret(), numbers)
    return time.perf_counter() - begin


def overhead(count: int) -> tuple[int, int]:
    """Bytes to and from a client beside the message and the numbers of the sum."""
    down = (
        32
        + count * (8 + 2 * KEY_BYTES + SIGNATURE_BYTES)
        + count * (1 + SEALED_BYTES)
        + 2 * count
        + count * SIGNATURE_BYTES
    )
    return down, 2 * KEY_BYTES + 2 * SIGNATURE_BYTES + count * SEALED_BYTES + count * KEY_BYTES


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    parser.add_argument("--numbers", type=int, nargs="*", default=NUMBERS)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that the masks of a cell may take")
    chosen = parser.parse_args()
    print("| clients | numbers | a client, s | server, s | server with drop-outs, s | bytes down | bytes up |")
    print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for count in chosen.clients:
        with tempfile.TemporaryDirectory() as folder:
            sites = Sites(count, Path(folder))
            for numbers in chosen.numbers:
                mask, drops = min(one_mask(numbers) for _ in range(3)), -(-count // 20)
                repeats = 3 if 3 * count * mask < chosen.limit else 1
                of_client = (
                    "–"
                    if count * mask > chosen.limit
                    else seconds(min(sites.client_seconds(c, numbers) for c in sites.names[:repeats]))
                )
                of_server = [
                    "–" if (count + d * count) * mask > chosen.limit else seconds(sites.server_seconds(numbers, d))
                    for d in (0, drops)
                ]
                down, up = overhead(count)
                print(
                    f"| {count} | {numbers} | {of_client} | {of_server[0]} | {of_server[1]} ({drops}) "
                    f"| {down} | {8 * numbers} + {up} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
