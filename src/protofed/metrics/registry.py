"""METRICS: every number that a run reports, in one place: its name, what it means, and how it is computed.

A metric belongs to a group, which says what was judged:

    domain     a model on the test set of one domain
    public     the public model on all test sets
    personal   a client's own model, right after training; reports show the mean over clients
    summary    made of the others
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np

from protofed.metrics import formulas
from protofed.metrics.formulas import Counts

Group = Literal["domain", "public", "personal", "summary"]


@dataclass(frozen=True)
class Metric:
    group: Group
    name: str
    label: str
    """The head of its column."""
    note: str
    compute: Callable[[Any], float | None]
    """Of a group's own input; None where the metric has no meaning."""
    is_shown: bool = True
    """Whether tables have a column for it; results always hold it."""

    @property
    def id(self) -> str:
        """Its name in tables and in published numbers, such as `personal.owned`; those of `summary` need no prefix."""
        return self.name if self.group == "summary" else f"{self.group}.{self.name}"


@dataclass(frozen=True)
class DomainJudgement:
    """One model on one domain's test set: the input of `domain` metrics."""

    confusion: Counts  # (C, C)
    area: float | None = None
    """Under the ROC curve, for tasks of two classes."""


@dataclass(frozen=True)
class PublicJudgement:
    """The public model: the input of `public` metrics."""

    domains: Sequence[Counts]  # (C, C) each, confusion on each domain's test set; none without a public model
    readings: Mapping[str, Sequence[Counts]] = field(default_factory=dict)
    """The same of global models that can be made of clients' own, by reading."""
    at_home: Sequence[Mapping[str, float]] = ()
    """What each client sees of the public model on its own test set, if it is that model that clients use."""

    def overall(self, formula: Callable[[Counts], float | None], reading: str = "") -> float | None:
        """A formula of the confusion on all test sets together; None if there is no such model."""
        domains = self.readings.get(reading, ()) if reading else self.domains
        return formula(np.stack([np.asarray(confusion) for confusion in domains]).sum(0)) if domains else None


@dataclass(frozen=True)
class PersonalJudgement:
    """One client's own model: the input of `personal` metrics."""

    pooled: Counts  # (C, C), confusion on all test sets together
    own: Counts  # (C, C), confusion on the client's own test set
    counts: Counts  # (C,), the client's training examples of each class


@dataclass(frozen=True)
class RoundJudgement:
    """Everything that was measured in a round: the input of `summary` metrics."""

    domains: Mapping[str, Mapping[str, float]]
    own_domains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What the clients of each domain see there, mean over them."""
    at_home: tuple[Mapping[str, float], ...] = ()
    """What each client sees on its domain's test set or, in a task without domains, on its own."""
    new: tuple[Mapping[str, float], ...] = ()
    """The same for clients that never trained."""
    public: Mapping[str, float] = field(default_factory=dict)
    personal: Mapping[str, float] = field(default_factory=dict)


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _harmonic(judged: RoundJudgement) -> float | None:
    if "accuracy" not in judged.public or "local_index" not in judged.personal:
        return None
    return formulas.harmonic_mean(judged.public["accuracy"], judged.personal["local_index"])


METRICS = (
    Metric("domain", "accuracy", "accuracy", "share of the test set that was classified right",
           lambda judged: formulas.accuracy(judged.confusion)),
    Metric("domain", "balanced_accuracy", "balanced", "mean of the classes' accuracies",
           lambda judged: formulas.balanced_accuracy(judged.confusion)),
    Metric("domain", "macro_f1", "MF1", "mean F1 of the classes that the test set has",
           lambda judged: formulas.macro_f1(judged.confusion)),
    Metric("domain", "majority_rate", "majority", "share of the most frequent class in the test set",
           lambda judged: formulas.majority_rate(judged.confusion)),
    Metric("domain", "auc", "AUC", "area under the ROC curve, for two classes", lambda judged: judged.area),
    Metric("public", "accuracy", "GM", "the public model on all test sets together",
           lambda judged: judged.overall(formulas.accuracy)),
    Metric("public", "mean_heads", "GM mean heads", "GM of the shared body under the mean of the clients' heads",
           lambda judged: judged.overall(formulas.accuracy, "mean_heads")),
    Metric("public", "nearest_prototype", "GM prototypes", "GM of the shared body with the nearest global prototype",
           lambda judged: judged.overall(formulas.accuracy, "nearest_prototype")),
    Metric("public", "initial_head", "GM initial head", "GM of the shared body under the head that clients began with",
           lambda judged: judged.overall(formulas.accuracy, "initial_head")),
    Metric("public", "balanced_accuracy", "GM balanced", "the same as GM, mean of the classes' accuracies",
           lambda judged: judged.overall(formulas.balanced_accuracy), is_shown=False),
    Metric("public", "local_index", "GM I_local", "I_local of the public model on the clients' own test sets",
           lambda judged: _mean(scores.get("local_index") for scores in judged.at_home)),
    Metric("public", "average", "GM AVG", "the public model, mean over the domains",
           lambda judged: _mean(map(formulas.accuracy, judged.domains)), is_shown=False),
    Metric("personal", "owned", "PM(V)", "own models on all test sets together, on the classes that the client has",
           lambda judged: formulas.owned_accuracy(judged.pooled, judged.counts)),
    Metric("personal", "proportional", "PM(L)", "the same, with classes weighted as in the client's data",
           lambda judged: formulas.proportional_accuracy(judged.pooled, judged.counts)),
    Metric("personal", "accuracy", "Acc", "own models on test sets with the client's own label proportions",
           lambda judged: formulas.accuracy(judged.own)),
    Metric("personal", "balanced_accuracy", "BAcc", "the same, mean of the classes' accuracies",
           lambda judged: formulas.balanced_accuracy(judged.own), is_shown=False),
    Metric("personal", "macro_f1", "MF1", "the same, mean F1 of the classes",
           lambda judged: formulas.macro_f1(judged.own)),
    Metric("personal", "local_index", "I_local", "harmonic mean of Acc and MF1",
           lambda judged: formulas.local_index(judged.own)),
    Metric("summary", "average", "AVG", "mean over the domains",
           lambda judged: _mean(scores["accuracy"] for scores in judged.domains.values())),
    Metric("summary", "own", "own", "what a client sees at home with the model that it uses, mean over clients",
           lambda judged: _mean(scores["accuracy"] for scores in judged.at_home)),
    Metric("summary", "new", "new", "the same, of clients that were held out of the training",
           lambda judged: _mean(scores["accuracy"] for scores in judged.new)),
    Metric("summary", "own_local_index", "own I_local", "I_local of what a client sees at home, mean over clients",
           lambda judged: _mean(scores.get("local_index") for scores in judged.at_home), is_shown=False),
    Metric("summary", "balanced_accuracy", "balanced", "mean over the own domains of the classes' mean accuracy",
           lambda judged: _mean(scores.get("balanced_accuracy") for scores in judged.own_domains.values())),
    Metric("summary", "macro_f1", "macro-F1", "mean over the own domains of the classes' mean F1",
           lambda judged: _mean(scores.get("macro_f1") for scores in judged.own_domains.values())),
    Metric("summary", "majority_rate", "majority", "share of the most frequent class, mean over the domains",
           lambda judged: _mean(scores["majority_rate"] for scores in judged.domains.values())),
    Metric("summary", "auc", "AUC", "area under the ROC curve on the own domain, mean over domains, for two classes",
           lambda judged: _mean(scores.get("auc") for scores in judged.own_domains.values())),
    Metric("summary", "harmonic_mean", "HM", "harmonic mean of GM and I_local", _harmonic),
)  # fmt: skip


def of_group(group: Group) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if metric.group == group)


def measured(group: Group, judged: Any) -> dict[str, float]:
    """The metrics of a group that have a meaning here, by name."""
    values = {metric.name: metric.compute(judged) for metric in of_group(group)}
    return {name: value for name, value in values.items() if value is not None}
