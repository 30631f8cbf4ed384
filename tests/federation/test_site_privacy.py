"""Differential privacy at sites: noise in what they send, a ledger of their own, and what each end refuses."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from federation.grids import CLIENTS, RUN, config_of, remote, sites_of
from protofed import METHODS, BadInput, PrivacySettings, RunFailed, SecureSettings, wire
from protofed.engine.message import WireMessage
from protofed.federation.agreement import refusals
from protofed.federation.codec import decoded, encoded
from protofed.federation.enrolling import Central, described, enrolled
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Answer, Description, Failed, Limits, Order, Refusal
from protofed.federation.processes import Worker, WorkerDied
from protofed.federation.server import prepared
from protofed.federation.signing import new_nonce
from protofed.federation.site import Site
from protofed.federation.site_data import SiteData
from protofed.federation.site_privacy import SitePrivate, Spent
from protofed.federation.site_store import LastFiles
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.privacy.account import epsilon_of, mu_of
from protofed.privacy.ledger import Entry, Ledger, read
from protofed.privacy.outbox import Outbox
from protofed.runs.config.config import Config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runtimes.jobs import Reason
from protofed.testing.federations import CLASSES, FEATURES, TASK, after

MOST = 10**9
EPSILON, DELTA, ROUNDS = 8.0, 1e-5, 3
RECORDS = PrivacySettings("record", epsilon=EPSILON, delta=DELTA, noise="secret")
BUDGET = mu_of(EPSILON, DELTA) ** 2


def without_batch_norm(client: str = "") -> Parts:
    features = nn.Sequential(
        nn.Conv2d(3, FEATURES, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return {"features": features, "classifier": nn.Linear(FEATURES, CLASSES)}


PLAIN = replace(TASK, model=without_batch_norm)


def config(method: str = "fedavg", privacy: PrivacySettings = RECORDS, **training: Any) -> Config:
    settings = {"rounds": ROUNDS, "epochs": 1, "optimizer": Sgd(lr=0.1), **training}
    return config_of(METHODS[method](), PLAIN, privacy=privacy, **settings)


def sites(folder: Path, **limits: Any) -> dict[str, Site]:
    return sites_of(folder, PLAIN, limits=Limits(**limits))


def again(site: Site) -> Site:
    """The same site, started once more."""
    return Site(site.folder, site.data, site.limits, keyring=site.keyring)


class Kept(InProcess):
    """Keeps what passes."""

    def __init__(self, of: dict[str, Any]) -> None:
        super().__init__(of)
        self.orders: list[tuple[str, Order]] = []
        self.uploads: list[tuple[str, int, WireMessage]] = []

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        message = decoded(data, MOST)
        if isinstance(message, Order):
            self.orders.append((site, message))
        return super().send(site, data, most_bytes)

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        for site, data in super().receive(timeout):
            message = decoded(data, MOST)
            if isinstance(message, Answer):
                found = ((one.client, WireMessage(one.upload)) for one in message.done)
                self.uploads += [(client, upload.ticket.round, upload) for client, upload in found]
            yield site, data


def ledger(site: Site) -> Ledger:
    return Ledger(entries=read(Spent(site.folder).path))


def digest(upload: WireMessage) -> str:
    return hashlib.sha256(save(wire.decode_arrays(upload.data))).hexdigest()


# ---- what leaves


def test_uploads_carry_the_noise_that_the_account_asks_for_and_never_the_same(tmp_path: Path) -> None:
    """What two runs of the same settings send in the first round differs by the noise of both, which is as wide as a
    run of three releases needs."""
    sent = []
    for name in ("one", "two"):
        link = Kept(sites(tmp_path / name))
        far = remote(link, config(batch_size=64))
        far.advance(far.start())
        sent.append({client: wire.decode_arrays(upload.data) for client, _, upload in link.uploads})
    multiplier = sqrt(ROUNDS / BUDGET)
    assert far.terms is not None
    assert far.terms.gradient_multiplier == pytest.approx(multiplier)
    for client, data in PLAIN.clients.items():
        pairs = [(sent[0][client][name], sent[1][client][name]) for name in sent[0][client] if "params" in name]
        differ = torch.cat([(a - b).flatten() for a, b in pairs])
        expected = sqrt(2) * 0.1 * multiplier / len(data)
        assert len(differ) > 200
        assert differ.std().item() == pytest.approx(expected, rel=0.2), client


def test_the_ledger_of_a_site_has_what_was_sent_and_no_more_than_was_promised(tmp_path: Path) -> None:
    own = sites(tmp_path)
    link = Kept(own)
    far = remote(link, config("fpl"))
    state = far.finish(after(ROUNDS, far))
    assert not state.failures
    for name, site in own.items():
        entries = ledger(site).entries
        assert {entry.client for entry in entries} == {*CLIENTS[name]}
        sent = {(client, number): digest(u) for client, number, u in link.uploads if client in CLIENTS[name]}
        assert {(entry.client, entry.round): entry.digest for entry in entries} == sent
        for client in CLIENTS[name]:
            assert ledger(site).spent(client) == pytest.approx(BUDGET)
    assert far.private is not None
    assert far.private.most_spent == pytest.approx(BUDGET), "the server writes down what sites say"


def test_the_log_says_what_was_released(tmp_path: Path) -> None:
    own = sites(tmp_path)
    after(1, remote(InProcess(own), config()))
    lines = [json.loads(line) for line in (own["north"].folder / "log.jsonl").read_text().splitlines()]
    [done] = [line for line in lines if line["event"] == "done"]
    expected = epsilon_of(sqrt(BUDGET / ROUNDS), DELTA)
    assert done["epsilon"] == {"ann": pytest.approx(expected), "bob": pytest.approx(expected)}
    assert Spent(own["north"].folder).epsilons(DELTA) == done["epsilon"]


# ---- asked twice, and killed


def round_of(folder: Path) -> tuple[dict[str, Site], Order, Answer]:
    """The first order of site north, and what it answered."""
    own = sites(folder)
    link = Kept(own)
    far = remote(link, config())
    far.advance(far.start())
    order = next(order for site, order in link.orders if site == "north")
    answer = own["north"].handle(encoded(order))
    assert answer is not None
    found = decoded(answer, MOST)
    assert isinstance(found, Answer)
    return own, order, found


def asked(site: Site, order: Order) -> Answer:
    answer = site.handle(encoded(order))
    assert answer is not None
    found = decoded(answer, MOST)
    assert isinstance(found, Answer)
    return found


def told(answer: Answer) -> list[Any]:
    """All that an answer says; the order of what a header holds is not always the same."""
    found = [WireMessage(one.upload) for one in answer.done]
    return [(one.ticket, one.receipt, one.loss, one.charges, digest(one)) for one in found]


def test_what_is_asked_twice_is_answered_with_the_same_bytes_and_paid_once(tmp_path: Path) -> None:
    own, order, first = round_of(tmp_path)
    before = ledger(own["north"]).entries
    for site in (own["north"], again(own["north"])):
        assert told(asked(site, replace(order, nonce=new_nonce()))) == told(first)
        assert site.handle(encoded(order)) == site.handle(encoded(order))
    assert ledger(own["north"]).entries == before


MOMENTS: dict[str, tuple[type, str, bool]] = {
    "before anything is kept": (Outbox, "put", False),
    "when the outbox is written": (Outbox, "put", True),
    "when the ledger is written": (Ledger, "write", True),
    "before the answer is kept": (LastFiles, "put", False),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_that_is_killed_has_paid_for_what_it_sent(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, is_after = MOMENTS[moment]
    real, flag, parent, calls = getattr(owner, name), tmp_path / "was killed", os.getpid(), list[Any]()

    def is_it(self: Any) -> bool:
        """Whether this is the moment, in the process of the site that is killed once."""
        if os.getpid() == parent or flag.exists():
            return False
        if isinstance(self, Ledger):
            return len(self.entries) == 1
        if isinstance(self, LastFiles):
            return self._path.name == "answers"
        calls.append(self)
        return len(calls) == 2

    def killed(self: Any, *arguments: Any, **named: Any) -> Any:
        result = real(self, *arguments, **named) if is_after else None
        if is_it(self):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result if is_after else real(self, *arguments, **named)

    class Forked:
        """A site in a process that is started again when it was killed."""

        def __init__(self, site: Site) -> None:
            self.site = site
            self.worker = Worker(site.handle, lambda: None)

        def handle(self, data: bytes) -> bytes | None:
            try:
                return self.worker.answer(data, 60.0)
            except WorkerDied:
                self.worker = Worker(again(self.site).handle, lambda: None)
                return self.worker.answer(data, 60.0)

    own = sites(tmp_path)
    north = Forked(own["north"])
    link = Kept({**own, "north": north})
    monkeypatch.setattr(owner, name, killed)
    far = remote(link, config())
    state = far.advance(far.start())
    monkeypatch.undo()
    north.worker.close()
    north.worker._forget()
    assert flag.exists()
    assert not state.failures
    sent = {client: digest(upload) for client, _, upload in link.uploads if client in CLIENTS["north"]}
    assert {entry.client: entry.digest for entry in ledger(own["north"]).entries} == sent
    assert len(ledger(own["north"]).entries) == 2
    _, order = next((site, order) for site, order in link.orders if site == "north")
    assert {one.client: digest(WireMessage(one.upload)) for one in asked(again(own["north"]), order).done} == sent


# ---- what cannot be paid


def other_messages(order: Order, number: int) -> Order:
    """The same order for another model, which is another release."""
    arrays = {name: leaf + number * 1e-3 for name, leaf in wire.decode_arrays(order.messages).items()}
    return replace(order, nonce=new_nonce(), messages=save(arrays))


def test_a_server_that_asks_for_more_than_is_paid_for_gets_nothing_more_also_after_a_restart(tmp_path: Path) -> None:
    own, order, _ = round_of(tmp_path)
    site = own["north"]
    for number in range(1, ROUNDS):
        assert len(asked(site, other_messages(order, number)).done) == 2
    for number, one in ((7, site), (8, again(site))):
        answer = asked(one, other_messages(order, number))
        assert not answer.done
        assert {failed.reason for failed in answer.failed} == {Reason.BUDGET_SPENT}
    assert ledger(site).spent("ann") == pytest.approx(BUDGET)


def test_clients_that_cannot_pay_are_left_out_and_others_go_on(tmp_path: Path) -> None:
    own = sites(tmp_path)
    link = Kept(own)
    far = remote(link, config())
    state = far.advance(far.start())
    order = next(order for site, order in link.orders if site == "west")
    for number in range(1, ROUNDS):
        asked(own["west"], other_messages(order, number))
    state = far.advance(state)
    assert [(failure.client, failure.reason) for failure in state.failures] == [("eve", Reason.BUDGET_SPENT)]


def together(runs: int) -> float:
    return epsilon_of(sqrt(runs * BUDGET), DELTA)


def test_what_all_runs_cost_adds_up_and_a_policy_bounds_it(tmp_path: Path) -> None:
    """Two runs fit into the bound, and a third one is refused by name, also by a site that was started again."""
    limits = {"epsilon": (together(2) + together(3)) / 2, "delta": DELTA}
    own: dict[str, Any] = sites(tmp_path, **limits)
    for run in ("first", "second"):
        after(ROUNDS, remote(InProcess(own), config(), run=run))
        assert len(asked_to_begin(own, run)) == 0, "a run that goes on is not counted twice"
    for sites_now in (own, {name: again(site) for name, site in own.items()}):
        found = asked_to_begin(sites_now, "third")
        assert len(found) == 5
        assert found[0].startswith("north: EPSILON_TOO_LARGE: max_epsilon = ")
        assert "privacy.epsilon = 8" in found[0]
        assert f"ε = {together(2):.4g} in other runs" in found[0]
        assert f"{together(3):.4g}" in found[0]
    assert ledger(own["north"]).spent("ann") == pytest.approx(2 * BUDGET)


def asked_to_begin(own: dict[str, Site], run: str) -> list[str]:
    try:
        remote(InProcess(own), config(), run=run)
    except BadInput as error:
        return str(error).splitlines()
    return []


def test_runs_that_began_together_share_what_the_policy_allows(tmp_path: Path) -> None:
    """Each of the two could be paid for alone. Once the first is done, the second is no longer agreed on."""
    own = sites(tmp_path, epsilon=together(1) * 1.2, delta=DELTA)
    first, second = [remote(InProcess(own), config(), run=run) for run in ("first", "second")]
    assert not after(ROUNDS, first).failures
    with pytest.raises(RunFailed, match=Refusal.NOT_AGREED):
        after(1, second)
    assert ledger(own["north"]).spent("ann") == pytest.approx(BUDGET)


def test_in_each_round_the_policy_s_bound_counts_too(tmp_path: Path) -> None:
    """Whatever a run could pay by itself."""
    limits = Limits(epsilon=together(1) * 1.2, delta=DELTA)
    bound = mu_of(limits.epsilon, DELTA) ** 2
    made = SitePrivate(RECORDS, RUN, tmp_path, tmp_path / "run", limits)
    assert made.left("ann") == pytest.approx(BUDGET)
    entry = Entry("before", 0, "round", 1, "ann", "gradients", 1, 0.9 * bound, "d")
    made.ledger.write([entry, replace(entry, client="bob", run=RUN, cost=0.1 * BUDGET)])
    assert made.left("ann") == pytest.approx(0.1 * bound)
    assert made.left("bob") == pytest.approx(0.9 * BUDGET)


# ---- what each end refuses


def refused(own: dict[str, Site], of: Config) -> str:
    with pytest.raises(BadInput) as error:
        prepared(InProcess(own), of, RUN)
    return str(error.value)


def description(own: dict[str, Site], of: Config) -> Description:
    """What a server could ask that does not check its own settings."""
    found = enrolled(InProcess(own), 5.0)
    return described(of, RUN, found, Central(PLAIN.tests, PLAIN.public, PLAIN.model))


def said(own: dict[str, Site], of: Config) -> list[str]:
    site = own["north"]
    assert isinstance(site.data, SiteData)
    found = refusals(description(own, of), site.data, site.limits, site.keyring)
    return [f"{name}: {text}" for name, text in found]


def test_noise_of_the_seed_is_refused_at_both_ends(tmp_path: Path) -> None:
    simulated, own = config(privacy=replace(RECORDS, noise="simulated")), sites(tmp_path)
    assert 'privacy.noise: is "simulated"' in refused(own, simulated)
    [why] = said(own, simulated)
    assert why.startswith("PRIVACY_REQUIRED: privacy.noise is not secret")


def test_a_site_draws_secret_noise_whatever_was_agreed(tmp_path: Path) -> None:
    own = sites(tmp_path)
    after(1, remote(InProcess(own), config()))
    private = own["north"]._runs[RUN].private
    assert private is not None
    assert private.settings.noise == "secret"
    made = type(private)(replace(RECORDS, noise="simulated"), RUN, tmp_path, tmp_path, Limits())
    assert made.settings.noise == "secret"


@pytest.mark.parametrize(
    ("limits", "asks"),
    [({"privacy": True}, "require_privacy is true"), ({"epsilon": 3.0}, "max_epsilon is 3")],
)
def test_a_site_whose_policy_asks_for_privacy_says_so_with_both_keys(
    limits: dict[str, Any], asks: str, tmp_path: Path
) -> None:
    why = refused(sites(tmp_path, **limits), config(privacy=PrivacySettings()))
    assert why.count(f"PRIVACY_REQUIRED: {asks} in this site's policy, and privacy.level is") == 3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda c: replace(c, evaluation=EvaluationSettings(fine_tune=1)), "evaluation.fine_tune"),
        (lambda c: replace(c, method=METHODS["fedpc"]()), "privacy.level"),
        (lambda c: replace(c, training=replace(c.training, optimizer_state="kept")), "training.optimizer_state"),
    ],
    ids=["fine_tune", "method", "optimizer_state"],
)
def test_a_site_refuses_settings_that_undo_the_promise_though_the_server_does_not(
    change: Callable[[Config], Config], key: str, tmp_path: Path
) -> None:
    why = said(sites(tmp_path), change(config()))
    assert any(one.startswith(f"BAD_EXPERIMENT: {key}") for one in why), why


def test_a_site_refuses_networks_that_mix_records(tmp_path: Path) -> None:
    mixed = config_of(METHODS["fedavg"](), privacy=RECORDS, optimizer=Sgd(lr=0.1))
    with pytest.raises(BadInput, match="BatchNorm"):
        remote(InProcess(sites_of(tmp_path)), mixed)


@pytest.mark.parametrize(
    "change", [{"step": "base.train"}, {"step": "base.evaluate_own"}, {"evaluates": True}], ids=str
)
def test_a_private_run_asks_for_training_and_for_nothing_else(change: dict[str, Any], tmp_path: Path) -> None:
    own, order, _ = round_of(tmp_path)
    answer = asked(own["north"], replace(order, nonce=new_nonce(), **change))
    assert {failed.detail.partition(":")[0] for failed in answer.failed} == {Refusal.STEP_NOT_ALLOWED}


def test_one_that_tells_nonsense_of_what_it_released_is_refused() -> None:
    for told in ('[["gradients", 1, -1.0]]', '[["others", 1, 1.0]]', "[[1]]", '[["gradients", true, 1.0]]', "nan"):
        message = WireMessage(save({}, metadata={"spent": told}))
        with pytest.raises(Exception, match=r"released"):
            _ = message.charges


# ---- noise inside a secure sum

SUMS = SecureSettings(sums=True, threshold=0.8)
"""Of five clients four stay at least."""
HONEST = 4


FPL = METHODS["fpl"](contrast_with="global", consistent_with="global")


def around_prototypes(config: Config) -> Config:
    """FedSGD around FPL: class sums are in the sums of some rounds."""
    return replace(config, method=METHODS["fedsgd"](base=FPL))


def summed(method: str = "fedsgd", privacy: PrivacySettings = RECORDS, **training: Any) -> Config:
    return replace(config(method, privacy, batch_size=64, **training), secure=SUMS)


def weights(state: Any) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in state.server.base.params.values()])


def test_a_sum_has_the_noise_of_all_shares_and_each_site_pays_for_its_clients(tmp_path: Path) -> None:
    """Two runs differ by their noise. Each of five clients adds a share that is wide enough if four stay."""
    ends = []
    for name in ("one", "two"):
        own = sites(tmp_path / name)
        far = remote(InProcess(own), summed())
        state = far.advance(far.start())
        assert not state.failures
        ends.append(weights(state))
    multiplier, records = sqrt(ROUNDS / BUDGET), sum(len(data) for data in PLAIN.clients.values())
    expected = sqrt(2) * 0.1 * multiplier * sqrt(5 / HONEST) / records
    assert len(ends[0]) > 200
    assert (ends[0] - ends[1]).std().item() == pytest.approx(expected, rel=0.2)
    assert far.private is not None
    for name, site in own.items():
        spent = {client: ledger(site).spent(client) for client in CLIENTS[name]}
        assert spent == dict.fromkeys(CLIENTS[name], pytest.approx(BUDGET / ROUNDS))
        assert spent == {client: pytest.approx(far.private.ledger.spent(client)) for client in spent}


@pytest.mark.parametrize(
    ("method", "level", "training"), [("fedsgd", "record", {}), ("fedavg", "client", {"weighting": "uniform"})]
)
def test_a_run_of_noised_sums_spends_what_was_promised(
    method: str, level: Any, training: dict[str, Any], tmp_path: Path
) -> None:
    own, useless = sites(tmp_path), replace(RECORDS, level=level, allow_useless=level == "client")
    far = remote(InProcess(own), summed(method, useless, **training))
    state = far.finish(after(ROUNDS, far))
    assert not state.failures
    kinds = {entry.kind for site in own.values() for entry in ledger(site).entries}
    assert kinds == {"gradient sums" if level == "record" else "a client's change"}
    for name, site in own.items():
        for client in CLIENTS[name]:
            assert ledger(site).spent(client) == pytest.approx(BUDGET)


def test_class_sums_in_noised_sums_are_paid_for_at_sites_too(tmp_path: Path) -> None:
    own = sites(tmp_path)
    far = remote(InProcess(own), around_prototypes(summed()))
    state = far.finish(after(ROUNDS, far))
    assert not state.failures
    entries = [entry for site in own.values() for entry in ledger(site).entries if entry.client == "ann"]
    assert [entry.round for entry in entries if entry.kind == "gradient sums"] == [*range(ROUNDS)]
    assert 0 < len([entry for entry in entries if entry.kind == "class sums"]) < ROUNDS
    assert sum(entry.cost for entry in entries) == pytest.approx(BUDGET)


def test_a_site_pays_before_it_adds_and_cannot_be_asked_to_add_more(tmp_path: Path) -> None:
    """A server that tries a round again and again gets as many masked uploads as are paid for."""
    own = sites(tmp_path)

    class Forgetful(Kept):
        """Loses what clients add."""

        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                answer = decoded(data, MOST)
                if isinstance(answer, Answer) and self.orders[-1][1].step == "sum.add.train":
                    lost = (Failed(done.client, Reason.CLIENT_ERROR, "lost") for done in answer.done)
                    data = encoded(replace(answer, done=(), failed=tuple(lost)))
                yield site, data

    far = remote(Forgetful(own), summed(attempts=ROUNDS))
    state = far.start()
    with pytest.raises(RunFailed, match="lost"):
        far.advance(state)
    assert ledger(own["north"]).spent("ann") == pytest.approx(BUDGET), "paid, though there is no sum"
    later = remote(InProcess({name: again(site) for name, site in own.items()}), summed())
    with pytest.raises(RunFailed, match="BUDGET_SPENT"):
        later.advance(state)


def test_a_private_run_has_one_sum_a_round(tmp_path: Path) -> None:
    link = Kept(sites(tmp_path))
    far = remote(link, summed())
    far.advance(far.start())
    order = next(order for site, order in link.orders if site == "north" and order.step == "sum.add.train")
    other = replace(order, step="sum.add.join", ticket=replace(order.ticket, question=2), nonce=new_nonce())
    site = link._sites["north"]
    assert isinstance(site, Site)
    details = {failed.detail for failed in asked(site, other).failed}
    assert details == {"STEP_NOT_ALLOWED: a private run has one sum in each round, that of the training"}
