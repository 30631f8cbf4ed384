"""Published images whose clients have different labels: CIFAR, Fashion-MNIST, Tiny ImageNet and VireoFood-172.

All clients share the publisher's test set. In addition, each client has its own test set, as in one of two papers.
FedPC uses a part of the client's images for testing. pFedCSPC divides the publisher's test set in proportion to the
training images. Defaults are FedPC's hundred clients for CIFAR and Fashion-MNIST, and pFedCSPC's ten for the others.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Interval, Lt
from torch import Tensor

from protofed.api.method import Positive
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.datasets import DATASETS
from protofed.datasets.cache import load
from protofed.datasets.preprocessing import ImageFiles
from protofed.errors import BadInput
from protofed.seeds import derive_seed
from protofed.tasks.models import ImageModel, image_network
from protofed.tasks.partition import dirichlet, proportional, shards, split

Pixels = Annotated[int, Interval(ge=16, le=512)]
Count = Annotated[int, Ge(1)]
Number = Annotated[int, Ge(0)]

IMAGENET = Transform(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PREPROCESSING: dict[str, dict[str, Transform]] = {
    "fedpc": {
        "cifar10": Transform((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), pad=4, flip=True),
        "cifar100": Transform((0.507, 0.487, 0.441), (0.267, 0.256, 0.276), pad=4, flip=True),
        "fashion_mnist": Transform((0.1307,), (0.3081,)),
    },
    "pfedcspc": {
        "cifar10": Transform(
            (125.3 / 255, 123.0 / 255, 113.9 / 255),
            (63.0 / 255, 62.1 / 255, 66.7 / 255),
            pad=4,
            pad_mode="reflect",
            flip=True,
        ),
        "cifar100": Transform((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), pad=4, flip=True, rotation=15.0),
        "tiny_imagenet": Transform(IMAGENET.mean, IMAGENET.std, pad=4, pad_mode="reflect", flip=True),
        "vireofood172": Transform((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), flip=True),
    },
}
"""How the papers' code augments and normalises images, by paper and dataset."""


@dataclass(frozen=True)
class _LabelSkew:
    num_clients: Count = 100
    """How many clients there are."""
    partition: Literal["dirichlet", "shards"] = "dirichlet"
    """`dirichlet`: each class is divided by a Dirichlet draw. `shards`: images sorted by label are cut into shards."""
    concentration: Positive = 0.3
    """β of the Dirichlet draw. Lower values give more skew."""
    shards_per_client: Count = 2
    """Number of shards of a client if `partition` is "shards"."""
    local_tests: Literal["kept", "proportional", "drawn"] = "kept"
    """A client's own test set. `kept`: a share of its images (FedPC). `proportional`: a part of the publisher's test
    set, divided in proportion to the training images (pFedCSPC). `drawn`: the largest part of the publisher's test set
    with the client's label proportions. Clients whose test set would be empty get a `drawn` one."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.25
    """The share of its images that a client uses for testing if `local_tests` is "kept"."""
    preprocessing: Literal["fedpc", "pfedcspc"] = "fedpc"
    """The paper whose code images are augmented and normalised as in."""
    model: ImageModel = "conv2"
    """The network."""
    pixels: Pixels = 32
    """The side to which images are resized."""
    seed: Number = 0
    """Seed of the division among clients. It is not the run's seed."""
    limit: Number = 0
    """Largest number of training images in all, evenly spaced. The test set has at most a fifth as many. 0: all."""

    def _of(self, name: str) -> Task:
        dataset = DATASETS[name]
        examples = load(dataset, pixels=self.pixels)[name]
        train = Data.of(torch.from_numpy(examples.train.x), torch.from_numpy(examples.train.y))
        test = Data.of(torch.from_numpy(examples.test.x), torch.from_numpy(examples.test.y))
        train, test = _limited(train, self.limit), _limited(test, self.limit // 5)
        rows = {f"client-{k:03d}": index for k, index in enumerate(self._rows(train.labels))}
        clients = {client: train.rows(index) for client, index in rows.items()}
        local_tests = {}
        match self.local_tests:
            case "kept":
                seeds = {client: derive_seed(self.seed, client) for client in clients}
                parts = {c: split(data.labels, self.test_share, seeds[c]) for c, data in clients.items()}
                local_tests = {c: data.rows(parts[c].test) for c, data in clients.items() if len(parts[c].test)}
                clients = {c: data.rows(parts[c].train) for c, data in clients.items()}
            case "proportional":
                test_rows = proportional({c: data.labels for c, data in clients.items()}, test.labels, self.seed)
                local_tests = {client: test.rows(index) for client, index in test_rows.items() if len(index)}
        channels, num_classes = examples.train.x.shape[1], len(dataset.classes)
        return Task(
            name=name,
            clients=clients,
            tests={name: test},
            num_classes=num_classes,
            model=image_network(self.model, channels, num_classes, self.pixels),
            class_names=dataset.classes,
            preprocessing=ImageFiles(self.pixels, channels),
            local_tests=local_tests,
            transform=self._transform(name),
        )

    def _rows(self, labels: Tensor) -> tuple[Tensor, ...]:
        if self.partition == "shards":
            return shards(labels, self.num_clients, self.shards_per_client, self.seed)
        return dirichlet(labels, self.num_clients, self.concentration, self.seed)

    def _transform(self, name: str) -> Transform:
        transforms = PREPROCESSING[self.preprocessing]
        if name not in transforms:
            choices = " or ".join(paper for paper, datasets in PREPROCESSING.items() if name in datasets)
            raise BadInput(
                f"task {name}: {self.preprocessing} does not use this dataset; set preprocessing to {choices}"
            )
        return transforms[name]


@dataclass(frozen=True)
class Cifar10(_LabelSkew):
    """CIFAR-10 among clients with different labels."""

    def build(self) -> Task:
        return self._of("cifar10")


@dataclass(frozen=True)
class Cifar100(_LabelSkew):
    """CIFAR-100, with its hundred fine classes, among clients with different labels."""

    def build(self) -> Task:
        return self._of("cifar100")


@dataclass(frozen=True)
class FashionMnist(_LabelSkew):
    """Fashion-MNIST, grey pictures of clothes, among clients with different labels."""

    pixels: Pixels = 28
    """The side to which images are resized."""

    def build(self) -> Task:
        return self._of("fashion_mnist")


@dataclass(frozen=True)
class _AsPFedCSPC(_LabelSkew):
    """Label skew with the defaults of pFedCSPC."""

    num_clients: Count = 10
    """How many clients there are."""
    concentration: Positive = 0.5
    """β of the Dirichlet draw. Lower values give more skew."""
    local_tests: Literal["kept", "proportional", "drawn"] = "proportional"
    """A client's own test set; see the other tasks with skewed labels."""
    model: ImageModel = "resnet18_projected"
    """The network."""
    preprocessing: Literal["fedpc", "pfedcspc"] = "pfedcspc"
    """The paper whose code images are augmented and normalised as in."""


@dataclass(frozen=True)
class TinyImagenet(_AsPFedCSPC):
    """Tiny ImageNet, 200 classes at 64 × 64, among clients with different labels."""

    pixels: Pixels = 64
    """The side to which images are resized."""

    def build(self) -> Task:
        return self._of("tiny_imagenet")


@dataclass(frozen=True)
class Vireofood172(_AsPFedCSPC):
    """VireoFood-172, photos of 172 Chinese dishes, among clients with different labels."""

    pixels: Pixels = 224
    """The side to which images are resized."""

    def build(self) -> Task:
        return self._of("vireofood172")


def _limited(data: Data, limit: int) -> Data:
    if not limit or limit >= len(data):
        return data
    return data.rows(torch.from_numpy(np.linspace(0, len(data) - 1, limit).round().astype(np.int64)))
