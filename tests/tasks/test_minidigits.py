"""The embedded federation: reproducible bytes, no source used twice, clients and domains as promised."""

from dataclasses import fields
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from protofed.datasets.minidigits import Domain, build, domains, print_font
from protofed.tasks.minidigits import CLIENT_SIZES, client_rows

NAMES = ("pen", "ink", "street", "print")
HANDWRITTEN = NAMES[:3]
HANDWRITTEN_IMAGES = 1797


def families(sources: NDArray[np.int64]) -> set[str]:
    return {print_font(int(source))[0] for source in sources}


def look(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Mean brightness, mean saturation and the share of pixels in the commonest colour, each in [0, 1]."""
    saturation = (images.max(1).astype(float) - images.min(1)) / 255
    pixels = images.reshape(len(images), 3, -1).transpose(0, 2, 1)
    flat = [np.unique(image, axis=0, return_counts=True)[1].max() / len(image) for image in pixels]
    return np.array([images.mean() / 255, saturation.mean(), np.mean(flat)])


def outline(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How far each pixel is from the ground's grey: the digit's shape whatever its colour and polarity."""
    grey = images.mean(1).reshape(len(images), -1)
    distance = np.abs(grey - np.median(grey, axis=1, keepdims=True))
    normed: NDArray[np.float64] = distance / np.linalg.norm(distance, axis=1, keepdims=True)
    return normed


def test_fresh_builds_are_equal_and_leave_the_global_generator_alone() -> None:
    np.random.seed(1)
    first = build()
    assert np.random.random() == np.random.RandomState(1).random()
    np.random.seed(2)
    second = build()
    assert tuple(first) == tuple(second) == tuple(domains()) == NAMES
    for name in NAMES:
        for field in fields(Domain):
            arrays = [getattr(built[name], field.name) for built in (first, second, domains())]
            assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes(), (name, field.name)


def test_the_images_are_the_same_where_libraries_keep_their_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = domains()
    for module in ("minidigits", "minidigits_drawing"):
        monkeypatch.setattr(f"protofed.datasets.{module}.package_folder", lambda name: tmp_path)
    found = build()
    for name in NAMES:
        for field in fields(Domain):
            arrays = [getattr(built[name], field.name) for built in (found, usual)]
            assert np.array_equal(*arrays), (name, field.name)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_types(name: str) -> None:
    domain = domains()[name]
    for part in ("train", "test"):
        x, y, source = (getattr(domain, f"{part}_{kind}") for kind in ("x", "y", "source"))
        assert x.dtype == np.uint8
        assert x.shape == (len(y), 3, 28, 28)
        assert y.dtype == source.dtype == np.int64
        assert y.shape == source.shape
        assert set(y) == set(range(10))


def test_handwriting_is_partitioned_and_print_ids_are_unique() -> None:
    handwritten = [s for n in HANDWRITTEN for s in (domains()[n].train_source, domains()[n].test_source)]
    assert sorted(np.concatenate(handwritten)) == list(range(HANDWRITTEN_IMAGES))
    printed = np.concatenate([domains()["print"].train_source, domains()["print"].test_source])
    assert len(set(printed)) == len(printed)
    assert printed.min() >= 10_000


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_labels_are_those_of_the_sources(name: str) -> None:
    from sklearn.datasets import load_digits

    target = load_digits().target
    domain = domains()[name]
    assert np.array_equal(domain.train_y, target[domain.train_source])
    assert np.array_equal(domain.test_y, target[domain.test_source])


def test_no_picture_appears_twice() -> None:
    pictures = [x.tobytes() for d in domains().values() for part in (d.train_x, d.test_x) for x in part]
    assert len(set(pictures)) == len(pictures)


def test_printed_test_set_has_seen_and_unseen_font_families() -> None:
    trained, tested = (families(s) for s in (domains()["print"].train_source, domains()["print"].test_source))
    assert tested - trained == {"STIX General", "Computer Modern Sans"}
    assert tested & trained


@pytest.mark.parametrize("name", NAMES)
def test_test_sets_are_large_and_balanced(name: str) -> None:
    counts = np.bincount(domains()[name].test_y, minlength=10)
    assert counts.sum() >= 120
    assert counts.max() - counts.min() <= 1


def test_clients_have_their_allotted_sizes_and_every_class() -> None:
    clients = client_rows()
    assert len(clients) == 12
    assert list(clients) == [f"{name}-{k}" for name in NAMES for k in range(len(CLIENT_SIZES[name]))]
    for client, (name, rows) in clients.items():
        assert client.startswith(name)
        assert rows.dtype == np.int64
        assert len(rows) == CLIENT_SIZES[name][int(client.split("-")[1])]
        assert set(domains()[name].train_y[rows]) == set(range(10)), client


@pytest.mark.parametrize("name", NAMES)
def test_clients_share_out_all_of_the_training_rows_without_overlap(name: str) -> None:
    rows = np.concatenate([rows for domain, rows in client_rows().values() if domain == name])
    assert sorted(rows) == list(range(len(domains()[name].train_y)))


def test_domains_and_clients_are_unequal() -> None:
    assert len({len(sizes) for sizes in CLIENT_SIZES.values()}) > 1
    assert all(len(set(sizes)) == len(sizes) for sizes in CLIENT_SIZES.values())
    totals = {name: sum(sizes) for name, sizes in CLIENT_SIZES.items()}
    assert totals["ink"] <= 0.5 * min(total for name, total in totals.items() if name != "ink")
    assert 1800 <= sum(totals.values()) <= 2200


def test_domains_look_different() -> None:
    looks = {name: look(domain.train_x) for name, domain in domains().items()}
    for one, other in combinations(NAMES, 2):
        assert np.abs(looks[one] - looks[other]).max() > 0.2, (one, other)
    assert looks["pen"][0] < 0.4
    assert looks["ink"][0] > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_pictures_show_their_labels(name: str) -> None:
    domain = domains()[name]
    train, test = outline(domain.train_x), outline(domain.test_x)
    centres = np.stack([train[domain.train_y == digit].mean(0) for digit in range(10)])
    assert np.mean((test @ centres.T).argmax(1) == domain.test_y) > 0.5
