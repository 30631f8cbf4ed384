"""The user's own data: a folder with a subfolder of images, or a table, for each site.

    folder/site/class/image.png     images of the formats that `datasets.images` reads
    folder/site.csv, .parquet       tables with the same columns at every site; one column is the label

Names are compared and returned in composed Unicode form (NFC), since operating systems spell accents differently.
Hidden files and folders are ignored. Problems with tables are collected as sentences, so that a user sees all of them
at once.
"""

from protofed.datasets.sites.column_facts import ColumnFacts, facts_of, kinds_from, numeric_sites, sites_with_words
from protofed.datasets.sites.groups import group_faults, group_finder, group_problem
from protofed.datasets.sites.image_files import ImageInfo, image_info, most_bits, read_image
from protofed.datasets.sites.labels import (
    LabelledRows,
    label_faults,
    labelled_rows,
    measurement_faults,
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
    refuse_case_variants,
    table_sites,
)
from protofed.datasets.sites.tables import (
    column_faults,
    first_few,
    kinds_of,
    missing_columns,
    normalised_code,
    read_tables,
    with_normalised_codes,
)

__all__ = [
    "TABLE_SUFFIXES",
    "ColumnFacts",
    "ImageInfo",
    "ImageSites",
    "LabelledRows",
    "SiteKind",
    "column_faults",
    "data_files",
    "facts_of",
    "first_few",
    "group_faults",
    "group_finder",
    "group_problem",
    "image_info",
    "image_sites",
    "kind_of",
    "kinds_from",
    "kinds_of",
    "label_faults",
    "labelled_rows",
    "measurement_faults",
    "missing_columns",
    "most_bits",
    "normalised_code",
    "normalised_number",
    "numeric_sites",
    "other_files",
    "read_image",
    "read_tables",
    "refuse_case_variants",
    "sites_with_words",
    "sorted_classes",
    "table_sites",
    "with_normalised_codes",
]
