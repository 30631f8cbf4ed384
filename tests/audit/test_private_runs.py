"""Audits of runs under differential privacy: the account once more, and what attacks are left with."""

import json
import shutil
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm

import protofed
from privacy.private_runs import task_of
from protofed import BadInput, PrivacySettings, Sgd, Task
from protofed.audit.canaries import canary_audit
from protofed.audit.ledger import account
from protofed.audit.replay import replayed
from protofed.audit.report import audit, facts
from protofed.runs.loading import SavedRun, open_run
from protofed.seeds import generator
from protofed.tasks.minidigits import Minidigits

TASK = task_of()


def run(folder: Path, noise: str = "simulated", task: Task = TASK, epsilon: float = 5.0, **settings: Any) -> SavedRun:
    privacy = PrivacySettings("record", epsilon=epsilon, noise=noise)  # type: ignore[arg-type]
    chosen = {"rounds": 3, "epochs": 2, "batch_size": 8, "runtime": "sequential", **settings}
    protofed.run("fedavg", task, folder=folder, privacy=privacy, **chosen)
    return open_run(folder, task=task)


@pytest.fixture(scope="module", params=["simulated", "secret"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return run(tmp_path_factory.mktemp("private") / "run", request.param)


def delta_at(epsilon: float, mu: float) -> float:
    """Written out once more: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def test_the_account_is_what_the_lines_of_the_ledger_add_up_to(saved: SavedRun) -> None:
    """With secret noise what was sent is read again, bit for bit, and no line is added."""
    ledger = saved.folder.path / "privacy" / "ledger.jsonl"
    before = ledger.read_bytes()
    replay = replayed(saved)
    found = account(saved, replay)
    assert found is not None
    assert (replay.kind, found.missing, ledger.read_bytes()) == ("exact", [], before)
    lines = [json.loads(line) for line in before.decode().splitlines()]
    assert found.lines == len(lines) == 3 * 3
    for client, epsilon in found.spent.items():
        mu = sum(line["cost"] for line in lines if line["client"] == client) ** 0.5
        assert delta_at(epsilon, mu) == pytest.approx(found.settings.delta, rel=1e-6)
    assert found.epsilon == pytest.approx(5.0, rel=1e-6)
    assert found.epsilon <= found.settings.epsilon


def test_an_upload_that_the_ledger_does_not_have_is_named(saved: SavedRun, tmp_path: Path) -> None:
    shutil.copytree(saved.folder.path, tmp_path / "run")
    ledger = tmp_path / "run" / "privacy" / "ledger.jsonl"
    kept = [line for line in ledger.read_text().splitlines() if json.loads(line)["round"] < 2]
    ledger.write_text("\n".join([*kept, ""]))
    found = facts(audit(open_run(tmp_path / "run", task=TASK)))["privacy"]
    assert found["not_in_ledger"] == ["c0", "c1", "c2"]
    assert found["epsilon"] < 5
    ledger.unlink()
    with pytest.raises(BadInput, match="nothing says what this private run has released"):
        audit(open_run(tmp_path / "run", task=TASK))


def test_a_private_run_does_not_train_once_more(saved: SavedRun, tmp_path: Path) -> None:
    shutil.copytree(saved.folder.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "000002")
    with pytest.raises(BadInput, match="would release more than its ε"):
        replayed(open_run(tmp_path / "run", task=TASK))


def test_canaries_are_trained_on_with_the_run_s_noise(tmp_path: Path) -> None:
    found = canary_audit(run(tmp_path / "run", epsilon=0.5, rounds=1), 24)
    assert found.delta == 1e-5
    assert all(one.epsilon <= 0.5 for one in found.found.values())


# ---- on minidigits


def half_held_out() -> Task:
    task = Minidigits(norm="group").build()
    train, tests = {}, {}
    for client, data in task.clients.items():
        order = torch.randperm(len(data), generator=generator(0, "half", client))
        train[client], tests[client] = (data.rows(rows) for rows in order.chunk(2))
    return replace(task, clients=train, local_tests=tests, name="half")


@pytest.mark.slow
def test_attacks_on_a_private_run_are_near_chance_and_on_a_plain_one_are_not(tmp_path: Path) -> None:
    """T20, with the control."""
    task, settings = half_held_out(), {"rounds": 5, "epochs": 3, "optimizer": Sgd(lr=0.05, momentum=0.9)}
    private = audit(run(tmp_path / "private", "secret", task, 1.0, **settings))
    for attack in private.attacks:
        assert attack.interval is not None
        assert attack.auc <= 0.58 + (attack.interval.high - attack.interval.low) / 2
    protofed.run("fedavg", task, folder=tmp_path / "plain", runtime="sequential", **settings)
    plain = audit(open_run(tmp_path / "plain", task=task))
    assert max(attack.auc for attack in plain.attacks) >= 0.60
