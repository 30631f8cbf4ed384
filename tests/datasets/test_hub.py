"""Sets in the form of Hugging Face's library, saved to a folder by the test."""

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from protofed.datasets.hub import hub_split
from protofed.errors import BadInput

REASON = "needs the extra protofed[hub]"


def png(shade: int, mode: str = "L") -> bytes:
    file = BytesIO()
    Image.new(mode, (4, 4), shade).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets", reason=REASON)


@pytest.fixture
def saved(library: Any, tmp_path: Path) -> Callable[..., str]:
    """Saves rows of (image, label, domain) for each part, and gives the source."""

    def save(image: Any = None, label: Any = None, domain: Any = None, **parts: list[tuple[Any, Any, Any]]) -> str:
        features = library.Features(
            picture=image or library.Image(),
            kind=label or library.ClassLabel(names=["cat", "dog"]),
            place=domain or library.Value("string"),
        )
        tables = {}
        for name, rows in parts.items():
            columns = dict(zip(features, map(list, zip(*rows, strict=True)), strict=True))
            tables[name] = library.Dataset.from_dict(columns, features=features)
        library.DatasetDict(tables).save_to_disk(tmp_path / "pets")
        return f"hf:{tmp_path / 'pets'}"

    return save


def split(source: str, domain: str | None = "place") -> dict[str, tuple[list[int], list[int], list[int], list[int]]]:
    """The shades and labels of the training and of the test images of each domain."""
    found = hub_split(source, "picture", "kind", domain, 2)
    return {
        name: (
            *(own.train.x[:, 0, 0, 0].tolist(), own.train.y.tolist()),
            *(own.test.x[:, 0, 0, 0].tolist(), own.test.y.tolist()),
        )
        for name, own in found.items()
    }


TRAIN = [(png(1), 0, "town"), (png(2), 1, "farm"), (png(3), 1, "town")]
TEST = [(png(4), 1, "town"), (png(5), 0, "farm")]
AS_DOMAINS = {"town": ([1, 3], [0, 1], [4], [1]), "farm": ([2], [1], [5], [0])}


def images(rows: list[tuple[bytes, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    return [({"bytes": content, "path": None}, label, domain) for content, label, domain in rows]


def test_the_column_of_domains_divides_the_set(saved: Callable[..., str]) -> None:
    assert split(saved(train=images(TRAIN), test=images(TEST))) == AS_DOMAINS


def test_without_a_column_of_domains_there_is_one(saved: Callable[..., str]) -> None:
    source = saved(train=images(TRAIN), test=images(TEST))
    assert split(source, None) == {"pets": ([1, 2, 3], [0, 1, 1], [4, 5], [1, 0])}
    found = hub_split(source, "picture", "kind", None, 2)["pets"]
    assert found.train.x.shape == (3, 3, 2, 2)
    assert found.train.x.dtype == "uint8"
    assert found.train.y.dtype == "int64"


def test_images_may_be_given_as_pictures(saved: Callable[..., str]) -> None:
    def opened(rows: list[tuple[bytes, Any, Any]]) -> list[tuple[Any, Any, Any]]:
        return [(Image.open(BytesIO(content)), label, domain) for content, label, domain in rows]

    assert split(saved(train=opened(TRAIN), test=opened(TEST))) == AS_DOMAINS


def test_images_may_be_given_as_plain_bytes(saved: Callable[..., str], library: Any) -> None:
    assert split(saved(image=library.Value("binary"), train=TRAIN, test=TEST)) == AS_DOMAINS


def test_domains_may_be_numbers_of_names(saved: Callable[..., str], library: Any) -> None:
    names = library.ClassLabel(names=["town", "farm"])
    assert split(saved(domain=names, train=images(TRAIN), test=images(TEST))) == AS_DOMAINS


def test_validation_is_tested_on_where_there_is_no_test(saved: Callable[..., str]) -> None:
    assert split(saved(train=images(TRAIN), validation=images(TEST))) == AS_DOMAINS


def test_test_goes_before_validation(saved: Callable[..., str]) -> None:
    assert split(saved(train=images(TRAIN), validation=images(TRAIN), test=images(TEST))) == AS_DOMAINS


def test_other_parts_are_listed_in_the_error(saved: Callable[..., str], library: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"train and test \(or validation\), but has train, extra"):
        split(saved(train=images(TRAIN), extra=images(TEST)))
    library.Dataset.from_dict({"kind": [1]}).save_to_disk(tmp_path / "alone")
    with pytest.raises(BadInput, match="a single unnamed part"):
        split(f"hf:{tmp_path / 'alone'}")


def test_unknown_columns_are_named_beside_those_there_are(saved: Callable[..., str]) -> None:
    source = saved(train=images(TRAIN), test=images(TEST))
    with pytest.raises(BadInput, match="train: has no column photo, where; its columns are picture, kind, place"):
        hub_split(source, "photo", "kind", "where", 2)
    with pytest.raises(BadInput, match=r"column place .*expected images or bytes"):
        hub_split(source, "place", "kind", None, 2)


@pytest.mark.parametrize("label", ["cat", -1, None, 0.5])
def test_labels_that_are_no_classes_are_refused_with_their_row(
    saved: Callable[..., str], library: Any, label: Any
) -> None:
    feature = library.Value({str: "string", float: "float32"}.get(type(label), "int64"))
    good = "dog" if isinstance(label, str) else 0
    rows = [({"bytes": png(1), "path": None}, value, "town") for value in (good, label)]
    with pytest.raises(BadInput, match=r"pets, train, row \d: kind is"):
        split(saved(label=feature, train=rows, test=rows))


def test_domains_without_a_name_or_without_test_images_are_refused(saved: Callable[..., str]) -> None:
    with pytest.raises(BadInput, match="'farm' has 1 training and 0 test images"):
        split(saved(train=images(TRAIN), test=images(TEST[:1])))
    with pytest.raises(BadInput, match="test, row 0: place is None"):
        split(saved(train=images(TRAIN), test=images([(png(4), 1, None)])))


def test_a_set_without_rows_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features = library.Features(picture=library.Value("binary"), kind=library.Value("int64"))
    table = library.Dataset.from_dict({"picture": [], "kind": []}, features=features)
    monkeypatch.setattr(library, "load_dataset", lambda name: library.DatasetDict(train=table, test=table))
    with pytest.raises(BadInput, match="hf:owner/animals: has no rows"):
        split("hf:owner/animals", None)


def test_damaged_images_are_refused_with_their_row(saved: Callable[..., str]) -> None:
    broken = [*TRAIN[:2], (png(3)[:40], 1, "town")]
    with pytest.raises(BadInput, match="pets, train, row 2: "):
        split(saved(train=images(broken), test=images(TEST)))


def test_the_rules_for_images_hold_here_too(saved: Callable[..., str]) -> None:
    rows = [({"bytes": png(0, "RGBA"), "path": None}, 0, "town")]  # nothing but transparent
    assert split(saved(train=rows, test=rows)) == {"town": ([255], [0], [255], [0])}


def test_a_row_cannot_name_a_file_outside(saved: Callable[..., str], library: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(9))
    feature = library.Features(picture=library.Image(decode=False), kind=library.Value("int64"))
    rows = {"picture": [{"bytes": None, "path": str(tmp_path / "secret.png")}], "kind": [0]}
    table = library.Dataset.from_dict(rows, features=feature)
    parts = library.DatasetDict(train=table, test=table)
    source = saved(train=images(TRAIN), test=images(TEST))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_from_disk", lambda place: parts)
        with pytest.raises(BadInput, match=r"row 0: its image is the file .*secret\.png, which is outside"):
            hub_split(source, "picture", "kind", None, 2)
        (tmp_path / "pets/inside.png").write_bytes(png(7))
        rows["picture"] = [{"bytes": None, "path": str(tmp_path / "pets/inside.png")}]
        parts["train"] = parts["test"] = library.Dataset.from_dict(rows, features=feature)
        assert split(source, None)["pets"] == ([7], [0], [7], [0])


def test_the_tables_themselves_must_lie_in_the_folder(saved: Callable[..., str], tmp_path: Path) -> None:
    source = saved(train=images(TRAIN), test=images(TEST))
    (table,) = (tmp_path / "pets/train").glob("*.arrow")
    table.rename(tmp_path / "moved.arrow")
    table.symlink_to(tmp_path / "moved.arrow")
    with pytest.raises(BadInput, match="a link out of"):
        split(source)


def test_names_of_the_hub_are_loaded_without_any_code(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    features = library.Features(picture=library.Value("binary"), kind=library.Value("int64"))
    table = library.Dataset.from_dict({"picture": [png(6)], "kind": [3]}, features=features)

    def load(*words: Any, **settings: Any) -> Any:
        asked.append((words, settings))
        return library.DatasetDict(train=table, test=table)

    monkeypatch.setattr(library, "load_dataset", load)
    assert split("hf:owner/animals", None) == {"animals": ([6], [3], [6], [3])}
    assert asked == [(("owner/animals",), {})]


def test_a_folder_here_is_not_taken_for_a_set_of_the_hub(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner/animals").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="is also a folder here"):
        split("hf:owner/animals")


@pytest.mark.parametrize("source", ["hf:animals", "hf:a/b/c", "hf:../x", "hf:", "s3:a/b", "a/b", "hf:https://x/y"])
def test_other_sources_are_refused(library: Any, source: str) -> None:
    with pytest.raises(BadInput, match="expected hf:owner/name"):
        split(source)


def test_a_folder_that_cannot_be_loaded_is_named(library: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"missing: cannot be loaded"):
        split(f"hf:{tmp_path / 'missing'}")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"hf:owner/animals: .*pip install 'protofed\[hub\]'"):
        split("hf:owner/animals")


def test_too_many_images_for_the_memory_are_refused(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(train=images(TRAIN), test=images(TEST))
    memory = SimpleNamespace(SC_PHYS_PAGES=1, SC_PAGE_SIZE=2 * 5 * 3 * 4 - 1)
    monkeypatch.setattr("os.sysconf", lambda name: getattr(memory, name))
    with pytest.raises(BadInput, match="5 images of 2 × 2 need"):
        split(source)
