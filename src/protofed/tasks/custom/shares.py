"""What each site tells of its own files so that all sites prepare them alike, and the preparation that follows.

A share holds names, counts and sums, and nothing of a single example. The task in one process and sites on several
machines agree by the same functions, in the order of the sites' names, so that both come to the same bits.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval, MaxLen

from protofed.datasets import sites
from protofed.datasets.images import DEEP_BITS
from protofed.datasets.preprocessing import ImageFiles, TableRows
from protofed.datasets.sites import ColumnFacts
from protofed.datasets.tabular import Encoder, Kind, Summary, sum_of
from protofed.datasets.tabular.encoding import Categories, Moments
from protofed.datasets.tabular.limits import MAX_CATEGORIES, MAX_COLUMNS
from protofed.errors import BadInput

if TYPE_CHECKING:
    from protofed.tasks.custom.settings import Custom

MAX_CLASSES = 10_000

log = logging.getLogger(__name__)

Name = Annotated[str, MaxLen(1000)]
Names = Annotated[tuple[Name, ...], MaxLen(MAX_CLASSES)]
Count = Annotated[int, Interval(ge=0, le=2**40)]


@dataclass(frozen=True)
class ImageShare:
    """Of a site's images."""

    classes: Names
    """In the order of `sorted_classes`."""
    tests: Count
    """Examples for testing."""
    files: Count
    damaged: Count
    """Files that cannot be decoded, and are left out."""
    bits: Annotated[int, Interval(ge=8, le=16)] | None
    """How many bits its deep grey uses; None if none is deep."""


@dataclass(frozen=True)
class ColumnShare:
    """Of one column of a site's table."""

    facts: ColumnFacts
    """Of all rows."""
    sums: Moments | None
    """Of the training rows, if it has no words."""
    words: Annotated[tuple[Name, ...], MaxLen(MAX_CATEGORIES)] | None
    """Those of the training rows, sorted, if it has words or is declared categorical."""


@dataclass(frozen=True)
class TableShare:
    """Of a site's table."""

    classes: Names
    tests: Count
    rows: Count
    """Those that have a label."""
    label: ColumnFacts
    names: Annotated[tuple[Name, ...], MaxLen(MAX_COLUMNS)]
    """Of all columns, in their order."""
    columns: Annotated[dict[Name, ColumnShare], MaxLen(MAX_COLUMNS)]
    """Those that are learnt from. A site that is held out says no sums and no words."""


Share = ImageShare | TableShare


@dataclass(frozen=True)
class Agreed:
    """How all sites prepare their files."""

    classes: tuple[str, ...]
    files: ImageFiles | TableRows


def agreed(shares: Mapping[str, Share], settings: "Custom") -> Agreed:
    """The preparation that the shares of all sites give. Raises BadInput with what does not fit together."""
    shares = dict(sorted(shares.items()))
    tables = {site: share for site, share in shares.items() if isinstance(share, TableShare)}
    images = {site: share for site, share in shares.items() if isinstance(share, ImageShare)}
    if tables and images:
        raise BadInput(f"task custom: {', '.join(tables)} have tables, and {', '.join(images)} have images")
    if images:
        _check_damaged(images, settings)
        bits = bits_of_all((share.bits for share in images.values()), settings.bits)
        return Agreed(_classes(shares, settings), ImageFiles(settings.pixels, settings.channels, bits))
    kinds = _kinds(tables, settings)
    left = training_sites(tables, settings.hold_out)
    encoder = Encoder.fit(sum_of(_summary(tables[site], kinds) for site in left))
    return Agreed(_classes(shares, settings), TableRows(encoder, settings.label or ""))


def training_sites(names: Collection[str], hold_out: Sequence[str]) -> list[str]:
    """The sites that are not held out. Refuses to hold out one that is not there, or all."""
    for site in hold_out:
        if site not in names:
            raise BadInput(f"task custom: hold_out names {site!r}; the sites are {', '.join(names)}")
    left = [site for site in names if site not in hold_out]
    if not left:
        raise BadInput("task custom: hold_out names all sites; one must be left to train")
    return left


def bits_of_all(found: Iterable[int | None], given: int | None) -> int:
    """How many bits deep grey uses: the same for all sites, so that equal values stay equal."""
    # guard: bits-of-all-files
    return max((bits for bits in found if bits is not None), default=DEEP_BITS) if given is None else given


# ---- classes


def _classes(shares: Mapping[str, Share], settings: "Custom") -> tuple[str, ...]:
    classes = sites.sorted_classes(name for share in shares.values() for name in share.classes)
    if isinstance(next(iter(shares.values())), ImageShare):
        sites.refuse_case_variants("task custom", "classes", classes)
    if len(classes) < 2:
        what = f"all examples are of class {classes[0]!r}" if classes else "no site tells a class"
        raise BadInput(f"task custom: {what}; at least two classes are needed")
    if not any(share.tests for share in shares.values()):
        raise BadInput(
            "task custom: no site has an example for testing. Every class has a single example at each site, or copies "
            "at several sites; remove copies, or raise test_fraction"
        )
    for site in (site for site, share in shares.items() if not share.tests):
        log.warning("task custom: %s has too few examples for a test set and only trains", site)
    _check_held_out(shares, settings.hold_out)
    return classes


def _check_held_out(shares: Mapping[str, Share], hold_out: Sequence[str]) -> None:
    """Refuses what cannot be tested, and says which classes of a held-out site nobody learns."""
    left = training_sites(shares, hold_out)
    trained = {label for site in left for label in shares[site].classes}
    if len(trained) < 2:
        raise BadInput(
            f"task custom: without {', '.join(hold_out)} all examples are of class {next(iter(trained), '')!r}; at "
            "least two classes are needed"
        )
    for site in hold_out:
        if not shares[site].tests:
            raise BadInput(f"task custom: hold_out names {site!r}, which has no example for testing")
        missing = sorted({*shares[site].classes} - trained)
        if missing:
            log.warning("task custom: only %s, which is held out, has class %s", site, ", ".join(missing))


# ---- images


def _check_damaged(shares: Mapping[str, ImageShare], settings: "Custom") -> None:
    damaged, files = (sum(getattr(share, what) for share in shares.values()) for what in ("damaged", "files"))
    if damaged > settings.max_damaged * files:  # guard: few-images-may-be-damaged-anywhere
        where = ", ".join(f"{site} {share.damaged}" for site, share in shares.items() if share.damaged)
        raise BadInput(
            f"task custom: {damaged} of {files} files are damaged, more than the share max_damaged = "
            f"{settings.max_damaged:g}: {where}"
        )


# ---- tables


def used_columns(names: Iterable[str], settings: "Custom") -> list[str]:
    """The columns to learn from."""
    unused = {settings.label, settings.group, *settings.leave_out}
    used = [name for name in names if name not in unused]
    if not used:
        raise BadInput(
            f"task custom: there is no column but the label {settings.label!r}; nothing can be learnt from it"
        )
    return used


def _kinds(shares: Mapping[str, TableShare], settings: "Custom") -> dict[str, Kind]:
    """The kind of every column that is learnt from, in the order of the first site."""
    label = settings.label or ""
    faults = [*_unknown_columns(shares, settings)]
    faults += sites.missing_columns({site: share.names for site, share in shares.items()}, settings.leave_out)
    labels = {site: share.label for site, share in shares.items()}
    if (numeric := sites.numeric_sites(labels)) and (words := sites.sites_with_words(labels)):
        faults.append(
            f"the label {label!r} has words at {sites.first_few(words)}, but only numbers at "
            f"{sites.first_few(numeric)}: write the classes in the same way at every site"
        )
    distinct = len({name for share in shares.values() for name in share.classes})
    faults += sites.measurement_faults(label, distinct, sum(share.rows for share in shares.values()))
    if not faults:
        names = used_columns(next(iter(shares.values())).names, settings)
        facts = {site: {name: share.columns[name].facts for name in names} for site, share in shares.items()}
        kinds, mixed = sites.kinds_from(facts, names, settings.categorical)
        faults = [_mixed(name, *where) for name, where in mixed.items()]
    if faults:
        raise BadInput("\n".join(f"task custom: {fault}" for fault in faults))
    return kinds


def _unknown_columns(shares: Mapping[str, TableShare], settings: "Custom") -> Iterable[str]:
    names = [*dict.fromkeys(name for share in shares.values() for name in share.names)]
    for name in (*settings.leave_out, *settings.categorical, *([settings.group] if settings.group else [])):
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the columns are {', '.join(names[:20])}"
            yield f"there is no column {name!r}; {hint}"


def _mixed(name: str, words: Sequence[str], numeric: Sequence[str]) -> str:
    others = f"only numbers at {sites.first_few(numeric)}" if numeric else "most of its values are numbers"
    return (
        f"column {name!r} has words at {sites.first_few(words)}, but {others}: correct them, leave the cells empty if "
        "the values are missing, or name the column in categorical if its numbers are codes"
    )


def _summary(share: TableShare, kinds: Mapping[str, Kind]) -> Summary:
    """What a site said of its training rows. A column without a value says the same as one of either kind."""
    return Summary({name: _column(name, share.columns[name], kind) for name, kind in kinds.items()})


def _column(name: str, share: ColumnShare, kind: Kind) -> Moments | Categories:
    if kind == "categorical" and (share.words is not None or not share.facts.present):
        return Categories(frozenset(share.words or ()))
    if kind == "numeric" and share.sums is not None:
        return share.sums
    raise BadInput(f"task custom: a site does not say what is in column {name!r}")
