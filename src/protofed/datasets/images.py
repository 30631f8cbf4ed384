"""Image files as arrays. What decoding takes is checked before it begins; errors name the damaged file.

Transparent pixels are shown on white. Deep grey, of 16 or 32 bits, must lie between 0 and 65535. Often fewer bits are
in use: scanners write 12 bits into files of 16. So `bits` says what white is: 0 to 2^bits - 1 become 0 to 255, by the
same rule for every image. Floating-point grey must lie between 0 and 1. Files with other values are refused, because
their scale is unknown.
"""

import os
import stat
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from protofed.datasets.files import inside
from protofed.datasets.image_limits import MAX_PIXELS, check_image
from protofed.errors import BadInput

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".dcm"})
MAX_BYTES = 64 * 2**20
DEEP_BITS = 16
"""The most bits that deep grey may use."""
STRIP = 2**20
"""Pixels that are converted at once. Converting a whole image would take many times its memory."""
WHITE = (255, 255, 255, 255)

T = TypeVar("T")


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


def decoded_bytes(
    content: bytes, where: str, pixels: int, channels: int = 3, bits: int = DEEP_BITS
) -> NDArray[np.uint8]:
    """The same for the bytes of an image file. Errors call it `where`. `bits` is for deep grey."""
    if channels not in (1, 3):
        raise BadInput(f"{where}: images have 1 or 3 channels, not {channels}")
    return _from_image(content, where, lambda image: resized(_plain(_turned(image), bits), pixels, channels))


def resized(image: Image.Image, pixels: int, channels: int) -> NDArray[np.uint8]:
    """An image of 8 bits as (C, H, W)."""
    mode = "L" if channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    result = np.asarray(image.resize((pixels, pixels), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(result.reshape(pixels, pixels, channels).transpose(2, 0, 1))


def bits_in_use(content: bytes, where: str) -> int | None:
    """How many bits the grey values of an image file use, at least 8. None if they are not deep.

    Deep images are decoded, others are not.
    """

    def bits(image: Image.Image) -> int | None:
        if not is_deep(image.mode):
            return None
        image.load()
        return max(8, max(_brightest(np.asarray(strip)) for _, strip in _strips(image)).bit_length())

    return _from_image(content, where, bits)


def is_deep(mode: str) -> bool:
    """Whether images of this mode have grey values of 16 or 32 bits."""
    return mode.startswith("I")


def _from_image(content: bytes, where: str, use: Callable[[Image.Image], T]) -> T:
    """What `use` makes of an image that has not been decoded yet. Errors name the file."""
    if len(content) > MAX_BYTES:
        raise BadInput(f"{where}: larger than {MAX_BYTES >> 20} MiB, the limit for one file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's warnings are harmless, or the checks here refuse the file
        try:
            image = Image.open(BytesIO(content), formats=FORMATS)  # of an animation, the first frame
            check_image(image, content, where)
            return use(image)
        except _TooBright as error:
            raise BadInput(f"{where}: {error}") from error
        except BadInput:
            raise
        except Exception as error:  # Pillow raises many types of errors for damaged files
            raise BadInput(_unreadable(where, error)) from error


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
    check_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > limit:
        raise BadInput(f"{path}: larger than {limit >> 20} MiB, the limit for one file")
    return content


def check_regular(path: Path) -> None:
    """Opening a pipe would wait for a writer forever; special files such as /dev/zero never end."""
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    if not is_regular:
        raise BadInput(f"{path}: not a regular file; put the image itself there")


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


class _TooBright(Exception):
    """A grey value needs more bits than were given."""


def _turned(image: Image.Image) -> Image.Image:
    """The image as its camera was held. An image that need not be turned is not copied."""
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _plain(image: Image.Image, bits: int) -> Image.Image:
    """The image in a mode that Pillow converts to grey and to RGB without clipping, and without transparency."""
    if is_deep(image.mode):
        return _converted(image, "L", lambda strip: _deep_grey(np.asarray(strip), bits))
    if image.mode == "F":
        return _converted(image, "L", lambda strip: _float_grey(np.asarray(strip, np.float64)))
    if image.has_transparency_data:
        return _converted(image, "RGB", _on_white)
    return image


def _converted(image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The image in another mode, converted a strip of rows at a time."""
    result = Image.new(mode, image.size)
    for top, strip in _strips(image):
        result.paste(convert(strip), (0, top))
    return result


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Some rows after the other, with the number of the first."""
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(image: Image.Image) -> Image.Image:
    foreground = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", foreground.size, WHITE), foreground).convert("RGB")


def _deep_grey(values: NDArray[Any], bits: int) -> Image.Image:
    brightest, white = _brightest(values), 2**bits - 1
    if brightest > white:  # guard: grey-values-are-within-their-bits
        raise _TooBright(
            f"a grey value of {brightest}, but the {bits} bits that are set end at {white}. Set bits = "
            f"{brightest.bit_length()} in [task], or export the file again"
        )
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def _brightest(values: NDArray[Any]) -> int:
    if values.min() < 0 or values.max() >= 2**DEEP_BITS:
        raise ValueError(f"grey values outside 0..{2**DEEP_BITS - 1}")
    return int(values.max())


def _float_grey(values: NDArray[np.float64]) -> Image.Image:
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("grey values outside 0..1")
    return Image.fromarray(np.rint(values * 255).astype(np.uint8))


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
