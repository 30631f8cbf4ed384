"""The tasks ``minidigits`` and ``minidigits_skewed``: who holds which images of `datasets.minidigits`."""

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge

from protofed.api.method import Positive
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.datasets.minidigits import CLASSES, SIDE, Domain, domains, public_images
from protofed.datasets.minidigits_drawing import Integers
from protofed.datasets.preprocessing import ImageFiles
from protofed.tasks.models import Network, network, small_cnn
from protofed.tasks.partition import dirichlet

CLIENT_SIZES: dict[str, tuple[int, ...]] = {
    "pen": (200, 140, 90, 50),
    "ink": (150, 90),
    "street": (290, 200, 137),
    "print": (290, 190, 120),
}
"""Number of training images of each client, by domain."""

Norm = Literal["batch", "group"]

TRANSFORM = Transform(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Minidigits:
    """Four domains of digits at 28 × 28 × 3, nothing to download; twelve clients of different domains and sizes."""

    projected: bool = False
    """Whether the network has a projection before its classifier, as pFedCSPC's networks do."""
    norm: Norm = "batch"
    """The network's layers of normalisation: BatchNorm, or GroupNorm, which differential privacy needs."""

    def build(self) -> Task:
        stores = {name: _stores(domain) for name, domain in domains().items()}
        rows = client_rows()
        return Task(
            name="minidigits",
            clients={c: stores[domain][0].rows(torch.from_numpy(index)) for c, (domain, index) in rows.items()},
            tests={name: test for name, (_, test) in stores.items()},
            num_classes=CLASSES,
            model=_network(self.projected, self.norm),
            preprocessing=ImageFiles(SIDE, 3),
            domain_of={client: domain for client, (domain, _) in rows.items()},
            transform=TRANSFORM,
            public=_public(),
        )


@dataclass(frozen=True)
class MinidigitsSkewed:
    """The digits of minidigits with all domains mixed, among clients with different classes: label skew."""

    num_clients: Annotated[int, Ge(1)] = 20
    """How many clients there are."""
    concentration: Positive = 0.3
    """β of the Dirichlet distribution that divides each class among the clients. Lower values give more skew."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the division among clients."""
    projected: bool = False
    """Whether the network has a projection before its classifier, as pFedCSPC's networks do."""
    norm: Norm = "batch"
    """The network's layers of normalisation: BatchNorm, or GroupNorm, which differential privacy needs."""

    def build(self) -> Task:
        stores = [_stores(domain) for domain in domains().values()]
        everything = Data.of(torch.cat([train.x for train, _ in stores]), torch.cat([train.y for train, _ in stores]))
        rows = dirichlet(everything.y, self.num_clients, self.concentration, self.seed)
        return Task(
            name="minidigits_skewed",
            clients={f"client-{k:02d}": everything.rows(index) for k, index in enumerate(rows)},
            tests={name: test for name, (_, test) in zip(domains(), stores, strict=True)},
            num_classes=CLASSES,
            model=_network(self.projected, self.norm),
            preprocessing=ImageFiles(SIDE, 3),
            transform=TRANSFORM,
            public=_public(),
        )


def client_rows() -> dict[str, tuple[str, Integers]]:
    """For each client id, its domain and its rows of that domain's training arrays. The rows are disjoint."""
    clients = {}
    for name, sizes in CLIENT_SIZES.items():
        order = _interleaved(domains()[name].train_y)
        pieces = np.split(order, np.cumsum(sizes)[:-1])
        clients.update({f"{name}-{k}": (name, np.sort(rows)) for k, rows in enumerate(pieces)})
    return clients


def _interleaved(labels: Integers) -> Integers:
    """Rows in the order of labels 0, 1, …, 9, 0, 1, …, so that every slice of ten rows holds every class."""
    rank = np.zeros_like(labels)
    for digit in range(CLASSES):
        rank[labels == digit] = np.arange(np.sum(labels == digit))
    return np.lexsort((labels, rank)).astype(np.int64)


def _network(projected: bool, norm: Norm) -> Network:
    return network(small_cnn, 3, CLASSES, projected, *([] if norm == "batch" else [norm]))


@functools.cache
def _public() -> Data:
    images, labels = public_images()
    return Data.of(torch.from_numpy(images), torch.from_numpy(labels))


def _stores(domain: Domain) -> tuple[Data, Data]:
    """Training and test examples."""
    return (
        Data.of(torch.from_numpy(domain.train_x), torch.from_numpy(domain.train_y)),
        Data.of(torch.from_numpy(domain.test_x), torch.from_numpy(domain.test_y)),
    )
