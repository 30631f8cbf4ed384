"""Office-Caltech10: ten classes of objects in four domains.

Gong et al., Geodesic flow kernel for unsupervised domain adaptation, CVPR 2012: the ten classes that Office-31 (Saenko
et al., ECCV 2010) and Caltech-256 (Griffin et al., 2007) have in common. We know of no licence. The set has no
published split; `fpl_split` makes one. Images are 32 pixels a side by default, as in FPL.
"""

from protofed.datasets.examples import Dataset
from protofed.datasets.image_folders import DomainFolders

OFFICE_FOLDERS = DomainFolders(
    folder="office_caltech10",
    classes=(
        ("back_pack", "backpack"),
        ("bike",),
        ("calculator",),
        ("headphones",),
        ("keyboard",),
        ("laptop_computer", "laptop"),
        ("monitor",),
        ("mouse",),
        ("mug",),
        ("projector",),
    ),
    counts={
        "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
        "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
        "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
        "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
    },
    obtain="Office-Caltech10 is four folders, caltech, amazon, webcam and dslr, of ten class folders each; put them "
    "into office_caltech10 below $PROTOFED_DATA.",
)

OFFICE_CALTECH10 = Dataset(
    name="office_caltech10",
    classes=tuple(names[0] for names in OFFICE_FOLDERS.classes),
    pixels=32,
    counts=OFFICE_FOLDERS.split_counts,
    obtain=OFFICE_FOLDERS.obtain,
    read=OFFICE_FOLDERS.read,
)
