"""An audit of a finished run, as numbers, as text and as pictures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.audit import labels, membership, prototypes
from protofed.audit.labels import Labels
from protofed.audit.ledger import Account, account
from protofed.audit.membership import Attack
from protofed.audit.pictures import prototype_bars, roc_curves
from protofed.audit.prototypes import FEW, Records, Told
from protofed.audit.replay import Replay, replayed
from protofed.audit.statistics import Share
from protofed.audit.wording import markdown
from protofed.errors import BadInput
from protofed.metrics.bootstrap import Interval
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
    account: Account | None = None
    """Of a private run."""

    @property
    def method(self) -> str:
        name: str = self.run.config.resolved()["method"]["name"]
        return name


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
    read, behind, spent = labels.labels(replay), prototypes.records(replay), account(run, replay)
    return Audit(run, replay, attacks, read, behind, told, min_owners, notes, spent)


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
        "method": audit.method,
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
        "privacy": None if audit.account is None else _spent(audit.account),
        "notes": list(audit.notes),
    }


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


def _spent(own: Account) -> dict[str, Any]:
    return {
        "epsilon": own.epsilon,
        "promised": own.settings.epsilon,
        "delta": own.settings.delta,
        "noise": own.settings.noise,
        "lines": own.lines,
        "of_clients": dict(own.spent),
        "not_in_ledger": list(own.missing),
    }


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _share(share: Share | None) -> dict[str, Any] | None:
    return None if share is None else {"value": share.value, "interval": _interval(share.interval)}
