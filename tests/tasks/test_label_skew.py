"""Clients with different labels: who has what, and the test set of each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from picture_doubles import made_up
from protofed import METHODS, BadInput, Task
from protofed.datasets.examples import Dataset, Split
from protofed.engine.federation import Federation
from protofed.engine.test_sets import label_counts, local_rows, pooled_tests
from protofed.engine.training import Training
from protofed.tasks import TASKS, label_skew
from protofed.tasks.label_skew import PREPROCESSING, Cifar10, FashionMnist, TinyImagenet


@pytest.fixture(autouse=True)
def no_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(dataset: Dataset, root: Path | None = None, pixels: int | None = None) -> dict[str, Split]:
        side, classes = pixels or dataset.pixels, len(dataset.classes)
        channels = 1 if dataset.name == "fashion_mnist" else 3
        return {dataset.name: Split(made_up(2000, channels, classes, side), made_up(400, channels, classes, side))}

    if "real_data" not in request.fixturenames:
        monkeypatch.setattr(label_skew, "load", load)


SMALL = Cifar10(num_clients=10, pixels=16)


def rows(task: Task) -> list[int]:
    return sorted(i for data in (*task.clients.values(), *task.local_tests.values()) for i in data.index.tolist())


def test_every_image_is_trained_on_or_kept_by_one_client() -> None:
    task = SMALL.build()
    assert rows(task) == list(range(2000))
    for client, data in task.clients.items():
        kept = len(task.local_tests[client]) / (len(data) + len(task.local_tests[client]))
        assert kept == pytest.approx(0.25, abs=0.02)
    assert len(task.tests["cifar10"]) == 400
    assert task.domain_of == {}


def test_a_test_set_divided_as_the_training_images_are() -> None:
    task = replace(SMALL, local_tests="proportional").build()
    assert sum(map(len, task.clients.values())) == 2000
    assert sorted(i for data in task.local_tests.values() for i in data.index.tolist()) == list(range(400))
    for client, data in task.local_tests.items():
        expected = label_counts(task.clients[client], 10) / 5  # 400 test images for 2000 training images
        assert (label_counts(data, 10) - expected).abs().max() <= 1


def test_a_client_with_too_few_images_to_keep_any_is_tested_on_others() -> None:
    task = replace(SMALL, partition="shards", num_clients=60, limit=180).build()
    few = task.clients.keys() - task.local_tests.keys()
    assert few, "the draw gives every client enough"
    assert max(len(task.clients[client]) for client in few) <= 3
    for client in few:
        pooled = pooled_tests(task.tests)
        assert pooled is not None
        data = pooled.rows(local_rows(task, client, 0))
        assert data.x.data_ptr() == task.tests["cifar10"].x.data_ptr()


def test_drawn_test_sets_are_left_to_the_evaluation() -> None:
    assert replace(SMALL, local_tests="drawn").build().local_tests == {}


def test_shards_give_few_classes_to_each() -> None:
    task = replace(SMALL, partition="shards", local_tests="drawn").build()
    assert {len(data) for data in task.clients.values()} == {200}
    assert max((label_counts(data, 10) > 0).sum() for data in task.clients.values()) <= 4


def test_a_limit_takes_evenly_spaced_images() -> None:
    task = replace(SMALL, limit=500, local_tests="drawn").build()
    assert rows(task) == torch.linspace(0, 1999, 500, dtype=torch.float64).round().long().tolist()
    assert len(task.tests["cifar10"]) == 100


def test_images_are_prepared_as_a_paper_does() -> None:
    assert SMALL.build().transform == PREPROCESSING["fedpc"]["cifar10"]
    other = replace(SMALL, preprocessing="pfedcspc").build().transform
    assert other == PREPROCESSING["pfedcspc"]["cifar10"]
    assert other.pad_mode == "reflect"
    assert other.mean[0] == pytest.approx(0.4914, abs=1e-4)  # 125.3 / 255
    tiny = TinyImagenet(num_clients=2, pixels=16, model="cnn2").build()
    assert tiny.transform == PREPROCESSING["pfedcspc"]["tiny_imagenet"]
    assert FashionMnist(num_clients=5).build().transform.mean == (0.1307,)
    with pytest.raises(BadInput, match="fashion_mnist: pfedcspc does not use this dataset"):
        FashionMnist(num_clients=5, preprocessing="pfedcspc").build()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist", "tiny_imagenet", "vireofood172"])
def test_a_federation_trains_on_it(name: str) -> None:
    settings = replace(TASKS[name](), num_clients=2, pixels=16, model="cnn2")  # type: ignore[type-var]
    federation = Federation(METHODS["fedavg"](), settings.build(), Training(rounds=1, epochs=1))
    assert not federation.advance(federation.start()).failures


def test_the_networks_of_the_papers_fit() -> None:
    shapes = {"cifar10": ("conv2", 192), "fashion_mnist": ("conv2", 192), "tiny_imagenet": ("resnet18_projected", 512)}
    for name, (model, features) in shapes.items():
        task = replace(TASKS[name](), num_clients=2).build()  # type: ignore[type-var]
        assert TASKS[name]().model == model  # type: ignore[attr-defined]
        networks = Federation(METHODS["fedavg"](), task, Training()).networks_of("client-000")
        assert networks.feature_dim(task.spec.input.blank()) == features


def test_cifar10_as_fedpc_has_it(real_data: Path) -> None:
    task = Cifar10().build()
    assert len(task.clients) == 100
    assert rows(task) == list(range(50_000))
    assert label_counts(task.tests["cifar10"], 10).tolist() == [1000] * 10
