"""Tasks whose clients are natural sites: hospitals, regions, kinds of products.

Each site is a domain with its own test set. Encoders are fitted on training rows only, from sums over the sites. Files
are read below the folder that the environment variable PROTOFED_DATA names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.datasets import amazon_reviews, heart_disease, tcga_brca
from protofed.datasets.files import data_root
from protofed.datasets.preprocessing import TableRows
from protofed.datasets.tabular import Encoder, Kind, Table, sum_of, summary_of
from protofed.errors import BadInput
from protofed.seeds import derive_seed
from protofed.tasks.models import mlp, network
from protofed.tasks.partition import proportional, split

Share = Annotated[float, Gt(0), Lt(1)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class HeartDisease:
    """Heart disease at four hospitals, UCI: 920 patients, each hospital a client and a domain."""

    test_share: Share = 0.34
    """The share of each class at each hospital that is used for testing."""
    split_seed: int = 0
    """Seed of the draw of the test sets. It is not the run's seed."""
    width: Count = 16
    """Number of hidden units of the network, which are its features."""
    pooled: bool = False
    """Whether one client has the training rows of all hospitals, as if data could be shared."""

    def build(self) -> Task:
        sites = {}
        for name, hospital in heart_disease.read(data_root("heart_disease", heart_disease.OBTAIN)).items():
            rows = split(torch.from_numpy(hospital.y), self.test_share, derive_seed(self.split_seed, name))
            sites[name] = (_labelled(hospital, rows.train), _labelled(hospital, rows.test))
        kinds, never_zero = heart_disease.KINDS, heart_disease.NEVER_ZERO
        task = _tabular_task("heart_disease", sites, kinds, self.width, heart_disease.CLASSES, never_zero)
        return _pooled(task) if self.pooled else task


@dataclass(frozen=True)
class TcgaBrca:
    """Survival of breast cancer patients in six regions, TCGA-BRCA with FLamby's split."""

    horizon: Count = tcga_brca.HORIZON
    """In days. Label 1 is death up to this day, label 0 is survival beyond it. Others are left out."""
    width: Count = 16
    """Number of hidden units of the network, which are its features."""

    def build(self) -> Task:
        regions = tcga_brca.read(data_root("tcga_brca", tcga_brca.OBTAIN))
        sites = {
            name: (self._labelled(region.train, name), self._labelled(region.test, name))
            for name, region in regions.items()
        }
        first, _ = sites["northeast"]
        kinds: dict[str, Kind] = dict.fromkeys(first.table.columns, "numeric")
        return _tabular_task("tcga_brca", sites, kinds, self.width, ("survival", "death"))

    def _labelled(self, patients: tcga_brca.Patients, region: str) -> "Labelled":
        labels = patients.labels(self.horizon)
        rows = np.flatnonzero(labels >= 0)
        if not len(rows):
            raise BadInput(
                f"task tcga_brca: nobody in {region} has a label at {self.horizon} days; choose a smaller horizon"
            )
        return Labelled(patients.table.take(rows), labels[rows])


@dataclass(frozen=True)
class AmazonReviews:
    """Positive or negative reviews of books, DVDs, electronics and kitchenware; each of the four is a domain."""

    clients_per_domain: Count = 2
    """Number of clients of each domain. The training reviews of the domain are divided among them, class by class."""
    dimensions: Annotated[int, Ge(16)] = 4096
    """Number of dimensions to which words and word pairs are hashed."""
    test_share: Share = 0.2
    """The share of each class in each domain that is used for testing."""
    split_seed: int = 0
    """Seed of the draw of the test sets and of the division among clients. It is not the run's seed."""
    width: Count = 64
    """Number of hidden units of the network, which are its features."""

    def build(self) -> Task:
        clients: dict[ClientId, Data] = {}
        tests: dict[str, Data] = {}
        domain_of: dict[ClientId, str] = {}
        for domain, reviews in amazon_reviews.read(data_root("amazon_reviews", amazon_reviews.OBTAIN)).items():
            data, seed = _distinct(reviews, self.dimensions), derive_seed(self.split_seed, domain)
            rows = split(data.y, self.test_share, seed)
            tests[domain] = data.rows(rows.test)
            domain_clients = _divided(domain, self.clients_per_domain, data.rows(rows.train), seed)
            clients |= domain_clients
            domain_of |= dict.fromkeys(domain_clients, domain)
        model, classes = network(mlp, self.dimensions, 2, self.width), ("negative", "positive")
        return Task(clients, tests, 2, model, domain_of, name="amazon_reviews", class_names=classes)


@dataclass(frozen=True)
class Labelled:
    """Rows of a table and their classes."""

    table: Table
    y: NDArray[np.int64]  # (N,)


def _labelled(hospital: heart_disease.Hospital, rows: Tensor) -> Labelled:
    return Labelled(hospital.table.take(rows.tolist()), hospital.y[rows.numpy()])


def _tabular_task(
    name: str,
    sites: Mapping[str, tuple[Labelled, Labelled]],
    kinds: Mapping[str, Kind],
    width: int,
    classes: tuple[str, str],
    zero_is_missing: tuple[str, ...] = (),
) -> Task:
    """A client and a domain for each site's training and test rows."""
    encoder = Encoder.fit(sum_of(summary_of(train.table, kinds) for train, _ in sites.values()))
    return Task(
        clients={site: _encoded(encoder, train) for site, (train, _) in sites.items()},
        tests={site: _encoded(encoder, test) for site, (_, test) in sites.items()},
        num_classes=2,
        model=network(mlp, len(encoder.features), 2, width),
        class_names=classes,
        preprocessing=TableRows(encoder, zero_is_missing=zero_is_missing),
        domain_of={site: site for site in sites},
        local_tests={site: _encoded(encoder, test) for site, (_, test) in sites.items()},
        name=name,
    )


def _pooled(task: Task) -> Task:
    """The same examples at a single client, which has no domain."""
    x = torch.cat([data.x[data.index] for data in task.clients.values()])
    y = torch.cat([data.labels for data in task.clients.values()])
    return replace(task, clients={"everyone": Data.of(x, y)}, domain_of={}, local_tests={})


def _encoded(encoder: Encoder, rows: Labelled) -> Data:
    return Data.of(torch.from_numpy(encoder.encode(rows.table)), torch.from_numpy(rows.y))


def _distinct(reviews: amazon_reviews.Reviews, dimensions: int) -> Data:
    """Each text once, so that no text is both in training and in a test set."""
    first = {text: row for row, text in reversed(list(enumerate(reviews.texts)))}
    rows = sorted(first.values())
    x = amazon_reviews.encode([reviews.texts[row] for row in rows], dimensions)
    return Data.of(torch.from_numpy(x), torch.from_numpy(reviews.y[rows]))


def _divided(domain: str, num_clients: int, data: Data, seed: int) -> dict[ClientId, Data]:
    """Equal shares of each class for the clients of a domain."""
    everyone = {f"{domain}-{k + 1}": data.labels for k in range(num_clients)}
    return {client: data.rows(rows) for client, rows in proportional(everyone, data.labels, seed).items()}
