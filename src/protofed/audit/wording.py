"""The report of an audit in words: each number with what it means."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protofed.audit.labels import Labels
from protofed.audit.membership import Attack
from protofed.audit.prototypes import FEW
from protofed.audit.replay import Replay
from protofed.audit.statistics import Share, pooled
from protofed.metrics.bootstrap import Interval
from protofed.printable import one_line
from protofed.runs.store.folder import environment

if TYPE_CHECKING:
    from protofed.audit.report import Audit


def markdown(audit: "Audit") -> list[str]:
    """The report, paragraph by paragraph."""
    config, replay = audit.run.config, audit.replay
    title = f"# Audit of {audit.method} on {one_line(replay.federation.task.name)}"
    about = (
        f"Run `{one_line(audit.run.folder.path.name)}`, seed {config.training.seed}, "
        f"{len(replay.federation.ids)} clients, round {audit.run.rounds[-1].round}. {_replay(replay)}"
    )
    software = environment()
    where = f"protofed {software['protofed']}, commit {software['commit']}, torch {software['torch']}."
    parts = [*_membership(audit), *_labels(audit.labels), *_records(audit), *_broadcast(audit), *_account(audit)]
    return [title, f"{about} {where}", *parts]


def _replay(replay: Replay) -> str:
    match replay.kind:
        case "exact":
            return "The round was replayed from the checkpoint before it, and ends in the run's last state bit for bit."
        case "differs":
            return (
                "The round was replayed from the checkpoint before it. **It does not end in the run's last state bit "
                f"for bit: the largest difference is {replay.difference:.2g}**, as on other hardware or software."
            )
    return (
        "**The checkpoint before the last round is not there. Clients trained once more from the last state**, with "
        "the draws of the last round: these are not uploads of the run, but those of one round more."
    )


def _membership(audit: "Audit") -> list[str]:
    found = ["## Was an example trained on?"]
    if not audit.attacks and not audit.notes:
        found.append("What is sent is neither weights nor prototypes, so no attack was tried.")
    if audit.attacks:
        found.append(
            "The attacker has one upload and asks of an example whether its client trained on it. AUC: the chance that "
            "a member scores higher than another example; 0.5 is guessing. Found at 1 % and 5 %: the share of members "
            "found by a threshold that takes so many of the others for members. AUC with the 95 % interval over "
            "clients drawn again, shares with that of Clopper and Pearson."
        )
        rows = [
            [
                one.kind,
                _with(one.auc, one.interval),
                *map(_percent, one.found.values()),
                *_counts(one),
                one.needs or "–",
            ]
            for one in audit.attacks
        ]
        columns = [
            "upload: attack",
            "AUC",
            "found at 1 %",
            "found at 5 %",
            "members",
            "others",
            "clients",
            "also needs",
        ]
        found.append(table(columns, rows))
        found.append(
            "Members and others are equally many of each class and client, so that labels and sizes say nothing."
        )
    if any(not one.is_same_source for one in audit.attacks):
        found.append(
            "**The others are from the test set of the client's domain**, since the client has no test set of its own. "
            "If that is of another source, attacks may tell sources apart and not members: then AUCs far from 0.5, "
            "above or below, say nothing of members."
        )
    return [*found, *(f"- {note}." for note in audit.notes)]


def _labels(found: Labels) -> list[str]:
    text = ["## Which classes does a client have?"]
    if found.counts_are_sent:
        text.append("The number of examples of each class is sent as it is: nobody needs to guess.")
    if not found.readings:
        return [*text, "No classifier is sent and trained, so nothing was read of one."]
    about = f"Read from how the classifier moved, of {len(found.readings)} clients"
    if found.correlation is None:
        text.append(f"{about}: no correlation, since every client has as many of each class.")
    else:
        text.append(
            f"{about}. Correlation with the true numbers of examples: {_with(found.correlation, found.interval)}, the "
            "mean over clients whose classes differ in size. 1 means that the server reads their proportions."
        )
    if found.presence is None:
        text.append("Every client has every class, so there is no presence to read.")
    else:
        text.append(
            f"AUC of telling a client's classes from those that it lacks: "
            f"{_with(found.presence, found.presence_interval)}."
        )
    return text


def _records(audit: "Audit") -> list[str]:
    found, text = audit.records, ["## Prototypes of few examples"]
    total = len(found.behind)
    if not total:
        return [*text, "No prototypes were sent in this round."]
    text.append(
        f"Of {total} prototypes that were sent, {found.of_one} ({found.of_one / total:.0%}) are the feature of one "
        f"example, and {found.of_few} ({found.of_few / total:.0%}) the mean of fewer than {FEW}. A prototype of one "
        "example is that example's feature, which can be looked at and searched for."
    )
    if found.are_bounds:
        text.append("Clients send several prototypes of a class. How many examples are behind each is at most counted.")
    if found.of_few:
        text.append("`uploads.min_class_count` keeps such prototypes at the clients.")
    return text


def _broadcast(audit: "Audit") -> list[str]:
    text = ["## Classes that few clients have"]
    if not audit.records.behind:
        return [*text, "No prototypes were sent in this round."]
    if not audit.told:
        return [*text, f"No class has fewer than {audit.min_owners} owners among the clients of the round."]
    names = audit.replay.federation.task.classes
    rows = [[one_line(names[t.label]), ", ".join(map(one_line, t.owners)), str(t.others)] for t in audit.told]
    return [
        *text,
        f"Classes of fewer than {audit.min_owners} owners, and how many clients without the class receive something "
        "that depends on the owners' prototypes. With one owner that is the owner's own prototype.",
        table(["class", "owners", "others who are told"], rows),
        "`uploads.min_owners` keeps such classes from others.",
    ]


def _account(audit: "Audit") -> list[str]:
    own, text = audit.account, ["## Differential privacy"]
    if own is None:
        return [*text, "None: nothing bounds what uploads tell."]
    s = own.settings
    text.append(
        f"Recomputed from {own.lines} lines of the ledger, the client that has released most has ε = {own.epsilon:.3f} "
        f"at δ = {s.delta:g}; promised was {s.epsilon:g}, for each {s.level}."
    )
    if own.epsilon > s.epsilon:
        text.append("**That is more than was promised.**")
    if own.missing:
        names = ", ".join(map(one_line, own.missing))
        text.append(f"**Not in the ledger are uploads of the last round, as they were replayed: {names}.**")
    else:
        text.append("Every upload of the last round is in the ledger, by its SHA-256.")
    if s.noise == "simulated":
        text.append("**SIMULATED: the noise is drawn from the run's seed. Whoever knows it can take the noise off.**")
    return text


def _with(value: float, interval: Interval | None) -> str:
    return f"{value:.3f}" + (f" ({interval.low:.3f} to {interval.high:.3f})" if interval else " (too few clients)")


def _percent(share: Share | None) -> str:
    if share is None:
        return "too few others"
    return f"{share.value:.1%} ({share.interval.low:.1%} to {share.interval.high:.1%})"


def _counts(one: Attack) -> list[str]:
    members, others = pooled([*one.pairs.values()])
    return [str(len(members)), str(len(others)), str(len(one.pairs))]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
