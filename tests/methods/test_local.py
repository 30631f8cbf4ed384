"""Local training: nothing is sent, and every client goes its own way."""

import torch

from methods.conformance import (
    TASK,
    assert_close,
    assert_same,
    federation,
    mean_cross_entropy,
    reply_of,
    small_task,
    trained_by_hand,
    usual,
)
from protofed import wire
from protofed.methods.local import LocalOnly


def test_nothing_is_sent_in_either_direction() -> None:
    state = usual(LocalOnly(), 1)
    upload = reply_of(federation(LocalOnly()), state, "ann").upload
    for record in (upload, LocalOnly().message_for(state.server, "ann"), state.server):
        assert sum(leaf.nbytes for leaf in wire.to_arrays(record).values()) == 0


def test_clients_start_alike_and_become_different() -> None:
    of, state = federation(LocalOnly()), usual(LocalOnly(), 0)
    starts = [of.client_state(state, client, state.server) for client in TASK.clients]
    for start in starts:
        assert_same(start, starts[0], "the first model")
    ends = usual(LocalOnly(), 2).memories
    for client in TASK.clients.keys() - {"ann"}:
        assert not torch.equal(ends["ann"].params["classifier.weight"], ends[client].params["classifier.weight"])


def test_a_client_trains_on_from_where_it_was() -> None:
    first = usual(LocalOnly(), 1).memories["ann"].params
    expected, _ = trained_by_hand(first, "ann", mean_cross_entropy, round=1)
    assert_close(usual(LocalOnly(), 2).memories["ann"].params, expected, "ann's model", within=1e-5)


def test_a_client_does_not_notice_the_others() -> None:
    alone = federation(LocalOnly(), small_task({"ann": TASK.clients["ann"].labels.tolist()}))
    state = alone.advance(alone.advance(alone.start()))
    assert_same(state.memories["ann"], usual(LocalOnly(), 2).memories["ann"], "ann with and without company")


def test_there_is_no_public_model() -> None:
    assert LocalOnly().public(usual(LocalOnly(), 1).server) is None
