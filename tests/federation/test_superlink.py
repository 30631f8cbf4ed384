"""A SuperLink of ours: what passes, and who is refused."""

import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import contextlib

import httpx
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient

from federation.machines import free_port
from protofed.federation import certificates, keys, kits, serve
from protofed.federation.flower.control import Access, Control, Session
from protofed.federation.flower.fleet import Fleet
from protofed.federation.flower.link import FlowerLink
from protofed.federation.flower.outcomes import BadParcel, Delivery, OtherServer, RunOver, Turned, Unreachable
from protofed.federation.flower.records import PART
from protofed.federation.keys import PrivateKey
from protofed.federation.signing import signed, verified

pytestmark = pytest.mark.slow
MOST = 64 * 2**20


class Running:
    """A server's SuperLink, with sites A and B enrolled, and C not."""

    def __init__(self, folder: Path) -> None:
        kits.init(folder / "fed", ["A", "B", "C"], f"127.0.0.1:{free_port()}")
        self.keys = {name: keys.new_private_key(folder / f"{name}.key") for name in "ABC"}
        for name in "AB":
            kits.enrol(folder / "fed", name, keys.public_text(self.keys[name].public_key()))
        self.server = kits.read_server(folder / "fed")
        self.access = serve.access_of(self.server)
        self.told: list[str] = []

    @property
    def address(self) -> str:
        return self.access.address

    @property
    def federation(self) -> str:
        return self.server.settings.federation

    def fleet(self, name: str, before: int = 0) -> Fleet:
        fleet = Fleet(self.address, self.server.authority, self.keys[name])
        try:
            fleet.activate(before)
        except Exception:
            fleet.close()
            raise
        return fleet

    def answer(self, fleet: Fleet, order: Delivery, site: str, key: PrivateKey, body: bytes) -> None:
        nonce = verified(order.message, self.own.public_key(), "order", self.federation, order.run, site).nonce
        reply = signed(key, "answer", self.federation, order.run, site, nonce, body, time.time())
        fleet.answer(order, reply)

    @property
    def own(self) -> PrivateKey:
        return keys.read_private_key(self.server.path / "signing.key")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, FlowerLink]]:
    one = Running(tmp_path_factory.mktemp("superlink"))
    with serve.served(one.server, one.told.append) as link:
        yield one, link


@pytest.fixture
def both(running: tuple[Running, FlowerLink]) -> Iterator[tuple[Running, FlowerLink, dict[str, Fleet]]]:
    one, link = running
    link._waiting.clear()
    fleets = {name: one.fleet(name) for name in "AB"}
    for fleet in fleets.values():
        while fleet.order(MOST):
            pass  # left by the test before
    one.told.clear()
    try:
        yield one, link, fleets
    finally:
        for fleet in fleets.values():
            with contextlib.suppress(Turned):
                fleet.deactivate()
            fleet.close()


def until(action: Callable[[], object], seconds: float = 20) -> object:
    end = time.monotonic() + seconds
    while not (found := action()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def next_order(fleet: Fleet) -> Delivery:
    found = until(lambda: fleet.order(MOST))
    assert isinstance(found, Delivery)
    return found


@pytest.mark.parametrize("size", [0, 10, PART - 1, PART, PART + 1, 3 * PART + 5])
def test_bytes_pass_in_parts_and_arrive_whole(both: tuple[Running, FlowerLink, dict[str, Fleet]], size: int) -> None:
    one, link, fleets = both
    body = os.urandom(size)
    link.send("A", body, MOST)
    order = next_order(fleets["A"])
    assert order.message.body == body
    one.answer(fleets["A"], order, "A", one.keys["A"], body[::-1])
    assert list(link.receive(30)) == [("A", body[::-1])]


def test_sites_get_what_is_theirs_and_answers_have_their_names(
    both: tuple[Running, FlowerLink, dict[str, Fleet]],
) -> None:
    one, link, fleets = both
    for name in "AB":
        link.send(name, f"for {name}".encode(), MOST)
    for name in "BA":
        order = next_order(fleets[name])
        assert order.message.body == f"for {name}".encode()
        one.answer(fleets[name], order, name, one.keys[name], f"from {name}".encode())
    came: dict[str, bytes] = {}
    until(lambda: came.update(link.receive(1)) or len(came) == 2)
    assert came == {"A": b"from A", "B": b"from B"}
    assert list(link.receive(0.2)) == []


def test_a_registered_site_cannot_answer_for_another(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    """Flower takes an answer from whoever knows the order's name. The signature says who made it."""
    one, link, fleets = both
    link.send("A", b"for A", MOST)
    order = next_order(fleets["A"])

    class Liar(Fleet):
        _node = Node(node_id=fleets["B"].node)  # what Flower compares with its key

    liar = Liar(one.address, one.server.authority, one.keys["B"])
    liar.node = fleets["A"].node  # what stands in its answer
    one.answer(liar, order, "A", one.keys["B"], b"from B, as A")
    liar.close()
    until(lambda: list(link.receive(0.5)) or one.told)
    assert any("A: an answer is refused" in text for text in one.told), one.told
    again = next_order(fleets["A"])  # the order is sent again, since nobody has answered it
    one.answer(fleets["A"], again, "A", one.keys["A"], b"from A")
    assert list(link.receive(30)) == [("A", b"from A")]


def test_an_answer_to_an_earlier_order_does_not_count(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    one, link, fleets = both
    link.send("A", b"first", MOST)
    first = next_order(fleets["A"])
    nonce = verified(first.message, one.own.public_key(), "order", one.federation, first.run, "A").nonce
    old = signed(one.keys["A"], "answer", one.federation, first.run, "A", nonce, b"to the first", time.time())
    fleets["A"].answer(first, old)
    assert list(link.receive(30)) == [("A", b"to the first")]
    link.send("A", b"second", MOST)
    fleets["A"].answer(next_order(fleets["A"]), old)
    until(lambda: list(link.receive(0.5)) or one.told)
    assert any("answers something else" in text for text in one.told)


def test_an_answer_that_broke_off_is_sent_on(
    both: tuple[Running, FlowerLink, dict[str, Fleet]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink takes one answer to an order, also if only its beginning came."""
    one, link, fleets = both
    body = os.urandom(3 * PART)
    link.send("A", b"do", MOST)
    order = next_order(fleets["A"])
    nonce = verified(order.message, one.own.public_key(), "order", one.federation, order.run, "A").nonce
    reply = signed(one.keys["A"], "answer", one.federation, order.run, "A", nonce, body, time.time())
    push, pushed = fleets["A"]._client.PushObject, list[object]()

    def breaks(request: object) -> object:
        pushed.append(request)
        if len(pushed) == 2:
            raise httpx.ConnectError("the line is cut")
        return push(request)

    monkeypatch.setattr(fleets["A"]._client, "PushObject", breaks)
    with pytest.raises(Unreachable, match="cut"):
        fleets["A"].answer(order, reply)
    fleets["A"].answer(order, reply)
    assert list(link.receive(30)) == [("A", body)]


def test_no_more_is_taken_in_than_was_asked_for(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    one, link, fleets = both
    link.send("A", b"small", 1000)
    one.answer(fleets["A"], next_order(fleets["A"]), "A", one.keys["A"], os.urandom(200_000))
    until(lambda: list(link.receive(0.5)) or one.told)
    assert any("larger than 1000 bytes" in text for text in one.told)
    link.send("B", os.urandom(200_000), MOST)
    with pytest.raises(BadParcel, match="larger than 1000 bytes"):
        until(lambda: fleets["B"].order(1000))


def test_a_site_that_was_started_anew_is_asked_again(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    one, link, fleets = both
    link.send("A", b"do", MOST)
    next_order(fleets["A"])  # and then its process is killed
    fleets["A"].close()
    fleets["A"] = one.fleet("A", before=fleets["A"].node)
    until(lambda: list(link.receive(0.2)) or one.told)
    again = next_order(fleets["A"])
    assert again.message.body == b"do"
    one.answer(fleets["A"], again, "A", one.keys["A"], b"done")
    assert list(link.receive(30)) == [("A", b"done")]


def test_a_site_that_comes_later_is_asked_then(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    _one, link, fleets = both
    fleets["A"].deactivate()
    link.send("A", b"do", MOST)
    assert list(link.receive(1.5)) == []
    fleets["A"].activate(0)
    until(lambda: list(link.receive(0.2)) or fleets["A"].order(MOST))


# ---- who is refused


def noted(one: Running, words: str) -> bool:
    """Whether the server's log says it."""
    return bool(re.search(f"refused: .*{words}", (one.server.path / "superlink.log").read_text()))


def test_a_key_that_is_not_enrolled_is_refused(running: tuple[Running, FlowerLink]) -> None:
    with pytest.raises(Turned, match="412"):
        running[0].fleet("C")
    assert noted(running[0], "/v1/fleet/activate-node: 412")


def test_who_has_no_key_is_refused(running: tuple[Running, FlowerLink]) -> None:
    one, _ = running
    fleet = Fleet(one.address, one.server.authority, one.keys["A"])
    no_key = [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
    fleet._client = FleetHttpClient.from_server_address(one.address, False, one.server.authority, no_key)
    with pytest.raises(Turned, match="401"):
        fleet.activate(0)
    fleet.close()
    assert noted(one, "/v1/fleet/activate-node: 401")


def test_a_second_process_with_the_key_of_a_site_is_refused(
    both: tuple[Running, FlowerLink, dict[str, Fleet]],
) -> None:
    one, _, _ = both
    with pytest.raises(Turned):
        one.fleet("A")


def test_a_site_cannot_take_another_s_orders(both: tuple[Running, FlowerLink, dict[str, Fleet]]) -> None:
    one, link, fleets = both
    link.send("A", b"for A", MOST)
    thief = Fleet(one.address, one.server.authority, one.keys["B"])
    thief.node = fleets["A"].node
    with pytest.raises(Turned, match="401"):
        thief.order(MOST)
    thief.close()
    one.answer(fleets["A"], next_order(fleets["A"]), "A", one.keys["A"], b"")
    assert list(link.receive(30)) == [("A", b"")]


def test_a_server_of_another_authority_is_refused_by_a_site(running: tuple[Running, FlowerLink]) -> None:
    one, _ = running
    other = certificates.authority(one.federation).certificate
    fleet = Fleet(one.address, other, one.keys["A"])
    with pytest.raises(OtherServer, match="certificate"):
        fleet.activate(0)
    fleet.close()


def test_plain_text_is_refused(running: tuple[Running, FlowerLink]) -> None:
    one, _ = running
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://{one.address}/v1/fleet/pull-messages", content=b"x")
    host, _, port = one.address.partition(":")
    with socket.create_connection((host, int(port)), 5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_a_server_that_speaks_plain_text_is_called_so_by_a_site(tmp_path: Path) -> None:
    one = Running(tmp_path)
    host, _, port = one.address.partition(":")
    with HTTPServer((host, int(port)), BaseHTTPRequestHandler) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        with pytest.raises(OtherServer, match="does not speak TLS"):
            one.fleet("A")
        plain.shutdown()


def test_who_has_only_the_authority_s_certificate_starts_and_sees_nothing(running: tuple[Running, FlowerLink]) -> None:
    one, _ = running
    stranger = Access(one.address, one.server.authority, "")
    control = Control(stranger)
    for attempt in (control.start_run, lambda: control.register(one.server.keys), lambda: control.nodes({})):
        with pytest.raises(Turned, match="404"):
            attempt()
    assert noted(one, "/v1/control/start-run: 404")
    control.close()
    trusting = ssl.create_default_context(cadata=one.server.authority.decode())
    for path in ("/", "/docs", "/openapi.json", "/health", "/v1/control/list-runs", "/v1/runtime/acquire-task"):
        assert httpx.get(f"https://{one.address}{path}", verify=trusting).status_code == 404


def test_a_stranger_s_run_is_ended_and_its_orders_are_none(
    both: tuple[Running, FlowerLink, dict[str, Fleet]], tmp_path: Path
) -> None:
    """At a SuperLink without our gate a stranger can start a run. It is ended, and what it sent is not signed."""
    one, _, fleets = both
    session = Session(one.access, one.server.keys)  # the stranger's
    stranger = keys.new_private_key(tmp_path / "stranger.key")
    message = signed(stranger, "order", one.federation, session.run, "A", "0" * 32, b"do", time.time())
    session.send(fleets["A"].node, message)
    order = next_order(fleets["A"])
    with pytest.raises(ValueError, match="not that of the key"):
        verified(order.message, one.own.public_key(), "order", one.federation, order.run, "A")
    session.close()
    control = Control(one.access)
    theirs = control.start_run()
    control.close()
    ours = Session(one.access, one.server.keys)
    assert ours.run != theirs
    assert not ours.is_over
    ours.close()


def test_an_order_of_a_run_that_is_over_is_answered_to_nobody(
    both: tuple[Running, FlowerLink, dict[str, Fleet]],
) -> None:
    one, _, fleets = both
    session = Session(one.access, one.server.keys)
    session.send(
        fleets["A"].node, signed(one.own, "order", one.federation, session.run, "A", "0" * 32, b"", time.time())
    )
    order = next_order(fleets["A"])
    session.close()
    with pytest.raises(RunOver):
        one.answer(fleets["A"], order, "A", one.keys["A"], b"")


def test_a_second_server_in_one_folder_is_refused(running: tuple[Running, FlowerLink]) -> None:
    with pytest.raises(ValueError, match="another process"), serve.served(running[0].server, print):
        pass


def test_a_superlink_that_is_not_there_may_come_back(tmp_path: Path) -> None:
    one = Running(tmp_path)
    with pytest.raises(Unreachable):
        one.fleet("A")
