"""Image files as arrays. Sizes are checked before decoding; errors name the damaged file.

Transparent pixels are shown on white. 16-bit grey is divided by 257, so that white stays white. Floating-point grey
must lie between 0 and 1, and 32-bit grey between 0 and 65535. Files with other values are refused, because their scale
is unknown.
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
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 64_000_000
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class Listing:
    """The class folders of a folder, and the images of each, in the order of their names."""

    classes: Mapping[str, tuple[Path, ...]]
    """Keys are names in composed form (NFC). Paths are spelt as the system spells them."""
    ignored: int
    """Number of entries that are not read: hidden ones, and all that is neither a class folder nor an image in one."""


def decoded(path: Path, pixels: int, channels: int = 3) -> NDArray[np.uint8]:
    """An image file as (C, H, W), resized to `pixels` a side. 3 channels are red, green and blue; 1 is grey."""
    return decoded_bytes(contents(path, MAX_BYTES), str(path), pixels, channels)


def decoded_bytes(content: bytes, where: str, pixels: int, channels: int = 3) -> NDArray[np.uint8]:
    """The same for the bytes of an image file. Errors call it `where`."""
    if channels not in (1, 3):
        raise BadInput(f"{where}: images have 1 or 3 channels, not {channels}")
    if len(content) > MAX_BYTES:
        raise BadInput(f"{where}: larger than {MAX_BYTES >> 20} MiB, the limit for one file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's warnings are harmless, or the checks here refuse the file
        try:
            image = _opened(content, where)
            image = _plain(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
            array = np.asarray(image.resize((pixels, pixels), Image.Resampling.BILINEAR))
        except BadInput:
            raise
        except Exception as error:  # Pillow raises many types of errors for damaged files
            raise BadInput(_unreadable(where, error)) from error
    return np.ascontiguousarray(array.reshape(pixels, pixels, channels).transpose(2, 0, 1))


def stacked(paths: Sequence[Path], pixels: int) -> NDArray[np.uint8]:
    """Image files as (N, 3, H, W), decoded one at a time into one array."""
    x = np.empty((len(paths), 3, pixels, pixels), np.uint8)
    for row, path in enumerate(paths):
        x[row] = decoded(path, pixels)
    return x


def check_memory(count: int, pixels: int, where: str) -> None:
    """Refuses more images than fit into half of this machine's memory."""
    needed, memory = count * 3 * pixels**2, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory // 2:
        raise BadInput(
            f"{where}: {count} images of {pixels} × {pixels} need {needed / 2**30:.1f} GiB, more than half of the "
            f"{memory / 2**30:.1f} GiB of this machine. Choose fewer pixels, or use a larger machine"
        )


def contents(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. Refuses a file of more than `limit` bytes."""
    try:
        # Opening a pipe would wait for a writer forever; special files such as /dev/zero never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: not a regular file; put the image itself there")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > limit:
        raise BadInput(f"{path}: larger than {limit >> 20} MiB, the limit for one file")
    return content


def listed(folder: Path, root: Path | None = None) -> Listing:
    """The class folders of `folder` and their images. Links may not lead out of `root`, by default `folder`."""
    root = folder if root is None else root
    entries = _entries(folder, root)
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    classes: dict[str, tuple[Path, ...]] = {}
    ignored = len(entries) - len(folders)
    for entry in folders:
        name = composed(entry.name)
        if name in classes:
            raise BadInput(f"{folder}: two folders are called {name!r}, in different Unicode spellings; keep one")
        classes[name], num_others = images_in(Path(entry.path), root)
        ignored += num_others
    return Listing(classes, ignored)


def images_in(folder: Path, root: Path) -> tuple[tuple[Path, ...], int]:
    """The image files of a folder in the order of their names, and the number of other entries."""
    entries = _entries(folder, root)
    paths = [Path(entry.path) for entry in entries if _is_image(entry)]
    return tuple(paths), len(entries) - len(paths)


def composed(name: str) -> str:
    """A name in composed form (NFC), for comparing names. Operating systems spell accents differently."""
    return unicodedata.normalize("NFC", name)


def check_inside(path: Path, root: Path) -> None:
    """Refuses paths that do not exist, and links that lead out of the root."""
    if not inside(root, path):
        raise BadInput(f"{path}: a link out of {root}; only files below that folder are read. Copy the file there")
    if not os.path.exists(path):
        raise BadInput(f"{path}: does not exist, or is a link to nothing")


def _opened(content: bytes, where: str) -> Image.Image:
    """The image, or the first frame of an animation. It is not decoded yet."""
    image = Image.open(BytesIO(content), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:  # guard: images-have-largest-size
        raise BadInput(
            f"{where}: {image.width} × {image.height} pixels; images of more than {MAX_PIXELS} pixels are not decoded"
        )
    return image


def _plain(image: Image.Image) -> Image.Image:
    """The image in a mode that Pillow converts to grey and to RGB without clipping, and without transparency."""
    if image.mode.startswith("I"):
        return _grey(np.asarray(image).astype(np.int64), 65535)
    if image.mode == "F":
        return _grey(np.asarray(image, np.float64), 1)
    if image.has_transparency_data:
        foreground = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", foreground.size, WHITE), foreground).convert("RGB")
    return image


def _grey(values: NDArray[Any], brightest: int) -> Image.Image:
    if not ((values >= 0) & (values <= brightest)).all():
        raise ValueError(f"grey values outside 0..{brightest}")
    return Image.fromarray(np.rint(values * (255 / brightest)).astype(np.uint8))


def _unreadable(where: str, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"{where}: too large; images of more than {MAX_PIXELS} pixels are not decoded"
    if isinstance(error, UnidentifiedImageError):
        return f"{where}: not an image, or damaged; the formats {', '.join(FORMATS)} are read. Get the file again"
    return f"{where}: damaged, or an unusual image ({error}). Get the file again"


def _entries(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, in the order of their names."""
    check_inside(folder, root)
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: (os.fsencode(composed(entry.name)), os.fsencode(entry.name)))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read as a folder ({error.strerror})") from error
    for entry in entries:
        if entry.is_symlink():  # guard: links-out-folder
            check_inside(Path(entry.path), root)
    return entries


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Judges by name only. A pipe called 1.png is not skipped: reading it raises an error."""
    return not entry.name.startswith(".") and Path(entry.name).suffix.lower() in SUFFIXES and not entry.is_dir()
