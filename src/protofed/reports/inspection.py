"""What a folder of users' own data holds, what is wrong with it and what to do, and an experiment that is ready to run.

Everything is read by the functions that the task `own` reads with, and divided as it divides, so that what is said here
is what a run does.
"""

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Literal

from rich.cells import cell_len

from protofed.errors import BadInput, RunFailed
from protofed.experiments.checkpoint import write_atomically
from protofed.sources import sites
from protofed.sources.images import SUFFIXES
from protofed.sources.sites import Described, ImageSites, LabelledRows
from protofed.sources.tabular import MOST_CATEGORIES, Kind, Table
from protofed.tasks.own import Own, Sample, Sides, divisions, sample_of, untested

Severity = Literal["error", "warning"]

SIDES = (28, 32, 64, 96, 128)
BATCHES = (8, 16, 32, 64)
GREY = frozenset({"1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"})
FEW = 10
"""A site with fewer examples says little."""
NAMED = 10
"""How many files of a kind are named."""
MOST_COLUMNS = 12
"""Of the table of sites and classes."""
MOST_CODES = 20
"""A column of numbers and words with more different values is meant to be numeric."""
LIKELY_LABEL = re.compile(r"label|class|target|outcome|diagnos|event|status|^y$", re.IGNORECASE)
LIKELY_IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|mrn|uid|key|nr|number|index|row|record|unnamed.*)$", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """Something that a person should know, and what to do about it. With an error nothing can be run."""

    severity: Severity
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Inspection:
    """What was found in a folder."""

    path: Path
    kind: sites.SiteKind
    sites: tuple[str, ...]
    """All that were found."""
    samples: Mapping[str, Sample]
    """The usable examples of each site that has some."""
    sides: Mapping[str, Sides]
    facts: tuple[str, ...]
    """Lines about images or columns."""
    findings: tuple[Finding, ...]
    settings: Own
    """Of the task that reads this folder."""
    written: Path | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def text(self) -> str:
        """All of it, for a person to read."""
        parts = [self._headline(), *([_grid(self.samples, self.sides)] if self.samples else []), "\n".join(self.facts)]
        for severity in ("error", "warning"):
            found = [finding for finding in self.findings if finding.severity == severity]
            parts += [_numbered(severity, found)] if found else []
        return _printable("\n\n".join(part for part in (*parts, self._ending()) if part))

    @property
    def toml(self) -> str:
        """The experiment; refused while there are errors."""
        if self.errors:
            raise BadInput(f"{self.path}: {len(self.errors)} errors have to be settled before an experiment can run")
        return _experiment(self.settings, self.sides)

    def _headline(self) -> str:
        classes, examples = _classes(self.samples), sum(len(sample.labels) for sample in self.samples.values())
        counted = f", {_count(len(classes), 'class')}, {_count(examples, 'example')}" if self.samples else ""
        return f"{self.path}: {self.kind} of {_count(len(self.sites), 'site')}{counted}"

    def _ending(self) -> str:
        if self.errors:
            return "No experiment was written: settle the errors, then inspect again."
        if self.written:
            return f"Written: {self.written}\nRun it with: protofed run {self.written}"
        return "Ready to run: inspect again with --write FILE for an experiment file."


def inspect(
    path: Path,
    label: str | None = None,
    skip_damaged: bool = False,
    write: Path | None = None,
    leave_out: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> Inspection:
    """Reads a folder of sites; with `write`, and unless there are errors, an experiment file is written as well.

    Of tables, `label` names the column to be predicted, `leave_out` columns that are not used, and `categorical`
    columns whose numbers are codes. `skip_damaged` leaves out images that cannot be decoded.
    """
    if write is not None:
        check_target(write)
    kind = sites.kind_of(path)
    wishes = Own(str(path), kind, label, tuple(leave_out), tuple(categorical), skip_damaged=skip_damaged)
    found = _images(path, wishes) if kind == "images" else _tables(path, wishes)
    if write is None or found.errors:
        return found
    write_new(write, found.toml)
    return replace(found, written=write)


def check_target(path: Path) -> None:
    """Refuses to write over a file, or where there is no folder."""
    if os.path.lexists(path):
        raise BadInput(f"{path}: is there already, and is not written over: choose another name, or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}: make it first")


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there yet, whole or not at all."""
    check_target(path)
    try:
        write_atomically(path, text.encode())
    except RunFailed as error:
        raise BadInput(f"{path}: cannot be written ({error.__cause__}): choose another place") from error
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: not written, since the path of the data is not UTF-8: give it another name") from error


# ---- images


def _images(path: Path, wishes: Own) -> Inspection:
    listing = sites.image_sites(path)
    known, damaged = _described(listing)
    samples = {site: sample for site, sample in _samples(listing, known).items() if sample.labels}
    settings = _image_settings(wishes, [*known.values()])
    sides = divisions(samples, settings.test_fraction, settings.seed)
    findings = [
        *_damage(damaged, wishes.skip_damaged),
        *_empty(listing, samples),
        *_copies(path, listing, known),
        *_misplaced(path, listing.ignored),
        *_class_findings(samples, sides),
    ]
    if wishes.label is not None:
        findings.append(Finding("warning", "a label column is for tables", "the class of an image is its folder"))
    return Inspection(
        path, "images", (*listing.files,), samples, sides, _image_facts(known, listing), tuple(findings), settings
    )


def _described(listing: ImageSites) -> tuple[dict[Path, Described], dict[Path, str]]:
    """What each image is, and what is wrong with those that cannot be decoded."""
    known, damaged = {}, {}
    for path in (path for classes in listing.files.values() for paths in classes.values() for path in paths):
        try:
            known[path] = sites.described(path)
        except BadInput as error:
            damaged[path] = str(error)
    return known, damaged


def _samples(listing: ImageSites, known: Mapping[Path, Described]) -> dict[str, Sample]:
    samples = {}
    for site, classes in listing.files.items():
        rows = [(name, known[path].digest) for name, paths in classes.items() for path in paths if path in known]
        samples[site] = Sample(tuple(name for name, _ in rows), tuple(digest for _, digest in rows))
    return samples


def _image_settings(wishes: Own, images: Sequence[Described]) -> Own:
    side = median_low([min(image.size) for image in images]) if images else SIDES[0]
    pixels = max([known for known in SIDES if known <= side], default=SIDES[0])
    channels: Literal[1, 3] = 1 if all(image.mode in GREY for image in images) else 3
    model: Literal["small_cnn", "cnn3"] = "small_cnn" if pixels == 28 else "cnn3"
    return replace(wishes, label=None, pixels=pixels, channels=channels, model=model)


def _image_facts(known: Mapping[Path, Described], listing: ImageSites) -> tuple[str, ...]:
    facts = []
    if known:
        by_size = sorted((image.size for image in known.values()), key=lambda size: (min(size), max(size)))
        named = (("smallest", by_size[0]), ("median", by_size[(len(by_size) - 1) // 2]), ("largest", by_size[-1]))
        modes = Counter(image.mode for image in known.values())
        facts += ["sizes    " + ", ".join(f"{name} {width} × {height}" for name, (width, height) in named)]
        facts += ["modes    " + ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items()))]
    facts += [f"ignored  {_count(len(listing.ignored), 'name')}, hidden ones aside"] if listing.ignored else []
    return tuple(facts)


def _damage(damaged: Mapping[Path, str], skip_damaged: bool) -> Iterator[Finding]:
    if not damaged:
        return
    what = f"{_count(len(damaged), 'image')} cannot be decoded:{_lines([*damaged.values()])}"
    if skip_damaged:
        yield Finding("warning", what, "they are left out, since skip_damaged is set")
    else:
        yield Finding("error", what, "get them again, remove them, or leave them out with --skip-damaged")


def _empty(listing: ImageSites, samples: Mapping[str, Sample]) -> Iterator[Finding]:
    for site, classes in listing.files.items():
        if site not in samples:
            yield Finding("warning", f"{site} has no images", "it is left out; add its images, or remove the folder")
            continue
        empty = [name for name, paths in classes.items() if not paths]
        if empty:
            yield Finding("warning", f"{site} has empty class folders: {_some(empty)}", "a class needs no empty folder")


def _copies(root: Path, listing: ImageSites, known: Mapping[Path, Described]) -> Iterator[Finding]:
    """Files with the same content, by what they would spoil."""
    places: dict[str, list[tuple[str, str, Path]]] = defaultdict(list)
    for site, classes in listing.files.items():
        for name, paths in classes.items():
            for path in (path for path in paths if path in known):
                places[known[path].digest].append((site, name, path))
    groups: dict[str, list[str]] = defaultdict(list)
    for copies in (copies for copies in places.values() if len(copies) > 1):
        named = " = ".join(str(path.relative_to(root)) for _, _, path in copies)
        kind = "class" if len({name for _, name, _ in copies}) > 1 else "site"
        groups[kind if len({(site, name) for site, name, _ in copies}) > 1 else "place"].append(named)
    advice = "they are trained on, never tested"
    if groups["class"]:
        what = f"{_count(len(groups['class']), 'image')} in more than one class:{_lines(groups['class'])}"
        yield Finding("warning", what, f"keep the right one of each; as they are, {advice}")
    if groups["site"]:
        what = f"{_count(len(groups['site']), 'image')} at more than one site:{_lines(groups['site'])}"
        yield Finding("warning", what, f"find out whose they are and remove the others; as they are, {advice}")
    if groups["place"]:
        what = f"{_count(len(groups['place']), 'image')} more than once in a class:{_lines(groups['place'])}"
        yield Finding("warning", what, "remove the copies; as they are, all copies are trained on, or all tested")


def _misplaced(root: Path, ignored: Sequence[Path]) -> Iterator[Finding]:
    folders = [path for path in ignored if path.is_dir()]
    tables = [path for path in ignored if path.suffix.lower() in sites.TABLE_SUFFIXES and path not in folders]
    images = [path for path in ignored if path.suffix.lower() in SUFFIXES and path not in folders]
    others = [path for path in ignored if path not in {*folders, *tables, *images}]
    for paths, what, advice in (
        (images, "images outside of class folders", "put them into folder/site/class/ if they are examples"),
        (folders, "folders inside class folders", "put their images into the class folder itself"),
        (tables, "tables among the images", "they are not read; put them into a folder of their own to use them"),
        (others, "files of other kinds", f"only {', '.join(sorted(SUFFIXES))} are read; export others as PNG or TIFF"),
    ):
        if paths:
            yield Finding("warning", f"{what}:{_lines([str(path.relative_to(root)) for path in paths])}", advice)


# ---- tables


def _tables(path: Path, wishes: Own) -> Inspection:
    tables, faults = sites.read_tables(path)
    findings = [Finding("error", fault) for fault in (*faults, *sites.column_faults(tables, wishes.leave_out))]
    findings += _unknown_columns(tables, wishes)
    names = [name for name in _common(tables) if name != wishes.label and name not in wishes.leave_out]
    columns = [_column(tables, name, wishes.categorical) for name in names]
    rows, label_findings = _labelled(tables, wishes.label)
    samples = {site: sample_of(own) for site, own in rows.items()}
    settings = _table_settings(wishes, columns)
    sides = divisions(samples, settings.test_fraction, settings.seed)
    findings += [*label_findings, *(finding for column in columns for finding in column.findings)]
    findings += [*_same_tables(tables), *_same_rows(tables), *_beside(path)]
    findings += _class_findings(samples, sides) if samples else []
    if tables and all(column.is_left_out for column in columns):
        findings.append(
            Finding("error", "no column is left to learn from", "give the sites columns that tell something")
        )
    facts = _column_facts(columns)
    return Inspection(path, "tables", (*tables,), samples, sides, facts, tuple(findings), settings)


@dataclass(frozen=True)
class Column:
    """What a column holds over all sites."""

    name: str
    kind: Kind
    missing: float
    """Share of all cells."""
    holds: str
    """Its range, or its categories."""
    findings: tuple[Finding, ...]
    is_left_out: bool
    is_code: bool
    """Whether its numbers and words are to be read as categories."""


def _column(tables: Mapping[str, Table], name: str, categorical: Sequence[str]) -> Column:
    cells = [cell for table in tables.values() for cell in table.column(name)]
    there = [cell for cell in cells if cell is not None]
    kinds, faults = sites.kinds_of(tables, [name], categorical)
    written = sites.plain_number if kinds[name] == "numeric" else sites.code
    values = sites.in_order(written(cell) for cell in there)
    reason = None if name in faults else _useless(tables, name, kinds[name], values)
    is_code = name in faults and len(values) <= MOST_CODES
    findings = [*_absences(tables, name)] if there else []
    if reason is not None:
        findings.append(Finding("warning", f"column {name!r} {reason}", "it is left out (leave_out in the file)"))
    elif is_code:
        findings.append(Finding("warning", faults[name], "the file that is written says categorical"))
    elif name in faults:
        findings.append(Finding("error", faults[name]))
    elif kinds[name] == "numeric":
        findings += _beyond_numbers(tables, name)
    missing = 1 - len(there) / len(cells)
    return Column(name, kinds[name], missing, _holds(values, kinds[name]), tuple(findings), reason is not None, is_code)


def _useless(tables: Mapping[str, Table], name: str, kind: Kind, values: Sequence[str]) -> str | None:
    """Why a column cannot help, if so."""
    if len(values) < 2:
        return f"has the same value everywhere, {values[0][:40]!r}" if values else "is empty"
    by_site = [[cell for cell in table.column(name) if cell is not None] for table in tables.values()]
    count, distinct = sum(len(cells) for cells in by_site), sum(len(set(cells)) for cells in by_site)
    if kind == "numeric":
        is_counted = distinct == count >= FEW and all(_is_running(cells) for cells in by_site if cells)
        is_named = LIKELY_IDENTIFIER.search(name) is not None and distinct == count >= FEW
        return "looks like an identifier: every row of a site has another value" if is_counted or is_named else None
    if count >= FEW and distinct > 0.9 * count:
        return "looks like an identifier, a date or free text: nearly every row of a site has another value"
    if len(values) > MOST_CATEGORIES:
        return f"has {len(values)} different words, the most is {MOST_CATEGORIES}; group them to use it"
    return None


def _is_running(cells: Sequence[str]) -> bool:
    """Whether different numbers are a count without gaps."""
    numbers = [float(cell) for cell in cells]
    return all(number.is_integer() for number in numbers) and max(numbers) - min(numbers) == len(numbers) - 1


def _holds(values: Sequence[str], kind: Kind) -> str:
    if not values:
        return "nothing"
    if kind == "numeric":
        counted = f" ({len(values)} different)" if len(values) <= FEW else ""
        return f"{values[0]} to {values[-1]}{counted}"
    more = f", … ({len(values)} in all)" if len(values) > 5 else ""
    return ", ".join(value[:20] for value in values[:5]) + more


def _beyond_numbers(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    for table in tables.values():
        try:
            table.numbers(name)
        except BadInput as error:
            yield Finding("error", str(error))


def _absences(tables: Mapping[str, Table], name: str) -> Iterator[Finding]:
    empty = [site for site, table in tables.items() if all(cell is None for cell in table.column(name))]
    if empty:
        what = f"column {name!r} has no value at {_some(empty)}"
        yield Finding(
            "warning", what, "it is read as missing there, which tells a network the site; consider leave_out"
        )


def _labelled(tables: Mapping[str, Table], label: str | None) -> tuple[dict[str, LabelledRows], list[Finding]]:
    """The rows that have a label, none if something is wrong with it; and what there is to say of it."""
    if not tables:
        return {}, []
    if label is None:
        candidates = "; or ".join(_candidates(tables)) or "no column that there is: none has a few values that repeat"
        what = f"which column is the label? It could be {candidates}"
        return {}, [Finding("error", what, "say --label COLUMN")]
    try:
        faults = sites.label_faults(tables, label)
    except BadInput as error:
        return {}, [Finding("error", str(error), "say --label COLUMN, with a column that every site has")]
    if faults:
        return {}, [Finding("error", fault) for fault in faults]
    rows = sites.labelled(tables, label)
    return rows, [*_unlabelled(rows)]


def _unknown_columns(tables: Mapping[str, Table], wishes: Own) -> Iterator[Finding]:
    known = {name for table in tables.values() for name in table.columns}
    for name in (*wishes.leave_out, *wishes.categorical):
        if tables and name not in known:
            yield Finding(
                "error", f"there is no column {name!r} to leave out or to read as codes", "look at its spelling"
            )


def _candidates(tables: Mapping[str, Table]) -> list[str]:
    """Columns with a few values that repeat, the likeliest names first, each with its values."""
    found = []
    for name in _common(tables):
        cells = [cell for table in tables.values() for cell in table.column(name) if cell is not None]
        values = sites.in_order(cells)
        if 2 <= len(values) <= MOST_CODES and len(values) * 2 <= len(cells):
            found.append((LIKELY_LABEL.search(name) is None, f"{name!r} ({_holds(values, 'categorical')})"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])[:NAMED]]


def _unlabelled(rows: Mapping[str, LabelledRows]) -> Iterator[Finding]:
    lines = [f"{site}: {own.dropped} of {own.dropped + len(own.labels)}" for site, own in rows.items() if own.dropped]
    if lines:
        yield Finding("warning", f"rows without a label:{_lines(lines)}", "they are left out")


def _table_settings(wishes: Own, columns: Sequence[Column]) -> Own:
    leave_out = [column.name for column in columns if column.is_left_out]
    codes = [column.name for column in columns if column.is_code]
    return replace(
        wishes, model="mlp", leave_out=(*wishes.leave_out, *leave_out), categorical=(*wishes.categorical, *codes)
    )


def _same_tables(tables: Mapping[str, Table]) -> Iterator[Finding]:
    """Sites that gave the same file."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for table in tables.values():
        with open(table.source, "rb") as file:
            by_digest[hashlib.file_digest(file, "sha256").hexdigest()].append(table.source)
    for sources in by_digest.values():
        if len(sources) > 1:
            yield Finding("error", f"the same file at several sites: {' = '.join(sources)}", "keep one of them")


def _same_rows(tables: Mapping[str, Table]) -> Iterator[Finding]:
    names = _common(tables)
    seen = Counter(
        row for table in tables.values() for row in zip(*(table.column(name) for name in names), strict=True)
    )
    copies = sum(count - 1 for count in seen.values())
    if copies:
        what = f"{_count(copies, 'row')} repeat another row in every column"
        yield Finding("warning", what, "remove them if they are the same people: one could be learnt, the other tested")


def _beside(path: Path) -> Iterator[Finding]:
    ignored = [name.name for name in sites.ignored_beside_tables(path)]
    if ignored:
        what = f"not read, since they are no tables:{_lines(ignored)}"
        yield Finding("warning", what, "export what holds data as CSV or Parquet, one file for each site")


def _common(tables: Mapping[str, Table]) -> list[str]:
    """The columns that every site has, in the first one's order."""
    first = next(iter(tables.values()), None)
    names = [] if first is None else [*first.columns]
    return [name for name in names if all(name in table.columns for table in tables.values())]


def _column_facts(columns: Sequence[Column]) -> tuple[str, ...]:
    if not columns:
        return ()
    rows = [(column.name, column.kind, f"{column.missing:.0%}", column.holds) for column in columns]
    return tuple(_aligned([("column", "kind", "missing", "values"), *rows], right=(2,)))


# ---- both


def _class_findings(samples: Mapping[str, Sample], sides: Mapping[str, Sides]) -> Iterator[Finding]:
    classes = _classes(samples)
    if not samples:
        yield Finding("error", "there is nothing left to learn from", "see above why")
        return
    if len(classes) == 1:
        yield Finding("error", f"all examples are of class {classes[0]!r}", "there must be two classes to tell apart")
    if not any(len(own.test) for own in sides.values()):
        yield Finding("error", "no site has an example for testing", "add examples, or remove copies")
        return
    if len(samples) == 1:
        yield Finding(
            "warning", "there is one site only", "a federation has two or more: give each its own folder or file"
        )
    yield from _variants(classes)
    yield from _scarcities(samples, sides)
    never = untested(samples, sides)
    if never:
        yield Finding("warning", f"no site can test {_some(never)}", "accuracies will not tell of it; add examples")


def _variants(classes: Sequence[str]) -> Iterator[Finding]:
    """Classes that a person would take for one."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        alike[re.sub(r"[\s_-]+", "", name).casefold() or name].append(name)
    for names in alike.values():
        if len(names) > 1:
            what = f"these classes differ in case or spaces only: {', '.join(map(repr, names))}"
            yield Finding("warning", what, "if they are one class, spell it alike at every site")


def _scarcities(samples: Mapping[str, Sample], sides: Mapping[str, Sides]) -> Iterator[Finding]:
    """Of which there is little or nothing, and where."""
    classes, counts = _classes(samples), {site: Counter(sample.labels) for site, sample in samples.items()}
    absent = {site: [name for name in classes if name not in own] for site, own in counts.items()}
    single = {site: [name for name in classes if own[name] == 1] for site, own in counts.items()}
    for lacking, what, advice in (
        (
            absent,
            "classes that a site does not have",
            "fine, if it has no such examples; otherwise look at the spelling",
        ),
        (single, "classes with a single example at a site", "it is trained on, and never tested there"),
    ):
        lines = [f"{site}: {_some(names)}" for site, names in lacking.items() if names]
        if lines:
            yield Finding("warning", f"{what}:{_lines(lines)}", advice)
    few = [
        f"{site}: {own.total()}, {len(sides[site].test)} of them for testing"
        for site, own in counts.items()
        if own.total() < FEW
    ]
    if few:
        yield Finding("warning", f"sites with fewer than {FEW} examples:{_lines(few)}", "their accuracy says little")


def _classes(samples: Mapping[str, Sample]) -> tuple[str, ...]:
    return sites.in_order(label for sample in samples.values() for label in sample.labels)


def _grid(samples: Mapping[str, Sample], sides: Mapping[str, Sides]) -> str:
    """How many examples of each class each site has; if classes are many, they go down and sites across."""
    classes, counts = _classes(samples), {site: Counter(sample.labels) for site, sample in samples.items()}
    ends = ("all", "train", "test")
    rows = [("", *classes, *ends)]
    for site, own in counts.items():
        parts = (own.total(), len(sides[site].train), len(sides[site].test))
        rows.append((site, *(str(own[name]) for name in classes), *map(str, parts)))
    if len(classes) + len(ends) > MOST_COLUMNS:
        rows = [*zip(*rows, strict=True)]
    left_out = len(rows[0]) - 1 - MOST_COLUMNS
    lines = _aligned([row[: MOST_COLUMNS + 1] for row in rows], right=range(1, MOST_COLUMNS + 1))
    return "\n".join([*lines, *([f"… and {left_out} more columns"] if left_out > 0 else [])])


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines, their cells below each other."""
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            blank + cell if k in right else cell + blank
            for k, (cell, blank) in enumerate(zip(row, blanks, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _numbered(severity: Severity, findings: Sequence[Finding]) -> str:
    lines = [f"{severity}s: {len(findings)}"]
    for number, finding in enumerate(findings, 1):
        lines += [f"{number:3}. {finding.what}", *([f"     → {finding.advice}"] if finding.advice else [])]
    return "\n".join(lines)


def _lines(names: Sequence[str]) -> str:
    """The first few, each on a line of its own, and how many more there are."""
    more = [f"… and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return "".join(f"\n       {name}" for name in [*names[:NAMED], *more])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _printable(text: str) -> str:
    """Names may hold characters that command a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


# ---- the experiment


def _experiment(settings: Own, sides: Mapping[str, Sides]) -> str:
    sizes = [len(own.train) for own in sides.values()]
    batch = max([size for size in BATCHES if size <= median_low(sizes)], default=BATCHES[0])
    specific = _image_lines(settings) if settings.kind == "images" else _table_lines(settings)
    lines = [
        "# Written by `protofed data inspect`. Run it with `protofed run` and the name of this file.",
        "# Every line may be changed; `protofed methods NAME` tells what the settings of a method are.",
        "",
        "[task]",
        'name = "own"',
        "# The folder with the sites; a relative path starts at the folder in which the run is started.",
        f"path = {_quoted(settings.path)}",
        f"kind = {_quoted(settings.kind)}",
        *specific,
        "# The share of each class at each site that is kept for testing, and the seed that draws it.",
        f"test_fraction = {settings.test_fraction}",
        f"seed = {settings.seed}",
        "",
        "[method]",
        "# FPL is made for sites whose data differ. To compare: fedavg shares weights only, local shares nothing.",
        'name = "fpl"',
        "",
        "[training]",
        "# How often the server and the sites exchange what they have learnt.",
        "rounds = 20",
        "# Passes of each site over its own data between two exchanges.",
        f"epochs = {2 if settings.kind == 'images' else 5}",
        "# Examples in one step of training: the fewer, the more steps.",
        f"batch_size = {batch}",
        "# Another seed gives another run: compare methods over several.",
        "seed = 0",
        "# How large the steps are: lower lr if accuracies jump or fall.",
        'optimizer = { name = "sgd", lr = 0.01, momentum = 0.9, weight_decay = 1e-5 }',
        "",
    ]
    return "\n".join(lines)


def _image_lines(settings: Own) -> list[str]:
    return [
        "# Images are scaled to so many pixels a side; more show finer details, and take longer.",
        f"pixels = {settings.pixels}",
        "# 3 for colours, 1 for grey.",
        f"channels = {settings.channels}",
        "# Whether files that cannot be decoded are left out; otherwise they end the run.",
        f"skip_damaged = {'true' if settings.skip_damaged else 'false'}",
        "# The network: small_cnn for 28 pixels; cnn2, cnn3 or resnet10, from small to large, for any size.",
        f"model = {_quoted(settings.model or '')}",
    ]


def _table_lines(settings: Own) -> list[str]:
    return [
        "# The column that is to be predicted; rows without a value there are left out.",
        f"label = {_quoted(settings.label or '')}",
        "# Columns that are not used: those that look like identifiers, are constant, or have too many words.",
        f"leave_out = [{', '.join(_quoted(name) for name in settings.leave_out)}]",
        "# Columns whose numbers are codes, not amounts, such as a ward or a device.",
        f"categorical = [{', '.join(_quoted(name) for name in settings.categorical)}]",
        "# The network: one hidden layer.",
        f"model = {_quoted(settings.model or '')}",
    ]


def _quoted(text: str) -> str:
    """As TOML writes it; JSON leaves one control character as it is that TOML does not allow."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
