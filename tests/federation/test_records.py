"""Messages as Flower's objects, and answers of which only a part is there. Nothing here has a network."""

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from flwr.proto.message_pb2 import Message, Metadata, PullObjectResponse

from protofed.federation.flower.control import Session
from protofed.federation.flower.outcomes import BadParcel
from protofed.federation.flower.records import PART, SENDS_FOR, SERVER_NODE, Incoming, Outgoing, opened
from protofed.federation.signing import Signed

RUN = 7
MOST = 8 * PART


def message(size: int) -> Signed:
    return Signed(b"header", b"signature", os.urandom(size))


def sent(body: Signed, reply_to: str = "") -> Outgoing:
    return Outgoing(body, RUN, 5, SERVER_NODE, reply_to)


class SuperLink:
    """What a session asks for answers. It has those parts of them that `there` has."""

    def __init__(self, answers: dict[str, Outgoing]) -> None:
        self.answers, self.there = answers, dict[str, bytes]()
        self.delivered = set[str]()
        self.pulled = list[str]()

    def PullMessages(self, request: Any) -> Any:  # noqa: N802, Flower calls it so
        names = [name for name in request.message_ids if name in self.answers and name not in self.delivered]
        self.delivered.update(request.message_ids)
        found = [Message(metadata=Metadata(message_id=self.answers[n].id, reply_to_message_id=n)) for n in names]
        return SimpleNamespace(messages_list=found, message_object_trees=[self.answers[n].tree for n in names])

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802, Flower calls it so
        self.pulled.append(request.object_id)
        content = self.there.get(request.object_id, b"")
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802, Flower calls it so
        assert request.message_object_id in {one.id for one in self.answers.values()}


def session(superlink: SuperLink) -> Session:
    own = Session.__new__(Session)  # a run of its own would need a SuperLink
    own.run, own._coming, own._client = RUN, {}, superlink  # type: ignore[assignment]
    return own


def test_nobody_waits_for_an_answer_that_another_site_is_still_sending() -> None:
    """A site that stops in the middle, or sends a part a minute, holds up no round of others."""
    slow, quick = message(2 * PART), message(10)
    answers = {"to slow": sent(slow, "to slow"), "to quick": sent(quick, "to quick")}
    superlink = SuperLink(answers)
    *first, last = answers["to slow"].objects
    superlink.there = {name: answers["to slow"].objects[name] for name in first} | answers["to quick"].objects
    own, wanted = session(superlink), dict.fromkeys(answers, MOST)
    begin = time.monotonic()
    assert list(own.answers(wanted)) == [("to quick", quick)]
    assert list(own.answers({"to slow": MOST})) == []
    assert time.monotonic() - begin < SENDS_FOR / 2
    superlink.there[last] = answers["to slow"].objects[last]
    assert list(own.answers({"to slow": MOST})) == [("to slow", slow)]
    assert list(own.answers({"to slow": MOST})) == []
    assert all(superlink.pulled.count(name) == 1 for name in first)


def test_what_nobody_asks_for_any_more_is_not_fetched_to_its_end() -> None:
    answers = {"to slow": sent(message(2 * PART), "to slow")}
    superlink = SuperLink(answers)
    own = session(superlink)
    assert list(own.answers({"to slow": MOST})) == []
    assert list(own.answers({"another": MOST})) == []
    assert own._coming == {}


def test_a_message_whose_sender_stopped_is_given_up() -> None:
    outgoing, now = sent(message(2 * PART)), [0.0]
    incoming = Incoming(outgoing.tree, MOST, lambda: now[0])
    there = dict[str, bytes]()

    def pull(name: str) -> PullObjectResponse:
        content = there.get(name, b"")
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    now[0] = SENDS_FOR - 1
    assert not incoming.is_whole(pull)
    there.update(list(outgoing.objects.items())[-1:])
    there.update(list(outgoing.objects.items())[:1])
    assert not incoming.is_whole(pull)
    now[0] += SENDS_FOR - 1  # something new had come
    assert not incoming.is_whole(pull)
    now[0] += 2
    with pytest.raises(BadParcel, match="stopped in the middle"):
        incoming.is_whole(pull)


def test_no_more_is_fetched_than_may_come() -> None:
    outgoing = sent(message(4 * PART))
    pulled = list[str]()

    def pull(name: str) -> PullObjectResponse:
        pulled.append(name)
        content = outgoing.objects[name]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    with pytest.raises(BadParcel, match="larger than 1000 bytes"):
        Incoming(outgoing.tree, 1000).is_whole(pull)
    assert sum(len(outgoing.objects[name]) for name in pulled) < 2 * PART
    body = message(4 * PART)
    outgoing = sent(body)
    incoming = Incoming(outgoing.tree, MOST)
    assert incoming.is_whole(pull)
    assert opened(outgoing.id, incoming.contents) == body
