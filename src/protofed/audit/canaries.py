"""An audit of privacy by one training run: planted examples, a coin for each, and guesses about the coins.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023. If a run is (ε, δ)-private for
single examples, nobody guesses many coins right. So right guesses rule small ε out. They never prove that ε is small.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.api.task import ClientId, Task
from protofed.audit.examples import Examples, known_tests
from protofed.audit.membership import scores_of
from protofed.audit.poison import private_of
from protofed.audit.replay import Replay, Tap
from protofed.audit.statistics import Guessed, Scores, best_guesses
from protofed.audit.wording import table
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.errors import BadInput
from protofed.printable import one_line
from protofed.runs.loading import SavedRun
from protofed.runs.runtime_choice import pinned_threads
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import environment
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed

REPORT, NUMBERS = "canaries.md", "canaries.json"
FEWEST = 16


@dataclass(frozen=True)
class Planted:
    """The canaries of one client."""

    canaries: Data
    is_in: NDArray[np.bool_]
    """Which of them it trains on."""
    population: Data
    """Examples that are no canaries."""


@dataclass(frozen=True)
class CanaryAudit:
    run: SavedRun
    rounds: int
    canaries: int
    delta: float
    found: Mapping[str, Guessed]
    """By the kind of upload and attack."""


def planted(task: Task, count: int, seed: int) -> tuple[Task, dict[ClientId, Planted]]:
    """The task with canaries: test images with wrong labels, as many for each client, in by the toss of a coin."""
    share, chosen, clients = count // len(task.clients), dict[ClientId, Planted](), {}
    used: dict[str, int] = {}
    for client, data in task.clients.items():
        draws = np.random.default_rng(derive_seed(seed, "canaries", client))
        tests, domain = known_tests(task, client), task.domain_of.get(client, "")
        if tests is None:
            raise BadInput(f"task {task.name}: canaries are made of test examples, and there are none at the server")
        first = used.get(domain, 0)
        used[domain] = first + share
        order = np.random.default_rng(derive_seed(seed, "canaries of", domain)).permutation(len(tests))
        mine, rest = order[first : first + share], order[_most(task, domain, share) :]
        if len(mine) < share or len(rest) < 2 * task.num_classes:
            raise BadInput(f"--canaries: the test set of {client} is too small for so many; ask for fewer")
        canaries = tests.rows(torch.from_numpy(mine))
        wrong = (canaries.labels + torch.from_numpy(draws.integers(1, task.num_classes, share))) % task.num_classes
        canaries = Data.of(canaries.inputs(canaries.index), wrong)
        is_in = draws.random(share) < 0.5
        kept = canaries.rows(torch.from_numpy(np.flatnonzero(is_in)))
        inputs = torch.cat([data.inputs(data.index), kept.inputs(kept.index)])
        clients[client] = Data.of(inputs, torch.cat([data.labels, kept.labels]))
        chosen[client] = Planted(canaries, is_in, tests.rows(torch.from_numpy(rest)))
    return replace(task, clients=clients), chosen


def _most(task: Task, domain: str, share: int) -> int:
    """Where the test examples begin that are no client's canaries."""
    return share * sum(task.domain_of.get(client, "") == domain for client in task.clients)


def canary_audit(
    run: SavedRun, count: int, rounds: int = 0, tell: Callable[[str], None] = lambda what: None
) -> CanaryAudit:
    """Trains the run's settings once, with canaries, and guesses from the uploads of the last round."""
    config, task = run.config, run.federation.task
    if not task.has_data:
        raise BadInput(f"{run.folder.path}: the data are not at hand: its task was made in Python")
    if config.secure.sums:
        raise BadInput(f"{run.folder.path}: guesses need single uploads, and secure.sums = true gives their sums alone")
    if count < max(FEWEST, len(task.clients)):
        raise BadInput(f"--canaries: {count} are too few to show anything; take some hundred")
    training = replace(config.training, rounds=rounds or config.training.rounds)
    spoiled, chosen = planted(task, count, training.seed)
    tap = Tap()
    uploads = replace(config.pipeline, stages=(tap, *config.pipeline.stages))
    private = private_of(config)
    federation = Federation(config.method, spoiled, training, Sequential(), uploads=uploads, private=private)
    with pinned_threads(config.runtime.threads):
        state = before = federation.start()
        while state.round < training.rounds:
            tell(f"training with canaries: round {state.round + 1} of {training.rounds}")
            tap.sent.clear()
            before, state = state, federation.advance(state)
        scores = _scores(Replay(federation, before, state, list(tap.sent), "exact"), chosen)
    if not scores:
        raise BadInput(f"{run.folder.path}: its uploads hold neither whole weights nor prototypes to guess from")
    delta = config.privacy.delta if config.privacy.is_on else 0.0
    found = {kind: best_guesses(values, is_in, delta) for kind, (values, is_in) in scores.items()}
    return CanaryAudit(run, training.rounds, sum(len(one.is_in) for one in chosen.values()), delta, found)


def _scores(replay: Replay, chosen: Mapping[ClientId, Planted]) -> dict[str, tuple[Scores, NDArray[np.bool_]]]:
    """The scores of all canaries whose client took part in the last round, by attack, and which of them were in."""
    parts: dict[str, list[tuple[Scores, NDArray[np.bool_]]]] = {}
    for call in replay.uploads.values():
        for client, sent in call.items():
            own = chosen[client]
            examples = Examples(own.canaries, own.canaries, own.population, is_same_source=True)
            with replay.federation.runtime.open(replay.federation):
                for kind, _, score in scores_of(replay, sent, examples, {}):
                    values = np.nan_to_num(score(own.canaries), nan=0.0)
                    parts.setdefault(kind, []).append((values, own.is_in))
    return {kind: (_joined([v for v, _ in own]), _joined([i for _, i in own])) for kind, own in parts.items()}


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts)


# ---- report


def facts(found: CanaryAudit) -> dict[str, Any]:
    return {
        "run": found.run.folder.path.name,
        "rounds": found.rounds,
        "seed": found.run.config.training.seed,
        "canaries": found.canaries,
        "delta": found.delta,
        "environment": {k: environment()[k] for k in ("protofed", "commit", "torch", "processor")},
        "found": {kind: asdict(one) for kind, one in found.found.items()},
    }


def markdown(found: CanaryAudit) -> list[str]:
    rows = [
        [kind, f"{one.epsilon:.2f}", f"{one.right} of {one.guesses}", f"{one.most:.2f}"]
        for kind, one in found.found.items()
    ]
    config, software = found.run.config, environment()
    claim = f"The run claims ε = {config.privacy.epsilon:g}. " if config.privacy.is_on else ""
    return [
        f"# Canaries in {config.resolved()['method']['name']}, {one_line(found.run.federation.task.name)}",
        f"{found.canaries} test images with wrong labels were planted, half of them trained on, in one run of "
        f"{found.rounds} round{'s' if found.rounds > 1 else ''} with seed {config.training.seed}. protofed "
        f"{software['protofed']}, commit {software['commit']}, torch {software['torch']}.",
        table(["guessed from", "ε is at least", "guesses right", "at most provable"], rows),
        f"{claim}Each line holds with 95 % confidence, for δ = {found.delta:g}. The bound is "
        "from below: a small number does not show that the run is private. The last column is what the bound would "
        "be with every guess right. It grows with the logarithm of the number of canaries, so that a claim of an ε "
        "above it cannot be refuted by this audit.",
    ]


def write(found: CanaryAudit, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / REPORT, folder / NUMBERS]
    write_atomically(paths[0], "\n\n".join([*markdown(found), ""]).encode())
    write_atomically(paths[1], (json.dumps(facts(found), indent=2) + "\n").encode())
    return paths
