"""The task of users' own files: clients, test sets and classes, whatever the sites lack, and no leak between sides."""

import logging
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from protofed.api.task import Task
from protofed.datasets.images import decoded
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.tasks.custom import Custom, SiteExamples, split_sites, untested_classes
from protofed.tasks.custom.shares import agreed

Draw = Callable[..., Path]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Writes a flat image below the folder; each has a shade of its own unless one is given."""
    shades = iter(range(256))

    def drawn(name: str, shade: int | None = None, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        value = next(shades) if shade is None else shade
        Image.new("RGB", size, (value, value, value)).convert(mode).save(path)
        return path

    return drawn


def folder(tmp_path: Path, draw: Draw, **counts: dict[str, int]) -> Custom:
    """Sites with so many images of each class."""
    for site, classes in counts.items():
        for name, count in classes.items():
            for k in range(count):
                draw(f"{site}/{name}/{k:02}.png")
    return Custom(str(tmp_path), pixels=8)


def tables(tmp_path: Path, **sites: str) -> Custom:
    """Sites with these lines, blanks for line ends."""
    for site, lines in sites.items():
        (tmp_path / f"{site}.csv").write_text(lines.replace(" ", "\n") + "\n", encoding="utf-8")
    return Custom(str(tmp_path), "tables", label="y")


def shades(task: Task, part: str, site: str) -> list[int]:
    data = (task.clients if part == "train" else task.tests)[site]
    return sorted(data.x[data.index][:, 0, 0, 0].tolist())


# ---- images


def deep_sites(tmp_path: Path, **brightest: int) -> Custom:
    """Sites of four images of 16 bits in each of two classes, of values up to the given one."""
    for seed, (site, value) in enumerate(brightest.items()):
        noise = np.random.default_rng(seed)
        for k in range(8):
            path = tmp_path / site / "ab"[k % 2] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(value // 2, value + 1, (8, 8), dtype=np.uint16)).save(path)
    Image.fromarray(np.full((8, 8), max(brightest.values()), np.uint16)).save(path)
    return Custom(str(tmp_path), pixels=8, channels=1)


def pixels_of(task: Task) -> dict[str, list[int]]:
    return {site: data.x.flatten().tolist() for site, data in task.clients.items()}


def test_the_bits_of_16_bit_grey_are_found_in_all_files_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = deep_sites(tmp_path, north=900, south=4095)
    found = pixels_of(settings.build())
    assert "use 12 bits: 0 to 4095 become 0 to 255. Write bits = 12 into [task]" in caplog.text
    # 900 · 255 / 4095 = 56.04 and 450 · 255 / 4095 = 28.02: the site is as dark as its files are beside the others.
    assert 28 <= min(found["north"]) < 30
    assert 54 < max(found["north"]) <= 56
    assert max(found["south"]) == 255
    caplog.clear()
    assert found == pixels_of(settings.build()) == pixels_of(replace(settings, bits=12).build())
    assert found != pixels_of(replace(settings, bits=16).build())


def test_bits_that_are_set_are_not_said_again_and_bound_the_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = deep_sites(tmp_path, north=900, south=4095)
    replace(settings, bits=12).build()
    assert "bits" not in caplog.text
    with pytest.raises(BadInput, match=r"south.*\.png: a grey value of \d+, but the 10 bits that are set end at 1023"):
        replace(settings, bits=10).build()


def test_images_of_eight_bits_have_no_use_for_bits(tmp_path: Path, draw: Draw) -> None:
    settings = folder(tmp_path, draw, north={"a": 4, "b": 4})
    assert pixels_of(settings.build()) == pixels_of(replace(settings, bits=12).build())


def test_a_damaged_deep_image_is_named_when_bits_are_found(tmp_path: Path) -> None:
    settings = deep_sites(tmp_path, north=4095)
    path = tmp_path / "north/a/0.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(BadInput, match=r"north/a/0\.png: damaged"):
        settings.build()


def test_every_site_is_a_client_and_a_domain_with_a_stratified_test_set(tmp_path: Path, draw: Draw) -> None:
    task = folder(tmp_path, draw, north={"a": 8, "b": 4}, south={"a": 4, "b": 8}).build()
    assert [*task.clients] == [*task.tests] == [*task.local_tests] == ["north", "south"]
    assert task.domain_of == {"north": "north", "south": "south"}
    # A quarter of 8 and 4.
    assert task.tests["north"].labels.bincount().tolist() == [2, 1]
    assert task.clients["north"].labels.bincount().tolist() == [6, 3]
    assert task.tests["south"].labels.bincount().tolist() == [1, 2]
    train, test = shades(task, "train", "north"), shades(task, "test", "north")
    assert sorted(train + test) == [*range(12)]


def test_pixels_are_those_of_the_file_and_belong_to_its_class(tmp_path: Path, draw: Draw) -> None:
    task = folder(tmp_path, draw, north={"a": 4, "b": 4}).build()
    for data in (task.clients["north"], task.tests["north"]):
        assert (data.x[data.index][:, 0, 0, 0] >= 4).long().tolist() == data.labels.tolist()


def test_a_class_missing_at_a_site_keeps_its_number_there(tmp_path: Path, draw: Draw) -> None:
    task = folder(tmp_path, draw, north={"a": 4, "c": 4}, south={"b": 4}).build()
    assert task.num_classes == 3
    assert task.clients["north"].labels.unique().tolist() == [0, 2]
    assert task.clients["south"].labels.unique().tolist() == [1]


def test_a_single_example_is_trained_on_and_an_untested_class_is_said(
    tmp_path: Path, draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    task = folder(tmp_path, draw, north={"a": 8, "rare": 1}, south={"a": 8, "b": 4}).build()
    assert (task.clients["north"].labels == 2).sum() == 1
    assert all(2 not in test.labels for test in task.tests.values())
    assert "class 'rare' is in no test set" in caplog.text
    assert "'b'" not in caplog.text


def test_a_site_too_small_for_a_test_set_only_trains(
    tmp_path: Path, draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    task = folder(tmp_path, draw, north={"a": 4, "b": 4}, south={"a": 1}).build()
    assert [*task.clients] == ["north", "south"]
    assert [*task.tests] == [*task.domain_of] == ["north"]
    assert "south has too few examples" in caplog.text


def test_sites_and_class_folders_without_images_are_left_out(
    tmp_path: Path, draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    settings = folder(tmp_path, draw, north={"a": 4, "b": 4})
    (tmp_path / "north/aa").mkdir()
    (tmp_path / "south/a").mkdir(parents=True)
    task = settings.build()
    assert ([*task.clients], task.num_classes) == (["north"], 2)
    assert "south has no images" in caplog.text


def test_sizes_and_modes_may_be_mixed_and_cameras_turned(tmp_path: Path, draw: Draw) -> None:
    settings = folder(tmp_path, draw, north={"a": 4, "b": 4})
    draw("north/a/grey.png", mode="L", size=(30, 20))
    draw("north/a/clear.png", mode="RGBA")
    Image.fromarray(np.full((9, 5), 65535, np.uint16)).save(tmp_path / "north/a/deep.png")
    turned = Image.new("RGB", (16, 8))
    turned.paste((255, 255, 255), (0, 0, 8, 8))  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to see it upright
    turned.save(tmp_path / "north/a/turned.jpg", exif=exif, quality=100)
    task = settings.build()
    store = task.clients["north"].x
    assert (store.shape, store.dtype) == ((12, 3, 8, 8), torch.uint8)
    names = sorted(path.name for path in (tmp_path / "north/a").iterdir())
    upright = store[names.index("turned.jpg"), 0]
    assert (upright[0] > 200).all()
    assert (upright[-1] < 50).all()
    assert (store[names.index("deep.png")] == 255).all()


def test_one_channel_is_grey_and_the_network_reads_it(tmp_path: Path, draw: Draw) -> None:
    folder(tmp_path, draw, north={"a": 4, "b": 4})
    task = Custom(str(tmp_path), pixels=28, channels=1, model="small_cnn").build()
    assert task.spec.input.blank().shape == (1, 1, 28, 28)
    networks = Networks(lambda: task.model("north"))
    assert networks.model(networks.init(0)).logits(task.spec.input.blank()).shape == (1, 2)


def test_both_unicode_spellings_of_a_class_are_one(tmp_path: Path, draw: Draw) -> None:
    for site, form in (("north", "NFC"), ("south", "NFD")):
        for k in range(4):
            draw(f"{site}/{unicodedata.normalize(form, 'Café')}/{k}.png")  # type: ignore[arg-type]
            draw(f"{site}/b/{k}.png")
    assert Custom(str(tmp_path), pixels=8).build().num_classes == 2


def test_a_file_at_two_sites_or_in_two_classes_is_trained_on_and_never_tested(tmp_path: Path, draw: Draw) -> None:
    for seed in range(8):
        for k in range(4):
            draw(f"{seed}/north/a/{k}.png", shade=k)
            draw(f"{seed}/north/b/{k}.png", shade=10 + k)
            draw(f"{seed}/south/a/{k}.png", shade=20 + k)
            draw(f"{seed}/south/b/{k}.png", shade=k)  # all of north's a
        task = Custom(str(tmp_path / str(seed)), pixels=8, seed=seed).build()
        tested = {shade for site in task.tests for shade in shades(task, "test", site)}
        assert tested
        assert not tested & {0, 1, 2, 3}


def test_copies_within_a_class_stay_on_one_side(tmp_path: Path, draw: Draw) -> None:
    for k in range(12):
        draw(f"north/a/{k:02}.png", shade=k % 4)
        draw(f"north/b/{k:02}.png", shade=100 + k)
    for seed in range(8):
        task = Custom(str(tmp_path), pixels=8, seed=seed).build()
        train, test = shades(task, "train", "north"), shades(task, "test", "north")
        assert not {*train} & {*test}
        assert len(train) + len(test) == 24
        assert [test.count(shade) for shade in {*test} if shade < 4] == [3]


def test_a_damaged_file_ends_the_task_by_name_unless_it_may_be_skipped(
    tmp_path: Path, draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    settings = folder(tmp_path, draw, north={"a": 4, "b": 4})
    (tmp_path / "north/a/00.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"00\.png: not an image.*skip_damaged = true"):
        settings.build()
    with pytest.raises(BadInput, match=r"1 of 8 files are damaged, more than .*max_damaged = 0\.01"):
        Custom(str(tmp_path), pixels=8, skip_damaged=True).build()
    task = Custom(str(tmp_path), pixels=8, skip_damaged=True, max_damaged=0.125).build()
    assert sorted(shades(task, "train", "north") + shades(task, "test", "north")) == [1, 2, 3, 4, 5, 6, 7]
    assert f"1 of 8 files are damaged and left out:\n  {tmp_path / 'north/a/00.png'}: not an image" in caplog.text


def test_the_seed_draws_the_test_set_and_nothing_else_does(tmp_path: Path, draw: Draw) -> None:
    folder(tmp_path, draw, north={"a": 16, "b": 16})
    drawn = [shades(Custom(str(tmp_path), pixels=8, seed=seed).build(), "test", "north") for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_images_are_normalised_to_plus_and_minus_one(tmp_path: Path, draw: Draw) -> None:
    draw("north/a/1.png", shade=255)
    draw("north/b/1.png", shade=0)
    draw("north/b/2.png", shade=1)
    task = Custom(str(tmp_path), pixels=8).build()
    data = task.clients["north"]
    assert task.transform.clean(data.inputs(data.index[:1])).unique().tolist() == [1.0]


# ---- what is refused


def test_a_missing_folder_is_refused_with_the_folder_from_which_it_was_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="path 'nowhere' is not a folder, seen from"):
        Custom("nowhere").build()
    with pytest.raises(BadInput, match="path is not set"):
        Custom().build()


def test_a_relative_path_starts_at_the_working_directory(
    tmp_path: Path, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, draw, north={"a": 4, "b": 4})
    monkeypatch.chdir(tmp_path.parent)
    assert [*Custom(tmp_path.name, pixels=8).build().clients] == ["north"]


def test_the_other_kind_of_files_is_refused_with_the_setting_to_change(tmp_path: Path, draw: Draw) -> None:
    tables(tmp_path, north="a,y 1,p")
    with pytest.raises(BadInput, match='set kind = "tables"'):
        Custom(str(tmp_path)).build()
    draw("images/north/a/1.png")
    with pytest.raises(BadInput, match='set kind = "images"'):
        Custom(str(tmp_path / "images"), "tables", label="y").build()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Custom(".", model="mlp"), "'mlp' is not for images; choose small_cnn or cnn_norm or cnn2 or cnn3 or resnet10"),
        (Custom(".", "tables", model="cnn3"), "'cnn3' is not for tables; choose mlp"),
        (Custom(".", model="small_cnn", pixels=32), "needs images of 28 pixels, not 32"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(settings: Custom, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings.build()


def test_examples_of_one_class_are_refused(tmp_path: Path, draw: Draw) -> None:
    with pytest.raises(BadInput, match="all examples are of class 'a'"):
        folder(tmp_path, draw, north={"a": 4}).build()


def test_sites_without_any_example_for_testing_are_refused(tmp_path: Path, draw: Draw) -> None:
    with pytest.raises(BadInput, match="no site has an example for testing"):
        folder(tmp_path, draw, north={"a": 1, "b": 1}, south={"a": 1}).build()


def test_a_folder_whose_images_are_all_damaged_is_refused_even_if_they_may_be_skipped(
    tmp_path: Path, draw: Draw
) -> None:
    draw("north/a/1.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match="1 of 1 files are damaged"):
        Custom(str(tmp_path), skip_damaged=True, max_damaged=0.99).build()


# ---- tables


ROWS = "1,f,p 2,m,q 3,f,p 4,m,q 5,f,p 6,m,q 7,f,p 8,m,q"


def test_tables_are_encoded_from_the_training_rows_of_all_sites(tmp_path: Path) -> None:
    task = tables(tmp_path, north=f"age,sex,y {ROWS}", south="y,sex,age p,f,100 q,m,200 p,f,300 q,m,400").build()
    train = torch.cat([data.x[data.index] for data in task.clients.values()])
    # Age standardised; sex in four places: f, m, other, missing.
    assert train.shape == (9, 5)
    assert train[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    assert train[:, 0].square().mean().item() == pytest.approx(1, abs=1e-5)
    assert task.clients["south"].x[0, 1:].tolist() == [1, 0, 0, 0]
    assert task.tests["north"].labels.bincount().tolist() == [1, 1]
    assert task.model("north")["features"](task.spec.input.blank()).shape == (1, 64)


def test_what_only_test_rows_hold_is_unknown_to_the_encoder(tmp_path: Path) -> None:
    """Each row has a word of its own, so that those of the training rows can be counted."""
    lines = " ".join(f"{'abcdefgh'[k]},{'pq'[k % 2]}" for k in range(8))
    task = tables(tmp_path, north=f"word,y {lines}").build()
    test = task.tests["north"]
    assert task.spec.input.blank().shape == (1, 6 + 2)
    assert test.x[test.index][:, 6].tolist() == [1.0, 1.0]


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = tables(tmp_path, north=f"age,sex,y {ROWS} 9,f, 10,f,NA").build()
    assert len(task.clients["north"]) + len(task.tests["north"]) == 8
    assert "rows without a label are left out: north 2" in caplog.text


def test_columns_may_be_left_out_or_told_to_be_codes(tmp_path: Path) -> None:
    tables(tmp_path, north=f"ward,sex,y {ROWS}", south="sex,extra,ward,y f,1,1,p m,1,2,q")
    settings = Custom(str(tmp_path), "tables", label="y", leave_out=["extra", "sex"], categorical=["ward"])
    task = settings.build()
    assert len(task.clients) == 2
    assert set(task.clients["north"].x.unique().tolist()) == {0.0, 1.0}


def test_a_code_is_the_same_one_at_a_site_that_writes_it_with_a_fraction(tmp_path: Path) -> None:
    tables(tmp_path, north="ward,y 1,p 2,q 1,q 2,p", south="ward,y 1.0,p 2.0,q 1.0,q 2.0,p")
    task = Custom(str(tmp_path), "tables", label="y", categorical=["ward"]).build()
    # 1, 2, other, missing.
    assert task.spec.input.blank().shape == (1, 4)
    assert task.clients["north"].x.tolist() == task.clients["south"].x.tolist()


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        ({"north": f"age,sex,y {ROWS}", "south": "age,y 1,p 2,q"}, "column 'sex' is at north, but not at south"),
        (
            {"north": f"age,sex,y {ROWS}", "south": "age,sex,y 1,f,p old,m,q"},
            "south.csv, line 3: column 'age' has 'old'",
        ),
        ({"north": f"age,sex,y {ROWS}", "south": "age,sex,y 1,f,0 2,m,1"}, "north.csv, line 2: the label 'y' is 'p'"),
        ({"north": f"age,sex,y {ROWS}", "south": "age,sex,y 1,f, 2,m,"}, "south.csv: no row has a label"),
        ({"north": f"age,sex,z {ROWS}"}, "north.csv: there is no column 'y'; the columns are age, sex, z"),
        ({"north": "y p q p q"}, "no column but the label 'y'"),
        ({"north": "a,y 1,p 2,q 3"}, "north.csv, line 4: has 1 fields"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(tmp_path: Path, sites: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        tables(tmp_path, **sites).build()
    assert said in str(error.value)


def test_settings_that_name_no_column_are_refused(tmp_path: Path) -> None:
    tables(tmp_path, north=f"age,sex,y {ROWS}")
    for settings, said in (
        (Custom(str(tmp_path), "tables"), "label is not set"),
        (Custom(str(tmp_path), "tables", label="y", leave_out=["y"]), "cannot be both"),
        (Custom(str(tmp_path), "tables", label="y", leave_out=["agee"]), "did you mean 'age'"),
        (Custom(str(tmp_path), "tables", label="y", categorical=["agee"]), "did you mean 'age'"),
    ):
        with pytest.raises(BadInput, match=said):
            settings.build()


def test_labels_that_are_numbers_are_ordered_and_counted_as_numbers(tmp_path: Path) -> None:
    lines = " ".join(f"{k},{label}" for label in ("10", "9") for k in range(4))
    task = tables(tmp_path, north=f"a,y {lines}", south="a,y 1,9.0 2,9.0 3,10.0 4,10.0").build()
    assert task.num_classes == 2
    assert task.clients["south"].y.tolist() == [0, 0, 1, 1]


# ---- the division


cells = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("stuvwxyz")), min_size=1, max_size=20)


@given(st.dictionaries(st.sampled_from(["north", "south", "east"]), cells, min_size=1), st.integers(0, 99))
def test_no_content_is_ever_on_both_sides(sites: dict[str, list[tuple[str, str]]], seed: int) -> None:
    samples = {
        site: SiteExamples(tuple(label for label, _ in rows), tuple(content for _, content in rows))
        for site, rows in sites.items()
    }
    sides = split_sites(samples, 0.25, seed)
    trained = {samples[site].contents[row] for site, own in sides.items() for row in own.train.tolist()}
    tested = {samples[site].contents[row] for site, own in sides.items() for row in own.test.tolist()}
    assert not trained & tested
    for site, own in sides.items():
        assert sorted([*own.train.tolist(), *own.test.tolist()]) == [*range(len(samples[site].labels))]
        kept = {samples[site].labels[row] for row in own.train.tolist()}
        assert kept == set(samples[site].labels)


def test_sites_of_the_same_size_are_not_divided_alike() -> None:
    samples = {site: SiteExamples(("a",) * 40, tuple(f"{site}{k}" for k in range(40))) for site in ("north", "south")}
    sides = split_sites(samples, 0.25, 0)
    assert sides["north"].test.tolist() != sides["south"].test.tolist()


def test_untested_classes_are_those_in_no_test_set() -> None:
    samples = {"north": SiteExamples(("a", "a", "a", "a", "b"), tuple("12345"))}
    assert untested_classes(samples, split_sites(samples, 0.25, 0)) == ["b"]


def test_the_log_is_quiet_where_there_is_nothing_to_say(
    tmp_path: Path, draw: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        task = folder(tmp_path, draw, north={"a": 4, "b": 4}).build()
    assert not caplog.records
    first = decoded(tmp_path / "north/a/00.png", 8)
    assert np.array_equal(task.clients["north"].x[0].numpy(), first)


def test_only_files_that_are_read_make_another_run(tmp_path: Path, draw: Draw) -> None:
    images, rows = folder(tmp_path / "images", draw), tables(tmp_path, leeds="x,y 1,0 2,1")
    draw("images/leeds/cat/00.png")
    before = images.stamp(), rows.stamp()
    for name in (
        ".DS_Store",
        "results/rounds.jsonl",
        "notes.txt",
        "images/leeds/.hidden",
        "images/leeds/cat/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert (images.stamp(), rows.stamp()) == before
    draw("images/leeds/cat/01.png")
    assert images.stamp() != before[0]
    tables(tmp_path, leeds="x,y 1,0 2,1 3,1")
    assert rows.stamp() != before[1]


# ---- groups, validation, balance, sites that are held out


def rows_of(task: Task, site: str) -> dict[str, list[int]]:
    """The values of the first column, standardised back to whole numbers, on each side."""
    sets = {"train": task.clients[site], "test": task.tests[site]}
    if site in task.validation:
        sets["validation"] = task.validation[site]
    return {side: sorted(data.index.tolist()) for side, data in sets.items()}


def patients(tmp_path: Path, **sites: list[tuple[str, str]]) -> Custom:
    """A row for each (patient, label)."""
    for site, people in sites.items():
        lines = [f"{k},{person},{label}" for k, (person, label) in enumerate(people)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,person,y", *lines]) + "\n", encoding="utf-8")
    return Custom(str(tmp_path), "tables", label="y", group="person")


@pytest.mark.parametrize("seed", range(6))
def test_all_rows_of_a_patient_are_on_one_side(tmp_path: Path, seed: int) -> None:
    people = [(f"p{k // 3}", "ab"[k // 3 % 2]) for k in range(60)]
    task = replace(patients(tmp_path, north=people), seed=seed, validation_fraction=0.2).build()
    sides = rows_of(task, "north")
    named = {side: {people[row][0] for row in rows} for side, rows in sides.items()}
    assert sum(len(names) for names in named.values()) == 20
    assert [len(named[side]) for side in ("test", "validation", "train")] == [5, 4, 11]
    assert sum(map(len, sides.values())) == 60
    # The column is for the split alone: only x is learnt from.
    assert task.spec.input.shape == (1,)


def test_without_groups_rows_of_a_patient_are_divided(tmp_path: Path) -> None:
    """The test above can fail."""
    people = [(f"p{k // 3}", "ab"[k // 3 % 2]) for k in range(60)]
    task = replace(patients(tmp_path, north=people), group=None, leave_out=("person",)).build()
    sides = rows_of(task, "north")
    assert {people[row][0] for row in sides["test"]} & {people[row][0] for row in sides["train"]}


def test_a_patient_at_two_sites_is_trained_on_and_never_tested(tmp_path: Path) -> None:
    for seed in range(6):
        north = [(f"n{k}", "ab"[k % 2]) for k in range(10)] + [("both", "a")] * 3
        south = [(f"s{k}", "ab"[k % 2]) for k in range(10)] + [("both", "b")] * 3
        task = replace(patients(tmp_path, north=north, south=south), seed=seed, validation_fraction=0.2).build()
        for site in ("north", "south"):
            assert {10, 11, 12} <= {*rows_of(task, site)["train"]}


def test_a_rare_class_among_a_patients_rows_decides_where_the_patient_counts(tmp_path: Path) -> None:
    # Both patients with a row of class r have more rows of class a; one of the two is tested, one is trained on.
    people = [("r1", "a"), ("r1", "a"), ("r1", "r"), ("r2", "a"), ("r2", "a"), ("r2", "r")]
    people += [(f"p{k}", "a") for k in range(6)]
    for seed in range(8):
        task = replace(patients(tmp_path, north=people), seed=seed, test_fraction=0.5).build()
        rare = [task.class_names[label] for label in task.tests["north"].labels].count("r")
        assert rare == 1
        assert [task.class_names[label] for label in task.clients["north"].labels].count("r") == 1


def test_copies_bind_patients_together(tmp_path: Path, draw: Draw) -> None:
    for seed in range(6):
        root = tmp_path / str(seed)
        for person in range(8):
            for k in range(2):
                name = f"{seed}/north/{'ab'[person % 2]}/P{person}_{k}.png"
                draw(name, shade=200 if (person, k) in ((0, 0), (2, 1)) else 10 * person + k)
        task = Custom(str(root), pixels=8, group=r"^(P\d+)_", seed=seed).build()
        train, test = shades(task, "train", "north"), shades(task, "test", "north")
        bound = {1, 20, 200}  # the rows of P0 and P2, who share an image
        assert bound <= {*train} or bound <= {*test}
        assert len(train) + len(test) == 16
        assert {shade // 10 for shade in train if shade < 100}.isdisjoint(shade // 10 for shade in test if shade < 100)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [(r"^(P\d+)_", r"00\.png: group = .* finds nothing"), ("(", "not a regular"), ("x", "0 pairs of brackets")],
)
def test_a_pattern_that_finds_no_patient_is_refused(tmp_path: Path, draw: Draw, pattern: str, words: str) -> None:
    settings = replace(folder(tmp_path, draw, north={"a": 4, "b": 4}), group=pattern)
    with pytest.raises(BadInput, match=words):
        settings.build()


def test_a_row_without_a_patient_is_refused(tmp_path: Path) -> None:
    settings = patients(tmp_path, north=[("p", "a"), ("", "b"), ("q", "a"), ("r", "b")])
    with pytest.raises(BadInput, match=r"1 rows have no value in column 'person'.*north\.csv, line 3"):
        settings.build()
    with pytest.raises(BadInput, match="there is no column 'persn'"):
        replace(settings, group="persn").build()


def test_a_validation_share_leaves_the_test_set_as_it_is(tmp_path: Path, draw: Draw) -> None:
    settings = folder(tmp_path, draw, north={"a": 20, "b": 20})
    plain, validated = settings.build(), replace(settings, validation_fraction=0.2).build()
    assert shades(plain, "test", "north") == shades(validated, "test", "north")
    assert validated.validation["north"].labels.bincount().tolist() == [4, 4]
    assert len(validated.clients["north"]) == 40 - 10 - 8
    assert not plain.validation
    rows = torch.cat([part["north"].index for part in (validated.clients, validated.validation, validated.tests)])
    assert rows.sort().values.tolist() == [*range(40)]


def test_balance_repeats_rare_classes_in_training_alone(tmp_path: Path, draw: Draw) -> None:
    settings = folder(tmp_path, draw, north={"a": 40, "b": 8, "c": 2})
    plain, balanced = settings.build(), replace(settings, balance=True).build()
    # 30 or 29 of a, 6 of b, 1 or 2 of c are for training: half of a is 15 or 14, so b is doubled and c at most tenfold.
    before, after = (task.clients["north"].labels.bincount() for task in (plain, balanced))
    assert after.tolist() == [before[0], 2 * before[1], min(10, before[0] // 2 // before[2]) * before[2]]
    assert shades(plain, "test", "north") == shades(balanced, "test", "north")
    assert {*shades(plain, "train", "north")} == {*shades(balanced, "train", "north")}


def test_a_site_that_is_held_out_changes_nothing_of_what_the_others_are_given(tmp_path: Path) -> None:
    north, south = "x,y 1,a 2,b 3,a 4,b 5,a 6,b", "x,y 2,a 4,b 6,a 8,b 9,a 1,b"
    (tmp_path / "two").mkdir()
    alone = tables(tmp_path / "two", north=north, south=south).build()
    # Its values are far away, and would move the mean and the deviation by which all sites are standardised.
    (tmp_path / "three").mkdir()
    three = tables(tmp_path / "three", north=north, south=south, west="x,y 900,a 950,b 970,c 990,a 999,b 980,c")
    held_out = replace(three, hold_out=["west"]).build()
    for site in ("north", "south"):
        assert torch.equal(alone.clients[site].x, held_out.clients[site].x)
        assert torch.equal(alone.clients[site].index, held_out.clients[site].index)
    assert not torch.equal(alone.clients["north"].x, three.build().clients["north"].x)
    assert held_out.held_out == ("west",)
    assert "west" in held_out.tests


def test_what_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    settings = tables(tmp_path, north="x,y 1,a 2,b 3,a 4,b", south="x,y 1,a 2,a 3,a 4,a", west="x,y 1,a")
    for names, words in (
        (["east"], "the sites are north, south, west"),
        (["north"], "all examples are of class 'a'"),
        (["west"], "'west', which has no example"),
        (["north", "south", "west"], "all sites"),
    ):
        with pytest.raises(BadInput, match=words):
            replace(settings, hold_out=names).build()


def test_a_class_that_only_the_held_out_site_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = tables(tmp_path, north="x,y 1,a 2,b 3,a 4,b", west="x,y 1,a 2,c 3,a 4,c")
    replace(settings, hold_out=["west"]).build()
    assert "only west, which is held out, has class c" in caplog.text


# ---- what is told of few rows


def test_of_few_rows_neither_words_nor_sums_are_told(tmp_path: Path) -> None:
    """Three training rows of four are `x` or `z`; `n` has a value in one row alone."""
    lines = "age,w,n,y " + " ".join(
        f"{age},{'xxxxz'[age % 5]},{'7777777' if age == 3 else ''},{age % 2}" for age in range(20)
    )
    settings = replace(tables(tmp_path, north=lines, south=lines), min_rows=5)
    shares = settings.read().shares
    assert shares["north"].columns["w"].words == ("x",)  # type: ignore[union-attr]
    sums = shares["north"].columns["n"].sums  # type: ignore[union-attr]
    assert sums is not None
    assert (sums.count, sums.total, sums.squares) == (0, 0.0, 0.0)
    assert "7777777" not in repr(shares)
    encoder = settings.build().preprocessing.encoder  # type: ignore[union-attr]
    assert encoder.features == ("age", "w=x", "w other", "w missing", "n", "n missing")


def test_every_site_comes_to_its_own_part_of_the_task_by_what_all_agreed(tmp_path: Path) -> None:
    rows = ["3,x,0", "4,y,1", "5,x,0", "7.5,x,1", ",y,0", "9,x,1", "11,z,0", "2,x,1"]
    settings = tables(
        tmp_path, **{name: "age,w,y " + " ".join(rows[k:] + rows[:4]) for k, name in enumerate(("a", "b-c", "b"))}
    )
    whole = settings.build()
    parts = {name: settings.read([name]) for name in ("b", "a", "b-c")}
    prepared = agreed({name: own.shares[name] for name, own in parts.items()}, settings)
    assert prepared.files == whole.preprocessing
    for name, own in parts.items():
        task = settings.made(own, prepared)
        assert [*task.clients] == [name]
        for one, other in ((task.clients, whole.clients), (task.local_tests, whole.local_tests)):
            assert torch.equal(one[name].inputs(one[name].index), other[name].inputs(other[name].index))
            assert torch.equal(one[name].labels, other[name].labels)


def test_an_example_of_a_class_that_was_not_agreed_on_is_refused(tmp_path: Path, draw: Draw) -> None:
    settings = folder(tmp_path, draw, north={"a": 4, "b": 4, "c": 4})
    own = settings.read()
    prepared = replace(agreed(own.shares, settings), classes=("a", "c"))
    with pytest.raises(BadInput, match="north has examples of b, which is none of the classes"):
        settings.made(own, prepared)


def test_damaged_images_of_all_sites_are_counted_together(tmp_path: Path, draw: Draw) -> None:
    settings = replace(folder(tmp_path, draw, north={"a": 50, "b": 49}, south={"a": 50, "b": 50}), skip_damaged=True)
    (tmp_path / "north/b/x.png").write_bytes(b"")
    (tmp_path / "north/b/y.png").write_bytes(b"")
    shares = settings.read().shares
    assert agreed(shares, settings).classes == ("a", "b")
    with pytest.raises(BadInput, match=r"2 of 101 files are damaged.*: north 2"):
        agreed({"north": shares["north"]}, settings)
