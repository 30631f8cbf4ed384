"""What was found in a folder, as a page to read and as an experiment."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofed.datasets import sites
from protofed.errors import BadInput
from protofed.inspection.experiment import experiment
from protofed.inspection.findings import Finding, Severity, classes_of
from protofed.inspection.text import aligned, number_of, printable
from protofed.tasks.custom import Custom, SiteExamples, TrainTestRows

MAX_COLUMNS = 12
"""Of the table of sites and classes."""


@dataclass(frozen=True)
class Inspection:
    """What was found in a folder."""

    path: Path
    kind: sites.SiteKind
    sites: tuple[str, ...]
    """All that were found."""
    samples: Mapping[str, SiteExamples]
    """The usable examples of each site that has some."""
    sides: Mapping[str, TrainTestRows]
    facts: tuple[str, ...]
    """Lines about images or columns."""
    findings: tuple[Finding, ...]
    settings: Custom
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
        return printable("\n\n".join(part for part in (*parts, self._ending()) if part))

    @property
    def toml(self) -> str:
        """The experiment; refused while there are errors."""
        if self.errors:
            raise BadInput(f"{self.path}: {len(self.errors)} errors have to be settled before an experiment can run")
        return experiment(self.settings, self.sides)

    def _headline(self) -> str:
        classes, examples = classes_of(self.samples), sum(len(sample.labels) for sample in self.samples.values())
        counted = f", {number_of(len(classes), 'class')}, {number_of(examples, 'example')}" if self.samples else ""
        return f"{self.path}: {self.kind} of {number_of(len(self.sites), 'site')}{counted}"

    def _ending(self) -> str:
        if self.errors:
            return "No experiment was written: settle the errors, then inspect again."
        if self.written:
            return f"Written: {self.written}\nRun it with: protofed run {shlex.quote(str(self.written))}"
        return "Ready to run: inspect again with --write FILE for an experiment file."


def _grid(samples: Mapping[str, SiteExamples], sides: Mapping[str, TrainTestRows]) -> str:
    """How many examples of each class each site has; if classes are many, they go down and sites across."""
    classes, counts = classes_of(samples), {site: Counter(sample.labels) for site, sample in samples.items()}
    ends = ("all", "train", "test")
    rows = [("", *classes, *ends)]
    for site, own in counts.items():
        parts = (own.total(), len(sides[site].train), len(sides[site].test))
        rows.append((site, *(str(own[name]) for name in classes), *map(str, parts)))
    if len(classes) + len(ends) > MAX_COLUMNS:
        rows = [*zip(*rows, strict=True)]
    left_out = len(rows[0]) - 1 - MAX_COLUMNS
    lines = aligned([row[: MAX_COLUMNS + 1] for row in rows], right=range(1, MAX_COLUMNS + 1))
    return "\n".join([*lines, *([f"… and {left_out} more columns"] if left_out > 0 else [])])


def _numbered(severity: Severity, findings: Sequence[Finding]) -> str:
    lines = [f"{severity}s: {len(findings)}"]
    for number, finding in enumerate(findings, 1):
        lines += [f"{number:3}. {finding.what}", *([f"     → {finding.advice}"] if finding.advice else [])]
    return "\n".join(lines)
