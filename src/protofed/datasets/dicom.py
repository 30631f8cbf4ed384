"""DICOM files as images, as a viewer shows them: rescaled, with the window of the file, black on white turned round.

Read are single images without compression, in grey (MONOCHROME1 and MONOCHROME2) or in 8-bit RGB. A file without a
window is shown with the whole range of its stored bits, so that equal values stay equal in all files. Needs pydicom.
"""

import warnings
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.datasets.image_limits import MAX_DECODED, MAX_PIXELS
from protofed.errors import BadInput

SUFFIX = ".dcm"
PLAIN = {
    "1.2.840.10008.1.2": "Implicit VR Little Endian",
    "1.2.840.10008.1.2.1": "Explicit VR Little Endian",
    "1.2.840.10008.1.2.2": "Explicit VR Big Endian",
}
"""Transfer syntaxes without compression. Others could grow without limit when they are decoded."""
MAX_BITS = 16
GREY = ("MONOCHROME1", "MONOCHROME2")
BYTES_EACH = 20
"""Of memory for a pixel at the peak: as stored, as a rescaled float64, and one more of these while it is windowed."""


@dataclass(frozen=True)
class DicomImage:
    image: Image.Image
    """In mode L or RGB."""
    has_window: bool
    """Whether the file says how its values are to be shown; always so for colours."""


def is_dicom(path: Path) -> bool:
    """Judges by name only."""
    return path.suffix.lower() == SUFFIX


def dicom_image(path: Path, content: bytes) -> DicomImage:
    """The image of a DICOM file with this content."""
    try:
        import pydicom
        from pydicom.filereader import read_file_meta_info
    except ModuleNotFoundError:
        raise BadInput(f"{path}: DICOM files need pydicom: pip install 'protofed[dicom]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom warns of values that do not conform; what matters is checked here
        try:
            _refuse_compressed(str(read_file_meta_info(path).get("TransferSyntaxUID", "")), path)
            dataset = pydicom.dcmread(BytesIO(content))
            _check(dataset, path)
            return _shown(dataset, path)
        except BadInput:
            raise
        except Exception as error:  # pydicom raises many types of errors for damaged files
            what = str(error).partition("\n")[0][:200]
            raise BadInput(f"{path}: damaged, or no DICOM image ({what}). Get the file again") from error


def _refuse_compressed(syntax: str, path: Path) -> None:
    if syntax not in PLAIN:  # guard: dicom-is-not-compressed
        raise BadInput(
            f"{path}: compressed DICOM (transfer syntax {syntax or 'missing'}) is not read; export it as Explicit VR "
            "Little Endian, or as PNG"
        )


def _check(dataset: Any, path: Path) -> None:
    """Refuses what is too large, or not one image in grey or RGB, before its pixels are decoded."""
    rows, columns = int(dataset.get("Rows") or 0), int(dataset.get("Columns") or 0)
    frames = int(dataset.get("NumberOfFrames") or 1)
    if rows < 1 or columns < 1 or "PixelData" not in dataset:
        raise BadInput(f"{path}: a DICOM file without an image; remove it")
    if frames > 1:
        raise BadInput(f"{path}: {frames} frames; only single images are read. Export the frames one by one")
    if rows * columns > MAX_PIXELS or rows * columns * BYTES_EACH > MAX_DECODED:  # guard: dicom-has-largest-size
        raise BadInput(f"{path}: {columns} × {rows} pixels are too many to be decoded. Export it with fewer pixels")
    kind, samples, stored = _kind(dataset)
    is_colour = kind == "RGB" and samples == 3 and stored == 8
    if not is_colour and not (kind in GREY and samples == 1 and 1 <= stored <= MAX_BITS):
        raise BadInput(
            f"{path}: DICOM images of kind {kind[:40] or 'unknown'} with {stored} bits are not read; export it as PNG"
        )


def _kind(dataset: Any) -> tuple[str, int, int]:
    """Photometric interpretation, samples of a pixel, and bits of a sample."""
    return (
        str(dataset.get("PhotometricInterpretation", "")),
        int(dataset.get("SamplesPerPixel") or 1),
        int(dataset.get("BitsStored") or 0),
    )


def _shown(dataset: Any, path: Path) -> DicomImage:
    kind, _, stored = _kind(dataset)
    pixels = dataset.pixel_array
    if kind == "RGB":
        return DicomImage(Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8)), has_window=True)
    shares, has_window = _shares(dataset, pixels, stored, path)
    shares = 1 - shares if kind == "MONOCHROME1" else shares  # there, low values are white
    return DicomImage(Image.fromarray(np.rint(255 * shares).astype(np.uint8)), has_window)


def _shares(dataset: Any, pixels: NDArray[Any], stored: int, path: Path) -> tuple[NDArray[np.float64], bool]:
    """How bright each pixel is, from 0 to 1, and whether the file says so."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    values = np.asarray(apply_modality_lut(pixels, dataset), dtype=np.float64)
    if dataset.get("VOILUTSequence"):
        table = np.asarray(apply_voi(values.astype(np.int64), dataset), dtype=np.float64)
        return (table / _white(dataset.VOILUTSequence[0], path)).clip(0, 1), True
    centre, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is not None and width is not None:
        return _windowed(values, centre, width, str(dataset.get("VOILUTFunction") or "LINEAR"), path), True
    if dataset.get("ModalityLUTSequence"):
        return (values / _white(dataset.ModalityLUTSequence[0], path)).clip(0, 1), False
    is_signed = bool(int(dataset.get("PixelRepresentation") or 0))
    lowest = -(2 ** (stored - 1)) if is_signed else 0
    return ((pixels.astype(np.float64) - lowest) / (2**stored - 1)).clip(0, 1), False


def _windowed(
    values: NDArray[np.float64], centre: float, width: float, function: str, path: Path
) -> NDArray[np.float64]:
    """DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3."""
    if not (isfinite(centre) and isfinite(width)) or width < (1 if function == "LINEAR" else 1e-9):
        raise BadInput(f"{path}: a window of width {width:g} around {centre:g} shows nothing; export the file again")
    match function:
        case "LINEAR" if width == 1:
            return (values > centre - 0.5).astype(np.float64)
        case "LINEAR":
            return ((values - (centre - 0.5)) / (width - 1) + 0.5).clip(0, 1)
        case "LINEAR_EXACT":
            return ((values - centre) / width + 0.5).clip(0, 1)
        case "SIGMOID":
            return np.asarray(1 / (1 + np.exp((-4 * (values - centre) / width).clip(-500, 500))), dtype=np.float64)
    raise BadInput(f"{path}: the window function {function[:40]!r} is not known; export the file as PNG")


def _white(table: Any, path: Path) -> int:
    """The largest value that a lookup table can give."""
    bits = int(table.LUTDescriptor[2])
    if not 1 <= bits <= MAX_BITS:
        raise BadInput(f"{path}: a lookup table of {bits} bits; export the file as PNG")
    return int(2**bits) - 1


def _first(value: Any) -> float | None:
    """A number, or the first of several: the first window is the default one."""
    from pydicom.multival import MultiValue

    if isinstance(value, MultiValue | list):
        value = value[0] if len(value) else None
    return None if value is None else float(value)
