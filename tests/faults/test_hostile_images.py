"""Images that are small files and long or large work (row D2): refused by their headers, with the limit."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from clocks import processor_time_below
from protofed.datasets import image_limits, images
from protofed.datasets.image_limits import MAX_SCAN_PIXELS, MAX_SCANS, num_scans
from protofed.errors import BadInput

SECONDS = 1.0
"""The most processor time that a refusal may take."""


def progressive(width: int, height: int, scans: int = 10, between: bytes = b"", subsampling: int = 2) -> bytes:
    """A flat JPEG whose last scan, of a few bytes, comes again and again."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 9, 9)).save(file, "JPEG", progressive=True, subsampling=subsampling)
    content = file.getvalue()
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + (between + last) * (scans - 10) + content[-2:]


def said_of(content: bytes) -> str:
    with processor_time_below(SECONDS), pytest.raises(BadInput) as error:
        images.decoded_bytes(content, "site/a/x.jpg", 8)
    return str(error.value)


def test_a_jpeg_of_a_thousand_scans_is_refused_by_name_with_the_limit() -> None:
    content = progressive(3000, 3000, 1000)
    assert len(content) < 100_000
    assert said_of(content).startswith("site/a/x.jpg: 1000 scans; JPEG files of more than 100 are not decoded. Save it")


def test_a_large_jpeg_may_have_fewer_scans() -> None:
    assert 60 * 4096**2 > MAX_SCAN_PIXELS > 59 * 4096**2
    said = said_of(progressive(4096, 4096, 60))
    assert said.startswith("site/a/x.jpg: 60 scans of 4096 × 4096 pixels; scans times pixels may be at most 1000000000")


@pytest.mark.parametrize(("side", "scans"), [(64, MAX_SCANS), (4096, 40)])
def test_progressive_jpegs_of_some_tens_of_scans_are_read(side: int, scans: int) -> None:
    content = progressive(side, side, scans)
    assert num_scans(content) == scans
    assert images.decoded_bytes(content, "x", 8).flatten().tolist() == [9] * 192


COMMENT = b"\xff\xfe\x00\x06\xff\xd9\xff\xda"
"""A comment whose words are the marks of an end and of a scan: a decoder passes over them."""


def test_scans_are_counted_as_a_decoder_does() -> None:
    """Not in comments and thumbnails, and not behind the end; but also behind what looks like an end and is none."""
    plain = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (99, 99, 3), dtype=np.uint8)).save(plain, "JPEG")
    assert num_scans(plain.getvalue()) == 1
    assert num_scans(progressive(64, 64)) == 10
    assert num_scans(progressive(64, 64, 200, COMMENT)) == 200
    assert num_scans(progressive(64, 64, 200, b"\xff\xd0\xff\xff\x00junk\xff\x01")) == 200
    assert num_scans(progressive(64, 64) + b"\xff\xda" * 500) == 10
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 600) + b"\xff\xda" * 300
    assert num_scans(progressive(64, 64).replace(b"\xff\xd8", b"\xff\xd8" + thumbnail, 1)) == 10
    assert num_scans(b"") == num_scans(b"\xff") == num_scans(b"\xff\xd8\xff\xe1") == 0
    assert "200 scans" in said_of(progressive(64, 64, 200, COMMENT))


def test_the_bytes_that_decoding_takes_are_known_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a progressive file each coefficient takes two bytes: 3 · 2 and the 4 of a pixel make 10."""
    content = progressive(1000, 1000, subsampling=0)
    monkeypatch.setattr(image_limits, "MAX_DECODED", 10_000_000)
    images.decoded_bytes(content, "x", 8)
    monkeypatch.setattr(image_limits, "MAX_DECODED", 9_999_999)
    said = said_of(content)
    assert said.startswith(
        "site/a/x.jpg: decoding its 1000 × 1000 pixels takes 9 MiB; at most 9 MiB are taken. Save it"
    )


def tiled(side: int, tile: int) -> bytes:
    """A TIFF file of one tile."""
    data = zlib.compress(bytes(min(tile, 16) ** 2))
    entries = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]
    entries += [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, 1, 8), (325, 4, 1, len(data))]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + table + bytes(4)


def test_a_small_image_in_a_huge_tile_is_refused() -> None:
    assert images.decoded_bytes(tiled(16, 16), "x", 8).max() == 0
    assert "decoding its 16 × 16 pixels takes 3433 MiB; at most 512 MiB are taken" in said_of(tiled(16, 30_000))
