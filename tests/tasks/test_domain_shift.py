"""Clients that see parts of domains: how many, which, and of what size; on made-up sets and on real ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from picture_doubles import made_up
from protofed import METHODS, BadInput, Task
from protofed.datasets.examples import Dataset, Split
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.runs.config import config
from protofed.tasks import domain_shift
from protofed.tasks.domain_shift import Digits, Hub, OfficeCaltech10, Pacs, Vlcs

COUNTS = {"mnist": (1000, 50), "usps": (500, 40), "svhn": (2000, 60), "syn": (400, 30)}
AT_HAND = {**COUNTS, "svhn": (900, 60)}
"""Of svhn, fewer are at hand than were published."""


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every set is made up, at the size that it is asked for."""

    def load(dataset: Dataset, root: Path | None = None, pixels: int | None = None) -> dict[str, Split]:
        side, classes = pixels or dataset.pixels, len(dataset.classes)
        sizes = {d: AT_HAND.get(d, (200, 35)) for d in dataset.counts}
        channels = 1 if dataset.name in ("mnist", "usps") else 3
        return {d: Split(*(made_up(n, channels, classes, side) for n in own)) for d, own in sizes.items()}

    published = {
        name: replace(dataset, counts={d: COUNTS.get(d, (200, 35)) for d in dataset.counts})
        for name, dataset in domain_shift.DATASETS.items()
    }
    monkeypatch.setattr(domain_shift, "load", load)
    monkeypatch.setattr(domain_shift, "DATASETS", published)


def sizes(task: Task) -> dict[str, int]:
    return {client: len(data) for client, data in task.clients.items()}


@pytest.mark.usefixtures("no_files")
def test_clients_have_their_share_of_what_was_published() -> None:
    task = Digits(clients={"mnist": 2, "svhn": 1}, fraction=0.05, pixels=16).build()
    assert sizes(task) == {"mnist-0": 50, "mnist-1": 50, "svhn-0": 100}  # of 1000, 1000 and 2000
    assert task.domain_of == {"mnist-0": "mnist", "mnist-1": "mnist", "svhn-0": "svhn"}
    assert {domain: len(test) for domain, test in task.tests.items()} == {"mnist": 50, "svhn": 60}
    assert task.num_classes == 10


@pytest.mark.usefixtures("no_files")
def test_images_are_in_colour_and_keep_their_labels() -> None:
    task = Digits(clients={"mnist": 2, "svhn": 1}, fraction=0.05, pixels=16).build()
    for data in (*task.clients.values(), *task.tests.values()):
        assert data.x.shape[1:] == (3, 16, 16)
        assert data.x.dtype == torch.uint8
    for client, data in task.clients.items():
        rows = data.x[data.index][:, 0, 0, 0].long()  # the row of the domain, modulo 251
        assert ((rows - data.labels) % 10).unique().numel() <= 10
        assert set(data.labels.tolist()) == set(range(10)), client
    first, second = (task.clients[f"mnist-{k}"].index for k in range(2))
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.usefixtures("no_files")
def test_each_image_has_the_label_that_its_domain_gives_it() -> None:
    """Of a domain with fewer than 251 images, a pixel tells the row, and the row the class."""
    task = Pacs(pixels=16).build()
    for data in task.clients.values():
        rows = data.x[data.index][:, 0, 0, 0].long()
        assert torch.equal(rows % 7, data.labels)


@pytest.mark.usefixtures("no_files")
def test_public_digits_are_those_of_mnist_that_no_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AT_HAND, "mnist", (250, 50))  # fewer than 251, so that a pixel tells the row
    monkeypatch.setattr(domain_shift, "PUBLIC", 100)
    task = Digits(clients={"mnist": 2}, fraction=0.05, pixels=16).build()  # 50 of the published 1000 for each
    assert task.public is not None
    public = set(task.public.x[:, 0, 0, 0].tolist())
    used = {int(v) for data in task.clients.values() for v in data.x[data.index][:, 0, 0, 0]}
    assert len(public) == 100
    assert len(used) == 100
    assert not public & used
    assert Digits(clients={"usps": 1}, fraction=0.05, pixels=16).build().public is None


@pytest.mark.usefixtures("no_files")
def test_the_draw_depends_on_the_seed_and_the_domain_alone() -> None:
    def rows(task: Task, client: str) -> list[int]:
        data = task.clients[client]
        return data.x[data.index][:, 0, 0, 0].tolist()

    one = OfficeCaltech10(pixels=16, fraction=0.1)
    fewer = replace(one, clients={"caltech": 3})
    assert rows(one.build(), "caltech-1") == rows(fewer.build(), "caltech-1") == rows(one.build(), "caltech-1")
    assert rows(one.build(), "caltech-1") != rows(replace(one, seed=1).build(), "caltech-1")


@pytest.mark.usefixtures("no_files")
def test_fewer_test_images_are_evenly_spaced() -> None:
    task = Vlcs(pixels=16, test_limit=3).build()
    assert {len(test) for test in task.tests.values()} == {3}
    assert task.tests["sun"].x[:, 0, 0, 0].tolist() == [0, 17, 34]


@pytest.mark.usefixtures("no_files")
def test_every_second_client_may_have_another_network() -> None:
    task = OfficeCaltech10(model="cnn3", other_model="cnn2", pixels=16).build()
    names = sorted(task.clients)
    kinds = [len(task.model(name)["features"]) for name in names]
    assert kinds[::2] == [kinds[0]] * 5
    assert kinds[1::2] == [kinds[1]] * 5
    assert kinds[0] > kinds[1]


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Digits(clients={"mnst": 1}), "task digits: there is no domain 'mnst'; .*mnist, usps"),
        (Digits(clients={"svhn": 1}, fraction=0.5, pixels=16), "domain svhn: .* 100 are missing"),
        (OfficeCaltech10(clients={"caltec": 1}), "office_caltech10: there is no domain 'caltec'"),
        (OfficeCaltech10(fraction=0.01, pixels=16), "domain caltech: client 'caltech-0' cannot have all 10"),
        (Hub(), "source is missing"),
    ],
)
def test_what_cannot_be_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        settings.build()


@pytest.mark.usefixtures("no_files")
def test_a_federation_trains_on_it() -> None:
    task = OfficeCaltech10(model="cnn2", pixels=16, fraction=0.1).build()
    federation = Federation(METHODS["fpl"](), task, Training(rounds=1, epochs=1))
    assert not federation.advance(federation.start()).failures


def test_a_set_of_the_hub_has_one_client_for_each_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {name: Split(made_up(40, 3, 4, 16), made_up(8, 3, 4, 16)) for name in ("a", "b")}
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(domain_shift, "hub_split", lambda *words: asked.append(words) or splits)
    task = Hub(source="hf:someone/something", domain="site", pixels=16, fraction=0.5, model="cnn2").build()
    assert asked == [("hf:someone/something", "image", "label", "site", 16)]
    assert sizes(task) == {"a-0": 20, "b-0": 20}
    assert task.num_classes == 4


def test_allocations_are_written_as_tables_and_checked() -> None:
    table = {"name": "digits", "clients": {"mnist": 2, "usps": 1}, "model": "resnet18"}
    found = config.parse({"task": table, "method": {"name": "fedavg"}}, "test")
    assert found.task == Digits(clients={"mnist": 2, "usps": 1}, model="resnet18")
    assert "[task.clients]\nmnist = 2\nusps = 1" in found.toml()
    for wrong in ({"clients": {"mnist": 0}}, {"clients": {"mnist": "x"}}, {"model": "resnet9"}, {"fraction": 0}):
        with pytest.raises(BadInput):
            config.parse({"task": {**table, **wrong}, "method": {"name": "fedavg"}}, "test")


# ---- real files


@pytest.mark.parametrize(
    "drawn", [{}, pytest.param({"syn_rendered": 4}, marks=pytest.mark.slow)], ids=["published", "and rendered"]
)
def test_the_digits_of_fpl(real_data: Path, drawn: dict[str, int]) -> None:
    """The 34 000 rendered digits take long to draw."""
    clients = {"mnist": 3, "usps": 7, "svhn": 6, **drawn}
    task = Digits(clients=clients).build()
    expected = {"mnist": (600, 10_000), "usps": (72, 2_007), "svhn": (732, 26_032), "syn_rendered": (250, 9_000)}
    assert sizes(task) == {f"{d}-{k}": expected[d][0] for d, n in clients.items() for k in range(n)}
    assert {d: len(t) for d, t in task.tests.items()} == {d: expected[d][1] for d in clients}


def test_the_office_of_fpl(real_data: Path) -> None:
    task = OfficeCaltech10().build()
    expected = {"caltech": 179, "amazon": 153, "webcam": 47, "dslr": 25}
    assert {client: len(data) for client, data in task.clients.items()} == {
        client: expected[domain] for client, domain in task.domain_of.items()
    }
    assert [len(task.tests[d]) for d in ("caltech", "amazon", "webcam", "dslr")] == [224, 190, 58, 30]
