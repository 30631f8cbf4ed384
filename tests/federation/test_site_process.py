"""A site's process, over a connection that the test plays: what it takes up, what it refuses, and what it survives."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protofed.errors import BadInput

pytest.importorskip("cryptography", reason="messages are signed, which needs what the extra flower brings")

from cryptography.hazmat.primitives.asymmetric import ec

from protofed.federation import keys, kits, policy, site_process
from protofed.federation.codec import decoded, encoded
from protofed.federation.flower.outcomes import BadParcel, Delivery, OtherServer, RunOver, Turned, Unreachable
from protofed.federation.messages import Answer, Description, Order, Proposal, Versions, Work
from protofed.federation.policy import SiteSettings
from protofed.federation.signing import Signed, new_nonce, signed, verified
from protofed.federation.site_process import SiteProcess, only_process
from protofed.federation.site_store import SiteFolder
from protofed.runtimes.jobs import Ticket


class Played:
    """Plays the SuperLink. It gives what is queued, and asks the site to stop when nothing is left."""

    def __init__(self) -> None:
        self.queue: deque[Delivery | Exception | None] = deque()
        self.answered: list[Signed] = []
        self.troubles: deque[Exception] = deque()
        """What happens when the site answers, before it is heard."""
        self.activated: list[int] = []
        self.refusals: deque[Exception] = deque()
        """What happens when the site connects."""
        self.node = 0
        self.is_closed = self.is_deactivated = False

    def activate(self, before: int) -> None:
        self.activated.append(before)
        if self.refusals:
            raise self.refusals.popleft()
        self.node = 77

    def deactivate(self) -> None:
        self.is_deactivated = True

    def beat(self) -> None:
        pass

    def order(self, most_bytes: int) -> Delivery | None:
        found = self.queue.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    def answer(self, delivery: Delivery, message: Signed) -> None:
        if self.troubles:
            raise self.troubles.popleft()
        self.answered.append(message)

    def close(self) -> None:
        self.is_closed = True


class Echo:
    def handle(self, data: bytes) -> bytes | None:
        if data == b"none":
            return None
        return data[::-1]


class Dying:
    def handle(self, data: bytes) -> bytes | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class Hanging:
    def handle(self, data: bytes) -> bytes | None:
        time.sleep(600)
        return None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "fed"
    kits.init(folder, ["A", "B"], "localhost:8000")
    keys.new_private_key(folder / "kits" / "A" / "site.key")
    return folder


@pytest.fixture
def settings(made: Path) -> SiteSettings:
    kit = made / "kits" / "A"
    if (kit / "state").exists():
        (kit / "state").rename(made / f"state-{new_nonce()}")
    found = policy.read(kit)
    keys.private_folder(found.state)
    return found


@pytest.fixture
def server(made: Path) -> keys.PrivateKey:
    return keys.read_private_key(made / "server" / "signing.key")


def order(settings: SiteSettings, server: keys.PrivateKey, body: bytes, run: int = 5, signed_for: int = 5) -> Delivery:
    federation = settings.site.federation
    message = signed(server, "order", federation, signed_for, "A", new_nonce(), body, time.time())
    return Delivery(run, "name", message, time.time() + 1000)


def ran(
    settings: SiteSettings, played: Played, handler: object = None, told: list[str] | None = None
) -> Callable[[Delivery], bytes]:
    """Runs the site until nothing is left. What it answered to an order."""
    handler = Echo() if handler is None else handler
    tell = (told if told is not None else []).append
    process = SiteProcess(settings, handler, lambda: played, tell, lambda: not played.queue)  # type: ignore[arg-type]
    process.run()
    own = keys.read_private_key(settings.key).public_key()

    def answer(to: Delivery) -> bytes:
        (message,) = played.answered
        header = verified(message, own, "answer", settings.site.federation, to.run, "A")
        ordered = verified(
            to.message, keys.read_public_key(settings.server_key), "order", settings.site.federation, to.run, "A"
        )
        assert header.nonce == ordered.nonce
        return message.body

    return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLLS", "POLLS_IDLE", "LONGEST_PAUSE"):
        monkeypatch.setattr(site_process, name, 0.01)


def test_an_order_is_answered_to_its_sender_alone(settings: SiteSettings, server: keys.PrivateKey) -> None:
    played, one = Played(), order(settings, server, b"abc")
    played.queue.extend([None, one, None])
    assert ran(settings, played)(one) == b"cba"
    assert played.is_deactivated
    assert played.is_closed


def test_what_is_no_message_is_not_answered(settings: SiteSettings, server: keys.PrivateKey) -> None:
    played = Played()
    played.queue.extend([order(settings, server, b"none"), None])
    ran(settings, played)
    assert played.answered == []


def test_what_the_server_did_not_order_for_this_run_is_never_looked_at(
    settings: SiteSettings, server: keys.PrivateKey
) -> None:
    stranger = ec.generate_private_key(ec.SECP384R1())
    played = Played()
    played.queue.extend(
        [order(settings, stranger, b"abc"), order(settings, server, b"abc", run=6), BadParcel("?"), None]
    )
    told: list[str] = []
    ran(settings, played, Dying(), told)
    assert played.answered == []
    assert not any("died" in text for text in told)
    refused = (settings.state / "refused.log").read_text()
    assert len(refused.splitlines()) == 3
    assert "not that of the key" in refused
    assert "another run" in refused


def test_an_order_that_comes_again_is_refused_also_after_a_restart(
    settings: SiteSettings, server: keys.PrivateKey
) -> None:
    one = order(settings, server, b"abc")
    for _ in range(2):
        played = Played()
        played.queue.extend([one, one, None])
        ran(settings, played)
    assert played.answered == []
    assert (settings.state / "refused.log").read_text().count("before") == 3


def test_a_site_that_comes_back_signs_off_its_former_self(settings: SiteSettings) -> None:
    for before in (0, 77):
        played = Played()
        played.queue.extend([None])
        ran(settings, played)
        assert played.activated == [before]


def test_a_server_that_is_away_while_the_site_answers_gets_the_answer_later(
    settings: SiteSettings, server: keys.PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SiteProcess, "_sleep", lambda self, seconds: self._check_stop())
    played, one = Played(), order(settings, server, b"abc")
    played.troubles.extend([Unreachable("gone"), Unreachable("gone")])
    played.queue.extend([one, None, None])
    assert ran(settings, played)(one) == b"cba"


def test_an_answer_that_nobody_waits_for_ends_nothing(settings: SiteSettings, server: keys.PrivateKey) -> None:
    played, second = Played(), order(settings, server, b"abc")
    played.troubles.append(RunOver("over"))
    played.queue.extend([order(settings, server, b"xyz"), second, None])
    assert ran(settings, played)(second) == b"cba"


@pytest.mark.parametrize("error", [Unreachable("gone"), Turned("401")])
def test_a_server_that_is_away_or_refuses_is_tried_again(
    settings: SiteSettings, server: keys.PrivateKey, error: Exception
) -> None:
    played, one = Played(), order(settings, server, b"abc")
    played.refusals.extend([error, error])
    played.queue.extend([error, one, None])
    assert ran(settings, played)(one) == b"cba"
    assert played.activated == [0, 0, 0, 77]  # it came anew, so what was lost on its way is sent again


@pytest.mark.parametrize("handler", [Dying(), Hanging()])
def test_a_worker_that_dies_or_hangs_costs_its_clients_and_nobody_else(
    settings: SiteSettings, server: keys.PrivateKey, handler: object
) -> None:
    limited = policy.Policy(order_minutes=0.02)
    works = tuple(Work(client, "", 0, 1, 32, 0, 0) for client in ("ann", "bob"))
    asked = Order("0" * 32, "1" * 64, Ticket("run", 0, "round", 0, "m", 1), "train", "none", False, 60.0, works, b"")
    one = order(settings, server, encoded(asked))
    played = Played()
    played.queue.extend([one, None])
    found = SiteSettings(settings.folder, settings.site, settings.task, settings.clients, limited)
    answer = decoded(ran(found, played, handler)(one), 10_000)
    assert isinstance(answer, Answer)
    assert [(one.client, one.reason) for one in answer.failed] == [("ann", "CLIENT_ERROR"), ("bob", "CLIENT_ERROR")]
    assert answer.done == ()


@pytest.mark.parametrize("run", ["agreed", "unknown", "../other"])
def test_time_at_an_order_that_was_ended_counts_for_its_run(
    run: str, settings: SiteSettings, server: keys.PrivateKey
) -> None:
    """Else orders that hang, one after another, would go on for longer than the policy's `most_hours`."""
    files = SiteFolder(settings.state)
    files.agree(Proposal("0" * 32, Description("agreed", "", Versions(1, "", ""), "", ())), "")
    limited = replace(settings, policy=policy.Policy(order_minutes=0.005))
    asked = Order("0" * 32, "", Ticket(run, 0, "round", 0, "m", 1), "train", "none", False, 60.0, (), b"")
    played = Played()
    played.queue.extend([order(settings, server, encoded(asked)), None])
    ran(limited, played, Hanging())
    assert (files.seconds("agreed") >= 0.3) == (run == "agreed")
    assert [path.name for path in (settings.state / "runs").iterdir()] == ["agreed"]


def test_what_is_not_the_server_is_called_so(settings: SiteSettings) -> None:
    played, told = Played(), list[str]()
    played.refusals.extend([OtherServer("its certificate is not good: unable to get local issuer certificate")] * 4)
    played.queue.append(None)
    ran(settings, played, told=told)
    (text,) = (text for text in told if "does not let this site in" in text)
    assert "it is not the server of this kit" in text
    assert "enrolled" not in text


@pytest.mark.parametrize("times", [3, 4])
def test_a_server_that_has_just_started_does_not_know_its_sites_for_a_moment(
    times: int, settings: SiteSettings, server: keys.PrivateKey
) -> None:
    played, one, told = Played(), order(settings, server, b"abc"), list[str]()
    played.refusals.extend([Turned("412")] * times)
    played.queue.extend([one, None])
    ran(settings, played, told=told)
    assert any("does not let this site in: 412" in text for text in told) == (times > 3)


def test_a_site_is_one_process(settings: SiteSettings) -> None:
    with (
        only_process(settings.state),
        pytest.raises(BadInput, match="another process"),
        only_process(settings.state),
    ):
        pass
    with only_process(settings.state):
        pass
