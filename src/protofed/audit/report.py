"""An audit of a finished run, as numbers, as text and as pictures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.audit import labels, membership, prototypes
from protofed.audit.labels import Labels
from protofed.audit.membership import Attack
from protofed.audit.pictures import prototype_bars, roc_curves
from protofed.audit.prototypes import FEW, Records, Told
from protofed.audit.replay import Replay, replayed
from protofed.audit.statistics import Share
from protofed.errors import BadInput
from protofed.metrics.bootstrap import Interval
from protofed.printable import one_line
from protofed.reports.figures import save_figure
from protofed.runs.loading import SavedRun
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import environment

REPORT, NUMBERS = "report.md", "audit.json"


@dataclass(frozen=True)
class Audit:
    run: SavedRun
    replay: Replay
    attacks: Sequence[Attack]
    labels: Labels
    records: Records
    told: Sequence[Told]
    min_owners: int
    notes: Sequence[str]
    """Why something was not tried."""


def audit(run: SavedRun, min_owners: int = 2, tell: Callable[[str], None] = lambda what: None) -> Audit:
    """What the uploads of a run's last round tell an attacker."""
    tell("replaying the last round")
    replay = replayed(run)
    if not any(one.is_of_round and tree.leaves(one.upload) for one in replay.sent):
        raise BadInput(f"{run.folder.path}: its clients send nothing in a round, so there is nothing to audit")
    tell("membership")
    attacks, notes = membership.attacks(replay)
    tell("labels and prototypes")
    told = prototypes.broadcast(replay, min_owners)
    return Audit(run, replay, attacks, labels.labels(replay), prototypes.records(replay), told, min_owners, notes)


def write(audit: Audit, folder: Path) -> list[Path]:
    """Report, numbers and pictures in a folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, shown = [], []
    if audit.attacks:
        paths.append(folder / "membership.png")
        save_figure(roc_curves(audit.attacks), paths[-1], grows=True)
        shown.append("![ROC curves of the attacks](membership.png)")
    if audit.records.behind:
        paths.append(folder / "prototypes.png")
        save_figure(prototype_bars(audit.records), paths[-1], grows=True)
        shown.append("![Prototypes by the number of examples behind them](prototypes.png)")
    paths += [folder / REPORT, folder / NUMBERS]
    write_atomically(folder / REPORT, "\n\n".join([*markdown(audit), *shown, ""]).encode())
    write_atomically(folder / NUMBERS, (json.dumps(facts(audit), indent=2) + "\n").encode())
    return paths


# ---- numbers


def facts(audit: Audit) -> dict[str, Any]:
    """All numbers of the report."""
    replay, config = audit.replay, audit.run.config
    return {
        "run": audit.run.folder.path.name,
        "method": method_of(audit),
        "task": replay.federation.task.name,
        "seed": config.training.seed,
        "rounds": audit.run.rounds[-1].round,
        "replay": {"kind": replay.kind, "difference": replay.difference},
        "environment": {k: environment()[k] for k in ("protofed", "commit", "torch", "processor")},
        "membership": [_attack(one) for one in audit.attacks],
        "labels": {
            "correlation": audit.labels.correlation,
            "interval": _interval(audit.labels.interval),
            "presence_auc": audit.labels.presence,
            "presence_interval": _interval(audit.labels.presence_interval),
            "clients": len(audit.labels.readings),
            "counts_are_sent": audit.labels.counts_are_sent,
        },
        "prototypes": {
            "sent": len(audit.records.behind),
            "of_one": audit.records.of_one,
            f"of_fewer_than_{FEW}": audit.records.of_few,
            "are_bounds": audit.records.are_bounds,
        },
        "broadcast": {
            "min_owners": audit.min_owners,
            "classes": [{"class": t.label, "owners": list(t.owners), "others_told": t.others} for t in audit.told],
        },
        "notes": list(audit.notes),
    }


def method_of(audit: Audit) -> str:
    name: str = audit.run.config.resolved()["method"]["name"]
    return name


def _attack(one: Attack) -> dict[str, Any]:
    sizes = [(len(members), len(others)) for members, others in one.pairs.values()]
    return {
        "kind": one.kind,
        "needs": one.needs,
        "auc": one.auc,
        "interval": _interval(one.interval),
        "found": {f"{rate:g}": _share(share) for rate, share in one.found.items()},
        "clients": len(sizes),
        "members": sum(members for members, _ in sizes),
        "others": sum(others for _, others in sizes),
        "is_same_source": one.is_same_source,
        "of_clients": one.of_clients,
    }


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _share(share: Share | None) -> dict[str, Any] | None:
    return None if share is None else {"value": share.value, "interval": _interval(share.interval)}


# ---- text


def markdown(audit: Audit) -> list[str]:
    """The report, paragraph by paragraph."""
    config, replay = audit.run.config, audit.replay
    title = f"# Audit of {method_of(audit)} on {one_line(replay.federation.task.name)}"
    about = (
        f"Run `{one_line(audit.run.folder.path.name)}`, seed {config.training.seed}, "
        f"{len(replay.federation.ids)} clients, round {audit.run.rounds[-1].round}. {_replay(replay)}"
    )
    software = environment()
    where = f"protofed {software['protofed']}, commit {software['commit']}, torch {software['torch']}."
    return [
        title,
        f"{about} {where}",
        *_membership(audit),
        *_labels(audit.labels),
        *_records(audit),
        *_broadcast(audit),
    ]


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


def _membership(audit: Audit) -> list[str]:
    found = ["## Was an example trained on?"]
    if not audit.attacks and not audit.notes:
        found.append("What is sent is neither weights nor prototypes, so no attack was tried.")
    if audit.attacks:
        found.append(
            "The attacker has one upload and asks of an example whether its client trained on it. AUC: the chance that "
            "a member scores higher than another example; .5 is guessing. Found at 1 % and 5 %: the share of members "
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
            "If that comes from another source, an attack may tell sources apart, and these numbers are too high."
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
            f"{about}. Correlation with the true numbers of examples: {_with(found.correlation, found.interval)}. 1 "
            "means that the server reads the proportions of the classes."
        )
    if found.presence is None:
        text.append("Every client has every class, so there is no presence to read.")
    else:
        text.append(
            f"AUC of telling a client's classes from those that it lacks: "
            f"{_with(found.presence, found.presence_interval)}."
        )
    return text


def _records(audit: Audit) -> list[str]:
    found, text = audit.records, ["## Prototypes of few examples"]
    total = len(found.behind)
    if not total:
        return [*text, "No prototypes are sent."]
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


def _broadcast(audit: Audit) -> list[str]:
    text = ["## Classes that few clients have"]
    if not audit.records.behind:
        return [*text, "No prototypes are sent."]
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


def _with(value: float, interval: Interval | None) -> str:
    return f"{value:.3f}" + (f" ({interval.low:.3f} to {interval.high:.3f})" if interval else " (too few clients)")


def _percent(share: Share | None) -> str:
    if share is None:
        return "too few others"
    return f"{share.value:.1%} ({share.interval.low:.1%} to {share.interval.high:.1%})"


def _counts(one: Attack) -> list[str]:
    numbers = _attack(one)
    return [str(numbers[key]) for key in ("members", "others", "clients")]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
