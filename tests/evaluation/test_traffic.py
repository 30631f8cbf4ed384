"""Bytes per round and client, against the formulas that papers give in floats, and against what the wire carries."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from doubles import CLASSES, FEATURES, INPUTS, tiny
from protofed import METHODS, wire
from protofed.evaluation.traffic import Traffic, num_bytes, traffic
from protofed.method import Reply
from protofed.methods.families import Weights
from protofed.methods.fedavg import FedAvg
from protofed.networks import matching
from protofed.runtimes.federation import Federation, State, Training
from protofed.runtimes.jobs import Job
from protofed.tree import Nothing, record

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
def test_traffic_is_what_the_formulas_say_and_what_our_records_add(name: str, rounds: int) -> None:
    federation, state = after(name, rounds)
    expected = formula(name, state)
    for client in federation.ids:
        assert traffic(federation, state, client) == Traffic(
            down=FLOAT * expected.down + expected.extra_down, up=FLOAT * expected.up + expected.extra_up
        )


def test_fpl_sends_more_once_there_are_clusters() -> None:
    federation, first = after("fpl", 0)
    _, later = after("fpl", 2)
    assert clusters(first) == 1
    assert clusters(later) >= CLASSES  # every class has an owner, so at least one cluster
    more = (clusters(later) - 1) * (FEATURES * FLOAT + WHOLE)
    assert traffic(federation, later, "c00").down - traffic(federation, first, "c00").down == more


class Sparing(FedAvg):
    """Sends one client less than the server has."""

    def message_for(self, server: Weights, client: str) -> Weights:
        return Weights(matching(server.params, ("classifier.*",))) if client == "c02" else server


def test_what_goes_down_is_the_clients_own_message() -> None:
    federation = Federation(Sparing(), tiny(), Training())
    state = federation.start()
    assert traffic(federation, state, "c02") == Traffic(down=FLOAT * HEAD, up=FLOAT * MODEL + WHOLE)
    assert traffic(federation, state, "c01").down == FLOAT * MODEL


def sent(federation: Federation, state: State, client: str) -> tuple[object, object]:
    """The message that a client gets, and what it really uploads."""
    method = federation.method
    message = method.message_for(state.server, client)
    memory = federation.memory_of(state, client, message)
    job = Job(client, method.train, federation.local(client, state.round), message, memory, method.init_memory)
    [(_, reply)] = federation.runtime.run([job])
    assert isinstance(reply, Reply)
    return message, reply.upload


@pytest.mark.parametrize("name", sorted(METHODS))
def test_traffic_is_what_the_wire_carries_without_its_header(name: str) -> None:
    federation, state = after(name, 1)
    carried = []
    for moved in sent(federation, state, "c01"):
        data = wire.encode(moved)
        carried.append(len(data) - 8 - int.from_bytes(data[:8], "little"))  # safetensors: size of header, header, data
    assert traffic(federation, state, "c01") == Traffic(*carried)
