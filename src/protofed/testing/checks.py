"""What every method must do, whatever it computes: functions that raise AssertionError when a method misbehaves."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from protofed import tree, wire
from protofed.api.method import Method
from protofed.api.requests import Map
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.round import RoundClients
from protofed.engine.state import State
from protofed.engine.upload_validation import UploadValidator
from protofed.evaluation.evaluate import evaluate
from protofed.nn.networks import matching
from protofed.runtimes.jobs import Failure
from protofed.testing.federations import (
    CLASSES,
    ODD_TASK,
    TASK,
    TRAINING,
    Elsewhere,
    Faulty,
    ReversedClients,
    ShuffledArrival,
    after,
    assert_close,
    assert_finite,
    assert_same,
    assert_tensors_only,
    federation,
    fingerprint,
    holds,
    memories,
    reply_of,
    scripted,
    usual,
    usual_reply,
    whole,
)
from protofed.testing.reach import reachable


def check_same_seed_same_result(method: Method[Any, Any, Any, Any]) -> None:
    assert_same(whole(after(2, federation(method))), whole(usual(method, 2)), "two runs of one seed")
    other = after(1, federation(method, seed=TRAINING.seed + 1))
    assert fingerprint(whole(other)) != fingerprint(whole(usual(method, 1))), "another seed gives the same result"


def check_runtimes_agree(method: Method[Any, Any, Any, Any]) -> None:
    state = after(2, federation(method, runtime=ShuffledArrival()))
    assert_same(whole(state), whole(usual(method, 2)), "a runtime of shuffled arrival against the sequential one")


def check_order_of_the_task(method: Method[Any, Any, Any, Any]) -> None:
    turned = dict(reversed(list(TASK.clients.items())))
    state = after(2, federation(method, dataclasses.replace(TASK, clients=turned)))
    assert_same(whole(state), whole(usual(method, 2)), "clients listed in another order")


def check_order_of_uploads(method: Method[Any, Any, Any, Any]) -> None:
    """Servers may number things differently, so what they make a client do is compared."""
    of, state = federation(method), usual(method, 1)
    states = []
    for kind in (lambda clients: clients, ReversedClients):
        clients = RoundClients(of, state, of.ids, "round")
        ended = clients.after(method.round(state.server, kind(clients)))
        states.append(dataclasses.replace(ended, round=state.round + 1))
    for client in ("ann", "dan"):
        forward, backward = (reply_of(of, state, client) for state in states)
        assert_close(backward, forward, f"{client} after uploads were read in reverse", within=1e-4)


def check_nothing_private_is_uploaded(method: Method[Any, Any, Any, Any]) -> None:
    for client in TASK.clients:
        message, reply = usual_reply(method, client)
        sent, leaves = wire.encode(reply.upload), tree.named_leaves(reply.upload)
        private = matching(method.local_weights(message, reply.memory), method.private)
        for name, weight in private.items():
            named = [path for path in leaves if path.split("/")[-1] == name]
            assert not named, f"{name} is private, and the upload of {client} has it as {named}"
            if weight.numel() <= 3 or weight.min() == weight.max():  # so little may be equal by chance
                continue
            for secret in (weight, weight.T) if weight.ndim == 2 else (weight,):
                found = [path for path, leaf in leaves.items() if holds(leaf, secret)]
                assert not found, f"{name} is private, and the upload of {client} holds its values in {found}"
                assert fingerprint(secret)[""][2] not in sent, f"the bytes of {name} are in the upload of {client}"
        _assert_no_examples(leaves, TASK.clients[client], client)


def _assert_no_examples(leaves: dict[str, Tensor], data: Data, client: str) -> None:
    stored = data.x[data.index]
    for kind, rows in (("stored", stored), ("clean", TASK.transform.clean(stored))):
        for i, row in enumerate(rows):
            found = [path for path, leaf in leaves.items() if holds(leaf, row)]
            assert not found, f"the upload of {client} holds its {kind} example {i} in {found}"
    for kind, labels in (("in order", data.labels), ("sorted", data.labels.sort().values)):
        found = [path for path, leaf in leaves.items() if holds(leaf, labels)]
        assert not found, f"the upload of {client} holds the labels of its examples ({kind}) in {found}"


def check_records_survive_the_wire(method: Method[Any, Any, Any, Any]) -> None:
    of, state = federation(method), usual(method, 1)
    central = of.server_context(state.round, "round")
    fresh = method.init_server(central)
    like = method.upload_spec(state.server, central)
    for client in TASK.clients:
        message, reply = usual_reply(method, client)
        template = method.message_for(fresh, client)
        memory = method.init_memory(of.client_context(client, 0), template)
        for what, value, expected in (
            ("server", state.server, fresh),
            ("message", message, template),
            ("upload", reply.upload, like),
            ("memory", reply.memory, memory),
        ):
            assert_tensors_only(value, f"the {what} of {client}")
            data = wire.encode(value)
            back = wire.decode(data, expected)
            assert_same(back, value, f"the {what} of {client} after the wire")
            assert type(back) is type(value), f"the {what} of {client} is a {type(back)} after the wire"
            assert wire.encode(back) == data, f"the {what} of {client} is encoded differently the second time"
        passed = UploadValidator(like, of.limits).validated(client, reply.upload)
        assert not isinstance(passed, Failure), f"the upload of {client} is refused: {passed}"
    again = of.advance(through_the_wire(of, state))
    assert_same(whole(again), whole(usual(method, 2)), "a round from decoded state")


def through_the_wire(of: Federation, state: State) -> State:
    """The state as another process would have it."""
    method = of.method
    fresh = method.init_server(of.server_context(0, "round"))
    receipts = {}
    for client, memory in memories(state).items():
        like = method.init_memory(of.client_context(client, 0), method.message_for(fresh, client))
        receipts[client] = of.runtime.store.keep(client, wire.decode(wire.encode(memory), like))
    return State(state.round, wire.decode(wire.encode(state.server), fresh), receipts)


def check_resuming_changes_nothing(method: Method[Any, Any, Any, Any]) -> None:
    """A run that another process goes on with after each round, and before what follows the last."""
    state = usual(method, 0)
    for done in range(TRAINING.rounds):
        of = federation(copy.copy(method))
        state = of.advance(through_the_wire(of, state))
        what = f"a run that was interrupted after {done} rounds and at each round before, in round {done + 1}"
        assert_same(whole(state), whole(usual(method, done + 1)), what)
    of = federation(copy.copy(method))
    ended = of.finish(through_the_wire(of, state))
    expected = federation(method).finish(usual(method, TRAINING.rounds))
    assert_same(whole(ended), whole(expected), "what follows the last round, in a run that was interrupted before it")


def check_a_client_may_fail(method: Method[Any, Any, Any, Any]) -> None:
    """A client that fails must be as if it had not been asked."""
    everyone, others = tuple(sorted(TASK.clients)), tuple(sorted(TASK.clients.keys() - {"cyd"}))
    absent, before = scripted(method, lambda t: others if t == 1 else everyone), usual(method, 1)
    expected = [absent.advance(before)]
    expected.append(absent.advance(expected[0]))
    for crashes in (True, False):
        how = "crashed" if crashes else "sent nonsense"
        of = federation(method, runtime=Faulty("cyd", round=1, crashes=crashes))
        state = of.advance(before)
        assert [f.client for f in state.failures] == ["cyd"], f"the failure of cyd is not on record: {state.failures}"
        assert_same(memories(state)["cyd"], memories(before)["cyd"], f"the memory of cyd, which {how}")
        assert_same(whole(state), whole(expected[0]), f"cyd {how} in the second round, against cyd absent")
        assert_same(whole(of.advance(state)), whole(expected[1]), f"the round after cyd {how}")


def check_odd_clients_are_fine(method: Method[Any, Any, Any, Any]) -> None:
    of = federation(method, ODD_TASK)
    state = after(3, of)
    assert not state.failures, f"clients failed: {state.failures}"
    assert_finite(whole(state), "a class nobody has, a client of one example, a client of one class")
    for who, scores in _scores(of, state):
        assert not scores.isnan().any(), f"{who} predicts NaN"
        assert torch.isfinite(scores[:, :3]).all(), f"{who} has no finite score for a class that clients have"
        assert (torch.isfinite(scores[:, 3]) | (scores[:, 3] == -torch.inf)).all(), (
            f"{who} cannot score the absent class"
        )


def _scores(of: Federation, state: State) -> Iterator[tuple[str, Tensor]]:
    """What every client's own model and the public model say of a test set."""
    method, networks = of.method, of.networks_of(of.ids[0])
    x = of.task.transform.clean(of.task.tests["domain 0"].x)
    with torch.no_grad():
        for client in of.ids:
            message = method.message_for(state.server, client)
            memory = of.client_state(state, client, message)
            model = of.networks_of(client).model(method.local_weights(message, memory))
            yield f"the model of {client}", method.predict(model, x, message, memory)
        public = method.public(state.server)
        if public is not None:
            params, message = public
            yield "the public model", method.predict(networks.model(params), x, message, None)


def check_inputs_are_left_alone(method: Method[Any, Any, Any, Any]) -> None:
    of = federation(method)
    state = after(1, of)
    data = {client: (own.x, own.y, own.index) for client, own in TASK.clients.items()}
    messages = {client: method.message_for(state.server, client) for client in TASK.clients}
    kept = {"state": whole(state), "messages": messages, "data": data}
    before = fingerprint(kept)
    after(1, of, state)
    changed = [path for path, bits in fingerprint(kept).items() if bits != before[path]]
    assert not changed, f"a round changed what it was given: {changed[:3]}"


def check_no_hidden_state(method: Method[Any, Any, Any, Any]) -> None:
    kind: Any = type(method)
    assert hasattr(kind, "__dataclass_fields__"), f"{kind.__name__} is not a dataclass"
    assert kind.__dataclass_params__.frozen, f"{kind.__name__} is not frozen"
    hash(method)
    own, shared = copy.deepcopy(vars(method)), dict(vars(kind))
    names = [f.name for f in dataclasses.fields(kind)]
    assert set(own) <= set(names), "there are attributes that are not fields"
    assert kind(**{name: own[name] for name in names if name in own}) == method
    after(2, federation(method))
    assert vars(method) == own, f"a run changed the method: {own} became {vars(method)}"
    assert dict(vars(kind)) == shared, f"a run changed the class {kind.__name__}"


def check_models_predict(method: Method[Any, Any, Any, Any]) -> None:
    of, state = federation(method), usual(method, 2)
    predictions = dict(_scores(of, state))
    assert len(predictions) == len(of.ids) + (method.public(state.server) is not None)
    for who, scores in predictions.items():
        assert scores.shape == (3 * CLASSES, CLASSES), f"{who} gives scores of shape {tuple(scores.shape)}"
        assert torch.isfinite(scores).all(), f"{who} gives scores that are not finite"
    public = method.public(state.server)
    if public is not None:
        params, message = public
        for domain, data in TASK.tests.items():
            request = Map(of.networks_of("ann"), params, (message, None), data, TASK.transform, 0, method.outcomes)
            predicted = of.runtime.answers([request])[0].predicted
            assert predicted.shape == data.labels.shape, f"{domain}: not every test example was judged once"


def check_few_clients_at_a_time(method: Method[Any, Any, Any, Any]) -> None:
    for fraction in (0.5, 0.2):  # of five clients, the second leaves one out of all four rounds
        of = federation(method, rounds=4, fraction=fraction)
        state = of.start()
        seen = set(state.receipts)  # a method may ask clients before the first round
        for t in range(4):
            seen |= set(of.sampled(t))
            state = of.advance(state)
            assert not state.failures, f"clients failed: {state.failures}"
            assert state.receipts.keys() == seen, f"states of {sorted(state.receipts)}, but {sorted(seen)} took part"
        assert_finite(whole(state), f"fraction {fraction}")
        for who, scores in _scores(of, state):
            assert scores.shape == (3 * CLASSES, CLASSES), f"{who} gives scores of shape {tuple(scores.shape)}"
            assert not scores.isnan().any(), f"{who} predicts NaN"


def check_clients_elsewhere_give_the_same_numbers(method: Method[Any, Any, Any, Any]) -> None:
    """What clients keep stays with them, uploads come as bytes, and clients judge their own models."""
    near, far = federation(method, rounds=2), federation(method, runtime=Elsewhere(), rounds=2)
    states = [near.start(), far.start()]
    for _ in range(2):
        states = [of.advance(state, evaluates=True) for of, state in zip((near, far), states, strict=True)]
        assert not states[1].failures, f"clients failed: {states[1].failures}"
    assert_same(states[1].server, states[0].server, "the server, with clients elsewhere")
    here, there = (evaluate(of, state, state.evaluations) for of, state in zip((near, far), states, strict=True))
    assert there == here, f"clients elsewhere are judged differently: {there} and {here}"
    trained = dict(there.clients)
    assert set(trained) == set(TASK.clients), f"only {sorted(trained)} were judged"
    ended = [of.finish(state) for of, state in zip((near, far), states, strict=True)]
    assert_same(ended[1].server, ended[0].server, "the server at the end, with clients elsewhere")
    here, there = (evaluate(of, state) for of, state in zip((near, far), ended, strict=True))
    assert there == here, f"clients elsewhere are judged differently at the end: {there} and {here}"


def check_the_server_reaches_no_example(method: Method[Any, Any, Any, Any]) -> None:
    of = federation(method)
    secrets = {leaf.untyped_storage().data_ptr() for data in TASK.clients.values() for leaf in (data.x, data.y)}
    state = after(1, of)
    for what, value in (("context", of.server_context(1, "round")), ("state", state.server)):
        found = [path for path, leaf in reachable(value, f"the server's {what}") if _address(leaf) in secrets]
        assert not found, f"training examples can be reached: {found[:3]}"


def _address(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


CHECKS: list[Callable[[Method[Any, Any, Any, Any]], None]] = [
    check_same_seed_same_result,
    check_runtimes_agree,
    check_order_of_the_task,
    check_order_of_uploads,
    check_nothing_private_is_uploaded,
    check_records_survive_the_wire,
    check_resuming_changes_nothing,
    check_a_client_may_fail,
    check_odd_clients_are_fine,
    check_inputs_are_left_alone,
    check_no_hidden_state,
    check_models_predict,
    check_few_clients_at_a_time,
    check_clients_elsewhere_give_the_same_numbers,
    check_the_server_reaches_no_example,
]
