"""What a person should know of their data; and what there is to say of classes, of images and tables alike."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from protofed.datasets import sites
from protofed.inspection.text import listed, some
from protofed.tasks.custom import SiteExamples, TrainTestRows, untested_classes

Severity = Literal["error", "warning"]

FEW = 10
"""A site with fewer examples says little."""


@dataclass(frozen=True)
class Finding:
    """Something that a person should know, and what to do about it. With an error nothing can be run."""

    severity: Severity
    what: str
    advice: str = ""


def class_findings(samples: Mapping[str, SiteExamples], sides: Mapping[str, TrainTestRows]) -> Iterator[Finding]:
    classes = classes_of(samples)
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
    never = untested_classes(samples, sides)
    if never:
        yield Finding("warning", f"no site can test {some(never)}", "accuracies will not tell of it; add examples")


def _variants(classes: Sequence[str]) -> Iterator[Finding]:
    """Classes that a person would take for one."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        alike[re.sub(r"[\s_-]+", "", name).casefold() or name].append(name)
    for names in alike.values():
        if len(names) > 1:
            what = f"these classes differ in case or spaces only: {', '.join(map(repr, names))}"
            yield Finding("warning", what, "if they are one class, spell it alike at every site")


def _scarcities(samples: Mapping[str, SiteExamples], sides: Mapping[str, TrainTestRows]) -> Iterator[Finding]:
    """Of which there is little or nothing, and where."""
    classes, counts = classes_of(samples), {site: Counter(sample.labels) for site, sample in samples.items()}
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
        lines = [f"{site}: {some(names)}" for site, names in lacking.items() if names]
        if lines:
            yield Finding("warning", f"{what}:{listed(lines)}", advice)
    few = [
        f"{site}: {own.total()}, {len(sides[site].test)} of them for testing"
        for site, own in counts.items()
        if own.total() < FEW
    ]
    if few:
        yield Finding("warning", f"sites with fewer than {FEW} examples:{listed(few)}", "their accuracy says little")


def classes_of(samples: Mapping[str, SiteExamples]) -> tuple[str, ...]:
    return sites.sorted_classes(label for sample in samples.values() for label in sample.labels)
