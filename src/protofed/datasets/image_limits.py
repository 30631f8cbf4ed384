"""What decoding an image may take. It is found from the file's headers, before anything is decoded."""

import re

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from protofed.errors import BadInput

MAX_PIXELS = 64_000_000
MAX_SCANS = 100
"""Scans of a JPEG file. Usual progressive files have ten; each scan goes over the whole image once more."""
MAX_SCAN_PIXELS = 1_000_000_000
"""Scans times pixels: 15 scans of the largest image, or 59 of 4096 × 4096 pixels."""
MAX_DECODED = 512 * 2**20
"""Bytes that decoding takes at its peak, beside the file itself."""

BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes of a pixel in memory, by Pillow's mode. Other modes take four."""
WEBP_BYTES = 16
"""Bytes of a pixel while a WebP file is decoded: libwebp keeps two copies of it, and Pillow two more."""
TILE_WIDTH, TILE_LENGTH = 322, 323
"""Tags of TIFF. A tile is decoded as a whole, however small the image is."""

START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
MARKER = re.compile(rb"\xff+([^\x00\xff])")
LONE = range(0x01, 0xC0)
"""Codes of JPEG markers that no length follows, or that are reserved. So are 0xD0 to 0xD9."""


def check_image(image: Image.Image, content: bytes, where: str) -> None:
    """Refuses an image that would take too much memory or time to decode. `content` is its file."""
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:  # guard: images-have-largest-size
        raise BadInput(
            f"{where}: {image.width} × {image.height} pixels; images of more than {MAX_PIXELS} pixels are not decoded"
        )
    scans = num_scans(content) if isinstance(image, JpegImageFile) else 0
    if scans > MAX_SCANS:  # guard: jpegs-have-few-scans
        raise BadInput(f"{where}: {scans} scans; JPEG files of more than {MAX_SCANS} are not decoded. {_ADVICE}")
    if scans * pixels > MAX_SCAN_PIXELS:  # guard: large-jpegs-have-fewer-scans
        raise BadInput(
            f"{where}: {scans} scans of {image.width} × {image.height} pixels; scans times pixels may be at most "
            f"{MAX_SCAN_PIXELS}. {_ADVICE}"
        )
    needed = _bytes_needed(image, scans)
    if needed > MAX_DECODED:  # guard: images-are-decoded-in-little-memory
        raise BadInput(
            f"{where}: decoding its {image.width} × {image.height} pixels takes {needed >> 20} MiB; at most "
            f"{MAX_DECODED >> 20} MiB are taken. Save it again as PNG, or with fewer pixels"
        )


def num_scans(content: bytes) -> int:
    """The number of scans that a decoder finds in a JPEG file. It reads the markers as libjpeg does."""
    scans, at = 0, 0
    while found := MARKER.search(content, at):
        code, at = found[1][0], found.end()
        if code == END_OF_IMAGE:
            break
        if code in LONE or 0xD0 <= code <= 0xD8:
            continue
        scans += code == START_OF_SCAN
        at += int.from_bytes(content[at : at + 2], "big")
    return scans


def _bytes_needed(image: Image.Image, scans: int) -> int:
    """The peak of decoding, and of one conversion or turn of the image afterwards."""
    each = BYTES.get(image.mode, 4)
    decoding: float = WEBP_BYTES if image.format == "WEBP" else each
    if isinstance(image, JpegImageFile) and scans > 1:  # then libjpeg keeps two bytes for each coefficient
        areas = [across * down for _, across, down, _ in image.layer]
        decoding += 2 * sum(areas) / max(areas)
    tile = 0
    if isinstance(image, TiffImageFile):
        tile = 4 * image.tag_v2.get(TILE_WIDTH, 0) * image.tag_v2.get(TILE_LENGTH, 0)
    converted = 5 if image.mode.startswith(("I", "F")) else 4  # to RGB, from deep grey by way of grey
    return int(image.width * image.height * max(decoding, each + converted)) + tile


_ADVICE = "Save it again as PNG, or as a JPEG that is not progressive"
