"""DICOM files: shown with their window, and refused by name where they cannot be read."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.datasets.dicom import dicom_image
from protofed.datasets.sites import image_info, most_bits, read_image
from protofed.errors import BadInput

pydicom = pytest.importorskip("pydicom")

from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.pixels.processing import apply_windowing  # noqa: E402
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, JPEGBaseline8Bit  # noqa: E402

STORED = np.array([[0, 500, 1000], [2000, 3000, 4095]], np.uint16)


def made(pixels: Any = STORED, syntax: str = ExplicitVRLittleEndian, **tags: Any) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.PixelData = pixels.tobytes()
    return dataset


def written(path: Path, dataset: Dataset) -> Path:
    buffer = BytesIO()
    pydicom.dcmwrite(buffer, dataset, enforce_file_format=True)
    path.write_bytes(buffer.getvalue())
    return path


def shown(tmp_path: Path, dataset: Dataset) -> list[list[int]]:
    path = written(tmp_path / "x.dcm", dataset)
    pixels: list[list[int]] = np.asarray(dicom_image(path, path.read_bytes()).image).tolist()
    return pixels


def test_a_window_is_the_one_of_the_standard(tmp_path: Path) -> None:
    # Values up to 1000 - 0.5 - 999/2 = 500 are black, those above 1499 white; 1000 is at 0.5 / 999 + 0.5 = 0.5005.
    window = made(WindowCenter=1000, WindowWidth=1000)
    assert shown(tmp_path, window) == [[0, 0, 128], [255, 255, 255]]
    # MONOCHROME1 is the negative.
    assert shown(tmp_path, made(WindowCenter=1000, WindowWidth=1000, PhotometricInterpretation="MONOCHROME1")) == [
        [255, 255, 127],
        [0, 0, 0],
    ]


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_windows_agree_with_pydicom(tmp_path: Path, function: str) -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": [40, 3000], "WindowWidth": [4000, 10]}
    dataset = made(VOILUTFunction=function, **tags)
    values = 2.0 * STORED - 1024
    theirs = apply_windowing(values, dataset)
    lowest, highest = -1024.0, 2.0 * 4095 - 1024  # pydicom's result spans the rescaled range of the stored bits
    expected = 255 * (theirs - lowest) / (highest - lowest)
    assert np.abs(np.array(shown(tmp_path, dataset)) - expected).max() <= 0.5 + 1e-9


def test_signed_values_are_rescaled_before_the_window(tmp_path: Path) -> None:
    hounsfield = np.array([[-1000, 0], [40, 400]], np.int16)
    dataset = made(hounsfield, PixelRepresentation=1, WindowCenter=40, WindowWidth=401, BitsStored=16, HighBit=15)
    # ((0 - 39.5) / 400 + 0.5) * 255 = 102.3; ((40 - 39.5) / 400 + 0.5) * 255 = 127.8
    assert shown(tmp_path, dataset) == [[0, 102], [128, 255]]


def test_without_a_window_the_whole_range_of_the_stored_bits_is_shown(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dcm", made())
    assert np.asarray(dicom_image(path, path.read_bytes()).image)[1].tolist() == [125, 187, 255]  # of 255 · v / 4095
    assert image_info(path).has_window is False
    assert image_info(written(tmp_path / "y.dcm", made(WindowCenter=9, WindowWidth=9))).has_window is True


def test_a_lookup_table_is_used(tmp_path: Path) -> None:
    item = Dataset()
    item.LUTDescriptor, item.LUTData = [4, 0, 8], [255, 0, 51, 102]
    table = made(np.array([[0, 1], [2, 9]], np.uint16), VOILUTSequence=[item])
    table["VOILUTSequence"].value[0]["LUTDescriptor"].VR = "US"
    table["VOILUTSequence"].value[0]["LUTData"].VR = "US"
    assert shown(tmp_path, table) == [[255, 0], [51, 102]]


def test_colours_are_read_and_files_are_resized_like_others(tmp_path: Path) -> None:
    colours = np.zeros((2, 2, 3), np.uint8)
    colours[..., 0] = 200
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    path = written(tmp_path / "x.dcm", made(colours, BitsAllocated=8, BitsStored=8, HighBit=7, **tags))
    _, array = read_image(path, pixels=8, channels=3)
    assert array.shape == (3, 8, 8)
    assert {*array[0].ravel()} == {200}
    assert {*array[1].ravel()} == {0}
    assert image_info(path).mode == "RGB"
    assert most_bits([path]) is None


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (lambda: made(np.zeros((3, 4, 4), np.uint16), Rows=4, Columns=4, NumberOfFrames=3), "3 frames; only single"),
        (lambda: made(Rows=60000, Columns=60000), "60000 × 60000 pixels are too many"),
        (lambda: made(Rows=6000, Columns=6000), "6000 × 6000 pixels are too many"),
        (lambda: made(PhotometricInterpretation="PALETTE COLOR"), "of kind PALETTE COLOR"),
        (lambda: made(BitsStored=0), "with 0 bits"),
        (lambda: made(WindowCenter=5, WindowWidth=0), "a window of width 0 around 5 shows nothing"),
        (lambda: made(Rows=500), "damaged, or no DICOM image"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(tmp_path: Path, dataset: Any, words: str) -> None:
    path = written(tmp_path / "x.dcm", dataset())
    with pytest.raises(BadInput, match=words) as error:
        image_info(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("syntax", [DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit])
def test_compressed_files_are_refused_before_they_are_decoded(tmp_path: Path, syntax: str) -> None:
    path = written(tmp_path / "x.dcm", made())
    content = path.read_bytes()
    old, new = str(ExplicitVRLittleEndian).encode(), str(syntax).encode()
    at = content.index(old) - 2  # its length comes before it
    padded = new + b"\0" * (len(new) % 2)
    group = content[:at] + len(padded).to_bytes(2, "little") + padded + content[at + 2 + len(old) + len(old) % 2 :]
    path.write_bytes(group)
    with pytest.raises(BadInput, match="compressed DICOM"):
        image_info(path)


@pytest.mark.parametrize("keep", [0, 100, 140, 200, -3])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path / "x.dcm", made(WindowCenter=1000, WindowWidth=1000))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"x\.dcm: "):
        image_info(path)
