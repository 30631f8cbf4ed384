"""The user's own data: a folder with a subfolder of images, or a table, for each site.

    folder/site/class/image.png     images of the formats that `datasets.images` reads
    folder/site.csv, .parquet       tables with the same columns at every site; one column is the label

Names are compared and returned in composed Unicode form (NFC), since operating systems spell accents differently.
Hidden files and folders are ignored. Problems with tables are collected as sentences, so that a user sees all of them
at once.
"""

from protofed.datasets.sites.groups import group_faults, group_finder, group_problem
from protofed.datasets.sites.image_files import ImageInfo, image_info, most_bits, read_image
from protofed.datasets.sites.labels import (
    LabelledRows,
    label_faults,
    labelled_rows,
    normalised_number,
    sorted_classes,
)
from protofed.datasets.sites.layout import (
    TABLE_SUFFIXES,
    ImageSites,
    SiteKind,
    data_files,
    image_sites,
    kind_of,
    other_files,
)
from protofed.datasets.sites.tables import (
    column_faults,
    kinds_of,
    normalised_code,
    read_tables,
    with_normalised_codes,
)

__all__ = [
    "TABLE_SUFFIXES",
    "ImageInfo",
    "ImageSites",
    "LabelledRows",
    "SiteKind",
    "column_faults",
    "data_files",
    "group_faults",
    "group_finder",
    "group_problem",
    "image_info",
    "image_sites",
    "kind_of",
    "kinds_of",
    "label_faults",
    "labelled_rows",
    "most_bits",
    "normalised_code",
    "normalised_number",
    "other_files",
    "read_image",
    "read_tables",
    "sorted_classes",
    "with_normalised_codes",
]
