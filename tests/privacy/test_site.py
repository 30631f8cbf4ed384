"""Secure sums without an engine: sums, drop-outs, and what a site refuses."""

import gc
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from scipy.stats import chisquare

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from protofed.errors import RoundAbandoned
from protofed.privacy import masks
from protofed.privacy.masks import Words
from protofed.privacy.site import (
    Advert,
    Occasion,
    Roster,
    Site,
    about,
    agreement_text,
    pair_mask,
    self_mask,
    threshold,
    words,
)
from protofed.privacy.unmasking import unmasked
from protofed.privacy.vault import Aborted, Vault

OCCASION = Occasion("run", "round", 3)
DIGEST = bytes(range(32))
NUMBERS = 7


@dataclass
class Server:
    """Passes on what sites say; a test changes it to lie."""

    sites: dict[str, Site]
    numbers: dict[str, Words]
    drops: dict[int, set[str]] = field(default_factory=dict)
    """By exchange, who drops out instead of answering."""
    occasion: Occasion = OCCASION
    adverts: dict[str, Advert] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    signed: dict[str, bytes] = field(default_factory=dict)

    def there(self, exchange: int, asked: object) -> Iterator[str]:
        return (client for client in sorted(asked) if client not in self.drops.get(exchange, ()))  # type: ignore[call-overload]

    @property
    def roster(self) -> Roster:
        return Roster(self.adverts)

    @property
    def needed(self) -> int:
        return threshold(len(self.adverts), 0.67)

    def advertise(self) -> None:
        self.adverts = {c: self.sites[c].advertise(self.occasion, DIGEST) for c in self.there(1, self.sites)}

    def share_out(self) -> None:
        self.advertise()
        self.sealed = {c: self.sites[c].share_out(self.occasion, self.roster) for c in self.there(2, self.adverts)}

    def for_site(self, client: str) -> dict[str, bytes]:
        return {other: sent[client] for other, sent in self.sealed.items() if other != client}

    def mask(self) -> None:
        self.share_out()
        for c in self.there(3, self.sealed):
            self.masked[c] = self.sites[c].mask(self.occasion, DIGEST, self.for_site(c), self.numbers[c])

    @property
    def dropped(self) -> list[str]:
        return [client for client in self.sealed if client not in self.masked]

    def agree(self) -> None:
        self.mask()
        self.signed = {
            c: self.sites[c].agree(self.occasion, list(self.masked), self.dropped) for c in self.there(4, self.masked)
        }

    def total(self) -> Words:
        self.agree()
        shares = {c: self.sites[c].unmask(self.occasion, self.signed) for c in self.there(5, self.signed)}
        binding = about(self.occasion, DIGEST, self.roster)
        return unmasked(self.masked_sum, list(self.masked), self.dropped, shares, self.roster, binding, self.needed)

    @property
    def masked_sum(self) -> Words:
        return np.stack(list(self.masked.values())).sum(0)


def server(tmp_path: Path, count: int = 10, seed: int = 0) -> Server:
    draws, vault = Random(seed), Vault(tmp_path)
    names = [f"c{k:02d}" for k in range(count)]
    identities = {name: masks.new_identity() for name in names}
    for name, private in identities.items():
        vault.keep(name, "identity", {"private": private.hex()})
    public = {name: masks.identity_of(private) for name, private in identities.items()}
    numbers = {name: words([draws.randrange(-(2**61), 2**61) for _ in range(NUMBERS)]) for name in names}
    return Server({name: Site(vault, name, public, 0.67) for name in names}, numbers)


def plain(of: Server, clients: object) -> list[int]:
    """The sum modulo 2⁶⁴, of Python's own whole numbers."""
    return [sum(int(of.numbers[c][k]) for c in clients) % 2**64 for k in range(NUMBERS)]  # type: ignore[attr-defined]


def drawn(of: Server, count: int, seed: int) -> set[str]:
    return set(Random(seed).sample(sorted(of.sites), count))


@pytest.mark.parametrize("exchange", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_sum_is_that_of_those_who_added_whoever_drops_out(tmp_path: Path, exchange: int, count: int) -> None:
    """T10."""
    of = server(tmp_path)
    gone = drawn(of, count, seed=10 * exchange + count)
    of.drops = {exchange: gone}
    total = of.total()
    added = set(of.sites) if exchange > 3 else set(of.sites) - gone
    assert set(of.masked) == added
    assert total.tolist() == plain(of, added)


@pytest.mark.parametrize("seed", range(6))
def test_the_sum_is_right_when_sites_drop_out_in_every_exchange(tmp_path: Path, seed: int) -> None:
    """16 sites: 15 advertise, 14 share, 13 add, 12 sign who has added and 11 help; the 15 need 11."""
    of = server(tmp_path, 16, seed)
    gone = Random(seed).sample(sorted(of.sites), 5)
    of.drops = {exchange: {client} for exchange, client in enumerate(gone, 1)}
    total = of.total()
    assert of.needed == 11
    assert total.tolist() == plain(of, set(of.sites) - set(gone[:3]))


def test_the_order_in_which_sites_add_changes_no_bit(tmp_path: Path) -> None:
    """T10: 50 orders of the masked numbers of those that stayed, with two gone in each of two exchanges."""
    of = server(tmp_path, 13)
    of.drops = {2: {"c03", "c08"}, 3: {"c00", "c05"}}
    of.total()
    for seed in range(50):
        order = Random(seed).sample(sorted(of.masked), len(of.masked))
        total = words([0] * NUMBERS)
        for client in order:
            total = total + of.masked[client]
        assert total.tolist() == of.masked_sum.tolist()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_sites_can_sum_too(tmp_path: Path, count: int) -> None:
    of = server(tmp_path, count)
    assert of.total().tolist() == plain(of, of.sites)


def test_more_than_two_thirds_must_stay() -> None:
    """⌊2n/3⌋ + 1, or the share of the setting if that is more."""
    assert [threshold(n, 0.67) for n in (3, 4, 5, 6, 9, 10, 12, 100)] == [3, 3, 4, 5, 7, 7, 9, 67]
    assert [threshold(n, 1.0) for n in (3, 10)] == [3, 10]
    for n in range(3, 200):
        assert 3 * threshold(n, 0.67) > 2 * n


def test_with_too_few_at_the_end_there_is_no_sum(tmp_path: Path) -> None:
    """T10."""
    of = server(tmp_path)
    of.drops = {5: drawn(of, 4, seed=1)}
    with pytest.raises(RoundAbandoned, match="6 sites gave shares, and 7"):
        of.total()


def test_with_too_few_that_signed_who_has_added_nobody_gives_shares(tmp_path: Path) -> None:
    of = server(tmp_path)
    of.drops = {4: drawn(of, 4, seed=1)}
    with pytest.raises(Aborted, match="6 of 10 sites were told that the same ones have added"):
        of.total()


def test_nobody_adds_beside_too_few_others(tmp_path: Path) -> None:
    of = server(tmp_path)
    of.share_out()
    few = dict(list(of.for_site("c00").items())[:5])
    aborts(lambda: of.sites["c00"].mask(OCCASION, DIGEST, few, of.numbers["c00"]), "6 of 10 sites are too few")


@pytest.mark.parametrize("exchange", [2, 3])
def test_with_too_few_before_the_end_sites_abort(tmp_path: Path, exchange: int) -> None:
    of = server(tmp_path)
    of.drops = {exchange: drawn(of, 4, seed=1)}
    with pytest.raises(Aborted, match="too few"):
        of.total()


def test_what_a_site_sends_is_uniform(tmp_path: Path) -> None:
    """T11: 10⁶ numbers, all of them 5, in 2¹⁶ cells. By chance, one run in a million fails."""
    of = server(tmp_path, 3)
    of.numbers = {name: words(np.full(10**6, 5)) for name in of.sites}
    of.mask()
    for masked in of.masked.values():
        cells = np.bincount((masked >> np.uint64(48)).astype(np.int64), minlength=2**16)
        low = np.bincount((masked & np.uint64(0xFFFF)).astype(np.int64), minlength=2**16)
        assert chisquare(cells).pvalue > 1e-6
        assert chisquare(low).pvalue > 1e-6


def test_with_all_masks_of_pairs_known_a_site_is_still_hidden(tmp_path: Path) -> None:
    """A server that takes a late site for one that has dropped out recovers its key; the site's own mask remains."""
    of = server(tmp_path, 3)
    of.share_out()
    kept = {c: site.vault.read(c, "secrets") or {} for c, site in of.sites.items()}
    site = of.sites["c00"]
    left = site.mask(OCCASION, DIGEST, of.for_site("c00"), of.numbers["c00"])
    binding, key = about(OCCASION, DIGEST, of.roster), bytes.fromhex(kept["c00"]["masking"])
    for other in ("c01", "c02"):
        left = left - pair_mask(key, of.adverts[other].masking, binding, ("c00", other), NUMBERS)
    assert not set(left.tolist()) & set(of.numbers["c00"].tolist())
    own = self_mask(bytes.fromhex(kept["c00"]["seed"]), binding, "c00", NUMBERS)
    assert (left - own).tolist() == of.numbers["c00"].tolist()


# ---- what a site refuses


def lies(tmp_path: Path, until: str) -> Server:
    of = server(tmp_path)
    getattr(of, until)()
    return of


def aborts(act: Callable[[], object], match: str) -> None:
    with pytest.raises(Aborted, match=match):
        act()


def test_both_shares_of_one_site_are_never_given(tmp_path: Path) -> None:
    """T12."""
    of = lies(tmp_path, "mask")
    aborts(lambda: of.sites["c00"].agree(OCCASION, sorted(of.masked), ["c04"]), "both shares")


def test_a_server_that_names_others_as_dropped_out_to_each_site_gets_no_upload(tmp_path: Path) -> None:
    """Of seven sites c05 and c06 work with the server, which wants what c00 added. It tells c00 that c03 and c04 have
    not shared their secrets, and the others that c01 or c02, or both, have dropped out. Without signatures below these
    accounts, five shares of the keys of c01 and c02 come together, and five of c00's own mask: its upload."""
    of = server(tmp_path, 7)
    of.share_out()
    near = {c: text for c, text in of.for_site("c00").items() if c not in ("c03", "c04")}
    for c in of.sites:
        known = near if c == "c00" else of.for_site(c)
        of.masked[c] = of.sites[c].mask(OCCASION, DIGEST, known, of.numbers[c])
    accounts = {"c01": ["c02"], "c02": ["c01"], "c03": ["c01", "c02"], "c04": ["c01", "c02"]}
    signed = {
        c: of.sites[c].agree(OCCASION, [o for o in sorted(of.sites) if o not in dropped], dropped)
        for c, dropped in accounts.items()
    }
    for c, dropped in accounts.items():
        bad = ("c05", "c06")
        binding, private = about(OCCASION, DIGEST, of.roster), {o: of.sites[o].vault.read(o, "identity") for o in bad}
        text = agreement_text(binding, [o for o in sorted(of.sites) if o not in dropped], dropped)
        lies = {o: masks.signed(bytes.fromhex((private[o] or {})["private"]), text) for o in bad}
        aborts(lambda c=c, lies=lies: of.sites[c].unmask(OCCASION, {**signed, **lies}), "too few")


@pytest.mark.parametrize("count", range(3, 40))
def test_as_many_sites_as_are_needed_cannot_have_signed_two_accounts(count: int) -> None:
    """Honest sites sign one. With just under a third of bad ones, which sign both, two accounts would take more sites
    than there are."""
    bad = (count - 1) // 3
    assert 2 * (threshold(count, 0.67) - bad) > count - bad


def test_who_has_added_is_signed_once(tmp_path: Path) -> None:
    of = lies(tmp_path, "mask")
    everybody = sorted(of.masked)
    of.sites["c00"].agree(OCCASION, everybody, [])
    aborts(lambda: of.sites["c00"].agree(OCCASION, everybody[:-1], everybody[-1:]), "not the next")


def test_signatures_below_another_account_do_not_count(tmp_path: Path) -> None:
    """Three of ten were told of another one; their signatures, and one by nobody, are passed on with the others."""
    of = lies(tmp_path, "mask")
    ids = sorted(of.sites)
    signed = {c: of.sites[c].agree(OCCASION, ids, []) for c in ids[:6]}
    signed |= {c: of.sites[c].agree(OCCASION, ids[1:], ids[:1]) for c in ids[6:9]} | {ids[9]: bytes(64)}
    aborts(lambda: of.sites["c00"].unmask(OCCASION, signed), "6 of 10 sites")
    signed[ids[9]] = of.sites[ids[9]].agree(OCCASION, ids, [])
    assert len(of.sites["c00"].unmask(OCCASION, signed)) == 10


def test_shares_are_given_once(tmp_path: Path) -> None:
    """Two sums of one round differ by what one client added."""
    of = lies(tmp_path, "agree")
    site, everybody = of.sites["c00"], sorted(of.masked)
    assert set(site.unmask(OCCASION, of.signed)) == set(everybody)
    aborts(lambda: site.unmask(OCCASION, of.signed), "not the next")
    aborts(lambda: site.advertise(OCCASION, DIGEST), "unmasked already")
    site.advertise(replace(OCCASION, round=4), DIGEST)


def test_a_round_that_was_not_unmasked_can_be_tried_again_with_other_keys(tmp_path: Path) -> None:
    of = lies(tmp_path, "mask")
    first, again = dict(of.masked), replace(of, masked={})
    assert again.total().tolist() == plain(of, of.sites)
    assert again.masked["c00"].tolist() != first["c00"].tolist()


def test_a_swapped_key_is_noticed(tmp_path: Path) -> None:
    """T12."""
    of = lies(tmp_path, "advertise")
    for kind in ("sealing", "masking"):
        mine = {kind: masks.public_key(masks.new_secret())}
        swapped = Roster({**of.adverts, "c03": replace(of.adverts["c03"], **mine)})
        aborts(lambda swapped=swapped: of.sites["c00"].share_out(OCCASION, swapped), "signature")
        aborts(lambda swapped=swapped: of.sites["c03"].share_out(OCCASION, swapped), "not its own")


def test_a_site_that_nobody_knows_is_noticed(tmp_path: Path) -> None:
    of = lies(tmp_path, "advertise")
    crowd = Roster({**of.adverts, "zoe": of.adverts["c03"]})
    aborts(lambda: of.sites["c00"].share_out(OCCASION, crowd), "nobody knows the site zoe")
    alone = Roster({**of.adverts, "c02": of.adverts["c03"]})
    aborts(lambda: of.sites["c00"].share_out(OCCASION, alone), "signature")


def test_sites_that_were_sent_different_messages_notice(tmp_path: Path) -> None:
    """T12: Each signs the message that was announced to it, so that the masks of unequal models are never even made."""
    of = server(tmp_path)
    of.advertise()
    of.adverts["c05"] = of.sites["c05"].advertise(OCCASION, bytes(32))
    aborts(lambda: of.sites["c00"].share_out(OCCASION, of.roster), "signature")
    aborts(lambda: of.sites["c05"].share_out(OCCASION, of.roster), "signature")


def test_a_message_that_is_not_the_announced_one_is_noticed(tmp_path: Path) -> None:
    of = lies(tmp_path, "share_out")
    aborts(lambda: of.sites["c00"].mask(OCCASION, bytes(32), of.for_site("c00"), of.numbers["c00"]), "announced")


def test_sites_that_were_told_of_different_others_have_no_masks_in_common(tmp_path: Path) -> None:
    of = lies(tmp_path, "advertise")
    fewer = Roster({c: a for c, a in of.adverts.items() if c != "c09"})
    of.sealed = {c: of.sites[c].share_out(OCCASION, of.roster) for c in of.sites if c != "c05"}
    of.sealed["c05"] = of.sites["c05"].share_out(OCCASION, fewer)
    aborts(lambda: of.sites["c00"].mask(OCCASION, DIGEST, of.for_site("c00"), of.numbers["c00"]), "sealed message")


def test_sealed_shares_are_for_one_receiver(tmp_path: Path) -> None:
    of = lies(tmp_path, "share_out")
    mixed = {**of.for_site("c00"), "c04": of.sealed["c04"]["c05"]}
    aborts(lambda: of.sites["c00"].mask(OCCASION, DIGEST, mixed, of.numbers["c00"]), "sealed message")


def test_two_are_too_few(tmp_path: Path) -> None:
    of = server(tmp_path, 2)
    aborts(of.total, "too few for a secure sum")


@pytest.mark.parametrize("survivors", [6, 7])
def test_too_few_survivors_get_no_shares(tmp_path: Path, survivors: int) -> None:
    of = lies(tmp_path, "mask")
    ids = sorted(of.sites)
    if survivors < 7:
        aborts(lambda: of.sites["c00"].agree(OCCASION, ids[:survivors], ids[survivors:]), "too few")
    else:
        assert len(of.sites["c00"].agree(OCCASION, ids[:survivors], ids[survivors:])) == 64


def test_an_exchange_is_made_in_its_turn_and_round(tmp_path: Path) -> None:
    of = lies(tmp_path, "share_out")
    site, other = of.sites["c00"], replace(OCCASION, round=4)
    aborts(lambda: site.agree(OCCASION, sorted(of.sites), []), "not the next")
    aborts(lambda: site.share_out(OCCASION, of.roster), "not the next")
    aborts(lambda: site.mask(other, DIGEST, of.for_site("c00"), of.numbers["c00"]), "not the next")
    site.mask(OCCASION, DIGEST, of.for_site("c00"), of.numbers["c00"])
    aborts(lambda: site.mask(OCCASION, DIGEST, of.for_site("c00"), of.numbers["c00"]), "not the next")
    aborts(lambda: site.unmask(OCCASION, {}), "not the next")


def test_a_site_that_is_named_twice_or_did_not_share_is_noticed(tmp_path: Path) -> None:
    of = server(tmp_path)
    of.drops = {2: {"c09"}}
    of.mask()
    ids = sorted(of.masked)
    aborts(lambda: of.sites["c00"].agree(OCCASION, ids, ["c09"]), "other sites than those")
    aborts(lambda: of.sites["c00"].agree(OCCASION, ids[1:], ids[:1]), "other sites than those")
    aborts(lambda: of.sites["c00"].agree(OCCASION, ids[:-1], []), "other sites than those")


def test_wrong_shares_of_a_key_give_no_sum(tmp_path: Path) -> None:
    of = server(tmp_path)
    of.drops = {3: {"c09"}}
    of.agree()
    shares = {c: of.sites[c].unmask(OCCASION, of.signed) for c in of.masked}
    shares["c00"]["c09"] = masks.new_secret()
    with pytest.raises(RoundAbandoned, match="c09"):
        unmasked(
            of.masked_sum, list(of.masked), of.dropped, shares, of.roster, about(OCCASION, DIGEST, of.roster), of.needed
        )


# ---- the vault


def test_secrets_lie_where_only_their_owner_reads_and_go(tmp_path: Path) -> None:
    of = lies(tmp_path, "mask")
    files = [path for path in tmp_path.iterdir() if path.suffix == ".secrets"]
    assert len(files) == 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    kept = of.sites["c00"].vault.read("c00", "secrets")
    assert kept is not None
    assert not {"seed", "masking", "sealing"} & kept.keys(), "its own keys are of no use after it has added"
    signed = {client: of.sites[client].agree(OCCASION, sorted(of.masked), []) for client in of.sites}
    for client in of.sites:
        of.sites[client].unmask(OCCASION, signed)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".secrets"]


def test_a_new_vault_goes_with_its_owner() -> None:
    vault = Vault.new()
    folder = vault.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    vault.keep("../ann", "secrets", {"a": "b"})
    assert [path.parent for path in folder.iterdir()] == [folder]
    del vault
    gc.collect()
    assert not folder.exists()


def in_houses(of: Server, party_of: dict[str, str]) -> Server:
    return replace(of, sites={name: replace(site, party_of=party_of) for name, site in of.sites.items()})


@pytest.mark.parametrize(("exchange", "gone"), [(2, {"c04"}), (3, {"c04"}), (4, {"c04"})])
def test_clients_of_two_houses_are_too_few(tmp_path: Path, exchange: int, gone: set[str]) -> None:
    """Of five clients four would be enough; two are at each of two sites, and the fifth alone at a third one."""
    houses = {"c00": "north", "c01": "north", "c02": "south", "c03": "south", "c04": "west"}
    of = in_houses(server(tmp_path, 5), houses)
    assert of.total().tolist() == plain(of, of.sites)
    lame = in_houses(server(tmp_path / "other", 5), houses)
    lame.drops = {exchange - 1: gone}
    if exchange == 2:
        lame.advertise()
        site, ask = lame.sites["c00"], lambda: lame.sites["c00"].share_out(OCCASION, lame.roster)
    elif exchange == 3:
        lame.share_out()
        site, ask = (
            lame.sites["c00"],
            lambda: lame.sites["c00"].mask(  # type: ignore[assignment,misc]
                OCCASION, DIGEST, lame.for_site("c00"), lame.numbers["c00"]
            ),
        )
    else:
        lame.mask()
        site, ask = lame.sites["c00"], lambda: lame.sites["c00"].agree(OCCASION, list(lame.masked), lame.dropped)
    with pytest.raises(Aborted, match="clients of 2 sites are too few"):
        ask()
    assert site.vault.read("c00", "secrets") is not None
