"""The census: a method whose server ends each round with the list of who was counted, and a checker that knows better.

Client k sends the unit vector e_k as its parameters and as the prototype of each of its classes. The server's weighted
mean then is the list of who was counted and with which weight, and so is the mean of every class. The checker shares no
code with the engine: it reads the history that a test's runtime wrote down and works out what the list must be.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.engine.state import State
from protofed.methods.families import PrototypeSharing, PrototypeUpload, WeightsAndPrototypes
from protofed.nn.networks import Parts
from protofed.prototypes.class_means import ClassSums, PrototypeMode, Prototypes, by_count, mean_of
from protofed.tree import record

CLASSES = 8
TOLERANCE = 1e-12


# ---- the method


@record
class Visits:
    """How often a client has been asked, as far as it remembers."""

    number: Tensor  # ()


def one_hot(client: ClientId, everyone: Iterable[ClientId]) -> Tensor:
    return torch.tensor([float(other == client) for other in sorted(everyone)], dtype=torch.float64)


@dataclass(frozen=True)
class Census(PrototypeSharing[Prototypes]):
    """Nobody trains. What the server does with the uploads is what the library's methods do."""

    clients: tuple[ClientId, ...] = ()
    prototype_mode: PrototypeMode = "recomputed"

    def no_prototypes(self, num_classes: int, dim: int) -> Prototypes:
        mean = torch.zeros(num_classes, len(self.clients), dtype=torch.float64)
        return Prototypes(mean, torch.zeros(num_classes, dtype=torch.float64))

    def init_server(self, server: ServerContext) -> WeightsAndPrototypes[Prototypes]:
        nobody = torch.zeros(len(self.clients), dtype=torch.float64)
        return WeightsAndPrototypes({"who": nobody}, self.no_prototypes(CLASSES, 0))

    def upload_spec(self, state: WeightsAndPrototypes[Prototypes], server: ServerContext) -> PrototypeUpload:
        return PrototypeUpload(state.params, state.prototypes, torch.tensor(0))

    def added(self, prototypes: Prototypes) -> ClassSums:
        return by_count(prototypes)

    def combine(self, sums: ClassSums, previous: Prototypes) -> Prototypes:
        return mean_of(sums, previous)

    def prototype_loss(self, z: Any, batch: Any, known: Any) -> Any:
        raise AssertionError("the census does not train")

    def init_memory(self, client: ClientContext, message: Any) -> Any:
        return Visits(torch.tensor(0))

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[PrototypeUpload, Any]:
        unit = one_hot(client.id, self.clients)
        count = torch.bincount(client.data.labels, minlength=CLASSES).double()
        prototypes = Prototypes((count > 0).double()[:, None] * unit, count)
        return Reply(PrototypeUpload({"who": unit}, prototypes, client.num_examples), Visits(memory.number + 1))


def parts(client: ClientId) -> Parts:
    return {"features": nn.Linear(1, 1), "classifier": nn.Linear(1, CLASSES)}


def people(count: int) -> Task:
    """Clients of 1 to 23 examples of one to three classes; the last classes have few holders, so that a round may lack
    them."""
    draw = torch.Generator().manual_seed(11)
    clients = {}
    for k in range(count):
        size = int(torch.randint(1, 24, (), generator=draw))
        own = torch.randint(0, CLASSES - 2, (3,), generator=draw)
        if k % 17 == 0:
            own[0] = CLASSES - 2 + (k // 17) % 2
        clients[f"c{k:03d}"] = Data.of(torch.zeros(size, 1), own[torch.arange(size) % 3])
    return Task(clients, {}, CLASSES, parts, name="people")


def census_of(task: Task) -> Census:
    return Census(tuple(sorted(task.clients)))


# ---- the history


class Arrival(NamedTuple):
    """Something that reached the server, as the one who sent it knows it."""

    client: ClientId
    is_answer: bool
    """Whether it says, legibly, that it answers this question of this run."""
    is_whole: bool = True


@dataclass
class History:
    """What happened in each round that was begun, in the order in which it happened."""

    asked: list[list[ClientId]] = field(default_factory=list)
    arrivals: list[list[Arrival]] = field(default_factory=list)

    def begin(self) -> None:
        self.asked.append([])
        self.arrivals.append([])


# ---- the checker, in plain Python


def who_counts(asked: Iterable[ClientId], arrivals: Iterable[Arrival]) -> set[ClientId]:
    """Those that were asked and whose first answer to this question was whole; it decides, whatever comes after it."""
    first: dict[ClientId, bool] = {}
    for arrival in arrivals:
        if arrival.is_answer:
            first.setdefault(arrival.client, arrival.is_whole)
    return {client for client in asked if first.get(client, False)}


def shares(weights: Mapping[ClientId, int], everyone: Iterable[ClientId]) -> list[float]:
    total = sum(weights.values())
    return [weights.get(client, 0) / total for client in sorted(everyone)]


def complaints(task: Task, counted: set[ClientId], before: State, after: State) -> list[str]:
    """What the state after a round says that it should not, if these clients counted in it."""
    labels = {client: data.labels.tolist() for client, data in task.clients.items()}
    found = _compared("parameters", after.server.params["who"], {c: len(labels[c]) for c in counted}, labels)
    for number in range(CLASSES):
        held = {c: labels[c].count(number) for c in counted if number in labels[c]}
        mean, was = after.server.prototypes.mean[number], before.server.prototypes.mean[number]
        if held:
            found += _compared(f"class {number}", mean, held, labels)
        elif mean.tolist() != was.tolist():
            found.append(f"class {number}: nobody sent it, and it changed")
    return found


def visits(memories: Mapping[ClientId, Visits]) -> dict[ClientId, int]:
    return {client: int(memory.number) for client, memory in memories.items()}


def forgotten(counted: set[ClientId], before: Mapping[ClientId, int], after: Mapping[ClientId, int]) -> list[str]:
    """What clients remember that they should not: those that counted one visit more, the others what they did."""
    everyone = before.keys() | after.keys() | counted
    expected = {client: before.get(client, 0) + (client in counted) for client in everyone}
    wrong = [client for client in everyone if after.get(client, 0) != expected[client]]
    return [f"{client} remembers {after.get(client, 0)} visits, not {expected[client]}" for client in wrong]


def _compared(what: str, vector: Tensor, weights: Mapping[ClientId, int], everyone: Iterable[ClientId]) -> list[str]:
    expected, seen = shares(weights, everyone), vector.tolist()
    found = [] if abs(sum(seen) - 1) <= TOLERANCE else [f"{what}: the shares add up to {sum(seen)}"]
    for client, share, coordinate in zip(sorted(everyone), expected, seen, strict=True):
        if abs(share - coordinate) > TOLERANCE or (share == 0) != (coordinate == 0):
            found.append(f"{what}: {client} has {coordinate} and should have {share}")
    return found
