"""Bytes per round and client, against the formulas that papers give in floats, and against what the wire carries."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from doubles import CLASSES, FEATURES, INPUTS, job_of, tiny
from protofed import METHODS, wire
from protofed.api.method import Clients, Method
from protofed.engine.federation import Federation
from protofed.engine.state import State, Traffic
from protofed.engine.training import Training
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import matching
from protofed.runtimes.jobs import Answer
from protofed.tree import Nothing, record
from protofed.wire import num_bytes

FLOAT, WHOLE = 4, 8
"""Bytes of a float32 and of an int64."""

# The tiny network: a linear layer, BatchNorm (scale, shift, mean, variance), and a linear classifier.
BODY = INPUTS * FEATURES + FEATURES + 4 * FEATURES  # θ
HEAD = FEATURES * CLASSES + CLASSES
MODEL = BODY + HEAD  # w
PROTOTYPES = CLASSES * FEATURES  # C·d


@record
class Mixed:
    a: Tensor
    b: dict[str, Tensor]


def test_bytes_are_numbers_of_elements_times_their_sizes() -> None:
    mixed = Mixed(torch.zeros(3, 5), {"x": torch.zeros(2, dtype=torch.int64), "y": torch.zeros((), dtype=torch.bool)})
    assert num_bytes(mixed) == 15 * 4 + 2 * 8 + 1
    assert num_bytes(torch.zeros(4, dtype=torch.float16)) == 8
    assert num_bytes(Nothing()) == 0


def test_a_view_counts_what_it_shows_and_not_what_is_behind_it() -> None:
    assert num_bytes(torch.zeros(100, 100)[:2, :3]) == 6 * 4
    assert num_bytes(torch.zeros(1).expand(50)) == 50 * 4


def test_what_is_no_tensor_cannot_travel() -> None:
    with pytest.raises(wire.WireError):
        num_bytes({"a": 3})


@dataclass(frozen=True)
class Formula:
    down: int
    """Floats that papers count."""
    up: int
    extra_down: int
    """Bytes that our records add."""
    extra_up: int


def clusters(state: State) -> int:
    """Σ_c J_c, the rows of FPL's cluster prototypes; one row that stands for nothing before the first round."""
    return len(state.server.prototypes.clusters)


def formula(name: str, state: State) -> Formula:
    counts = CLASSES * FLOAT  # `count` beside prototypes: which classes there are, or how many clients own them
    match name:
        case "fedavg":  # up: num_examples
            return Formula(MODEL, MODEL, 0, WHOLE)
        case "fedrep":  # up: num_examples
            return Formula(BODY, BODY, 0, WHOLE)
        case "fedproto":
            return Formula(PROTOTYPES, PROTOTYPES, counts, counts)
        case "fedproto_avg":  # up: num_examples as well
            return Formula(MODEL + PROTOTYPES, MODEL + PROTOTYPES, counts, counts + WHOLE)
        case "fpl":  # down: the class of each cluster prototype as well; up: num_examples as well
            m = clusters(state)
            return Formula(MODEL + (m + CLASSES) * FEATURES, MODEL + PROTOTYPES, counts + m * WHOLE, counts + WHOLE)
    raise ValueError(name)


NAMES = ["fedavg", "fedproto", "fedproto_avg", "fpl", "fedrep"]


def after(name: str, rounds: int) -> tuple[Federation, State]:
    federation = Federation(METHODS[name](), tiny(), Training(rounds=2, epochs=1, batch_size=8))
    state = federation.start()
    for _ in range(rounds):
        state = federation.advance(state)
    return federation, state


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_moves_what_the_formulas_say_and_what_our_records_add(name: str, rounds: int) -> None:
    federation, before = after(name, rounds)
    expected = formula(name, before)
    moved = federation.advance(before).traffic
    assert moved.keys() == set(federation.ids)
    for client in federation.ids:
        assert moved[client] == Traffic(
            down=FLOAT * expected.down + expected.extra_down, up=FLOAT * expected.up + expected.extra_up
        )


def test_fpl_sends_more_once_there_are_clusters() -> None:
    federation, first = after("fpl", 0)
    _, later = after("fpl", 2)
    assert clusters(first) == 1
    assert clusters(later) >= CLASSES  # every class has an owner, so at least one cluster
    more = (clusters(later) - 1) * (FEATURES * FLOAT + WHOLE)
    early, late = (federation.advance(state).traffic["c00"].down for state in (first, later))
    assert late - early == more


class Sparing(FedAvg):
    """Sends one client less than the server has."""

    def message_for(self, server: Weights, client: str) -> Weights:
        return Weights(matching(server.params, ("classifier.*",))) if client == "c02" else server


def test_what_goes_down_is_the_clients_own_message_and_a_failed_client_sends_nothing() -> None:
    federation = Federation(Sparing(), tiny(), Training(epochs=1))
    state = federation.advance(federation.start())
    assert [failure.client for failure in state.failures] == ["c02"]  # whose network lacks its features
    assert state.traffic["c02"] == Traffic(down=FLOAT * HEAD, up=0)
    assert state.traffic["c01"] == Traffic(down=FLOAT * MODEL, up=FLOAT * MODEL + WHOLE)


def sent(federation: Federation, state: State, client: str) -> tuple[object, object]:
    """The message that a client gets, and what it really uploads."""
    method = federation.method
    message = method.message_for(state.server, client)
    [(_, reply)] = federation.runtime.run(
        [job_of(federation, client, message, state.receipts.get(client), state.round)]
    )
    assert isinstance(reply, Answer)
    return message, reply.upload


ONE_EXCHANGE = sorted(name for name, cls in METHODS.items() if cls.round is Method.round)
"""Methods whose rounds are one message and one upload for each client."""


@pytest.mark.parametrize("name", ONE_EXCHANGE)
def test_traffic_is_what_the_wire_carries_without_its_header(name: str) -> None:
    federation, state = after(name, 1)
    carried = []
    for moved in sent(federation, state, "c01"):
        data = wire.encode(moved)
        carried.append(len(data) - 8 - int.from_bytes(data[:8], "little"))  # safetensors: size of header, header, data
    assert federation.advance(state).traffic["c01"] == Traffic(*carried)


def test_a_setup_that_asks_clients_is_counted_and_one_that_does_not_is_empty() -> None:
    _, asked = after("fedpc", 0)
    assert all(t.down > 0 and t.up > 0 for t in asked.traffic.values())
    _, silent = after("fedavg", 0)
    assert silent.traffic == {}


class Farewell(FedAvg):
    """Trains once more at the end."""

    def finish(self, server: Weights, clients: Clients) -> Weights:
        return self.round(server, clients)


def test_what_the_end_moves_is_added_to_the_last_round() -> None:
    federation = Federation(Farewell(), tiny(), Training(rounds=1, epochs=1, fraction=0.5))
    last = federation.advance(federation.start())
    both = federation.finish(last).traffic
    once = Traffic(FLOAT * MODEL, FLOAT * MODEL + WHOLE)
    assert both.keys() == set(federation.ids)
    assert {c for c, t in both.items() if t == Traffic(2 * once.down, 2 * once.up)} == set(federation.sampled(0))
    assert all(both[c] == once for c in set(federation.ids) - set(federation.sampled(0)))
