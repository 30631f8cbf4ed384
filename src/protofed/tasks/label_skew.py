"""Published images whose clients have different labels: CIFAR, Fashion-MNIST, Tiny ImageNet and VireoFood-172.

One test set is for all, the publisher's. Beside it each client has one of its own, by the manner of a paper: FedPC
keeps a part of the client's own images for testing; pFedCSPC divides the official test set as the training images are
divided. Defaults are FedPC's hundred clients for CIFAR and Fashion-MNIST, and pFedCSPC's ten for the others.
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
from protofed.errors import BadInput
from protofed.seeds import derive_seed
from protofed.tasks.models import ImageModel, image_model
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
"""How the papers' code varies and normalises images, by paper and set."""


@dataclass(frozen=True)
class _LabelSkew:
    num_clients: Count = 100
    partition: Literal["dirichlet", "shards"] = "dirichlet"
    """Whether each class is divided by a Dirichlet draw, or images sorted by label are dealt out in shards."""
    concentration: Positive = 0.3
    """β of the Dirichlet draw; the lower, the more skewed."""
    shards_per_client: Count = 2
    """How many shards a client has where `partition` is "shards"."""
    local_tests: Literal["kept", "proportional", "drawn"] = "kept"
    """A client's own test set: a share of its own images (FedPC), a part of the official test set divided as the
    training images are (pFedCSPC), or the largest part of it in the client's proportions, which a client also has that
    has too few images to keep any."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.25
    """The share of its images that a client keeps for testing where `local_tests` is "kept"."""
    preprocessing: Literal["fedpc", "pfedcspc"] = "fedpc"
    """Whose code images are varied and normalised as in."""
    model: ImageModel = "conv2"
    pixels: Pixels = 32
    """The side to which images are resized."""
    seed: Number = 0
    """Of the division among clients; it is not the run's seed."""
    limit: Number = 0
    """At most so many training images in all, and a fifth as many for testing, evenly spaced; 0: all."""

    def _of(self, name: str) -> Task:
        dataset = DATASETS[name]
        examples = load(dataset, pixels=self.pixels)[name]
        train = Data.of(torch.from_numpy(examples.train.x), torch.from_numpy(examples.train.y))
        test = Data.of(torch.from_numpy(examples.test.x), torch.from_numpy(examples.test.y))
        train, test = _limited(train, self.limit), _limited(test, self.limit // 5)
        rows = {f"client-{k:03d}": own for k, own in enumerate(self._rows(train.labels))}
        clients = {client: train.rows(own) for client, own in rows.items()}
        local_tests = {}
        match self.local_tests:
            case "kept":
                seeds = {client: derive_seed(self.seed, client) for client in clients}
                parts = {c: split(data.labels, self.test_share, seeds[c]) for c, data in clients.items()}
                local_tests = {c: data.rows(parts[c].test) for c, data in clients.items() if len(parts[c].test)}
                clients = {c: data.rows(parts[c].train) for c, data in clients.items()}
            case "proportional":
                theirs = proportional({c: data.labels for c, data in clients.items()}, test.labels, self.seed)
                local_tests = {client: test.rows(own) for client, own in theirs.items() if len(own)}
        channels, num_classes = examples.train.x.shape[1], len(dataset.classes)
        return Task(
            name=name,
            clients=clients,
            tests={name: test},
            num_classes=num_classes,
            model=lambda client: image_model(self.model, channels, num_classes, self.pixels),
            local_tests=local_tests,
            transform=self._transform(name),
        )

    def _rows(self, labels: Tensor) -> tuple[Tensor, ...]:
        if self.partition == "shards":
            return shards(labels, self.num_clients, self.shards_per_client, self.seed)
        return dirichlet(labels, self.num_clients, self.concentration, self.seed)

    def _transform(self, name: str) -> Transform:
        own = PREPROCESSING[self.preprocessing]
        if name not in own:
            raise BadInput(f"task {name}: {self.preprocessing} does not use this set; its preprocessing is another's")
        return own[name]


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
    """With the defaults of pFedCSPC."""

    num_clients: Count = 10
    concentration: Positive = 0.5
    """β of the Dirichlet draw; the lower, the more skewed."""
    local_tests: Literal["kept", "proportional", "drawn"] = "proportional"
    """A client's own test set; see the other tasks with skewed labels."""
    model: ImageModel = "resnet18_projected"
    preprocessing: Literal["fedpc", "pfedcspc"] = "pfedcspc"
    """Whose code images are varied and normalised as in."""


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


def _limited(data: Data, most: int) -> Data:
    if not most or most >= len(data):
        return data
    return data.rows(torch.from_numpy(np.linspace(0, len(data) - 1, most).round().astype(np.int64)))
