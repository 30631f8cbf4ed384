"""Image files as arrays, opened with care: bounded before they are decoded, and refused by name where damaged.

What has no colours of its own gets some by rule. Transparent pixels lie on white, as a page would show them. Grey of
16 bits is divided by 257, so that the brightest stays the brightest. Grey in floating point runs from 0 to 1, and grey
of 32 bits from 0 to 65535; a file with values outside of that is refused, for nobody can know what it means.
"""

import os
import stat
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from protofed.datasets.files import inside
from protofed.errors import BadInput

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
MOST_BYTES = 64 * 2**20
MOST_PIXELS = 64_000_000
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class Listing:
    """The class folders of an image folder in the order of their names, and the images of each in the same order."""

    classes: Mapping[str, tuple[Path, ...]]
    """Keyed by the name in its composed form (NFC); the paths are as the system spells them."""
    ignored: int
    """How many names were passed over: hidden ones, and what is neither a class folder nor an image in one."""


def decoded(path: Path, pixels: int, channels: int = 3) -> NDArray[np.uint8]:
    """An image file as (C, H, W), its sides made `pixels` long; 3 channels are red, green, blue, 1 is grey."""
    return decoded_bytes(contents(path, MOST_BYTES), str(path), pixels, channels)


def decoded_bytes(content: bytes, where: str, pixels: int, channels: int = 3) -> NDArray[np.uint8]:
    """The same for the contents of an image file; `where` is how an error names it."""
    if channels not in (1, 3):
        raise BadInput(f"{where}: images are read with 1 or 3 channels, not {channels}")
    if len(content) > MOST_BYTES:
        raise BadInput(f"{where}: larger than {MOST_BYTES >> 20} MiB, the most that is read of one file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow warns of is either harmless, or refused here
        try:
            image = _opened(content, where)
            image = _plain(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
            array = np.asarray(image.resize((pixels, pixels), Image.Resampling.BILINEAR))
        except BadInput:
            raise
        except Exception as error:  # Pillow raises all kinds of errors for damaged files
            raise BadInput(_unreadable(where, error)) from error
    return np.ascontiguousarray(array.reshape(pixels, pixels, channels).transpose(2, 0, 1))


def stacked(paths: Sequence[Path], pixels: int) -> NDArray[np.uint8]:
    """Image files as (N, 3, H, W), decoded one at a time into their places."""
    x = np.empty((len(paths), 3, pixels, pixels), np.uint8)
    for row, path in enumerate(paths):
        x[row] = decoded(path, pixels)
    return x


def check_memory(count: int, pixels: int, where: str) -> None:
    """Refuses more images than fit into half of this machine's memory."""
    needed, there = count * 3 * pixels**2, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there // 2:
        raise BadInput(
            f"{where}: {count} images of {pixels} × {pixels} need {needed / 2**30:.1f} GiB, over half of the "
            f"{there / 2**30:.1f} GiB of this machine: ask for smaller images, or use a larger machine"
        )


def contents(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file of at most so many bytes."""
    try:
        # Opening a pipe would wait for a writer, for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: not an ordinary file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > most:
        raise BadInput(f"{path}: larger than {most >> 20} MiB, the most that is read of one file")
    return content


def listed(folder: Path, root: Path | None = None) -> Listing:
    """The class folders of `folder` and their images; links may not leave `root`, which is the folder unless given."""
    root = folder if root is None else root
    entries = _entries(folder, root)
    kept = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    classes: dict[str, tuple[Path, ...]] = {}
    ignored = len(entries) - len(kept)
    for entry in kept:
        name = composed(entry.name)
        if name in classes:
            raise BadInput(f"{folder}: two folders are called {name!r}, in different Unicode spellings: keep one")
        classes[name], passed_over = images_in(Path(entry.path), root)
        ignored += passed_over
    return Listing(classes, ignored)


def images_in(folder: Path, root: Path) -> tuple[tuple[Path, ...], int]:
    """The image files of a folder in the order of their names, and how many other names there are."""
    entries = _entries(folder, root)
    kept = [Path(entry.path) for entry in entries if _is_image(entry)]
    return tuple(kept), len(entries) - len(kept)


def composed(name: str) -> str:
    """A name in its composed form, by which names are compared: systems differ in how they spell an accent."""
    return unicodedata.normalize("NFC", name)


def check_inside(path: Path, root: Path) -> None:
    """Refuses what is not there, and links that leave the folder."""
    if not inside(root, path):
        raise BadInput(f"{path}: a link out of {root}; only what lies below that folder is read: copy it there")
    if not os.path.exists(path):
        raise BadInput(f"{path}: not there, or a link that leads nowhere")


def _opened(content: bytes, where: str) -> Image.Image:
    """The image, or the first of an animation; nothing of it is decoded yet."""
    image = Image.open(BytesIO(content), formats=FORMATS)
    if image.width * image.height > MOST_PIXELS:  # guard: images-have-largest-size
        raise BadInput(f"{where}: {image.width} × {image.height} pixels; at most {MOST_PIXELS} in all are decoded")
    return image


def _plain(image: Image.Image) -> Image.Image:
    """The image in a mode that converts to grey and to colours without loss of range, nothing transparent."""
    if image.mode.startswith("I"):
        return _grey(np.asarray(image).astype(np.int64), 65535)
    if image.mode == "F":
        return _grey(np.asarray(image, np.float64), 1)
    if image.has_transparency_data:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, WHITE), over).convert("RGB")
    return image


def _grey(values: NDArray[Any], brightest: int) -> Image.Image:
    if not ((values >= 0) & (values <= brightest)).all():
        raise ValueError(f"grey values outside 0..{brightest}")
    return Image.fromarray(np.rint(values * (255 / brightest)).astype(np.uint8))


def _unreadable(where: str, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"{where}: too large; at most {MOST_PIXELS} pixels are decoded"
    if isinstance(error, UnidentifiedImageError):
        return f"{where}: not an image, or damaged; {', '.join(FORMATS)} are read. Get the file again"
    return f"{where}: damaged, or not a usual image ({error}). Get the file again"


def _entries(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, in the order of names."""
    check_inside(folder, root)
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: (os.fsencode(composed(entry.name)), os.fsencode(entry.name)))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read as a folder ({error.strerror})") from error
    for entry in entries:
        if entry.is_symlink():  # guard: links-out-folder
            check_inside(Path(entry.path), root)
    return entries


def _is_image(entry: os.DirEntry[str]) -> bool:
    """By its name: what is no ordinary file, such as a pipe, is refused when it is to be read, and not passed over."""
    return not entry.name.startswith(".") and Path(entry.name).suffix.lower() in SUFFIXES and not entry.is_dir()
