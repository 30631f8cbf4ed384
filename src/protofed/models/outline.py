"""Tasks without their data: from what a run has written down, enough to load its models."""

from collections.abc import Callable
from pathlib import Path

import torch

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.errors import BadInput
from protofed.models.formats import DTYPES, Inputs, NetworkByName, Outline, preprocessing_of
from protofed.nn.networks import Parts
from protofed.tasks.models import Network, NetworkOfClient

FindNetwork = Callable[[str], Callable[..., Parts]]
"""Gives a function of the user's own by its name, `module:function`, or raises BadInput."""


def task_without_data(outline: Outline, find: FindNetwork, where: Path) -> Task:
    """A task whose clients have blank examples, as many as they had."""
    networks = {}
    for client, facts in outline.clients.items():
        if facts.network is None:
            raise BadInput(
                f"{where} was run on a Task that was made in Python, with networks that have no name: give it again, "
                "as load(..., task=...)"
            )
        networks[client] = network_of(facts.network, find)
    first, *others = networks.values()
    return Task(
        name=outline.name,
        clients={client: _blank(outline.inputs, facts.examples) for client, facts in outline.clients.items()},
        tests={},
        num_classes=len(outline.classes),
        model=NetworkOfClient(networks) if any(one != first for one in others) else first,
        transform=Transform(outline.inputs.mean, outline.inputs.std),
        public=_blank(outline.inputs, outline.public) if outline.public else None,
        held_out=tuple(client for client, facts in outline.clients.items() if facts.is_held_out),
        class_names=outline.classes,
        preprocessing=preprocessing_of(outline.inputs.files),
        has_data=False,
    )


def network_of(network: NetworkByName, find: FindNetwork) -> Network:
    return Network(network.name, network.settings, find(network.name) if network.is_own else None)


def _blank(inputs: Inputs, count: int) -> Data:
    """Rows that are all the same blank example."""
    x = torch.zeros((1, *inputs.shape), dtype=DTYPES[inputs.stored_dtype])
    return Data(x, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64).expand(count))
