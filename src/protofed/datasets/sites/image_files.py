"""One image file of a user: its pixels, and what it is."""

import hashlib
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.datasets.images import FORMATS, MAX_BYTES, contents, decoded_bytes


@dataclass(frozen=True)
class ImageInfo:
    """Facts about an image file that can be decoded."""

    digest: str
    """SHA-256 of the file. Copies have the same digest."""
    size: tuple[int, int]
    """Width and height, as stored."""
    mode: str


def read_image(path: Path, pixels: int, channels: int) -> tuple[str, NDArray[np.uint8]]:
    """The SHA-256 of a file, and its image as (C, H, W)."""
    content = contents(path, MAX_BYTES)
    return hashlib.sha256(content).hexdigest(), decoded_bytes(content, str(path), pixels, channels)


def image_info(path: Path) -> ImageInfo:
    """Facts about an image file. Refuses a file that cannot be decoded completely."""
    content = contents(path, MAX_BYTES)
    decoded_bytes(content, str(path), pixels=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding succeeded just now, so Pillow's warnings do not matter
        image = Image.open(BytesIO(content), formats=FORMATS)
    return ImageInfo(hashlib.sha256(content).hexdigest(), image.size, image.mode)
