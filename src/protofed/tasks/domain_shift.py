"""Published images whose clients have different domains: digits, office objects, and datasets of the Hugging Face hub.

Every client has a part of one domain's training images. Each domain is tested on its whole test set. The defaults are
the allocations of FPL (Huang et al., CVPR 2023) for Digits and Office-Caltech10, and of FedSeProto (ECAI 2024) for
PACS. No paper states one for VLCS; it follows PACS. Images are augmented and normalised as in FPL's code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from protofed.api.task import ClientId, Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.datasets import DATASETS
from protofed.datasets.cache import load
from protofed.datasets.examples import Examples, Split
from protofed.datasets.hub import hub_split
from protofed.datasets.preprocessing import ImageFiles
from protofed.errors import BadInput
from protofed.seeds import derive_seed, generator
from protofed.tasks.models import ImageModel, NetworkOfClient, image_network
from protofed.tasks.partition import allotted, portion

Clients = Mapping[str, Annotated[int, Ge(1)]]
Fraction = Annotated[float, Interval(gt=0, le=1)]
Pixels = Annotated[int, Interval(ge=16, le=512)]
Number = Annotated[int, Ge(0)]

DIGITS = tuple("0123456789")
PUBLIC = 5000
"""Number of MNIST images, which no client has, for methods that need public examples."""
TRANSFORM = Transform(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), pad=4, flip=True)
"""A random crop after padding by four zeros on each side, a random horizontal flip, and ImageNet's normalisation."""


@dataclass(frozen=True)
class _DomainShift:
    clients: Clients
    """Number of clients of each domain. A domain that is not named is left out."""
    fraction: Fraction
    """The share of its domain's training images that a client has."""
    model: ImageModel = "resnet10"
    """The network."""
    other_model: ImageModel | Literal[""] = ""
    """Another network for every second client, for methods that allow it. Empty: none."""
    pixels: Pixels = 32
    """The side to which images are resized."""
    every_class: bool = True
    """Whether every client gets at least one image of every class, as in FPL."""
    seed: Number = 0
    """Seed of the draw of the clients' images. It is not the run's seed."""
    test_limit: Number = 0
    """Largest number of test images of each domain, evenly spaced. 0: all."""

    def _task(
        self, name: str, splits: Mapping[str, Split], published: Mapping[str, int], classes: tuple[str, ...]
    ) -> Task:
        clients: dict[ClientId, Data] = {}
        domain_of: dict[ClientId, str] = {}
        for domain in self.clients:
            domain_clients = self._allotted(domain, splits[domain].train, published.get(domain, 0))
            clients |= domain_clients
            domain_of |= dict.fromkeys(domain_clients, domain)
        tests = {domain: _limited(splits[domain].test, self.test_limit) for domain in self.clients}
        names, num_classes = sorted(clients), len(classes)

        two = [image_network(one, 3, num_classes, self.pixels) for one in (self.model, self.other_model or self.model)]
        model = NetworkOfClient({client: two[k % 2] for k, client in enumerate(names)}) if self.other_model else two[0]
        return Task(
            clients,
            tests,
            num_classes,
            model,
            domain_of,
            transform=TRANSFORM,
            name=name,
            class_names=classes,
            preprocessing=ImageFiles(self.pixels, 3),
        )

    def _rows(self, domain: str, train: Examples, published: int = 0) -> dict[ClientId, Tensor]:
        """The rows of a domain's training images that each of its clients has."""
        size = portion(self.fraction, max(published, len(train)))
        sizes = {f"{domain}-{k}": size for k in range(self.clients[domain])}
        try:
            return allotted(torch.from_numpy(train.y), sizes, derive_seed(self.seed, domain), self.every_class)
        except BadInput as error:
            raise BadInput(f"domain {domain}: {error}") from error

    def _allotted(self, domain: str, train: Examples, published: int) -> dict[ClientId, Data]:
        """The images of the clients of one domain. Images that no client has are not kept in memory."""
        rows = self._rows(domain, train, published)
        used = torch.cat(list(rows.values())).sort().values
        store = _coloured(Examples(train.x[used.numpy()], train.y[used.numpy()]))
        return {client: store.rows(torch.searchsorted(used, index)) for client, index in rows.items()}


@dataclass(frozen=True)
class Digits(_DomainShift):
    """Digits of MNIST, USPS, SVHN and SYN, each a domain. FPL's twenty clients have one per cent of a domain each."""

    clients: Clients = field(default_factory=lambda: {"mnist": 3, "usps": 7, "svhn": 6, "syn": 4})
    """Number of clients of each domain. Domains are mnist, usps, svhn, syn, syn_rendered and mnist_m."""
    fraction: Fraction = 0.01
    """The share of its domain's published training images that a client has."""

    def build(self) -> Task:
        domains = ("mnist", "usps", "svhn", "syn", "syn_rendered", "mnist_m")
        _refuse_unknown(self.clients, domains, "digits")
        splits = {name: load(DATASETS[name], pixels=self.pixels)[name] for name in self.clients}
        task = self._task("digits", splits, {name: DATASETS[name].counts[name][0] for name in self.clients}, DIGITS)
        return replace(task, public=self._public(splits["mnist"].train)) if "mnist" in splits else task

    def _public(self, train: Examples) -> Data | None:
        """Images of MNIST that no client has, as public examples. None if all are used."""
        used = torch.cat(list(self._rows("mnist", train, DATASETS["mnist"].counts["mnist"][0]).values()))
        is_free = torch.ones(len(train), dtype=torch.bool).index_fill(0, used, False)
        free = is_free.nonzero().flatten()
        order = torch.randperm(len(free), generator=generator(self.seed, "public"))
        rows = free[order[:PUBLIC]].sort().values.numpy()
        return _coloured(Examples(train.x[rows], train.y[rows])) if len(rows) else None


@dataclass(frozen=True)
class _OfOneSet(_DomainShift):
    fraction: Fraction = 0.2
    """The share of its domain's training images that a client has."""

    def _of(self, name: str) -> Task:
        dataset = DATASETS[name]
        _refuse_unknown(self.clients, dataset.counts, name)
        published = {domain: train for domain, (train, _) in dataset.counts.items()}
        return self._task(name, load(dataset, pixels=self.pixels), published, dataset.classes)


@dataclass(frozen=True)
class OfficeCaltech10(_OfOneSet):
    """Ten kinds of office objects from four sources. FPL's ten clients have a fifth of a domain each."""

    clients: Clients = field(default_factory=lambda: {"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4})
    """Number of clients of each domain."""

    def build(self) -> Task:
        return self._of("office_caltech10")


@dataclass(frozen=True)
class Pacs(_OfOneSet):
    """Seven classes as photos, art, cartoons and sketches; FedSeProto's ten clients."""

    clients: Clients = field(default_factory=lambda: {"photo": 2, "art_painting": 3, "cartoon": 4, "sketch": 1})
    """Number of clients of each domain."""

    def build(self) -> Task:
        return self._of("pacs")


@dataclass(frozen=True)
class Vlcs(_OfOneSet):
    """Five classes from four collections of photos; ten clients, allotted as for PACS."""

    clients: Clients = field(default_factory=lambda: {"caltech": 2, "labelme": 3, "pascal": 4, "sun": 1})
    """Number of clients of each domain."""

    def build(self) -> Task:
        return self._of("vlcs")


@dataclass(frozen=True)
class Hub(_DomainShift):
    """Any dataset of labelled images from the Hugging Face hub, or from a folder."""

    clients: Clients = field(default_factory=dict)
    """Number of clients of each domain. If empty, every domain has one."""
    fraction: Fraction = 0.2
    """The share of its domain's training images that a client has."""
    source: str = ""
    """`hf:owner/name`, or `hf:` and the full path of a folder that `save_to_disk` wrote."""
    image: str = "image"
    """The column of the images."""
    label: str = "label"
    """The column of the labels, integers from 0."""
    domain: str = ""
    """The column that names the domain. Without it, the dataset is one domain."""

    def build(self) -> Task:
        if not self.source:
            raise BadInput("task hub: source is missing; write hf:owner/name, or hf: and the path of a saved folder")
        splits = hub_split(self.source, self.image, self.label, self.domain or None, self.pixels)
        _refuse_unknown(self.clients, splits, f"hub ({self.source})")
        settings = replace(self, clients=self.clients or dict.fromkeys(splits, 1))
        num_classes = 1 + max(int(part.y.max()) for split in splits.values() for part in (split.train, split.test))
        return settings._task("hub", splits, {}, tuple(map(str, range(num_classes))))


def _refuse_unknown(clients: Mapping[str, int], domains: Mapping[str, object] | tuple[str, ...], task: str) -> None:
    for domain in clients:
        if domain not in domains:
            raise BadInput(f"task {task}: there is no domain {domain!r}; the domains are {', '.join(domains)}")


def _limited(test: Examples, limit: int) -> Data:
    if not limit or limit >= len(test):
        return _coloured(test)
    rows = np.linspace(0, len(test) - 1, limit).round().astype(np.int64)
    return _coloured(Examples(test.x[rows], test.y[rows]))


def _coloured(examples: Examples) -> Data:
    """Images with three channels. A grey channel is repeated."""
    x = torch.from_numpy(examples.x)
    return Data.of(x.expand(-1, 3, -1, -1).contiguous() if x.shape[1] == 1 else x, torch.from_numpy(examples.y))
