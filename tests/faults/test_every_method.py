"""What holds of every method, whatever it does with uploads.

The conformance suite already shows, for every entry of METHODS, that a client that fails is as if it had not been asked
(`check_a_client_may_fail`) and that a run goes on from a state that went through bytes
(`check_resuming_changes_nothing`). Here, for every entry too: who was counted, by what it changes; messages over a wire
in the place of replies; uploads that weigh nothing; and runs that are stopped after every round and resumed from their
folder. What is near to a check of the suite is slow for most methods.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.wires import Scripted, Wired
from methods.conformance import assert_finite, assert_same, federation, fingerprint, usual, whole
from methods.sampling import some_methods
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.roles import Prototype, roles
from protofed.api.task import ClientId
from protofed.engine.state import State
from protofed.errors import RunFailed
from protofed.evaluation.evaluate import evaluate
from protofed.methods import METHODS
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.jobs import Failure, Reason
from protofed.tree import Tree, named_leaves, with_leaves

SENDS_NOTHING = {"local"}
"""Methods whose clients send nothing, so that nobody can count."""

FAILED, ACCEPTED = "eve", "bob"
every_method = pytest.mark.parametrize("name", METHODS)


# ---- who was counted


@lru_cache
def runtime_of(method: Method[Any, Any, Any, Any]) -> Scripted:
    """One for all tests of a method, so that its clients train once."""
    return Scripted()


def second_round(method: Method[Any, Any, Any, Any], change: Callable[[ClientId, Reply[Any, Any]], Any]) -> State:
    runtime = replace(runtime_of(method), change=change)
    return federation(method, runtime=runtime).advance(usual(method, 1))


def nudged(upload: Tree) -> Tree:
    """The upload with its first tensor of numbers a little different; what is 0 stays 0, as absent classes must."""
    leaves = named_leaves(upload)
    path = next(path for path, leaf in leaves.items() if leaf.is_floating_point() and not path.endswith("count"))
    leaf = leaves[path]
    return with_leaves(upload, list({**leaves, path: torch.where(leaf != 0, 1.01 * leaf + 0.001, leaf)}.values()))


def effects(method: Method[Any, Any, Any, Any], state: State) -> dict[str, Any]:
    """All that the server knows and will tell anybody."""
    everyone = federation(method).ids
    messages = {client: method.message_for(state.server, client) for client in everyone}
    return fingerprint({"server": state.server, "messages": messages})


@every_method
def test_an_accepted_upload_has_an_effect_and_that_of_a_failed_client_has_none(name: str) -> None:
    method = METHODS[name]()

    def failing(is_nudged: set[ClientId]) -> Callable[[ClientId, Reply[Any, Any]], Any]:
        """One client's upload is refused for a name too many, whatever else it holds."""

        def change(client: ClientId, reply: Reply[Any, Any]) -> Any:
            upload = nudged(reply.upload) if client in is_nudged else reply.upload
            return replace(reply, upload={"all": upload, "more": torch.zeros(1)} if client == FAILED else upload)

        return change

    if name in SENDS_NOTHING:
        assert named_leaves(second_round(method, lambda _, reply: reply).server) == {}
        return
    usually, other_failed, other_accepted = (
        second_round(method, failing(who)) for who in (set(), {FAILED}, {ACCEPTED})
    )
    assert [f.client for f in usually.failures] == [FAILED]
    assert_same(whole(other_failed), whole(usually), "a round in which the refused upload held something else")
    assert effects(method, other_accepted) != effects(method, usually), "an accepted upload has no effect"
    assert other_accepted.failures == usually.failures


def test_only_these_methods_send_nothing() -> None:
    likes = {name: usual(METHODS[name](), 1).traffic for name in METHODS}
    assert {name for name, traffic in likes.items() if not any(t.up for t in traffic.values())} == SENDS_NOTHING


# ---- messages in the place of replies


@some_methods
def test_over_a_wire_every_bit_is_the_same(name: str) -> None:
    """Setup, two rounds and the last word, with every upload sealed and opened, and memories at the clients' end."""
    method, wire = METHODS[name](), Wired()
    near, far = federation(method, rounds=2), federation(method, runtime=wire, rounds=2)
    states = [near.start(), far.start()]
    for _ in range(2):
        states = [near.advance(states[0], evaluates=True), far.advance(states[1], evaluates=True)]
        assert states[1].failures == ()
        assert states[1].refused == {}
    wire.tell(states[1])
    assert_same(states[1].server, states[0].server, "the server")
    assert_same(wire.memories, dict(sorted(states[0].memories.items())), "what clients keep")
    judged = [evaluate(of, state, state.evaluations) for of, state in zip((near, far), states, strict=True)]
    assert judged[0] == judged[1], "how the federation does"
    assert set(judged[1].clients) == set(far.ids)
    assert_same(far.finish(states[1]).server, near.finish(states[0]).server, "the server after the last word")


# ---- R25 and V9: uploads that weigh nothing


def without_prototypes(upload: Tree) -> Tree:
    """The upload of a client that has no prototypes."""
    leaves = named_leaves(upload)
    counts = [path for path in leaves if path.rpartition("/")[2] == "count"]
    empty = {*counts, *(path for path, role in roles(upload).items() if isinstance(role, Prototype))}
    return with_leaves(upload, [torch.zeros_like(leaf) if path in empty else leaf for path, leaf in leaves.items()])


def without_examples(upload: Tree) -> Tree:
    """The upload of a client that says it has no example of anything."""
    leaves = named_leaves(without_prototypes(upload))
    is_number = {path: path.rpartition("/")[2] == "num_examples" for path in leaves}
    return with_leaves(upload, [torch.zeros_like(leaf) if is_number[path] else leaf for path, leaf in leaves.items()])


def lightened(method: Method[Any, Any, Any, Any], change: Callable[[Tree], Tree], who: set[ClientId]) -> State | str:
    """The state after a round in which these clients' uploads were changed, or why there is none."""
    try:
        return second_round(method, lambda c, reply: replace(reply, upload=change(reply.upload)) if c in who else reply)
    except RunFailed as error:
        return str(error)


lightening = pytest.mark.parametrize("change", [without_prototypes, without_examples])


@every_method
@lightening
def test_a_client_that_has_nothing_to_add_is_fine(name: str, change: Callable[[Tree], Tree]) -> None:
    """V9: its upload is accepted, and the others count."""
    after = lightened(METHODS[name](), change, {ACCEPTED})
    assert isinstance(after, State), after
    assert after.failures == ()
    assert_finite(whole(after), "the state after it")


@every_method
@lightening
def test_a_round_in_which_nobody_has_anything_to_add_is_abandoned_or_harmless(
    name: str, change: Callable[[Tree], Tree]
) -> None:
    """R25: no division by zero and no NaN."""
    method = METHODS[name]()
    after = lightened(method, change, set(federation(method).ids))
    if isinstance(after, State):
        assert_finite(whole(after), "the state after it")
    else:
        assert "Given up after 3 attempts" in after
        assert "not finite" not in after


# ---- runs that are stopped and resumed


def unhurried(text: str) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl without the seconds."""
    return [{**json.loads(line), "seconds": {}} for line in text.splitlines()]


@some_methods
def test_a_run_that_is_stopped_after_every_round_is_the_run_that_is_not(name: str, tmp_path: Path) -> None:
    """Each part of the run begins with nothing but the folder."""
    broken, straight = RunFolder(tmp_path / "broken"), RunFolder(tmp_path / "straight")
    parts = 0
    while not broken.is_done:
        rounds = iter(range(1))
        experiment = Experiment(federation(METHODS[name]()), evaluate_every=3, identity=name)
        resumed = execute(experiment, broken, resume=True, should_stop=lambda left=rounds: next(left, None) is None)
        parts += 1
    expected = execute(Experiment(federation(METHODS[name]()), evaluate_every=3, identity=name), straight)
    assert parts == 3
    assert_same(whole(resumed.state), whole(expected.state), "the state at the end")
    assert unhurried(broken.read_rounds()) == unhurried(straight.read_rounds())


def test_the_failed_client_check_would_find_a_method_that_reads_refused_uploads() -> None:
    """The check above can fail: a runtime that lets the refused upload pass has an effect."""
    method = METHODS["fedavg"]()
    refused = second_round(method, lambda c, reply: Failure(c, Reason.CLIENT_ERROR, "") if c == FAILED else reply)
    passed = second_round(
        method, lambda c, reply: replace(reply, upload=nudged(reply.upload)) if c == FAILED else reply
    )
    assert effects(method, refused) != effects(method, passed)
