"""The server's link, over a SuperLink that the test plays: what is sent, sent again, believed and given up."""

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

pytest.importorskip("cryptography", reason="messages are signed, which needs what the extra flower brings")

from cryptography.hazmat.primitives.asymmetric import ec

from protofed.federation.flower import link as link_module
from protofed.federation.flower.link import MOST_REFUSED, MOST_WAITING, FlowerLink
from protofed.federation.flower.outcomes import RunOver, SiteNode, Turned, Unreachable
from protofed.federation.keys import PrivateKey
from protofed.federation.signing import Signed, signed, verified

FEDERATION = "0" * 32
SERVER, A, B = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))


class SuperLink:
    """Plays one: runs, nodes, and messages in both directions."""

    def __init__(self) -> None:
        self.nodes = {"A": SiteNode(1, True, "monday"), "B": SiteNode(2, True, "monday")}
        self.sessions: list[Played] = []
        self.down: Exception | None = None

    def begin(self) -> "Played":
        if self.down:
            raise self.down
        self.sessions.append(Played(self, 100 + len(self.sessions)))
        return self.sessions[-1]

    @property
    def sent(self) -> list[tuple[int, bytes]]:
        return [(node, message.body) for one in self.sessions for node, message in one.posts.values()]


class Played:
    def __init__(self, superlink: SuperLink, run: int) -> None:
        self.superlink, self.run = superlink, run
        self.is_over = False
        self.posts: dict[str, tuple[int, Signed]] = {}
        self.replies: dict[str, Signed | str] = {}

    def nodes(self) -> dict[str, SiteNode]:
        self._check()
        return dict(self.superlink.nodes)

    def send(self, node: int, message: Signed) -> str:
        self._check()
        name = f"post-{self.run}-{len(self.posts)}"
        self.posts[name] = node, message
        return name

    def answers(self, sent: Mapping[str, int]) -> Iterator[tuple[str, Signed | str]]:
        self._check()
        for name in [name for name in self.replies if name in sent]:
            yield name, self.replies.pop(name)

    def close(self) -> None:
        pass

    def reply(self, post: str, body: bytes, key: PrivateKey = A, site: str = "A", nonce: str = "") -> None:
        """What the site would send back."""
        message = self.posts[post][1]
        own = verified(message, SERVER.public_key(), "order", FEDERATION, self.run, site).nonce
        answer = signed(key, "answer", FEDERATION, self.run, site, nonce or own, body, time.time())
        self.replies[post] = answer

    def _check(self) -> None:
        if self.superlink.down:
            raise self.superlink.down


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    for name in ("POLLS", "LOOKS", "LOOKS_FOR_MISSING", "TRIES"):
        monkeypatch.setattr(link_module, name, 0.0)
    return SuperLink()


@pytest.fixture
def told() -> list[str]:
    return []


def link_of(superlink: SuperLink, told: list[str], keep_alive: Callable[[], None] = lambda: None) -> FlowerLink:
    keys = {"A": A.public_key(), "B": B.public_key()}
    return FlowerLink(superlink.begin, FEDERATION, SERVER, keys, keep_alive, told.append)


def test_an_answer_comes_once(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    (session,) = superlink.sessions
    assert superlink.sent == [(1, b"do")]
    session.reply("post-100-0", b"done")
    assert list(link.receive(0)) == [("A", b"done")]
    session.reply("post-100-0", b"done")
    assert list(link.receive(0)) == []


def test_nothing_goes_to_whom_nobody_enrolled(superlink: SuperLink, told: list[str]) -> None:
    with pytest.raises(ValueError, match="C"):
        link_of(superlink, told).send("C", b"do", 100)


def test_who_is_not_there_is_asked_when_he_comes(superlink: SuperLink, told: list[str]) -> None:
    superlink.nodes["A"] = SiteNode(1, False, "monday")
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    list(link.receive(0))
    assert superlink.sent == []
    superlink.nodes["A"] = SiteNode(1, True, "tuesday")
    list(link.receive(0))
    list(link.receive(0))
    assert superlink.sent == [(1, b"do")]


def test_who_was_away_is_asked_again_and_either_answer_counts(superlink: SuperLink, told: list[str]) -> None:
    for which in (0, 1):
        link = link_of(superlink, told)
        link.send("A", b"do", 100)
        superlink.nodes["A"] = SiteNode(1, True, f"day {which}")
        list(link.receive(0))
        session = superlink.sessions[-1]
        assert len(session.posts) == 2
        session.reply(f"post-{session.run}-{which}", b"done")
        assert list(link.receive(0)) == [("A", b"done")]


def test_every_time_it_is_sent_an_order_is_another(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    name = link.send("A", b"do", 100)
    link.resend(name)
    first, second = (message for _, message in superlink.sessions[0].posts.values())
    assert first.body == second.body
    assert first.header != second.header


@pytest.mark.parametrize("key", [B, SERVER, ec.generate_private_key(ec.SECP384R1())])
def test_an_answer_of_another_key_does_not_count(superlink: SuperLink, told: list[str], key: PrivateKey) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    superlink.sessions[0].reply("post-100-0", b"forged", key)
    assert list(link.receive(0)) == []
    assert any("not that of the key" in text for text in told)


def test_an_answer_to_something_else_does_not_count(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    superlink.sessions[0].reply("post-100-0", b"old", nonce="0" * 32)
    assert list(link.receive(0)) == []
    assert any("answers something else" in text for text in told)


def test_who_answers_wrongly_is_asked_again_but_not_for_ever(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    for _ in range(3 * MOST_REFUSED):
        session = superlink.sessions[0]
        session.reply(f"post-100-{len(session.posts) - 1}", b"forged", B)
        assert list(link.receive(0)) == []
    assert len(superlink.sessions[0].posts) == MOST_REFUSED


def test_when_flower_loses_an_answer_its_order_is_sent_again(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    superlink.sessions[0].replies["post-100-0"] = "Flower says 5: gone"
    list(link.receive(0))
    list(link.receive(0))
    assert superlink.sent == [(1, b"do")] * 2


@pytest.mark.parametrize("error", [Turned("unknown run"), RunOver("over")])
def test_when_the_run_is_over_another_begins_with_what_is_open(
    superlink: SuperLink, told: list[str], error: Exception
) -> None:
    link = link_of(superlink, told)
    link.send("A", b"to A", 100)
    link.send("B", b"to B", 100)
    superlink.sessions[0].reply("post-100-0", b"done")
    assert list(link.receive(0)) == [("A", b"done")]
    superlink.down = error
    list(link.receive(0))
    superlink.down = None
    list(link.receive(0))
    assert [one.run for one in superlink.sessions] == [100, 101]
    assert [body for _, body in superlink.sent] == [b"to A", b"to B", b"to B"]
    superlink.sessions[1].reply("post-101-0", b"done too", B, "B")
    assert list(link.receive(0)) == [("B", b"done too")]


def test_a_heart_that_finds_the_run_over_is_heard(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    superlink.sessions[0].is_over = True
    list(link.receive(0))
    assert [body for _, body in superlink.sent] == [b"do", b"do"]


def test_a_superlink_that_is_away_is_waited_for_and_the_run_goes_on(superlink: SuperLink, told: list[str]) -> None:
    started: list[int] = []
    link = link_of(superlink, told, lambda: started.append(1))
    link.send("A", b"do", 100)
    superlink.down = Unreachable("gone")
    for _ in range(3):
        assert list(link.receive(0)) == []
    assert len(started) >= 3
    assert len([text for text in told if "gone" in text]) == 1
    superlink.down = None
    list(link.receive(0))
    assert len(superlink.sessions) == 1
    superlink.sessions[0].reply("post-100-0", b"done")
    assert list(link.receive(0)) == [("A", b"done")]


def test_what_is_sent_before_the_superlink_is_there_is_sent_then(superlink: SuperLink, told: list[str]) -> None:
    superlink.down = Unreachable("not yet")
    link = link_of(superlink, told)
    link.send("A", b"do", 100)
    superlink.down = None
    list(link.receive(0))
    assert superlink.sent == [(1, b"do")]


def test_what_nobody_waits_for_is_given_up(superlink: SuperLink, told: list[str]) -> None:
    link = link_of(superlink, told)
    for number in range(MOST_WAITING + 3):
        link.send("A", f"{number}".encode(), 100)
    assert len(link._waiting) == MOST_WAITING
    superlink.sessions[0].reply("post-100-0", b"late")
    assert list(link.receive(0)) == []
