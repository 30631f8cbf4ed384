"""What sites and server tell each other of sites' own files, as JSON. Everything is checked when it is read: types,
ranges, and that a site's numbers fit together."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from protofed.datasets.sites import ColumnFacts, SiteKind
from protofed.datasets.tabular.encoding import Moments
from protofed.datasets.tabular.table import MAX_MAGNITUDE
from protofed.errors import BadInput
from protofed.models.formats import Images, Name, Rows, Text, Written, files_of, preprocessing_of, read
from protofed.printable import one_line
from protofed.tasks.custom.shares import MAX_CLASSES, Agreed, ColumnShare, ImageShare, Share, TableShare

MOST_CLIENTS = 10_000
"""Of one site."""
MOST_TOLD = 2**21
"""Bytes of what one site tells, and of the preparation: both are in headers of messages."""
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_SHARES: dict[SiteKind, TypeAdapter[Any]] = {
    "images": TypeAdapter(Annotated[dict[Name, ImageShare], MinLen(1), MaxLen(MOST_CLIENTS)], config=_STRICT),
    "tables": TypeAdapter(Annotated[dict[Name, TableShare], MinLen(1), MaxLen(MOST_CLIENTS)], config=_STRICT),
}
LEAVE_OUT = "name columns of many or long words in leave_out"


class Preparation(Written):
    """How all sites prepare their own files."""

    format: Literal[1] = 1
    classes: Annotated[tuple[Text, ...], MinLen(2), MaxLen(MAX_CLASSES)]
    files: Annotated[Images | Rows, Field(discriminator="kind")]


def preparation_text(agreed: Agreed) -> str:
    files = files_of(agreed.files)
    assert files is not None, "own files are images or tables"
    text = Preparation(classes=agreed.classes, files=files).text()
    if len(text) > MOST_TOLD:
        raise BadInput(f"the preparation of all sites has {len(text)} bytes; at most {MOST_TOLD} are sent: {LEAVE_OUT}")
    return text.decode()


def read_preparation(text: str) -> Agreed:
    """Raises BadInput."""
    found = read(Preparation, text.encode(), "the agreed preparation")
    files = preprocessing_of(found.files)
    assert files is not None
    return Agreed(found.classes, files)


def shares_text(shares: Mapping[str, Share]) -> str:
    return json.dumps({client: asdict(share) for client, share in sorted(shares.items())}, ensure_ascii=False)


def read_shares(text: str, kind: SiteKind, where: str) -> dict[str, Share]:
    """What a site told. Raises BadInput with all that does not fit together."""
    try:
        shares: dict[str, Share] = _SHARES[kind].validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = one_line(".".join(map(str, first["loc"]))[:200])
        raise BadInput(f"{where}: what it tells of its files is no share: {place}: {first['msg'][:200]}") from None
    faults = [f"{where}: {client}: {fault}" for client, share in shares.items() for fault in _faults(share)]
    if faults:  # guard: shares-fit-together
        raise BadInput("\n".join(map(one_line, faults)))
    return shares


def _faults(share: Share) -> Iterator[str]:
    if len({*share.classes}) < len(share.classes):
        yield "a class twice"
    if not isinstance(share, TableShare):
        if share.damaged > share.files:
            yield "more damaged files than files"
        return
    if len({*share.names}) < len(share.names):
        yield "a column twice"
    if not share.columns.keys() <= {*share.names}:
        yield "a column that is none of its table"
    if not _is_possible(share.label):
        yield "the label has impossible counts"
    for name, column in share.columns.items():
        if why := _column_fault(column):
            yield f"column {name!r} has {why}"


def _column_fault(column: ColumnShare) -> str:
    sums, words = column.sums, column.words
    if not _is_possible(column.facts):
        return "impossible counts"
    if sums is not None and words is not None:
        return "sums and words"
    if words is not None and [*words] != sorted({*words}):
        return "words that are not sorted, or twice"
    if sums is not None and not _are_sums(sums, column.facts):
        return "impossible sums"
    return ""


def _is_possible(facts: ColumnFacts) -> bool:
    return facts.numbers <= facts.meant <= facts.present


def _are_sums(sums: Moments, facts: ColumnFacts) -> bool:
    count = sums.count
    return (
        0 <= count <= facts.numbers
        and 0 <= sums.missing <= 2**40
        and abs(sums.total) <= 1.01 * MAX_MAGNITUDE * count
        and 0 <= sums.squares <= 4.04 * MAX_MAGNITUDE**2 * count
    )
