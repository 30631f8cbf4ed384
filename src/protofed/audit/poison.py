"""Attacks × rules × numbers of attackers, on the settings of a run: what each rule is worth, and what it costs."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from statistics import fmean
from typing import Any

from protofed import tree
from protofed.api.roles import PerClass, Prototype, Weights, roles
from protofed.api.task import ClientId, Task
from protofed.audit.attacks import ATTACKS, TRIGGER, Attack, Own
from protofed.engine.federation import Federation
from protofed.engine.private import Private
from protofed.errors import BadInput, RunFailed
from protofed.runs.config.config import Config
from protofed.runs.loading import SavedRun
from protofed.runs.runner import Experiment, execute
from protofed.runtimes.jobs import Answer, Job
from protofed.runtimes.sequential import Sequential
from protofed.transforms.chain import UploadSettings
from protofed.transforms.robust_stage import RobustSettings
from protofed.transforms.stage import Stage

WEIGHT_RULES = ("mean", "clip", "trimmed", "median", "geometric", "nnm_trimmed")
"""`clip` is uploads.clip = "median", the others are robust.weights."""
PROTOTYPE_RULES = ("none", "gate", "clip", "median", "filter")
"""`gate` is uploads.max_prototype_ratio = 10, the others are robust.prototypes."""
REACH = 10.0


class Poisoned(Sequential):
    """Some clients lie, and know what all others send."""

    def __init__(self, bad: Sequence[ClientId], attack: Attack) -> None:
        super().__init__()
        self._bad, self._attack = bad, attack

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[str, Any]]:
        asked = list(jobs)
        outcomes = dict(super().run(asked))
        sent = [
            Own(job.client, job.message, outcome.upload)
            for job in asked
            if job.ticket.phase != "evaluate" and isinstance(outcome := outcomes[job.client], Answer)
        ]
        for own in sent:
            answer = outcomes[own.client]
            if own.client in self._bad and isinstance(answer, Answer):
                outcomes[own.client] = replace(answer, upload=self._attack.lie(own, sent))
        yield from outcomes.items()


@dataclass(frozen=True)
class Cell:
    """What came of one run under attack."""

    attack: str
    what: str
    """What the rule is for: `weights` or `prototypes`."""
    rule: str
    attackers: int
    """Without an attack: how many the rule was set for, 0 if it does not ask."""
    seed: int
    accuracy: float | None
    """The mean over the domains after the last round; None if the run failed."""
    success: float | None = None
    """Of a back-door: the share of examples with the trigger that are taken for the target."""


@dataclass(frozen=True)
class Wanted:
    """Which cells of the table are measured."""

    attacks: Sequence[str] = ()
    """Empty: all that the method's uploads allow."""
    rules: Sequence[str] = ()
    attackers: Sequence[int] = (1, 2)
    seeds: Sequence[int] = ()
    """Empty: the run's own."""
    rounds: int = 0
    """0: as many as the run had."""


def campaign(run: SavedRun, wanted: Wanted, tell: Callable[[str], None] = lambda what: None) -> list[Cell]:
    """Trains the run's settings anew under every attack, with every rule. `none` is measured with each rule's setting
    for so many attackers, and without any: what the rule costs."""
    task, config, kinds = run.federation.task, run.config, _kinds(run)
    _refuse_unfit(run, wanted, kinds)
    names = wanted.attacks or [name for name, attack in ATTACKS.items() if attack.what in ("", *kinds)]
    pairs = [(name, what) for name in names for what in kinds if ATTACKS[name].what in ("", what)]
    found: dict[tuple[Any, ...], Cell] = {}
    for (attack, what), attackers, seed in product(pairs, wanted.attackers, wanted.seeds or (config.training.seed,)):
        for rule in [r for r in RULES[what] if not wanted.rules or r in wanted.rules]:
            is_same = attack == "none" and is_fixed(what, rule)
            key = (attack, what, rule, 0 if is_same else attackers, seed)
            if key not in found:
                cell = measured(config, task, attack, what, rule, attackers, seed, wanted.rounds)
                found[key] = replace(cell, attackers=key[3])
                tell(said(cell))
    return [*found.values()]


RULES = {"weights": WEIGHT_RULES, "prototypes": PROTOTYPE_RULES}


def is_fixed(what: str, rule: str) -> bool:
    """Whether a rule is the same for any number of bad clients."""
    return rule in ("mean", "none", "gate") or (what, rule) == ("weights", "clip")


def measured(
    config: Config, task: Task, attack: str, what: str, rule: str, attackers: int, seed: int, rounds: int = 0,
    stages: Sequence[Stage] = (),
) -> Cell:  # fmt: skip
    """One cell. `stages` stand behind those of the rule."""
    one, bad = ATTACKS[attack], attackers_of(task, attackers) if attack != "none" else ()
    uploads, robust = settings_of(config, what, rule, attackers)
    training = replace(
        config.training,
        rounds=rounds or config.training.rounds,
        seed=seed,
        weighting="uniform",
        minimum_replies=max(config.training.minimum_replies, 2 * attackers + 1, ceil(len(task.clients) / 2)),
        on_divergence="skip",
    )
    pipeline = uploads.pipeline(robust)
    federation = Federation(
        config.method, one.spoiled(task, bad), training, Poisoned(bad, one),
        uploads=replace(pipeline, stages=(*pipeline.stages, *stages)),
        private=private_of(config),
    )  # fmt: skip
    try:
        with without_warnings():
            result = execute(Experiment(federation, evaluate_every=training.rounds, threads=config.runtime.threads))
    except RunFailed:
        return Cell(attack, what, rule, attackers, seed, None)
    of_domains = result.accuracy("last")
    success = of_domains.pop(TRIGGER, None)
    return Cell(attack, what, rule, attackers, seed, fmean(of_domains.values()), success)


def private_of(config: Config) -> Private | None:
    """A run that is trained anew has the noise of the run's settings, and an account of its own."""
    return Private(config.privacy) if config.privacy.is_on else None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Attacks make clients diverge and uploads be refused: that is what is measured."""
    log = logging.getLogger("protofed")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def settings_of(config: Config, what: str, rule: str, faulty: int) -> tuple[UploadSettings, RobustSettings]:
    """The run's settings of uploads, with no rule but this one."""
    own = replace(config.uploads, clip="none", max_prototype_ratio=0.0, max_update_ratio=0.0)
    if what == "weights" and rule == "clip":
        return replace(own, clip="median"), RobustSettings()
    if rule == "gate":
        return replace(own, max_prototype_ratio=REACH), RobustSettings()
    if rule in ("mean", "none"):
        return own, RobustSettings()
    weights, prototypes = (rule, "mean") if what == "weights" else ("mean", rule)
    return own, RobustSettings(faulty, weights, prototypes)  # type: ignore[arg-type]


def attackers_of(task: Task, count: int) -> tuple[ClientId, ...]:
    """Clients of different domains in turn, in the order of names."""
    by_domain: dict[str, list[ClientId]] = {}
    for client in sorted(task.clients):
        by_domain.setdefault(task.domain_of.get(client, ""), []).append(client)
    turns = [own[k] for k in range(max(map(len, by_domain.values()))) for own in by_domain.values() if k < len(own)]
    return tuple(turns[:count])


def _kinds(run: SavedRun) -> list[str]:
    """What the run's method sends that an attack can spoil."""
    federation = run.federation
    like = federation.method.upload_spec(federation.initial_server, federation.server_context(0, "load"))
    found = roles(like).values()
    shared = any(isinstance(role, PerClass) and role.is_shared for role in found)
    has_weights = any(isinstance(role, Weights) for role in found) and bool(tree.named_leaves(like))
    return ["weights"] * has_weights + ["prototypes"] * (shared and any(isinstance(r, Prototype) for r in found))


def _refuse_unfit(run: SavedRun, wanted: Wanted, kinds: Sequence[str]) -> None:
    task, where = run.federation.task, run.folder.path
    if not task.has_data:
        raise BadInput(f"{where}: the data are not at hand: its task was made in Python, so give it from Python")
    if run.config.secure.sums:
        raise BadInput(f"{where}: rules need single uploads, and secure.sums = true gives their sums alone")
    if not task.tests:
        raise BadInput(f"{where}: task {task.name} has no test sets at the server, by which rules are compared")
    if not kinds:
        raise BadInput(f"{where}: its method sends neither weights nor prototypes for others, so no rule applies")
    unknown = [name for name in wanted.attacks if name not in ATTACKS]
    if unknown:
        raise BadInput(f"--attack {unknown[0]!r} is unknown; the attacks are {', '.join(map(repr, ATTACKS))}")
    for name in wanted.attacks:
        if ATTACKS[name].what not in ("", *kinds):
            raise BadInput(f"--attack {name!r} spoils {ATTACKS[name].what}, which the run's method does not send")
    known = [rule for kind in kinds for rule in RULES[kind]]
    if wrong := [rule for rule in wanted.rules if rule not in known]:
        raise BadInput(f"--rule {wrong[0]!r} is none of {', '.join(map(repr, dict.fromkeys(known)))}")
    most = (len(task.clients) - 1) // 2
    if any(not 1 <= count <= most for count in wanted.attackers):
        raise BadInput(f"--attackers: of {len(task.clients)} clients 1 to {most} can be bad, so that rules apply")


def said(cell: Cell) -> str:
    accuracy = "failed" if cell.accuracy is None else f"{cell.accuracy:.1%}"
    success = "" if cell.success is None else f", success {cell.success:.0%}"
    return f"{cell.attack}, {cell.attackers} bad, {cell.rule} of {cell.what}, seed {cell.seed}: {accuracy}{success}"
