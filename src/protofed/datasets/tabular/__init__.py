"""Tables with named columns: read from files and encoded as vectors, without pooling the sites' rows.

    table = read_table(path)                          one for each site
    kinds = column_kinds(tables, given={"ward": "categorical"})
    encoder = Encoder.fit(sum_of(summary_of(table, kinds) for table in tables))
    x = encoder.encode(table)                         (N, F), float32

A `Summary` holds counts, sums and the categories that occur, but no rows. Sites can send their summaries to a server,
which adds them up; the encoder is then the one that the pooled rows would give. Summaries are not anonymous: a category
that only one person has is in them, and so are the values of a site with a single row.
"""

from protofed.datasets.tabular.csv_reader import read_csv
from protofed.datasets.tabular.encoding import Encoder, Summary, sum_of, summary_of
from protofed.datasets.tabular.reader import read_table
from protofed.datasets.tabular.schema import Kind, column_kinds
from protofed.datasets.tabular.table import Cells, Table, is_number

__all__ = [
    "Cells",
    "Encoder",
    "Kind",
    "Summary",
    "Table",
    "column_kinds",
    "is_number",
    "read_csv",
    "read_table",
    "sum_of",
    "summary_of",
]
