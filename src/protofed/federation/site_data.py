"""What a site has, and the task as it sees it: its own examples, and nothing of others' clients but their names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.engine.test_sets import is_testable, label_counts
from protofed.errors import BadInput
from protofed.federation.messages import RosterEntry
from protofed.runs.config.recording import task_table
from protofed.tasks import TaskSettings
from protofed.tasks.models import Network, NetworkOfClient


@dataclass(frozen=True)
class SiteData:
    """The examples of a site's clients, and how the task is called that they belong to."""

    task: Task
    """With the clients of this site alone."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The section [task] of the experiments that it is for: name and settings."""

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(sorted(self.task.clients))

    @property
    def own_tests(self) -> tuple[ClientId, ...]:
        """Of its clients, those with a test set of their own, or one that can be drawn for them."""
        return tuple(client for client in self.clients if is_testable(self.task, client))

    @property
    def smallest_class(self) -> dict[ClientId, int]:
        """The number of examples of each client's smallest class that is not empty."""
        counts = {c: label_counts(data, self.task.num_classes) for c, data in self.task.clients.items()}
        return {client: int(own[own > 0].min()) for client, own in counts.items()}

    def network_names(self) -> set[str]:
        """`custom` stands for a network without a name."""
        model = self.task.model
        if isinstance(model, NetworkOfClient):
            return {model.networks[client].name for client in self.clients}
        return {model.name if isinstance(model, Network) else "custom"}

    def task_among(self, roster: Sequence[RosterEntry]) -> Task:
        """The task with all clients of a federation: those of other sites are blank, and nothing trains on them."""
        blank = blank_examples(next(iter(self.task.clients.values())).x, 1)
        others = [entry for entry in roster if entry.id not in self.task.clients]
        domains = {entry.id: entry.domain for entry in others if entry.domain in self.task.tests}
        return replace(
            self.task,
            clients={**self.task.clients, **{entry.id: blank for entry in others}},
            domain_of={**self.task.domain_of, **{client: domain for client, domain in domains.items() if domain}},
            held_out=(*self.task.held_out, *(entry.id for entry in others if entry.is_held_out)),
        )


def own_part(task: Task, clients: Collection[ClientId]) -> Task:
    """The task as the site of these clients has it: with the test sets of the domains, without others' examples."""
    if unknown := {*clients} - task.clients.keys():
        there = list(task.clients)
        some = f"{', '.join(there[:20])}{' and others' if len(there) > 20 else ''}"
        raise BadInput(f"the task {task.name} has no clients {', '.join(sorted(unknown))}: its clients are {some}")
    return replace(
        task,
        clients=_of(task.clients, clients),
        domain_of=_of(task.domain_of, clients),
        local_tests=_of(task.local_tests, clients),
        validation=_of(task.validation, clients),
        held_out=tuple(client for client in task.held_out if client in clients),
    )


def package_data(settings: TaskSettings, clients: Iterable[ClientId]) -> SiteData:
    """A site's part of one of the package's tasks."""
    task = own_part(settings.build(), {*clients})
    alone = {client: own_rows(data) for client, data in task.clients.items()}
    return SiteData(replace(task, clients=alone), task_table(settings))


def own_rows(data: Data) -> Data:
    """The examples without other rows of the store that they lie in."""
    return data if len(data.x) == len(data) else Data.of(data.inputs(data.index), data.labels)


def blank_examples(like: Tensor, count: int) -> Data:
    """As many rows, all of them the same blank example, in the shape of those in a store."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Data(torch.zeros_like(like[:1]), zero, zero.expand(count))


def _of(values: Mapping[ClientId, Any], clients: Collection[ClientId]) -> dict[ClientId, Any]:
    return {client: value for client, value in values.items() if client in clients}
