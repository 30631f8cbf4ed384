"""One image file of a user: its pixels, and what it is."""

import hashlib
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

from protofed.datasets.dicom import dicom_image, is_dicom
from protofed.datasets.images import (
    DEEP_BITS,
    FORMATS,
    MAX_BYTES,
    bits_in_use,
    check_regular,
    contents,
    decoded_bytes,
    is_deep,
    resized,
)
from protofed.errors import BadInput


@dataclass(frozen=True)
class ImageInfo:
    """Facts about an image file that can be decoded."""

    digest: str
    """SHA-256 of the file. Copies have the same digest."""
    size: tuple[int, int]
    """Width and height, as stored."""
    mode: str
    bits: int | None = None
    """How many bits its grey values use, if they are of 16 or 32 bits."""
    is_cut: bool = False
    """Whether its colours have 16 bits each, of which the upper 8 are read."""
    has_window: bool | None = None
    """Of a DICOM file, whether it says how its values are to be shown."""


def read_image(path: Path, pixels: int, channels: int, bits: int = DEEP_BITS) -> tuple[str, NDArray[np.uint8]]:
    """The SHA-256 of a file, and its image as (C, H, W). `bits` is for deep grey."""
    content = contents(path, MAX_BYTES)
    if is_dicom(path):
        return hashlib.sha256(content).hexdigest(), resized(dicom_image(path, content).image, pixels, channels)
    return hashlib.sha256(content).hexdigest(), decoded_bytes(content, str(path), pixels, channels, bits)


def image_info(path: Path) -> ImageInfo:
    """Facts about an image file. Refuses a file that cannot be decoded completely."""
    content = contents(path, MAX_BYTES)
    if is_dicom(path):
        found = dicom_image(path, content)
        digest = hashlib.sha256(content).hexdigest()
        return ImageInfo(digest, found.image.size, found.image.mode, has_window=found.has_window)
    bits = bits_in_use(content, str(path))
    if bits is None:
        decoded_bytes(content, str(path), pixels=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding succeeded just now, so Pillow's warnings do not matter
        image = Image.open(BytesIO(content), formats=FORMATS)
    return ImageInfo(hashlib.sha256(content).hexdigest(), image.size, image.mode, bits, _is_cut(image))


def most_bits(paths: Iterable[Path]) -> int | None:
    """How many bits the grey values of these files use, if any are deep. Of other files only the header is read.

    Files that cannot be read are passed over: reading their pixels will say what is wrong with them.
    """
    found: list[int | None] = []
    for path in (path for path in paths if not is_dicom(path)):
        with suppress(BadInput):
            if is_deep(_mode(path)):
                found.append(bits_in_use(contents(path, MAX_BYTES), str(path)))
    return max((bits for bits in found if bits is not None), default=None)


def _mode(path: Path) -> str:
    check_regular(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=FORMATS) as image:
                return image.mode
        except Exception as error:  # Pillow raises many types of errors for damaged files
            raise BadInput(f"{path}: not an image, or damaged") from error


def _is_cut(image: Image.Image) -> bool:
    """Pillow reads colours of 16 bits, but keeps 8 of them."""
    return (
        isinstance(image, ImageFile) and not is_deep(image.mode) and any(";16" in str(tile[3]) for tile in image.tile)
    )
