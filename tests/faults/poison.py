"""Attacks by plausible lies × robust rules, on minidigits: python tests/faults/poison.py [--attackers 1 2]

Clients of different domains are bad. What they send passes every check of a single upload.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from protofed import METHODS, TASKS, RobustSettings, RunFailed, Sgd, Task, UploadSettings
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.runs.runner import Experiment, execute
from protofed.runtimes.base import Answer, Job
from protofed.runtimes.sequential import Sequential
from protofed.transforms.stage import Exchange
from protofed.tree import Tree, named_leaves, with_leaves

ROUNDS, EPOCHS, BATCH = 8, 2, 32
RATES = {"fedavg": 0.03, "fpl": 0.01}  # FPL does not learn with more
BAD = ("street-0", "print-1", "pen-0", "ink-1")
"""The first f of them are bad: of different domains and sizes."""


@dataclass(frozen=True)
class Sent:
    """What a client of a round received and what it honestly made of it."""

    client: str
    message: Tree
    upload: Tree


Lie = Callable[[Sent, list[Sent]], Tree]


def away(factor: float) -> Lie:
    """The client's update, times a negative number."""

    def lie(own: Sent, everyone: list[Sent]) -> Tree:
        received = {path.rpartition("/")[2]: leaf for path, leaf in named_leaves(own.message).items()}

        def turned(path: str, leaf: torch.Tensor) -> torch.Tensor:
            name = path.rpartition("/")[2]
            if name not in received or name.endswith("running_var"):  # a negative variance is refused by itself
                return leaf
            return received[name] + factor * (leaf - received[name])

        return changed(own.upload, turned)

    return lie


def little(own: Sent, everyone: list[Sent]) -> Tree:
    """A little is enough (ALIE): the mean of all less their deviation, which no distance gives away."""
    uploads = [named_leaves(sent.upload) for sent in everyone]

    def hidden(path: str, leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point() or path.startswith("prototypes") or path.endswith("running_var"):
            return leaf
        all_sent = torch.stack([upload[path] for upload in uploads]).double()
        return (all_sent.mean(0) - all_sent.std(0)).to(leaf.dtype)

    return changed(own.upload, hidden)


def prototypes_times(factor: float) -> Lie:
    def lie(own: Sent, everyone: list[Sent]) -> Tree:
        return changed(own.upload, lambda path, leaf: leaf * factor if path == "prototypes/mean" else leaf)

    return lie


def honest(own: Sent, everyone: list[Sent]) -> Tree:
    return own.upload


def changed(upload: Tree, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Tree:
    return with_leaves(upload, [change(path, leaf) for path, leaf in named_leaves(upload).items()])


LIES: dict[str, Lie] = {
    "none": honest,
    "-1 x update": away(-1),
    "-10 x update": away(-10),
    "labels + 1": honest,  # on data whose labels are wrong
    "ALIE, z = 1": little,
    "prototypes x 100": prototypes_times(100),
    "prototypes x -5": prototypes_times(-5),
}


class Poisoned(Sequential):
    """Some clients lie, and know what all others send."""

    def __init__(self, bad: tuple[str, ...], lie: Lie) -> None:
        super().__init__()
        self.bad, self.lie = bad, lie

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[str, Any]]:
        asked = list(jobs)
        outcomes = dict(super().run(asked))
        sent = [
            Sent(job.client, job.message, outcome.upload)
            for job in asked
            if isinstance(outcome := outcomes[job.client], Answer)
        ]
        for own in sent:
            if own.client in self.bad and hasattr(own.upload, "params"):  # not an evaluation
                outcomes[own.client] = replace(outcomes[own.client], upload=self.lie(own, sent))
        yield from outcomes.items()


class Krum:
    """The upload whose nearest neighbours are nearest, under every name: a control, which protofed does not offer."""

    def __init__(self, faulty: int) -> None:
        self.faulty = faulty

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        return None

    def cleaned(self, uploads: Iterable[tuple[str, Tree]], exchange: Exchange) -> Iterator[tuple[str, Tree]]:
        accepted = list(uploads)
        rows = torch.stack([torch.cat([w.flatten() for w in upload.params.values()]) for _, upload in accepted])
        near = torch.cdist(rows.double(), rows.double()).square().sort(1).values[:, 1 : len(rows) - self.faulty - 1]
        chosen = accepted[int(near.sum(1).argmin())][1]
        yield from ((client, chosen) for client, _ in accepted)


@cache
def minidigits() -> Task:
    task = TASKS["minidigits"]().build()
    assert set(BAD) <= set(task.clients), sorted(task.clients)
    return task


def mislabelled(task: Task, bad: tuple[str, ...]) -> Task:
    clients = {
        client: replace(data, y=(data.y + 1) % task.num_classes) if client in bad else data
        for client, data in task.clients.items()
    }
    return replace(task, clients=clients)


def accuracy(
    method: str, attack: str, attackers: int, robust: RobustSettings, seed: int = 0, ratio: float = 10.0,
    krum: bool = False, rounds: int = ROUNDS,
) -> float | None:  # fmt: skip
    """Per cent, the mean over domains after the last round; None if the run failed."""
    bad = BAD[:attackers] if attack != "none" else ()
    task = mislabelled(minidigits(), bad) if attack == "labels + 1" else minidigits()
    training = Training(
        rounds=rounds, epochs=EPOCHS, batch_size=BATCH, seed=seed, optimizer=Sgd(lr=RATES[method], momentum=0.9),
        weighting="uniform", minimum_replies=9, on_divergence="skip",
    )  # fmt: skip
    uploads = UploadSettings(max_prototype_ratio=ratio).pipeline(robust)
    uploads = replace(uploads, stages=(*uploads.stages, *([Krum(attackers)] if krum else [])))
    federation = Federation(METHODS[method](), task, training, Poisoned(bad, LIES[attack]), uploads=uploads)
    try:
        result = execute(Experiment(federation, evaluate_every=rounds))
    except RunFailed:
        return None
    return 100 * fmean(result.accuracy("last").values())


RULES = ("mean", "trimmed", "median", "geometric", "nnm_trimmed")
PROTOTYPE_RULES = ("no gate", "gate", "clip", "median", "filter")


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy under attack, by rule.")
    parser.add_argument("--attackers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--attacks", nargs="+", default=[*LIES])
    parser.add_argument("--rules", nargs="+", default=[*RULES, "Krum", *PROTOTYPE_RULES])
    wanted = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    for attack in wanted.attacks:
        for attackers in wanted.attackers:
            of_prototypes = attack.startswith("prototypes")
            cells: dict[str, list[float | None]] = {}
            rules = PROTOTYPE_RULES if of_prototypes else (*RULES, "Krum") if attack == "none" else RULES
            for rule in [rule for rule in rules if rule in wanted.rules]:
                cells[rule] = [_cell(attack, attackers, rule, seed, of_prototypes) for seed in wanted.seeds]
            shown = ", ".join(f"{rule} {_shown(found)}" for rule, found in cells.items())
            print(f"{attack}, {attackers} of 12: {shown} ({time.monotonic() - begin:.0f} s)", flush=True)
    return 0


def _cell(attack: str, attackers: int, rule: Any, seed: int, of_prototypes: bool) -> float | None:
    if of_prototypes:
        is_rule = rule in ("clip", "median", "filter")
        robust = RobustSettings(attackers, "mean", rule) if is_rule else RobustSettings()
        return accuracy("fpl", attack, attackers, robust, seed, 10.0 if rule == "gate" else 0.0)
    is_rule = rule not in ("mean", "Krum")
    robust = RobustSettings(attackers, rule, "mean") if is_rule else RobustSettings()
    return accuracy("fedavg", attack, attackers, robust, seed, krum=rule == "Krum")


def _shown(found: list[float | None]) -> str:
    good = [one for one in found if one is not None]
    failed = f" ({len(found) - len(good)} failed)" if len(good) < len(found) else ""
    return (f"{fmean(good):.0f}" if good else "fails") + (failed if good else "")


if __name__ == "__main__":
    sys.exit(main())
