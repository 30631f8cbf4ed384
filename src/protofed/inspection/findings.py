"""Findings about the user's data, and those about classes, which images and tables have in common."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from protofed.datasets import sites
from protofed.inspection.text import listed, number_of, some
from protofed.tasks.custom import SiteExamples, SplitRows, groups_at_several_sites, untested_classes

Severity = Literal["error", "warning"]

UNBALANCED = 5
"""How many times as frequent as the rarest class the most frequent one of a site may be without a warning."""
FEW = 10
"""With fewer examples, the accuracy of a site says little."""


@dataclass(frozen=True)
class Finding:
    """A problem in the data, and what to do about it. With an error, nothing can run."""

    severity: Severity
    what: str
    advice: str = ""


def class_findings(examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows]) -> Iterator[Finding]:
    classes = classes_of(examples)
    if not examples:
        yield Finding("error", "there is nothing left to learn from", "see the other errors and warnings")
        return
    if len(classes) == 1:
        yield Finding("error", f"all examples are of class {classes[0]!r}", "at least two classes are needed")
    yield from _shared_groups(examples)
    if not any(len(site_rows.test) for site_rows in rows.values()):
        yield Finding("error", "no site has an example for testing", "add examples, or remove copies")
        return
    if len(examples) == 1:
        yield Finding(
            "warning", "there is only one site", "a federation has two or more; give each its own folder or file"
        )
    yield from _variants(classes)
    yield from _unbalanced(examples)
    yield from _scarcities(examples, rows)
    untested = untested_classes(examples, rows)
    if untested:
        yield Finding("warning", f"no site can test {some(untested)}", "no accuracy covers it; add examples")


def is_unbalanced(examples: Mapping[str, SiteExamples]) -> bool:
    return any(_imbalance(site_examples) is not None for site_examples in examples.values())


def _imbalance(examples: SiteExamples) -> str | None:
    """The most frequent and the rarest class of a site, if they differ much."""
    ordered = Counter(examples.labels).most_common()
    (most, many), (least, few) = ordered[0], ordered[-1]
    return f"{many} of class {most!r}, {few} of class {least!r}" if many >= UNBALANCED * few else None


def _unbalanced(examples: Mapping[str, SiteExamples]) -> Iterator[Finding]:
    found = {site: _imbalance(site_examples) for site, site_examples in examples.items()}
    lines = [f"{site}: {what}" for site, what in found.items() if what]
    if lines:
        yield Finding(
            "warning",
            f"classes that are much rarer than others:{listed(lines)}",
            "the written file repeats their examples in training (balance); judge by the balanced accuracy",
        )


def _shared_groups(examples: Mapping[str, SiteExamples]) -> Iterator[Finding]:
    shared = groups_at_several_sites(examples)
    if shared:
        lines = [f"{group}: {', '.join(names)}" for group, names in shared.items()]
        yield Finding(
            "warning",
            f"{number_of(len(shared), 'group')} (patients) at more than one site:{listed(lines)}",
            "they are used for training, never for testing; make sure that sites do not give the same name to others",
        )


def _variants(classes: Sequence[str]) -> Iterator[Finding]:
    """Classes whose names look like two spellings of one name."""
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        spellings[re.sub(r"[\s_-]+", "", name).casefold() or name].append(name)
    for names in spellings.values():
        if len(names) > 1:
            what = f"these classes differ only in case or spaces: {', '.join(map(repr, names))}"
            yield Finding("warning", what, "if they are one class, use one spelling at every site")


def _scarcities(examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows]) -> Iterator[Finding]:
    """Classes and sites with few examples or none."""
    classes = classes_of(examples)
    counts = {site: Counter(site_examples.labels) for site, site_examples in examples.items()}
    absent = {site: [name for name in classes if name not in count] for site, count in counts.items()}
    single = {site: [name for name in classes if count[name] == 1] for site, count in counts.items()}
    for by_site, what, advice in (
        (
            absent,
            "classes that a site does not have",
            "fine if the site has no such examples; otherwise check the spelling",
        ),
        (single, "classes with a single example at a site", "it is used for training, so it is never tested there"),
    ):
        lines = [f"{site}: {some(names)}" for site, names in by_site.items() if names]
        if lines:
            yield Finding("warning", f"{what}:{listed(lines)}", advice)
    few = [
        f"{site}: {count.total()}, {len(rows[site].test)} of them for testing"
        for site, count in counts.items()
        if count.total() < FEW
    ]
    if few:
        yield Finding("warning", f"sites with fewer than {FEW} examples:{listed(few)}", "their accuracy says little")


def classes_of(examples: Mapping[str, SiteExamples]) -> tuple[str, ...]:
    return sites.sorted_classes(label for site_examples in examples.values() for label in site_examples.labels)
