"""PACS: seven classes as photos, art paintings, cartoons and sketches.

Li et al., Deeper, broader and artier domain generalization, ICCV 2017. We know of no licence. The set has no published
split; `fpl_split` makes one. No federated paper states a size of images; 64 pixels a side is our choice.
"""

from protofed.datasets.examples import Dataset
from protofed.datasets.image_folders import DomainFolders

PACS_FOLDERS = DomainFolders(
    folder="pacs",
    classes=(("dog",), ("elephant",), ("giraffe",), ("guitar",), ("horse",), ("house",), ("person",)),
    counts={
        "photo": (189, 202, 182, 186, 199, 280, 432),
        "art_painting": (379, 255, 285, 184, 201, 295, 449),
        "cartoon": (389, 457, 346, 135, 324, 288, 405),
        "sketch": (772, 740, 753, 608, 816, 80, 160),
    },
    obtain="PACS is published as an archive of the folder kfold with photo, art_painting, cartoon and sketch in it; "
    "put these four into pacs below $PROTOFED_DATA.",
)

PACS = Dataset(
    name="pacs",
    classes=tuple(names[0] for names in PACS_FOLDERS.classes),
    pixels=64,
    counts=PACS_FOLDERS.split_counts,
    obtain=PACS_FOLDERS.obtain,
    read=PACS_FOLDERS.read,
)
