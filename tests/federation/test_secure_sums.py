"""Secure sums over messages: the same state as in one process, bit for bit, whoever drops out where; and what each end
refuses."""

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save

from engine.test_secure import CASES, Dropping, method_of
from federation.grids import CLIENTS, FEDERATION, RUN, config_of, keyring_of, remote, sites_of, states
from protofed import BadInput, RunFailed, SecureSettings, wire
from protofed.engine.federation import Federation
from protofed.engine.kept_sums import KeptSum, KeptSums
from protofed.engine.message import WireMessage
from protofed.engine.secure import SecureClients
from protofed.federation.codec import decoded, encoded
from protofed.federation.enrolling import Central, described, enrolled
from protofed.federation.in_process import InProcess
from protofed.federation.keyring import Keyring, fingerprints
from protofed.federation.messages import Answer, ClientKey, Limits, Order, Proposal, Refusal, SiteKeys, Verdict
from protofed.federation.server import prepared
from protofed.federation.signing import new_nonce
from protofed.federation.site import Site
from protofed.federation.site_run import SiteRun
from protofed.privacy import masks
from protofed.privacy.site import Occasion
from protofed.privacy.vault import Vault
from protofed.runs.config.config import Config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Failure, Job, Reason
from protofed.testing.federations import TASK, after, assert_same, memories

MOST = 10**9
SUMS = SecureSettings(sums=True)
FAST = ("fedavg", "fpl_sums", "scaffold", "ifca", "fedpc_sums", "ccvr")
some_cases = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)


def near(case: str, masks: bool = False, **training: object) -> Federation:
    """The same federation in one process."""
    config = config_of(method_of(case), **training)
    settings = replace(SUMS, masks=masks)
    return Federation(config.method, TASK, config.training, secure=settings.made(), name=RUN)


@some_cases
def test_a_method_by_sums_over_messages_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    far = remote(InProcess(sites), config_of(method_of(case), secure=SUMS))
    there = far.finish(after(3, far))
    of = near(case)
    here = of.finish(after(3, of))
    assert not there.failures, there.failures
    assert_same(there.server, here.server, "the server's state over messages")
    assert_same(states(sites, there, far), memories(here), "what clients keep")


# ---- who drops out


STEPS = {1: "Advertise", 2: "ShareOut", 3: "AddMasked", 4: "Agree", 5: "Unmask"}


def told(monkeypatch: pytest.MonkeyPatch, gone: str, kind: str) -> None:
    """A client that fails at its site in one of the exchanges of every sum."""
    real = SiteRun._one

    def one(self: SiteRun, job: Job) -> Any:
        if job.client == gone and type(job.step).__name__ == kind:
            raise RuntimeError("told to")
        return real(self, job)

    monkeypatch.setattr(SiteRun, "_one", one)


@pytest.mark.parametrize("exchange", STEPS)
@pytest.mark.parametrize("case", ["fedavg", pytest.param("fpl_sums", marks=pytest.mark.slow)])
def test_whoever_drops_out_the_state_is_that_of_one_process(
    case: str, exchange: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = replace(near(case, masks=True), runtime=Dropping(("ann",), STEPS[exchange]))
    here = of.finish(after(2, of))
    sites = sites_of(tmp_path)
    far = remote(InProcess(sites), config_of(method_of(case), secure=SUMS))
    told(monkeypatch, "ann", STEPS[exchange])
    there = far.finish(after(2, far))
    assert {failure.client for failure in there.failures} <= {"ann"}
    assert_same(there.server, here.server, "the server's state over messages")
    assert_same(states(sites, there, far), memories(here), "what clients keep")


def test_a_sum_over_clients_of_two_sites_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five clients would be enough, but eve is all that the third site has."""
    far = remote(InProcess(sites_of(tmp_path)), config_of(method_of("fedavg"), secure=SUMS, attempts=2))
    state = far.start()
    told(monkeypatch, "eve", "AddMasked")
    with pytest.raises(RunFailed, match="clients of 2 sites are left"):
        far.advance(state)
    monkeypatch.undo()
    assert far.advance(state).round == 1, "nothing was unmasked, so the round can be tried again"


# ---- sites that are started again


class Restarting(InProcess):
    """A site is started again after each of its answers: only its disk remembers."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__(sites)
        self.num_starts = 0

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        for site, data in super().receive(timeout):
            old = self._sites[site]
            assert isinstance(old, Site)
            self._sites[site] = again(old)
            self.num_starts += 1
            yield site, data


def again(site: Site) -> Site:
    return Site(site.folder, site.data, site.limits, keyring=site.keyring)


@pytest.mark.parametrize("case", ["fedavg", "fpl_sums"])
def test_sites_that_are_started_again_between_exchanges_go_on(case: str, tmp_path: Path) -> None:
    link = Restarting(sites_of(tmp_path))
    far = remote(link, config_of(method_of(case), secure=SUMS))
    there = after(2, far)
    assert link.num_starts >= 2 * 4 * 3
    assert not there.failures
    of = near(case)
    assert_same(there.server, after(2, of).server, "the server's state over messages")


def test_a_site_whose_vault_is_lost_leaves_a_sum_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = sites_of(tmp_path)
    far = remote(InProcess(sites), config_of(method_of("fedavg"), secure=SUMS))
    state, real = far.start(), SiteRun._one

    def one(self: SiteRun, job: Job) -> Any:
        if job.client == "ann" and type(job.step).__name__ == "AddMasked":
            Vault(tmp_path / "north" / "vault").forget("ann", "secrets")
        return real(self, job)

    monkeypatch.setattr(SiteRun, "_one", one)
    [failure] = far.advance(state).failures
    assert failure.client == "ann"
    assert "this exchange is not the next one of this round" in failure.detail


def test_a_round_that_was_unmasked_is_not_unmasked_again_also_after_a_restart(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    far = remote(InProcess(sites), config_of(method_of("fedavg"), secure=SUMS))
    state = far.start()
    far.advance(state)
    later = remote(InProcess({k: again(s) for k, s in sites.items()}), config_of(method_of("fedavg"), secure=SUMS))
    with pytest.raises(RunFailed, match="unmasked already"):
        later.advance(state)


def test_secrets_lie_in_files_of_one_user_and_go_with_the_sum(tmp_path: Path) -> None:
    far = remote(InProcess(sites_of(tmp_path)), config_of(method_of("fedavg"), secure=SUMS))
    after(1, far)
    files = [*(tmp_path / "north" / "vault").iterdir()]
    assert {path.suffix.partition("-")[0] for path in files} == {".identity", ".unmasked"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


# ---- a server that asks for more


@pytest.fixture
def north(tmp_path: Path) -> tuple[Site, list[Order]]:
    """A site in a run with secure sums, and the orders of its first round."""
    sites, kept = sites_of(tmp_path), list[Order]()

    class Kept(InProcess):
        def send(self, site: str, data: bytes, most_bytes: int) -> str:
            message = decoded(data, MOST)
            if site == "north" and isinstance(message, Order):
                kept.append(message)
            return super().send(site, data, most_bytes)

    far = remote(Kept(sites), config_of(method_of("fedavg"), secure=SUMS))
    far.advance(far.start())
    return sites["north"], kept


def reasons(site: Site, order: Order) -> set[str]:
    answer = site.handle(encoded(replace(order, nonce=new_nonce())))
    assert answer is not None
    found = decoded(answer, MOST)
    assert isinstance(found, Answer)
    assert not found.done
    return {failed.detail for failed in found.failed}


def plain(order: Order, step: str, **changes: Any) -> Order:
    """A request for something else, with the message that the method sends."""
    arrays = wire.decode_arrays(order.messages)
    base = {name.replace("/base/", "/"): leaf for name, leaf in arrays.items() if name.startswith("0/base/")}
    works = (replace(order.works[0], message=0),)
    return replace(order, step=step, works=works, messages=save(base), **changes)


def test_a_site_that_agreed_to_sums_gives_no_upload(north: tuple[Site, list[Order]]) -> None:
    site, orders = north
    exchanges = ["advertise", "share", "add.train", "agree", "unmask"]
    assert [order.step for order in orders] == [f"sum.{exchange}" for exchange in exchanges]
    [detail] = reasons(site, plain(orders[2], "train"))
    assert detail.startswith(Refusal.SUMS_ONLY)
    [detail] = reasons(site, replace(orders[2], evaluates=True))
    assert detail.startswith(Refusal.SUMS_ONLY)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "sum.add.evaluate_own"},
        {"step": "sum.add.__init__"},
        {"step": "sum.add.base.train"},
        {"step": "sum.add"},
        {"step": "sum.unmask.train"},
        {"step": "sum.add.validate"},
        {"question": 2},
        {"phase": "setup"},
        {"phase": "another"},
    ],
    ids=str,
)
def test_other_exchanges_and_a_second_training_are_refused(
    change: dict[str, Any], north: tuple[Site, list[Order]]
) -> None:
    site, orders = north
    order, ticket = orders[2], {key: value for key, value in change.items() if key != "step"}
    [detail] = reasons(
        site, replace(order, step=change.get("step", order.step), ticket=replace(order.ticket, **ticket))
    )
    assert detail.startswith(Refusal.STEP_NOT_ALLOWED), detail


def test_exchanges_where_no_sums_were_agreed_are_refused(tmp_path: Path) -> None:
    sites, kept = sites_of(tmp_path), list[Order]()

    class Kept(InProcess):
        def send(self, site: str, data: bytes, most_bytes: int) -> str:
            message = decoded(data, MOST)
            if site == "north" and isinstance(message, Order):
                kept.append(message)
            return super().send(site, data, most_bytes)

    after(1, remote(Kept(sites), config_of(method_of("fedavg"))))
    for step in ("sum.advertise", "sum.add.train", "sum.unmask"):
        [detail] = reasons(sites["north"], replace(kept[0], step=step))
        assert detail.startswith(Refusal.STEP_NOT_ALLOWED)


def test_a_policy_of_steps_is_about_the_method_s_steps(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, limits=Limits(steps=("train",)))
    assert not after(1, remote(InProcess(sites), config_of(method_of("fedavg"), secure=SUMS))).failures


# ---- who adds up with whom


def refused(sites: dict[str, Site], config: Config) -> str:
    with pytest.raises(BadInput) as error:
        prepared(InProcess(sites), config, RUN)
    return str(error.value)


def test_a_site_that_takes_part_in_sums_alone_says_so_with_both_keys(tmp_path: Path) -> None:
    said = refused(sites_of(tmp_path, limits=Limits(secure_sums=True)), config_of(method_of("fedavg")))
    assert said.count("SUMS_REQUIRED: require_secure_sums is true in this site's policy, and secure.sums is false") == 3


def test_sums_of_sites_have_masks_at_both_ends(tmp_path: Path) -> None:
    config = config_of(method_of("fedavg"), secure=replace(SUMS, masks=False))
    assert "secure.masks: is false, which is for simulations" in refused(sites_of(tmp_path), config)
    with pytest.raises(BadInput, match=r"SUMS_REQUIRED: secure\.masks is false"):
        remote(InProcess(sites_of(tmp_path)), config)


def test_two_sites_are_too_few_at_both_ends(tmp_path: Path) -> None:
    two = {"north": ("ann", "bob", "cyd"), "south": ("dan", "eve")}
    sites = sites_of(tmp_path, clients=two)
    config = config_of(method_of("fedavg"), secure=SUMS)
    assert "secure.sums: 2 sites take part, and it takes 3" in refused(sites, config)
    found = enrolled(InProcess(sites), 5.0)
    keyring = sites["north"].keyring
    assert keyring is not None
    [(name, _)] = keyring.refusals(found.keys, found.clients, ["ann", "bob", "cyd"])
    assert name == Refusal.FEW_SITES


def changed(given: tuple[SiteKeys, ...], **clients: ClientKey) -> tuple[SiteKeys, ...]:
    return tuple(
        replace(one, clients=tuple(clients.get(client.client, client) for client in one.clients)) for one in given
    )


@pytest.fixture
def known(tmp_path: Path) -> tuple[Keyring, tuple[SiteKeys, ...]]:
    """What north knows, and the keys that all sites give."""
    given = tuple(keyring_of(tmp_path, site).own(clients) for site, clients in CLIENTS.items())
    return keyring_of(tmp_path, "north"), given


EVERYONE = sorted(client for clients in CLIENTS.values() for client in clients)


def said(keyring: Keyring, given: tuple[SiteKeys, ...]) -> list[str]:
    return [f"{name}: {text}" for name, text in keyring.refusals(given, EVERYONE, CLIENTS["north"])]


def test_keys_that_sites_gave_are_believed(known: tuple[Keyring, tuple[SiteKeys, ...]]) -> None:
    assert said(*known) == []


def test_a_key_that_the_server_made_for_a_client_is_not_signed_by_its_site(
    known: tuple[Keyring, tuple[SiteKeys, ...]],
) -> None:
    keyring, given = known
    made = ClientKey("cyd", masks.identity_of(masks.new_identity()).hex(), given[1].clients[0].signature)
    [why] = said(keyring, changed(given, cyd=made))
    assert why.startswith("OTHER_KEYS: the key of cyd is not signed by the key of south (")
    dan = replace(given[1].clients[1], client="cyd")  # another client's of the same site
    [why] = said(keyring, (given[0], replace(given[1], clients=(dan, given[1].clients[1])), given[2]))
    assert "the key of cyd is not signed" in why


def test_keys_of_this_site_that_are_not_its_own_are_refused(known: tuple[Keyring, tuple[SiteKeys, ...]]) -> None:
    keyring, given = known
    swapped = replace(given[0].clients[0], key=given[0].clients[1].key)
    [why] = said(keyring, changed(given, ann=swapped))
    assert why == "OTHER_KEYS: the keys that the server gives out for this site's clients are not its own"
    moved = (replace(given[0], clients=given[0].clients[1:]), replace(given[1], clients=(*given[1].clients, swapped)))
    assert why in said(keyring, (*moved, given[2]))


def test_clients_without_a_key_and_keys_without_a_client_are_refused(
    known: tuple[Keyring, tuple[SiteKeys, ...]],
) -> None:
    keyring, given = known
    fewer = (*given[:1], replace(given[1], clients=given[1].clients[1:]), given[2])
    assert any("not given a key for each client" in why for why in said(keyring, fewer))
    assert said(keyring, (*given, replace(given[2], site="east"))) != []
    assert said(keyring, (given[0], given[1], replace(given[2], site="../x"))) != []
    assert said(keyring, changed(given, cyd=ClientKey("cyd", "no", "")))[0].endswith("the key of cyd is none")


def test_a_site_believes_no_other_key_of_a_site_that_it_knows(
    known: tuple[Keyring, tuple[SiteKeys, ...]], tmp_path: Path
) -> None:
    keyring, given = known
    keyring.keep(given)
    assert said(keyring, given) == []
    other = Keyring(FEDERATION, "south", ec.generate_private_key(ec.SECP384R1()), tmp_path / "other")
    [why] = said(keyring, (given[0], other.own(CLIENTS["south"]), given[2]))
    assert why.startswith("OTHER_KEYS: the key of south was ")
    assert "by telephone" in why


def test_a_policy_that_names_keys_believes_no_others(known: tuple[Keyring, tuple[SiteKeys, ...]]) -> None:
    keyring, given = known
    marks = fingerprints(given)
    both = replace(keyring, believed=(marks["south"].replace(" ", "").upper(), marks["west"]))
    assert said(both, given) == []
    [why] = said(replace(keyring, believed=(marks["south"],)), given)
    assert marks["west"] in why
    assert "believed_keys" in why


def test_a_site_keeps_keys_when_it_agrees_and_says_whose(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    remote(InProcess(sites), config_of(method_of("fedavg"), secure=SUMS))
    keyring = sites["north"].keyring
    assert keyring is not None
    assert keyring.known().keys() == {"south", "west"}
    lines = [json.loads(line) for line in (tmp_path / "north" / "log.jsonl").read_text().splitlines()]
    [told_keys] = [line["keys"] for line in lines if line.get("keys")]
    assert {site: mark for site, mark in told_keys.items() if site != "north"} == keyring.known()


def test_a_site_without_a_key_takes_part_in_no_sum(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    sites["south"].keyring = None
    assert "south: OTHER_KEYS: it gives no keys" in refused(sites, config_of(method_of("fedavg"), secure=SUMS))
    sites["south"].keyring = sites["west"].keyring
    said = refused(sites, config_of(method_of("fedavg"), secure=SUMS))
    assert "south: OTHER_KEYS: it gives the keys of another site" in said


def test_no_loss_is_told_beside_sums(tmp_path: Path) -> None:
    """Where models are fine-tuned before they are tested, counts are told, and not how training went."""
    sites, losses = sites_of(tmp_path), list[float | None]()

    class Seen(InProcess):
        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                answer = decoded(data, MOST)
                if isinstance(answer, Answer):
                    losses.extend(WireMessage(one.upload).loss for one in answer.done)
                yield site, data

    tuned = EvaluationSettings(fine_tune=1)
    far = remote(Seen(sites), config_of(method_of("fedavg"), evaluation=tuned, secure=SUMS))
    assert len(far.evaluated(after(1, far), tests="own")) == 5
    assert losses == [None] * (5 * 5 + 5)


def test_keys_that_come_with_a_run_without_sums_are_not_kept(tmp_path: Path) -> None:
    """Nobody has checked them."""
    sites = sites_of(tmp_path)
    found = enrolled(InProcess(sites), 5.0)
    asked = described(config_of(method_of("fedavg")), RUN, found, Central(TASK.tests, TASK.public, TASK.model))
    proposal = Proposal(new_nonce(), replace(asked, keys=found.keys))
    answer = sites["north"].handle(encoded(proposal))
    assert answer is not None
    verdict = decoded(answer, MOST)
    assert isinstance(verdict, Verdict)
    assert not verdict.refusals
    keyring = sites["north"].keyring
    assert keyring is not None
    assert keyring.known() == {}


# ---- a server that is started again


class Stop(BaseException):
    """The end of the server's process."""


@pytest.mark.parametrize("case", ["scaffold", "fpl_sums"])
def test_a_server_that_is_killed_after_a_sum_was_unmasked_goes_on_from_the_sum(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round it is killed after each sum in turn. No sum is unmasked twice, and the state is the same."""
    config = config_of(method_of(case), secure=SUMS, rounds=2, evaluation=EvaluationSettings(every=2))
    sites, folder, kills = sites_of(tmp_path), RunFolder(tmp_path / "run"), list[int]()
    real = SecureClients._check_weights

    def killed(self: SecureClients, *arguments: Any) -> None:
        real(self, *arguments)
        if self._state.round == 1 and self._questions > len(kills):
            kills.append(self._questions)
            raise Stop

    monkeypatch.setattr(SecureClients, "_check_weights", killed)
    number = 1 if case == "scaffold" else 3  # of which two are of k-means
    for _ in range(number):
        with pytest.raises(Stop):
            execute(prepared(InProcess(sites), config, RUN), folder, resume=True)
        sites = {name: again(site) for name, site in sites.items()}
    far = execute(prepared(InProcess(sites), config, RUN), folder, resume=True)
    assert kills == [*range(1, number + 1)]
    assert not any(each.failures for each in far.rounds)
    of = near(case, rounds=2)
    here = of.finish(after(2, of))
    assert_same(far.server, here.server, "the server's state over messages")
    assert_same(states(sites, far.state, far.federation), memories(here), "what clients keep")


def test_a_kept_sum_is_of_the_same_question_and_whole(tmp_path: Path) -> None:
    kept, occasion = KeptSums(), Occasion("run", "round", 3, 1)
    kept.keep_in(tmp_path / "sums")
    failure = Failure("c", Reason.LATE, "gone")
    total = torch.tensor([1, -(2**62)])
    found = KeptSum(["a", "b", "c"], ["a", "b"], {"a": Receipt("r")}, [failure], total)
    kept.put(occasion, b"digest", found)
    same = kept.get(occasion, b"digest", ["a", "b", "c"])
    assert same is not None
    assert same.total.equal(total)
    assert replace(same, total=total) == found
    assert kept.get(occasion, b"other", ["a", "b", "c"]) is None
    assert kept.get(occasion, b"digest", ["a", "b"]) is None
    assert kept.get(replace(occasion, run="other"), b"digest", ["a", "b", "c"]) is None
    assert kept.get(replace(occasion, number=2), b"digest", ["a", "b", "c"]) is None
    kept.put(replace(occasion, round=7), b"digest", found)
    assert kept.get(occasion, b"digest", ["a", "b", "c"]) is None, "what is older than any state is removed"
    [path] = (tmp_path / "sums").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunFailed, match="damaged"):
        kept.get(replace(occasion, round=7), b"digest", ["a", "b", "c"])
