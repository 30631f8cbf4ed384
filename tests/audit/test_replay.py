"""Audits of runs in folders: what is replayed, what is written, and what is refused."""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from audit.replays import task_of
from protofed import BadInput, SecureSettings
from protofed.audit.replay import difference, replayed
from protofed.audit.report import audit, facts, write
from protofed.methods.families import OwnWeights
from protofed.methods.fedper import FedPer
from protofed.runs.loading import SavedRun, open_run
from protofed.runs.store import verify
from protofed.tree import Params

TASK = task_of({f"c{k}": [0, 1, 2] * (4 + k) for k in range(4)}, tests=20)


def run(folder: Path, method: str = "fpl", **settings: Any) -> SavedRun:
    chosen = {"rounds": 3, "epochs": 1, "batch_size": 8, "runtime": "sequential", **settings}
    protofed.run(method, TASK, folder=folder, **chosen)
    return open_run(folder, task=TASK)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    run(folder)
    return folder


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "scaffold", "fedpc", "ccvr"])
def test_the_last_round_is_replayed_bit_for_bit(method: str, tmp_path: Path) -> None:
    """With what clients remember, a setup before the first round, and an end after the last."""
    replay = replayed(run(tmp_path / "run", method))
    assert (replay.kind, replay.difference) == ("exact", 0)
    assert {one.where for one in replay.sent if one.is_of_round} == {"round 3"}
    assert [*next(iter(replay.uploads.values()))] == [*TASK.clients]


def test_a_run_of_several_processes_is_replayed_too(tmp_path: Path) -> None:
    assert replayed(run(tmp_path / "run", runtime="workers")).kind == "exact"


def test_a_replay_that_ends_elsewhere_is_not_called_exact(copy: Path) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("epochs = 1", "epochs = 2"))
    replay = replayed(open_run(copy, task=TASK))
    assert replay.kind == "differs"
    assert replay.difference > 0
    assert "does not end in the run's last state" in written(copy, copy / "audit")


class Restless(FedPer):
    """What its clients keep is never the same twice; in the last round nobody but them sees that."""

    def remember(self, params: Params, memory: OwnWeights) -> OwnWeights:
        kept = super().remember(params, memory)
        return OwnWeights({name: leaf + next(STEPS) for name, leaf in kept.params.items()})


STEPS = count()


def test_a_replay_after_which_clients_keep_something_else_is_not_called_exact(tmp_path: Path) -> None:
    protofed.run(Restless(), TASK, folder=tmp_path / "run", rounds=2, epochs=1, batch_size=8, runtime="sequential")
    replay = replayed(open_run(tmp_path / "run", task=TASK, method=Restless()))
    assert replay.kind == "differs"
    assert replay.difference > 1


def test_without_the_state_before_it_clients_train_once_more(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoint" / "000002")
    replay = replayed(open_run(copy, task=TASK))
    assert replay.kind == "further"
    assert difference(replay.server_after(), replay.after.server) == 0
    assert "trained once more" in written(copy, copy / "audit")


def test_differences_are_found_wherever_they_are() -> None:
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([0])}
    assert difference(a, {**a}) == 0
    assert difference(a, {**a, "y": torch.tensor([3])}) == 3
    assert difference(a, {"x": a["x"]}) == float("inf")
    assert difference(a, {**a, "x": torch.tensor([1.0])}) == float("inf")


def written(folder: Path, out: Path) -> str:
    paths = write(audit(open_run(folder, task=TASK)), out)
    assert all(path.stat().st_size > 100 for path in paths)
    return (out / "report.md").read_text(encoding="utf-8")


def test_the_report_has_text_numbers_and_pictures(done: Path, tmp_path: Path) -> None:
    text = written(done, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("report.md", "audit.json", "membership.png", "prototypes.png"),
    }
    numbers = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert numbers == json.loads(json.dumps(facts(audit(open_run(done, task=TASK)))))
    assert [one["kind"] for one in numbers["membership"]] == [
        *("weights: loss", "weights: loss drop", "prototypes: tracing"),
    ]
    assert numbers["replay"] == {"kind": "exact", "difference": 0}
    assert numbers["prototypes"] == {"sent": 12, "of_one": 0, "of_fewer_than_5": 3, "are_bounds": False}
    assert "bit for bit" in text
    assert not (done / "audit").exists(), "the run's folder is left alone"


# ---- refused


def test_a_run_that_has_not_ended_is_refused(copy: Path) -> None:
    (copy / "done").unlink()
    with pytest.raises(BadInput, match="has not ended; let it go on with --resume"):
        audit(open_run(copy, task=TASK))


def test_a_run_of_secure_sums_is_refused(tmp_path: Path) -> None:
    saved = run(tmp_path / "run", "fedavg", secure=SecureSettings(sums=True, masks=False))
    with pytest.raises(BadInput, match=r"saw sums alone \(secure.sums = true\)"):
        audit(saved)


def test_a_run_over_sites_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = verify.manifest_of
    monkeypatch.setattr(verify, "manifest_of", lambda folder, name: {**of(folder, name), "receipts": {"c0": "1"}})
    with pytest.raises(BadInput, match="at their sites"):
        audit(open_run(copy, task=TASK))


def test_a_run_whose_data_are_elsewhere_is_refused(tmp_path: Path) -> None:
    """Its task was made in Python and is not given: the folder has its outline alone."""
    task = protofed.TASKS["minidigits"]().build()
    protofed.run("fedavg", task, rounds=1, epochs=1, batch_size=256, folder=tmp_path / "run", runtime="sequential")
    with pytest.raises(BadInput, match="data are not at hand"):
        audit(open_run(tmp_path / "run"))


def test_a_method_whose_clients_send_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="send nothing"):
        audit(run(tmp_path / "run", "local"))
