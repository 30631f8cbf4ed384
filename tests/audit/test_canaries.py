"""Audits by one run: planted examples, and guesses which of them were trained on."""

from pathlib import Path

import pytest
import torch

import protofed
from audit.replays import task_of
from protofed import BadInput
from protofed.audit.canaries import canary_audit, facts, planted, write
from protofed.audit.examples import known_tests
from protofed.runs.loading import open_run

TASK = task_of({f"c{k}": [0, 1, 2] * 4 for k in range(3)})


def test_canaries_have_wrong_labels_and_half_of_them_are_in() -> None:
    spoiled, chosen = planted(TASK, 90, seed=0)
    everyone = []
    for client, own in chosen.items():
        kept = own.is_in.sum()
        assert len(own.canaries) == 30
        assert 5 <= kept <= 25
        data = spoiled.clients[client]
        assert len(data) == len(TASK.clients[client]) + kept
        added = data.rows(torch.arange(len(TASK.clients[client]), len(data)))
        is_in = torch.from_numpy(own.is_in)
        assert torch.equal(added.inputs(added.index), own.canaries.inputs(own.canaries.index)[is_in])
        assert torch.equal(added.labels, own.canaries.labels[is_in])
        everyone += map(tuple, own.canaries.inputs(own.canaries.index).tolist())
        spare = {*map(tuple, own.population.inputs(own.population.index).tolist())}
        assert not spare & {*everyone}, "what the attacker knows is no canary"
    assert len({*everyone}) == 90, "each is one client's"
    tests = known_tests(TASK, "c0")
    assert tests is not None
    true = dict(zip(map(tuple, tests.inputs(tests.index).tolist()), tests.labels.tolist(), strict=True))
    labels = torch.cat([own.canaries.labels for own in chosen.values()]).tolist()
    assert all(true[x] != label for x, label in zip(everyone, labels, strict=True))


def test_a_run_that_learns_its_canaries_by_heart_is_not_private(tmp_path: Path) -> None:
    task = task_of({f"c{k}": [0] for k in range(3)})
    protofed.run("fedavg", task, rounds=1, epochs=400, batch_size=16, folder=tmp_path / "run", runtime="sequential")
    found = canary_audit(open_run(tmp_path / "run", task=task), 90)
    loss = found.found["weights: loss"]
    assert loss.epsilon > 0.3
    assert loss.epsilon <= loss.most
    assert facts(found)["canaries"] == 90
    assert all(path.stat().st_size > 100 for path in write(found, tmp_path / "out"))


def test_a_run_that_learns_nothing_shows_nothing(tmp_path: Path) -> None:
    """The control: a learning rate at which weights keep their bits."""
    tiny = protofed.Sgd(lr=1e-30)
    protofed.run("fedavg", TASK, rounds=1, epochs=1, optimizer=tiny, folder=tmp_path / "run", runtime="sequential")
    saved = open_run(tmp_path / "run", task=TASK)
    assert canary_audit(saved, 90).found["weights: loss"].epsilon == 0
    with pytest.raises(BadInput, match="are too few to show anything"):
        canary_audit(saved, 8)
    with pytest.raises(BadInput, match="too small for so many"):
        canary_audit(saved, 150)
