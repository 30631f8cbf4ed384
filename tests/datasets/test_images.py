"""Image files are opened with care, in every mode, and class folders are listed in one order on every system."""

import contextlib
import os
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from protofed.datasets import images
from protofed.datasets.images import bits_in_use, check_memory, decoded, decoded_bytes, listed, stacked
from protofed.errors import BadInput


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def claiming(width: int, height: int) -> bytes:
    """A PNG file whose header claims this size, with next to nothing behind it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def noise(side: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def pixel(path: Path, channels: int = 3) -> list[int]:
    """The top left pixel, of an image that is 2 × 2, so that nothing is resized."""
    found: list[int] = decoded(path, 2, channels)[:, 0, 0].tolist()
    return found


def grey(values: list[list[int]] | list[list[float]], dtype: type) -> Image.Image:
    return Image.fromarray(np.array(values, dtype))


@pytest.mark.parametrize(
    ("mode", "colour", "name", "expected"),
    [
        ("1", 1, "a.png", [255, 255, 255]),
        ("1", 0, "a.png", [0, 0, 0]),
        ("L", 100, "a.png", [100, 100, 100]),
        # 100 · 128/255 + 255 · 127/255 = 50.2 + 127 = 177.2
        ("LA", (100, 128), "a.png", [177, 177, 177]),
        ("RGB", (10, 20, 30), "a.png", [10, 20, 30]),
        ("RGB", (10, 20, 30), "a.BMP", [10, 20, 30]),
        ("RGB", (10, 20, 30), "a.tiff", [10, 20, 30]),
        # Alpha 51 is one fifth: 200/5 + 255·4/5 = 244, and 0 + 204.
        ("RGBA", (200, 0, 0, 51), "a.png", [244, 204, 204]),
        ("RGBA", (200, 0, 0, 0), "a.png", [255, 255, 255]),
        # No cyan, all magenta and yellow: red. With 51 of black, a fifth less of it.
        ("CMYK", (0, 255, 255, 0), "a.tif", [255, 0, 0]),
        ("CMYK", (0, 255, 255, 51), "a.tif", [204, 0, 0]),
        ("F", 0.2, "a.tif", [51, 51, 51]),
        ("I", 25700, "a.tif", [100, 100, 100]),
    ],
)
def test_each_mode_gives_the_colour_worked_out_by_hand(
    tmp_path: Path, mode: str, colour: float | tuple[int, ...], name: str, expected: list[int]
) -> None:
    Image.new(mode, (2, 2), colour).save(tmp_path / name)
    with Image.open(tmp_path / name) as saved:
        assert saved.mode == mode
    assert pixel(tmp_path / name) == expected


@pytest.mark.parametrize(("value", "expected"), [(65535, 255), (25700, 100), (128, 0), (129, 1), (0, 0)])
def test_grey_of_16_bits_is_divided_by_257_and_not_clipped(tmp_path: Path, value: int, expected: int) -> None:
    Image.fromarray(np.full((2, 2), value, np.uint16)).save(tmp_path / "a.png")
    assert pixel(tmp_path / "a.png") == [expected] * 3


def deep(tmp_path: Path, values: object, name: str = "deep.png") -> bytes:
    Image.fromarray(np.asarray(values, np.uint16)).save(tmp_path / name)
    return (tmp_path / name).read_bytes()


def test_twelve_bits_in_a_file_of_16_keep_all_levels_of_grey(tmp_path: Path) -> None:
    """Divided by 257, 4096 levels become 17: 4095 / 257 is 15.9, rounded 16."""
    content = deep(tmp_path, np.arange(4096).reshape(64, 64))
    assert len(np.unique(decoded_bytes(content, "x", 64, 1))) == 17
    found = decoded_bytes(content, "x", 64, 1, bits=12).flatten()
    assert len(np.unique(found)) == 256
    # 4095 is white. 2048 · 255 / 4095 = 127.53.
    assert found[[0, 2048, 4095]].tolist() == [0, 128, 255]


def test_equal_values_in_two_images_stay_equal(tmp_path: Path) -> None:
    """The largest value of a file does not matter: a dark image stays dark."""
    dark, bright = deep(tmp_path, [[1000, 1000]]), deep(tmp_path, [[1000, 4000]])
    found = [decoded_bytes(content, "x", 2, 1, bits=12)[0, 0, 0] for content in (dark, bright)]
    assert found == [62, 62]  # 1000 · 255 / 4095 = 62.3


def test_a_value_beyond_the_bits_is_refused_with_what_to_set(tmp_path: Path) -> None:
    content = deep(tmp_path, [[0, 4096]])
    with pytest.raises(BadInput, match=r"x: a grey value of 4096, but the 12 bits .* end at 4095\. Set bits = 13 in"):
        decoded_bytes(content, "x", 2, bits=12)
    assert decoded_bytes(content, "x", 2, bits=13).max() == 128


@pytest.mark.parametrize(("brightest", "bits"), [(0, 8), (255, 8), (256, 9), (4095, 12), (4096, 13), (65535, 16)])
def test_the_bits_in_use_are_those_of_the_largest_value(tmp_path: Path, brightest: int, bits: int) -> None:
    assert bits_in_use(deep(tmp_path, [[0, brightest]]), "x") == bits
    assert bits_in_use(deep(tmp_path, [[0, brightest]], "deep.tif"), "x") == bits


def test_a_large_deep_image_is_converted_in_strips_as_it_would_be_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = deep(tmp_path, np.random.default_rng(0).integers(0, 4096, (50, 30)))
    at_once = decoded_bytes(content, "x", 30, bits=12)
    monkeypatch.setattr(images, "STRIP", 90)
    assert (decoded_bytes(content, "x", 30, bits=12) == at_once).all()
    assert bits_in_use(content, "x") == 12


def test_images_of_eight_bits_and_of_colours_have_no_deep_grey(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg"):
        noise(8).save(tmp_path / name)
        assert bits_in_use((tmp_path / name).read_bytes(), "x") is None


def test_grey_of_16_bits_in_the_other_order_of_bytes_is_the_same(tmp_path: Path) -> None:
    Image.frombytes("I;16B", (2, 2), struct.pack(">4H", *[25700] * 4)).save(tmp_path / "a.tif")
    assert pixel(tmp_path / "a.tif") == [100] * 3


def test_a_palette_gives_its_colours_and_its_transparent_colour_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([9, 9, 9, 10, 20, 30])
    image.putpixel((1, 1), 0)
    image.save(tmp_path / "a.png", transparency=0)
    found = decoded(tmp_path / "a.png", 2)
    assert found[:, 0, 0].tolist() == [10, 20, 30]
    assert found[:, 1, 1].tolist() == [255, 255, 255]


def test_half_transparent_entries_of_a_palette_lie_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([9, 9, 9, 200, 0, 0])
    image.save(tmp_path / "a.png", transparency=bytes([255, 51]))
    assert pixel(tmp_path / "a.png") == [244, 204, 204]


def test_one_transparent_colour_without_an_alpha_channel_is_white(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2), (10, 20, 30)).save(tmp_path / "a.png", transparency=(10, 20, 30))
    assert pixel(tmp_path / "a.png") == [255, 255, 255]


def test_one_channel_is_the_luminance(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2), (200, 100, 50)).save(tmp_path / "a.png")
    # 0.299 · 200 + 0.587 · 100 + 0.114 · 50 = 59.8 + 58.7 + 5.7 = 124.2
    assert pixel(tmp_path / "a.png", channels=1) == [124]
    with pytest.raises(BadInput, match="1 or 3 channels, not 2"):
        decoded(tmp_path / "a.png", 2, channels=2)


def test_axes_are_channel_row_column(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    image.putpixel((1, 0), (10, 20, 30))  # the second column of the first row
    image.save(tmp_path / "a.png")
    found = decoded(tmp_path / "a.png", 2)
    assert found.shape == (3, 2, 2)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found[:, 0, 1].tolist() == [10, 20, 30]
    assert found.sum() == 60


def test_of_an_animation_the_first_image_is_taken(tmp_path: Path) -> None:
    first, second = Image.new("L", (2, 2), 50), Image.new("L", (2, 2), 200)
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert pixel(tmp_path / "a.gif") == [50] * 3
    first.save(tmp_path / "a.webp", save_all=True, append_images=[second], lossless=True)
    assert pixel(tmp_path / "a.webp") == [50] * 3


def test_a_picture_taken_upside_down_is_turned(tmp_path: Path) -> None:
    image = grey([[10, 20], [30, 40]], np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: half a turn
    image.save(tmp_path / "a.png", exif=exif)
    assert decoded(tmp_path / "a.png", 2, 1)[0].tolist() == [[40, 30], [20, 10]]


def test_all_pixels_count_when_an_image_is_made_smaller(tmp_path: Path) -> None:
    grey([[160, 160, 160, 0, 0, 160, 160, 160]] * 8, np.uint8).save(tmp_path / "a.png")
    # Weights fall linearly over 8 pixels: 0.9375, 0.8125, 0.6875, 0.5625 to each side, 3 in all; the two dark ones in
    # the middle take 0.9375 / 3 = 0.3125, and 160 · 0.6875 = 110. Without antialiasing it would be 0.
    assert decoded(tmp_path / "a.png", 1, 1).tolist() == [[[110]]]


def test_an_image_is_made_square(tmp_path: Path) -> None:
    Image.new("RGB", (6, 3), (1, 2, 3)).save(tmp_path / "a.png")
    assert decoded(tmp_path / "a.png", 4)[:, 3, 3].tolist() == [1, 2, 3]


# The first is beyond what Pillow refuses, the second beyond what it warns of, the third it would decode.
@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (10_000, 10_000), (8_000, 8_001)])
def test_a_header_that_claims_too_many_pixels_is_refused(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "bomb.png").write_bytes(claiming(width, height))
    with pytest.raises(BadInput, match=r"bomb\.png.*64000000"):
        decoded(tmp_path / "bomb.png", 8)


def test_the_limit_on_pixels_does_not_hang_on_pillows_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "bomb.png").write_bytes(claiming(100_000, 100_000))
    with pytest.raises(BadInput, match=r"bomb\.png.*64000000"):
        decoded(tmp_path / "bomb.png", 8)


def test_a_file_of_too_many_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert images.MAX_BYTES == 64 * 2**20
    monkeypatch.setattr(images, "MAX_BYTES", 2**20)
    noise(8).save(tmp_path / "big.png")
    content = (tmp_path / "big.png").read_bytes()
    padded = content + bytes(2**20 - len(content))
    (tmp_path / "big.png").write_bytes(padded)
    decoded(tmp_path / "big.png", 8)
    (tmp_path / "big.png").write_bytes(padded + b"\0")
    with pytest.raises(BadInput, match=r"big\.png: larger than 1 MiB"):
        decoded(tmp_path / "big.png", 8)
    with pytest.raises(BadInput, match="row 3: larger than 1 MiB"):
        decoded_bytes(padded + b"\0", "row 3", 8)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.gif", "a.tif", "a.webp"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.02, 0.0])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    noise().save(path)
    decoded(path, 8)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BadInput, match=name):
        decoded(path, 8)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise().save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.png.*damaged"):
        decoded(path, 8)


def test_damage_anywhere_gives_an_image_or_bad_input_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for name in ("a.jpg", "a.png", "a.gif", "a.tif", "a.webp", "a.bmp"):
        noise(16).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        for _ in range(40):
            broken = bytearray(content)
            for at in rng.integers(0, min(len(broken), 200), 3):
                broken[at] = rng.integers(256)
            with contextlib.suppress(BadInput):
                assert decoded_bytes(bytes(broken), name, 4).shape == (3, 4, 4)


def test_corrupt_exif_is_no_reason_to_warn(tmp_path: Path) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"
    Image.new("RGB", (2, 2)).save(tmp_path / "a.jpg", exif=exif)
    assert pixel(tmp_path / "a.jpg") == [0, 0, 0]  # warnings are errors in tests


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA"])
def test_formats_beyond_the_common_ones_are_not_opened(tmp_path: Path, kind: str) -> None:
    noise(16).save(tmp_path / "a.png", format=kind)
    with pytest.raises(BadInput, match=r"a\.png: not an image.*JPEG, PNG"):
        decoded(tmp_path / "a.png", 8)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([[0, 70_000]], np.int32), ([[0, -1]], np.int32), ([[0, 1.5]], np.float32), ([[0, float("nan")]], np.float32)],
)
def test_grey_values_of_unknown_range_are_refused(tmp_path: Path, values: list[list[float]], dtype: type) -> None:
    grey(values, dtype).save(tmp_path / "a.tif")
    with pytest.raises(BadInput, match=r"a\.tif.*grey values outside 0\.\."):
        decoded(tmp_path / "a.tif", 2)


def test_what_is_not_an_ordinary_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(BadInput, match=r"a\.png: not a regular file"):
        decoded(tmp_path / "a.png", 2)
    with pytest.raises(BadInput, match=r"b\.png: cannot be read \(No such file"):
        decoded(tmp_path / "b.png", 2)


def test_files_are_stacked_in_the_order_given(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        Image.new("L", (2, 2), value).save(tmp_path / f"{value}.png")
    found: NDArray[np.uint8] = stacked([tmp_path / f"{value}.png" for value in (2, 3, 1)], 2)
    assert found.shape == (3, 3, 2, 2)
    assert found[:, 0, 0, 0].tolist() == [2, 3, 1]


def test_more_images_than_half_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1024, "SC_PAGE_SIZE": 3 * 2048}.__getitem__)  # 6 MiB
    check_memory(1024, 32, "here")  # 1024 · 3 · 32² bytes are 3 MiB
    with pytest.raises(BadInput, match=r"here: 1025 images of 32 × 32 need 0\.0 GiB"):
        check_memory(1025, 32, "here")


def test_the_message_on_memory_says_how_much_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**22, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(BadInput, match=r"need 14\.2 GiB, more than half of the 16\.0 GiB"):
        check_memory(68_175 + 33_154, 224, "vireofood172")  # 101 329 · 150 528 bytes


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def names_of(folder: Path) -> dict[str, list[str]]:
    return {name: [path.name for path in files] for name, files in listed(folder).classes.items()}


def test_classes_and_images_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.png", "b/1.PNG", "B/x.jpeg", "a/y.webp", "a/Z.gif"):
        touched(tmp_path / name)
    assert list(listed(tmp_path).classes) == ["B", "a", "b"]
    assert names_of(tmp_path) == {"B": ["x.jpeg"], "a": ["Z.gif", "y.webp"], "b": ["1.PNG", "10.png", "2.png"]}


def test_accents_sort_alike_however_they_are_spelt_and_files_are_opened_as_they_are(tmp_path: Path) -> None:
    apart = unicodedata.normalize("NFD", "é")
    assert len(apart) == 2
    (tmp_path / f"caf{apart}").mkdir()
    for name in (f"{apart}.png", "f.png"):
        noise(2).save(tmp_path / f"caf{apart}" / name)
    found = listed(tmp_path).classes
    # Composed, é is C3 A9 and comes after f; as e and an accent it would come before it.
    assert [path.name for path in found["café"]] == ["f.png", f"{apart}.png"]
    assert stacked(found["café"], 2).shape == (2, 3, 2, 2)


def test_two_spellings_of_one_class_are_refused(tmp_path: Path) -> None:
    for form in ("NFC", "NFD"):
        (tmp_path / unicodedata.normalize(form, "café")).mkdir()
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("this file system holds the two spellings for one name")
    with pytest.raises(BadInput, match="two folders are called 'café'"):
        listed(tmp_path)


def test_hidden_names_and_other_files_are_passed_over_and_counted(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/.2.png", "a/._1.png", "a/Thumbs.db", "a/deeper/3.png", ".git/4.png", "LICENCE", "5.png"):
        touched(tmp_path / name)
    (tmp_path / "empty").mkdir()
    found = listed(tmp_path)
    assert names_of(tmp_path) == {"a": ["1.png"], "empty": []}
    assert found.ignored == 7  # .git, LICENCE, 5.png; .2.png, ._1.png, Thumbs.db, deeper


@pytest.mark.parametrize("link", ["inner/a/2.png", "inner/b"])
def test_links_out_of_the_folder_are_refused_by_name(tmp_path: Path, link: str) -> None:
    touched(tmp_path / "inner/a/1.png")
    outside = touched(tmp_path / "outer/secret.png")
    (tmp_path / link).symlink_to(outside if link.endswith("png") else outside.parent)
    with pytest.raises(BadInput, match=rf"{link}: a link out of"):
        listed(tmp_path / "inner")
    listed(tmp_path / "inner", tmp_path)


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    touched(tmp_path / "a/1.png")
    (tmp_path / "a/2.png").symlink_to("1.png")
    assert names_of(tmp_path) == {"a": ["1.png", "2.png"]}


@pytest.mark.parametrize("target", ["nowhere.png", "2.png"])
def test_links_to_nothing_and_to_themselves_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/2.png").symlink_to(target)
    with pytest.raises(BadInput, match=r"2\.png: does not exist, or is a link to nothing"):
        listed(tmp_path)


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="missing: does not exist"):
        listed(tmp_path / "missing")
    with pytest.raises(BadInput, match=r"file: cannot be read as a folder \(Not a directory\)"):
        listed(touched(tmp_path / "file"))
