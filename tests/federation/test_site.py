"""A site by itself: what it agrees to, what it refuses, what it writes down."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from federation.grids import RUN, config_of, remote, sites_of
from protofed import wire
from protofed.engine.message import WireMessage
from protofed.errors import BadInput
from protofed.federation.codec import decoded, encoded
from protofed.federation.enrolling import Central, Enrolled, enrolled, server_task
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Answer, Enrolment, Limits, Message, Order, Proposal, Refusal, Verdict
from protofed.federation.plan import method_digests
from protofed.federation.site import Site
from protofed.federation.site_run import SiteRun
from protofed.federation.site_store import SiteFolder
from protofed.methods import METHODS
from protofed.models.formats import NetworkByName, Outline
from protofed.runtimes.jobs import Reason
from protofed.testing.federations import TASK, assert_same

MOST = 10**9
DITTO = METHODS["ditto"]()
OTHER_NONCE = "f" * 32


class Seen(InProcess):
    """A link that keeps what the server sent to one site."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__(sites)
        self.messages: list[Message] = []

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        if site == "north":
            self.messages.append(decoded(data, MOST))
        return super().send(site, data, most_bytes)


@pytest.fixture
def north(tmp_path: Path) -> tuple[Site, Order]:
    """A site in a run, and the order of its first round, which it has answered."""
    sites = sites_of(tmp_path)
    link = Seen(sites)
    of = remote(link, config_of(DITTO))
    of.advance(of.start())
    orders = [message for message in link.messages if isinstance(message, Order)]
    return sites["north"], orders[0]


def asked(site: Site, message: Message) -> Any:
    answer = site.handle(encoded(message))
    assert answer is not None
    return decoded(answer, MOST)


def lines(site: Site) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site.folder / "log.jsonl").read_text().splitlines()]


def test_the_same_order_is_answered_with_the_same_bytes_and_done_once(north: tuple[Site, Order]) -> None:
    site, order = north
    first = site.handle(encoded(order))
    started_again = Site(site.folder, site.data, site.limits)
    assert started_again.handle(encoded(order)) == first
    assert len([line for line in lines(site) if line["event"] == "done"]) == 1


def test_an_order_that_is_done_again_has_the_same_answer(north: tuple[Site, Order]) -> None:
    site, order = north
    first, again = asked(site, order), asked(site, fresh(order))
    for one, other in zip(first.done, again.done, strict=True):
        before, after = WireMessage(one.upload), WireMessage(other.upload)
        assert (after.ticket, after.receipt, after.loss) == (before.ticket, before.receipt, before.loss)
        numbers = [[*sorted_arrays(message).values()] for message in (after, before)]
        assert_same(*numbers, f"the upload of {one.client}")


def sorted_arrays(message: WireMessage) -> dict[str, torch.Tensor]:
    return dict(sorted(wire.decode_arrays(message.data).items()))


def fresh(order: Order, **changes: Any) -> Order:
    return replace(order, nonce=OTHER_NONCE, **changes)


def with_work(order: Order, **changes: Any) -> Order:
    """Of one of its clients."""
    return fresh(order, works=(replace(order.works[0], **changes),))


def not_finite(order: Order) -> bytes:
    arrays = wire.decode_arrays(order.messages)
    return save({name: torch.full_like(leaf, torch.nan) for name, leaf in arrays.items()})


OTHER_ORDERS: list[tuple[Refusal, Callable[[Order], Order]]] = [
    (Refusal.NONCE_USED, lambda order: replace(order, seconds=1.0)),
    (Refusal.NOT_AGREED, lambda order: fresh(order, digest="0" * 64)),
    (Refusal.NOT_AGREED, lambda order: fresh(order, ticket=replace(order.ticket, run="another"))),
    (Refusal.NOT_AGREED, lambda order: fresh(order, ticket=replace(order.ticket, run="../../etc"))),
    (Refusal.FOREIGN_CLIENT, lambda order: with_work(order, client="eve")),
    (Refusal.OTHER_SETTINGS, lambda order: with_work(order, epochs=50)),
    (Refusal.OTHER_SETTINGS, lambda order: with_work(order, step_seed=1)),
    (Refusal.OTHER_SETTINGS, lambda order: with_work(order, halvings=-3)),
    (Refusal.STEP_NOT_ALLOWED, lambda order: fresh(order, step="validate")),
    (Refusal.STEP_NOT_ALLOWED, lambda order: fresh(order, step="__init__")),
    (Refusal.STEP_NOT_ALLOWED, lambda order: fresh(order, step="base.train")),
    (Refusal.STEP_NOT_ALLOWED, lambda order: fresh(order, step="evaluate")),
    (Refusal.TOO_MANY_ROUNDS, lambda order: fresh(order, ticket=replace(order.ticket, round=4))),
    (Refusal.TOO_MANY_ROUNDS, lambda order: fresh(order, ticket=replace(order.ticket, round=-1))),
    (Refusal.UNREADABLE, lambda order: fresh(order, messages=wire.encode([{"a": torch.zeros(1)}]))),
    (Refusal.UNREADABLE, lambda order: fresh(order, messages=b"tensors")),
    (Refusal.UNREADABLE, lambda order: with_work(order, message=7)),
    (Refusal.NOT_FINITE, lambda order: fresh(order, messages=not_finite(order))),
]


@pytest.mark.parametrize(("name", "change"), OTHER_ORDERS)
def test_an_order_for_something_else_is_refused(
    name: Refusal, change: Callable[[Order], Order], north: tuple[Site, Order]
) -> None:
    site, order = north
    before = {path for path in site.folder.rglob("*") if path.is_file()}
    answer = asked(site, change(order))
    assert not answer.done
    told = {(one.reason, one.detail.partition(":")[0]) for one in answer.failed}
    is_of_one = name in (Refusal.OTHER_SETTINGS,)
    assert (Reason.REFUSED_BY_SITE, name) in told
    written = {path for path in site.folder.rglob("*") if path.is_file()} - before
    assert is_of_one or not written, f"{written} was written for an order that was refused"


def test_a_state_is_looked_for_by_its_digest_only(north: tuple[Site, Order]) -> None:
    site, order = north
    for receipt, nonce in (("../../experiment", "a" * 32), ("0" * 64, "b" * 32), ("0", "c" * 32)):
        answer = asked(site, replace(with_work(order, receipt=receipt), nonce=nonce))
        assert answer.failed[0].reason == Reason.MEMORY_LOST


def test_an_order_after_its_time_is_not_begun(north: tuple[Site, Order]) -> None:
    site, order = north
    answer = asked(site, fresh(order, seconds=-1.0))
    assert {one.reason for one in answer.failed} == {Reason.CLIENT_ERROR}
    assert "waits" in answer.failed[0].detail


def test_an_error_that_nobody_foresaw_ends_no_site(north: tuple[Site, Order], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("not foreseen")

    site, order = north
    monkeypatch.setattr(SiteRun, "done", broken)
    answer = asked(site, fresh(order))
    assert {(one.reason, one.detail) for one in answer.failed} == {(Reason.CLIENT_ERROR, "TypeError: not foreseen")}


def test_an_experiment_that_cannot_be_built_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("not foreseen")

    monkeypatch.setattr(SiteRun, "of", broken)
    with pytest.raises(BadInput, match="west: BAD_EXPERIMENT: TypeError: not foreseen"):
        remote(InProcess(sites_of(tmp_path)), config_of(DITTO))


@pytest.mark.parametrize("data", [b"", b"PFED", b"noise" * 100])
def test_what_is_no_message_is_written_down_and_not_answered(data: bytes, north: tuple[Site, Order]) -> None:
    site, _ = north
    assert site.handle(data) is None
    assert lines(site)[-1]["event"] == "unreadable"


def test_a_message_that_is_no_question_is_not_answered(north: tuple[Site, Order]) -> None:
    site, _ = north
    assert site.handle(encoded(Answer(OTHER_NONCE, (), ()))) is None
    assert lines(site)[-1]["event"] == "unexpected"


def test_the_log_says_what_was_asked_and_what_was_sent(north: tuple[Site, Order]) -> None:
    site, order = north
    found = lines(site)
    assert [line["event"] for line in found] == [
        *("asked", "sent", "proposal", "sent"),
        *("order", "done", "sent"),
    ]
    assert found[4]["clients"] == {"ann": "", "bob": ""}
    assert (found[4]["run"], found[4]["round"], found[4]["step"]) == (RUN, 0, "train")
    assert found[4]["nonce"] == found[5]["nonce"] == found[6]["nonce"] == order.nonce
    assert all(len(digest) == 64 for digest in found[5]["uploads"].values())
    assert found[5]["seconds"] > 0


# ---- limits


LIMITS: list[tuple[Refusal, Limits]] = [
    (Refusal.METHOD_NOT_ALLOWED, Limits(methods=("fedavg",))),
    (Refusal.NETWORK_NOT_ALLOWED, Limits(networks=("small_cnn",))),
    (Refusal.TOO_MANY_EPOCHS, Limits(epochs=1)),
    (Refusal.TOO_MANY_ROUNDS, Limits(rounds=2)),
]


@pytest.mark.parametrize(("name", "limits"), LIMITS)
def test_a_site_does_not_take_part_in_what_is_beyond_its_limits(name: Refusal, limits: Limits, tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    sites["south"].limits = limits
    with pytest.raises(BadInput, match=rf"south: {name}: "):
        remote(InProcess(sites), config_of(DITTO))
    assert not [*sites["south"].folder.glob("runs/*/experiment")]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        (Refusal.STEP_NOT_ALLOWED, Limits(steps=("evaluate_own",))),
        (Refusal.TOO_MANY_HOURS, Limits(hours=0.0)),
    ],
)
def test_a_site_does_not_do_what_is_beyond_its_limits(name: Refusal, limits: Limits, north: tuple[Site, Order]) -> None:
    site, order = north
    site.limits = limits
    site._runs.clear()
    answer = asked(site, fresh(order))
    assert {one.detail.partition(":")[0] for one in answer.failed} == {name}


def test_an_answer_that_is_too_large_does_not_leave(north: tuple[Site, Order]) -> None:
    site, order = north
    site.limits = Limits(bytes=len(encoded(fresh(order))))
    answer = asked(site, fresh(order))
    assert {one.detail.partition(":")[0] for one in answer.failed} == {Refusal.TOO_MANY_BYTES}


def test_limits_that_have_changed_hold_for_a_run_that_was_agreed(north: tuple[Site, Order]) -> None:
    site, order = north
    narrower = Site(site.folder, site.data, Limits(epochs=1))
    answer = asked(narrower, fresh(order))
    assert {one.detail.partition(":")[0] for one in answer.failed} == {Refusal.NOT_AGREED}


def test_a_methods_own_epochs_are_limited_too(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, limits=Limits(epochs=2))
    of = remote(InProcess(sites), config_of(METHODS["fedrep"](head_epochs=3), minimum_replies=1, attempts=1))
    with pytest.raises(Exception, match="TOO_MANY_EPOCHS"):
        of.advance(of.start())


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    for site in sites.values():
        site.dry_run = True
    with pytest.raises(BadInput, match="west: DRY_RUN"):
        remote(InProcess(sites), config_of(DITTO))
    assert not [*sites["west"].folder.glob("runs/*")]
    assert lines(sites["west"])[2]["refused"][0][0] == "DRY_RUN"


def test_a_site_that_becomes_dry_trains_nothing(north: tuple[Site, Order]) -> None:
    site, order = north
    site.dry_run = True
    answer = asked(site, fresh(order))
    assert {one.detail.partition(":")[0] for one in answer.failed} == {Refusal.DRY_RUN}


# ---- both ends mean the same


OTHER: list[tuple[Refusal, Callable[[Any], Any]]] = [
    (Refusal.OTHER_PROTOCOL, lambda d: replace(d, versions=replace(d.versions, protocol=1))),
    (Refusal.OTHER_VERSION, lambda d: replace(d, versions=replace(d.versions, protofed="0.0"))),
    (Refusal.OTHER_VERSION, lambda d: replace(d, versions=replace(d.versions, torch="1.0"))),
    (Refusal.OTHER_CODE, lambda d: replace(d, method_digest="0" * 64)),
    (Refusal.OTHER_TASK, lambda d: replace(d, config=d.config.replace("fingerprint = ", "other = "))),
    (Refusal.OTHER_TASK, lambda d: replace(d, tests=("domain 0",))),
    (Refusal.OTHER_CLIENTS, lambda d: replace(d, clients=d.clients[1:])),
    (Refusal.OTHER_CLIENTS, lambda d: replace(d, clients=(*d.clients, d.clients[0]))),
    (Refusal.BAD_EXPERIMENT, lambda d: replace(d, run="../escape")),
    (Refusal.BAD_EXPERIMENT, lambda d: replace(d, config="not = [TOML")),
    (Refusal.BAD_EXPERIMENT, lambda d: replace(d, config=d.config.replace('"ditto"', '"os:system"'))),
    (Refusal.BAD_EXPERIMENT, lambda d: replace(d, config=d.config.replace("epochs = 2", "epochs = -2"))),
    (Refusal.BAD_EXPERIMENT, lambda d: replace(d, config=d.config + "\n[runtime]\nthreads = 4\n")),
]


@pytest.mark.parametrize(("name", "change"), OTHER)
def test_an_experiment_that_is_not_the_sites_is_refused(
    name: Refusal, change: Callable[[Any], Any], tmp_path: Path
) -> None:
    sites = sites_of(tmp_path)
    link = Seen(sites)
    remote(link, config_of(DITTO))
    [proposal] = [message for message in link.messages if isinstance(message, Proposal)]
    other = change(proposal.description)
    assert other != proposal.description
    verdict = asked(sites["north"], replace(proposal, description=other))
    assert isinstance(verdict, Verdict)
    assert name in {refusal for refusal, _ in verdict.refusals}


def test_a_site_whose_code_differs_is_named_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = dict(method_digests())

    class OtherCode(InProcess):
        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                message = decoded(data, MOST)
                if site == "south" and isinstance(message, Enrolment):
                    message = replace(message, methods=digests | {"ditto": "0" * 64})
                yield site, encoded(message)

    with pytest.raises(BadInput, match="south: OTHER_CODE"):
        remote(OtherCode(sites_of(tmp_path)), config_of(DITTO))


def test_a_site_whose_examples_have_changed_since_the_run_began_does_not_go_on(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    remote(InProcess(sites), config_of(DITTO))
    remote(InProcess(sites), config_of(DITTO, rounds=2))
    data = sites["west"].data
    fewer = {client: own.rows(torch.arange(3)) for client, own in data.task.clients.items()}
    sites["west"].data = replace(data, task=replace(data.task, clients=fewer))
    with pytest.raises(BadInput, match="west: OTHER_DATA"):
        remote(InProcess(sites), config_of(DITTO))
    remote(InProcess(sites), config_of(DITTO), run="run-2")


def test_a_client_that_two_sites_claim_is_refused(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, clients={"north": ("ann", "bob"), "south": ("bob", "cyd")})
    with pytest.raises(BadInput, match="south: OTHER_CLIENTS: 'bob' is a client of north too"):
        remote(InProcess(sites), config_of(DITTO))


def test_sites_with_other_tasks_are_refused(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    task = sites["south"].data.task
    data = replace(
        sites["south"].data, task=replace(task, transform=replace(task.transform, mean=(0.5,) * 3, std=(1.0,) * 3))
    )
    sites["south"].data = data
    with pytest.raises(BadInput, match="south: OTHER_TASK: inputs"):
        remote(InProcess(sites), config_of(DITTO))


def test_a_site_that_does_not_answer_is_named(tmp_path: Path) -> None:
    class Away:
        def handle(self, data: bytes) -> bytes | None:
            return None

    link = InProcess({**sites_of(tmp_path), "east": Away()})
    with pytest.raises(BadInput, match="no answer of east"):
        enrolled(link, 0.1)


def test_a_site_that_judged_another_experiment_is_named(tmp_path: Path) -> None:
    class Confused(InProcess):
        def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
            for site, data in super().receive(timeout):
                message = decoded(data, MOST)
                if site == "south" and isinstance(message, Verdict):
                    message = replace(message, digest="0" * 64)
                yield site, encoded(message)

    with pytest.raises(BadInput, match="south: BAD_EXPERIMENT: it judged another"):
        remote(Confused(sites_of(tmp_path)), config_of(DITTO))


def with_network(sites: Enrolled, network: NetworkByName) -> Enrolled:
    def changed(outline: Outline) -> Outline:
        clients = {c: facts.model_copy(update={"network": network}) for c, facts in outline.clients.items()}
        return outline.model_copy(update={"clients": clients})

    return replace(sites, outlines={site: changed(outline) for site, outline in sites.outlines.items()})


def test_a_network_that_the_server_cannot_build_is_refused(tmp_path: Path) -> None:
    sites = enrolled(InProcess(sites_of(tmp_path)), 5.0)
    without_model = Central(TASK.tests, TASK.public)
    with pytest.raises(BadInput, match="of client ann is none"):
        server_task(sites, without_model)
    foreign = NetworkByName.model_validate({"name": "os:system", "settings": {}})
    with pytest.raises(BadInput, match="none of protofed's"):
        server_task(with_network(sites, foreign), without_model)


@pytest.mark.parametrize(
    ("settings", "why"), [({"inputs": 2**40, "num_classes": 4}, "weights"), ({"inputs": "x"}, "cannot be built")]
)
def test_a_huge_or_impossible_network_is_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    sites = enrolled(InProcess(sites_of(tmp_path)), 5.0)
    network = NetworkByName.model_validate({"name": "mlp", "settings": settings})
    with pytest.raises(BadInput, match=why):
        server_task(with_network(sites, network), Central(TASK.tests, TASK.public))


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a" * 101, "a b"])
def test_no_name_of_a_run_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be called"):
        SiteFolder(tmp_path).run(name)
