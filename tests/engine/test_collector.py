"""The inbox: at most one reply of each client, the right one, in time, in order; and an exact record of the rest."""

import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from protofed.api.private import Charge
from protofed.engine.collector import Collector
from protofed.engine.message import WireMessage, bounds, digest, sealed
from protofed.errors import RunFailed
from protofed.runtimes.jobs import Failure, Reason, Ticket

LIKE = {"w": torch.zeros(3)}
TICKET = Ticket("run", 4, "round", 1, digest(LIKE), 1)
GOOD = sealed(TICKET, LIKE)


def inbox(ids: str = "abc", deadline: float = inf, asked: str = "abc") -> Collector:
    return Collector(ids, TICKET, bounds(LIKE), deadline, asked.__contains__)


def sorted_by(box: Collector, arrivals: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What came of each client, by name for failures."""
    return {c: o.reason if isinstance(o, Failure) else o for c, o in box.sorted(arrivals)}


def reasons(box: Collector) -> list[tuple[str, Reason]]:
    return [(failure.client, failure.reason) for failure in box.refused]


def test_messages_come_out_in_the_order_of_the_clients() -> None:
    box = inbox()
    assert list(sorted_by(box, [("c", GOOD), ("a", GOOD), ("b", GOOD)])) == ["a", "b", "c"]
    assert box.refused == []


def test_the_first_message_counts_and_further_ones_are_duplicates() -> None:
    box = inbox()
    other = sealed(TICKET, {"w": torch.ones(3)})
    found = sorted_by(box, [("a", GOOD), ("b", GOOD), ("a", other), ("c", GOOD), ("a", GOOD)])
    assert found["a"] is GOOD
    assert reasons(box) == [("a", Reason.DUPLICATE)] * 2


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (replace(TICKET, run="other"), Reason.WRONG_RUN),
        (replace(TICKET, run="other", round=1, model="x"), Reason.WRONG_RUN),
        (replace(TICKET, round=3), Reason.STALE_ROUND),
        (replace(TICKET, round=5), Reason.STALE_ROUND),
        (replace(TICKET, phase="setup"), Reason.STALE_ROUND),
        (replace(TICKET, call=2), Reason.STALE_ROUND),
        (replace(TICKET, question=2), Reason.STALE_ROUND),
        (replace(TICKET, model="x"), Reason.WRONG_MODEL),
    ],
)
def test_a_message_that_answers_something_else_leaves_its_client_awaited(ticket: Ticket, reason: Reason) -> None:
    wrong = sealed(ticket, LIKE)
    box = inbox()
    assert sorted_by(box, [("a", wrong), ("b", GOOD), ("a", GOOD), ("c", GOOD)])["a"] is GOOD
    assert reasons(box) == [("a", reason)]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (WireMessage(b""), Reason.UNDECODABLE),
        (WireMessage(bytes(10**5)), Reason.TOO_LARGE),
        (WireMessage(b"\xff" * 8 + GOOD.data[8:]), Reason.TOO_LARGE),
        (sealed(replace(TICKET, round=0), LIKE), Reason.STALE_ROUND),
        (sealed(TICKET, LIKE, charges=[Charge("nothing known", 1, 1.0)]), Reason.UNDECODABLE),
    ],
)
def test_a_client_from_whom_nothing_better_comes_is_left_out_for_its_last_message_and_counted_once(
    wrong: WireMessage, reason: Reason
) -> None:
    """Of three equal messages, one is why the client is left out, and two were refused besides."""
    box = inbox()
    found = sorted_by(box, [("a", wrong), ("b", GOOD), ("a", wrong), ("c", GOOD), ("a", wrong)])
    assert found["a"] == reason
    assert reasons(box) == [("a", reason)] * 2


def test_a_message_of_one_who_was_not_asked_is_refused() -> None:
    box = inbox()
    assert sorted_by(box, [("x", GOOD), ("a", GOOD), ("b", GOOD), ("c", GOOD)]).keys() == set("abc")
    assert box.refused == [Failure("x", Reason.DUPLICATE, "nobody asked it")]


def test_after_the_deadline_replies_and_messages_are_late_and_failures_are_themselves() -> None:
    box = inbox(deadline=time.monotonic() - 1)
    failure = Failure("c", Reason.CLIENT_ERROR, "it died")
    found = dict(box.sorted([("a", GOOD), ("b", "a reply"), ("c", failure)]))
    assert {client: found[client].reason for client in "ab"} == {"a": Reason.LATE, "b": Reason.LATE}
    assert found["c"] is failure


def test_a_client_that_was_never_asked_is_late() -> None:
    box = inbox(asked="ab")
    [_, _, (client, outcome)] = list(box.sorted([("a", GOOD), ("b", GOOD)]))
    assert (client, outcome) == ("c", Failure("c", Reason.LATE, "the deadline came before it was asked"))


def test_a_client_that_was_asked_and_never_heard_of_is_the_runtimes_fault() -> None:
    with pytest.raises(RunFailed, match="the runtime lost client c"):
        list(inbox().sorted([("a", GOOD), ("b", GOOD)]))


def test_a_runtimes_second_word_is_its_fault_but_a_message_more_is_not() -> None:
    """What a runtime says itself is trusted to be said once; what strangers send is not."""
    with pytest.raises(RunFailed, match="gave back client a twice"):
        list(inbox().sorted([("a", "a reply"), ("a", "a reply")]))
    box = inbox()
    assert sorted_by(box, [("a", "a reply"), ("a", GOOD), ("b", GOOD), ("c", GOOD)])["a"] == "a reply"
    assert reasons(box) == [("a", Reason.DUPLICATE)]
