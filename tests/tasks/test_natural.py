"""Natural sites as tasks: who holds what, that tests are held out, and that encoders see training rows only."""

import os
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

import protofed
from protofed.data.batches import Data
from protofed.datasets import amazon_reviews, heart_disease, tcga_brca
from protofed.datasets.amazon_reviews import Reviews
from protofed.datasets.heart_disease import Hospital
from protofed.datasets.tabular import Table
from protofed.datasets.tcga_brca import Patients, Region
from protofed.errors import BadInput
from protofed.tasks import natural
from protofed.tasks.natural import AmazonReviews, HeartDisease, TcgaBrca

needs_files = pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="needs the published files: PROTOFED_DATA")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    return tmp_path


def rows_of(data: Data) -> list[tuple[float, ...]]:
    return [tuple(row) for row in data.x[data.index].tolist()]


def counts(data: Data) -> list[int]:
    return data.labels.bincount(minlength=2).tolist()


@pytest.fixture
def hospitals(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Hospital]:
    """Two hospitals whose patients differ in age, none like another."""

    def hospital(first: int, healthy: int, ill: int) -> Hospital:
        n = healthy + ill
        columns = {name: tuple(str(first + k) for k in range(n)) for name in ("age", "thalach")}
        codes = {name: ("1",) * n for name in heart_disease.KINDS if name not in columns}
        table = Table({name: {**codes, **columns}[name] for name in heart_disease.KINDS}, "t.csv", range(n))
        return Hospital(table, np.array([0] * healthy + [1] * ill))

    found = {"north": hospital(20, 30, 20), "south": hospital(120, 4, 46)}
    monkeypatch.setattr(heart_disease, "read", lambda folder: {root: found}[folder])
    return found


def test_each_hospital_is_a_client_and_a_domain_with_a_test_set_of_its_own(hospitals: dict[str, Hospital]) -> None:
    task = HeartDisease(test_share=0.3).build()
    assert task.domain_of == {"north": "north", "south": "south"}
    assert {name: (counts(task.clients[name]), counts(task.tests[name])) for name in hospitals} == {
        "north": ([21, 14], [9, 6]),
        "south": ([3, 32], [1, 14]),
    }
    for name in hospitals:
        rows = [*rows_of(task.clients[name]), *rows_of(task.tests[name])]
        assert len(set(rows)) == 50  # nobody is in both
    assert task.model("north")["features"][1].out_features == 16
    assert HeartDisease(width=5).build().model("north")["features"][1].out_features == 5


def test_the_encoder_is_fitted_on_the_training_rows_of_all_hospitals_together(hospitals: dict[str, Hospital]) -> None:
    task = HeartDisease().build()
    ages = torch.cat([data.x[:, 0] for data in task.clients.values()]).double()
    assert ages.mean().item() == pytest.approx(0, abs=1e-6)
    assert ages.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert abs(fmean(data.x[:, 0].double().mean().item() for data in task.tests.values())) > 1e-4


def test_the_split_depends_on_its_seed_alone(hospitals: dict[str, Hospital]) -> None:
    one, two, other = (HeartDisease(split_seed=seed).build() for seed in (0, 0, 1))
    assert rows_of(one.tests["north"]) == rows_of(two.tests["north"])
    assert rows_of(one.tests["north"]) != rows_of(other.tests["north"])


@pytest.fixture
def regions(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Region]:
    def patients(first: int, times: list[float], is_dead: list[bool]) -> Patients:
        ages = tuple(str(first + k) for k in range(len(times)))
        return Patients(Table({"age": ages}, "t.csv", range(len(times))), np.array(times), np.array(is_dead))

    train = patients(0, [5, 9, 20, 30], [True, False, False, True])
    found = {
        "northeast": Region(train, patients(4, [3, 40], [False, False])),
        "south": Region(patients(6, [40, 8], [False, True]), patients(8, [10], [True])),
    }
    monkeypatch.setattr(tcga_brca, "read", lambda folder: {root: found}[folder])
    return found


def test_patients_without_a_label_at_the_horizon_are_left_out(regions: dict[str, Region]) -> None:
    task = TcgaBrca(horizon=10).build()
    assert {name: data.labels.tolist() for name, data in task.clients.items()} == {
        "northeast": [1, 0, 0],
        "south": [0, 1],
    }
    assert {name: data.labels.tolist() for name, data in task.tests.items()} == {"northeast": [0], "south": [1]}
    # Ages 0, 2, 3, 6 and 7 have the mean 3.6 and the variance 98 / 5 - 3.6² = 6.64.
    ages = [float(x) for data in task.clients.values() for x in data.x[:, 0]]
    assert ages == pytest.approx([(age - 3.6) / 6.64**0.5 for age in (0, 2, 3, 6, 7)], abs=1e-6)


def test_a_horizon_at_which_a_region_has_nobody_is_refused(regions: dict[str, Region]) -> None:
    with pytest.raises(BadInput, match="nobody in northeast has a label at 50 days"):
        TcgaBrca(horizon=50).build()


@pytest.fixture
def goods(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Reviews]:
    def reviews(kind: str) -> Reviews:
        texts = [f"{kind} {word} {k}{k}" for word in ("bad", "good") for k in range(50)]
        texts[7], texts[60] = texts[3], texts[99]  # two that are there twice
        return Reviews(tuple(texts), np.repeat([0, 1], 50))

    found = {kind: reviews(kind) for kind in ("books", "dvd")}
    monkeypatch.setattr(amazon_reviews, "read", lambda folder: {root: found}[folder])
    return found


def test_each_domain_is_dealt_out_to_its_clients_and_no_text_is_used_twice(goods: dict[str, Reviews]) -> None:
    task = AmazonReviews(clients_per_domain=3, dimensions=4096).build()
    assert list(task.clients) == [f"{kind}-{k}" for kind in goods for k in (1, 2, 3)]
    assert task.domain_of == {client: client[:-2] for client in task.clients}
    for kind, reviews in goods.items():
        own = [data for client, data in task.clients.items() if task.domain_of[client] == kind]
        assert sum(counts(task.tests[kind])) == 20  # a fifth of 98 is 19.6
        assert all(12 <= label <= 14 for data in own for label in counts(data))
        used = [row for data in [*own, task.tests[kind]] for row in rows_of(data)]
        assert len(used) == len(set(used)) == len(set(reviews.texts)) == 98


def test_by_default_a_domain_has_two_clients(goods: dict[str, Reviews]) -> None:
    task = AmazonReviews().build()
    assert list(task.clients) == ["books-1", "books-2", "dvd-1", "dvd-2"]
    assert task.spec.input.blank().shape == (1, 4096)


def test_the_data_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    with pytest.raises(BadInput, match=r"heart_disease: set .*PROTOFED_DATA"):
        natural.HeartDisease().build()


@needs_files
def test_hospitals_learn_something() -> None:
    result = protofed.run("fedavg", HeartDisease().build(), rounds=4, epochs=2, batch_size=16, evaluate_every=4)
    # The larger class of Cleveland and of Hungary has 54 and 64 per cent of their patients.
    accuracy = result.accuracy("last")
    assert min(accuracy["cleveland"], accuracy["hungarian"]) > 0.7


@needs_files
def test_the_published_files_make_tasks_of_the_documented_sizes() -> None:
    heart, tcga, amazon = HeartDisease().build(), TcgaBrca().build(), AmazonReviews().build()
    assert {name: (len(data), len(heart.tests[name])) for name, data in heart.clients.items()} == {
        "cleveland": (200, 103),
        "hungarian": (194, 100),
        "switzerland": (81, 42),
        "va": (132, 68),
    }
    assert heart.spec.input.blank().shape == (1, 44)
    assert [(len(data), len(tcga.tests[name])) for name, data in tcga.clients.items()] == [
        *((154, 38), (77, 16), (70, 14), (81, 23), (24, 4), (2, 2))
    ]
    assert tcga.spec.input.blank().shape == (1, 39)
    assert [len(data) for data in amazon.clients.values()] == [783, 782, 781, 782, 787, 786, 792, 790]
    assert [len(data) for data in amazon.tests.values()] == [391, 391, 393, 395]
