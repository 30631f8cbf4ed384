"""The result of an inspection, as a page of text and as an experiment file."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protofed.datasets import sites
from protofed.errors import BadInput
from protofed.inspection.experiment import experiment
from protofed.inspection.findings import Finding, Severity, classes_of
from protofed.inspection.text import aligned, number_of
from protofed.printable import one_line, printable
from protofed.tasks.custom import Custom, SiteExamples, SplitRows

MAX_COLUMNS = 12
"""In the table of sites and classes."""


@dataclass(frozen=True)
class Inspection:
    """The result of inspecting a folder."""

    path: Path
    kind: sites.SiteKind
    sites: tuple[str, ...]
    """All sites of the folder."""
    examples: Mapping[str, SiteExamples]
    """The usable examples of each site that has any."""
    rows: Mapping[str, SplitRows]
    """The training and test rows of each site."""
    facts: tuple[str, ...]
    """Lines about images or columns."""
    findings: tuple[Finding, ...]
    settings: Custom
    """Settings of the task that reads this folder."""
    written: Path | None = None
    seconds: float | None = None
    """How long the written file will take on this machine, about."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def text(self) -> str:
        """The page of text."""
        table = [_grid(self.examples, self.rows), _majority_note(self.examples)] if self.examples else []
        parts = [self._headline(), *table, "\n".join(self.facts)]
        for severity in ("error", "warning"):
            selected = [finding for finding in self.findings if finding.severity == severity]
            parts += [_numbered(severity, selected)] if selected else []
        return printable("\n\n".join(part for part in (*parts, self._ending()) if part))

    @property
    def json(self) -> dict[str, Any]:
        """The same as the page of text, for programs."""
        counts = {site: Counter(site_examples.labels) for site, site_examples in self.examples.items()}
        return {
            "path": str(self.path),
            "kind": self.kind,
            "classes": list(classes_of(self.examples)) if self.examples else [],
            "sites": {
                site: {
                    "examples": counts[site].total() if site in counts else 0,
                    "train": len(self.rows[site].train) if site in self.rows else 0,
                    "test": len(self.rows[site].test) if site in self.rows else 0,
                    "classes": dict(sorted(counts[site].items())) if site in counts else {},
                }
                for site in self.sites
            },
            "facts": list(self.facts),
            "findings": [asdict(finding) for finding in self.findings],
            "ready": not self.errors,
            "written": None if self.written is None else str(self.written),
        }

    @property
    def toml(self) -> str:
        """The experiment file. Refused while there are errors."""
        if self.errors:
            raise BadInput(
                f"{self.path}: {number_of(len(self.errors), 'error')} to correct before an experiment can run"
            )
        return experiment(self.settings, self.rows)

    def _headline(self) -> str:
        headline = f"{self.path}: {self.kind} of {number_of(len(self.sites), 'site')}"
        if not self.examples:
            return headline
        num_examples = sum(len(site_examples.labels) for site_examples in self.examples.values())
        return f"{headline}, {number_of(len(classes_of(self.examples)), 'class')}, {number_of(num_examples, 'example')}"

    def _ending(self) -> str:
        if self.errors:
            return "No experiment was written: correct the errors, then inspect again."
        if self.written:
            time = "" if self.seconds is None else f"\nIt takes {about(self.seconds)} on this machine."
            return f"Written: {self.written}\nRun it with: protofed compare {shlex.quote(str(self.written))}{time}"
        return "Ready to run: add --write FILE to get an experiment file."


def _grid(examples: Mapping[str, SiteExamples], rows: Mapping[str, SplitRows]) -> str:
    """Number of examples of each class at each site. If there are many classes, they are the lines of the table."""
    classes = classes_of(examples)
    counts = {site: Counter(site_examples.labels) for site, site_examples in examples.items()}
    has_validation = any(len(site_rows.validation) for site_rows in rows.values())
    totals = ("all", "train", *(["validation"] if has_validation else []), "test", "majority")
    lines = [("", *map(one_line, classes), *totals)]
    for site, count in counts.items():
        parts = (rows[site].train, *([rows[site].validation] if has_validation else []), rows[site].test)
        sizes = (count.total(), *map(len, parts))
        lines.append(
            (one_line(site), *(str(count[name]) for name in classes), *map(str, sizes), f"{_majority(count)[1]:.0%}")
        )
    if len(classes) + len(totals) > MAX_COLUMNS:
        lines = [*zip(*lines, strict=True)]
    hidden = len(lines[0]) - 1 - MAX_COLUMNS
    text = aligned([line[: MAX_COLUMNS + 1] for line in lines], right=range(1, MAX_COLUMNS + 1))
    return "\n".join([*text, *([f"… and {hidden} more columns"] if hidden > 0 else [])])


def about(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return "about a minute" if seconds > 30 else "less than a minute"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.0f} hours"


def _majority_note(examples: Mapping[str, SiteExamples]) -> str:
    """What the column `majority` means, and its value over all sites."""
    name, share = _majority(Counter(label for site_examples in examples.values() for label in site_examples.labels))
    return (
        "majority is the share of the most frequent class; "
        f"over all sites, {share:.0%} of the examples are of class {name!r}.\n"
        "A network that always predicts this class reaches that accuracy: look at the balanced accuracy as well."
    )


def _majority(count: Counter[str]) -> tuple[str, float]:
    """The most frequent class, and its share of the examples. Of equally frequent classes, the first by name."""
    name = max(sorted(count), key=count.__getitem__)
    return name, count[name] / count.total()


def _numbered(severity: Severity, findings: Sequence[Finding]) -> str:
    lines = [f"{severity}s: {len(findings)}"]
    for number, finding in enumerate(findings, 1):
        lines += [f"{number:3}. {finding.what}", *([f"     → {finding.advice}"] if finding.advice else [])]
    return "\n".join(lines)
