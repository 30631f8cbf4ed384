"""`protofed compare --ray` on real clusters of this machine. Needs the extra `ray`; CONTRIBUTING says how to run it."""

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clocks import PATIENCE, wait_for
from protofed import BadInput
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.remote import job, versions
from protofed.runs.store.folder import RunFolder

pytest.importorskip("ray", reason="needs ray: pip install 'protofed[ray]'")

from ray.exceptions import WorkerCrashedError

from protofed.runs import ray_sweep
from protofed.runs.ray_sweep import RETRIES, RaySweep, _Tasks

KILL_ME_WITH_MY_PARENT = 1  # PR_SET_PDEATHSIG
COMPARISON = """
seeds = {seeds}
[common.training]
rounds = {rounds}
epochs = 1
[tasks.digits.task]
name = "minidigits"
"""
METHODS = '[methods.FedAvg.method]\nname = "fedavg"\n[methods.FPL.method]\nname = "fpl"\n'


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(KILL_ME_WITH_MY_PARENT, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Cluster:
    """Nodes of one core each, on addresses of the loopback. All that they write is below one folder. They end with
    this process, and nobody without their token can use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address, self.client = f"127.0.0.2:{free_port()}", f"ray://127.0.0.2:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "COLUMNS": "120",
            "TERM": "dumb",
        }

    def add(self) -> None:
        """Starts a node; the first one is the head."""
        number = len(self.nodes)
        here = ["--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false"]
        here += [f"--ray-client-server-port={self.client.rpartition(':')[2]}"]
        place = [f"--address={self.address}"] if number else here
        place += [f"--node-ip-address=127.0.0.{2 + number}"]
        size = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        self.temporary(number).mkdir()
        with (self.folder / f"node-{number}.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *size],
                env={**self.environment, "TMPDIR": str(self.temporary(number))},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.nodes.append(node)
        wait_for(lambda: node.poll() is not None or b"until terminated" in self.log(number))
        assert node.poll() is None, self.log(number).decode()

    def log(self, number: int) -> bytes:
        return (self.folder / f"node-{number}.log").read_bytes()

    def client_logs(self) -> str:
        """What Ray says of drivers that come by ray://."""
        return "\n".join(path.read_text() for path in self.folder.glob("ray/session_2*/logs/ray_client_server*.err"))

    def temporary(self, number: int) -> Path:
        return self.folder / f"t{number}"

    def kill(self, number: int) -> None:
        """As if the machine were gone: the node's own processes die with the one that started them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def processes(self) -> list[int]:
        """All that work below the folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def started(self, *words: object) -> "subprocess.Popen[str]":
        """The command, on this cluster."""
        command = [sys.executable, "-m", "protofed.cli.app", *map(str, words)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as name:  # paths of sockets are short
        one = Cluster(Path(name))
        try:
            one.add()
            yield one
        finally:
            for number in range(len(one.nodes)):
                one.kill(number)
            wait_for(lambda: not one.processes())
    shutil.rmtree(name, ignore_errors=True)


def numbers(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What each finished run has found, without how long it took."""
    return {
        path.parent.name: [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in (path.parent / "rounds.jsonl").read_text().splitlines()
        ]
        for path in out.glob("*/done")
    }


def states(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


def scores(printed: str) -> Any:
    """What --json prints, without how long it took."""
    return json.loads(printed, object_hook=lambda one: {k: v for k, v in one.items() if "seconds" not in k})["digits"]


@pytest.mark.slow
def test_every_run_is_there_once_although_a_node_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(COMPARISON.format(seeds=[0, 1, 2, 3, 4, 5], rounds=2) + METHODS)
    words = ("compare", tmp_path / "c.toml", "--json", "--out")
    plain = cluster.started(*words, tmp_path / "plain", "--jobs", 2)
    plain_printed, complaint = plain.communicate(timeout=PATIENCE)
    assert plain.returncode == 0, complaint
    cluster.add()
    running = cluster.started(*words, tmp_path / "ray", "--ray", cluster.address)
    wait_for(lambda: running.poll() is not None or list(cluster.temporary(1).glob("protofed-*/run/checkpoint/000001")))
    assert running.poll() is None
    assert len(numbers(tmp_path / "ray")) < 12
    cluster.kill(1)  # in the middle of a run
    printed, complaint = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, complaint
    assert "it begins again, time 1 of 3" in " ".join(complaint.split())
    assert len(numbers(tmp_path / "plain")) == 12
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "plain")
    assert states(tmp_path / "ray") == states(tmp_path / "plain")
    assert scores(printed) == scores(plain_printed)
    assert [len(rows) for rows in scores(printed).values()] == [6, 6]


MINE = """
from dataclasses import dataclass
from protofed import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


@pytest.mark.slow
def test_ctrl_c_stops_after_the_round_and_the_same_command_continues(cluster: Cluster, tmp_path: Path) -> None:
    """Also: a class of the user's own, and a driver that is no node of the cluster."""
    (tmp_path / "mine_on_ray.py").write_text(MINE)
    text = COMPARISON.format(seeds=[0, 1], rounds=12) + '[methods.Mine.method]\nname = "mine_on_ray:Mine"\n'
    (tmp_path / "c.toml").write_text(text)
    words = ("compare", tmp_path / "c.toml", "--grace-period", PATIENCE, "--out", tmp_path / "ray", "--ray")
    running = cluster.started(*words, cluster.address)
    wait_for(lambda: running.poll() is not None or list(cluster.temporary(0).glob("protofed-*/run/checkpoint/000002")))
    running.send_signal(signal.SIGINT)
    _, complaint = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, complaint
    assert "run the same command again to continue" in complaint
    (folder,) = (tmp_path / "ray").iterdir()  # the other run had not begun
    begun = RunFolder(folder)
    assert 2 <= begun.rounds_saved < 12
    assert not begun.is_done
    lines = begun.read_rounds()

    again = cluster.started(*words, cluster.client)
    _, complaint = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, complaint + cluster.client_logs()
    assert begun.read_rounds().startswith(lines)  # seconds and all: these rounds were not done again
    plain = cluster.started("compare", tmp_path / "c.toml", "--out", tmp_path / "plain")
    _, complaint = plain.communicate(timeout=PATIENCE)
    assert plain.returncode == 0, complaint
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "plain")
    assert states(tmp_path / "ray") == states(tmp_path / "plain")
    assert list(cluster.temporary(0).glob("protofed-*")) == []


def asked_for(**runtime: object) -> Config:
    sections = {
        "task": {"name": "minidigits"},
        "method": {"name": "fedavg"},
        "training": {"rounds": 1, "epochs": 1},
        "runtime": runtime,
    }
    return config.parse(sections, "test")


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("local", "write auto, HOST:PORT or ray://HOST:PORT"),
        ("http://host:1", "write auto, HOST:PORT or ray://HOST:PORT"),
        ("127.0.0.1:1", r"--ray 127\.0\.0\.1:1: no Ray cluster answers there"),
        ("ray://127.0.0.1:99999", r"ray://127\.0\.0\.1:99999: no Ray cluster answers there"),
    ],
)
def test_an_address_without_a_cluster_is_said(tmp_path: Path, address: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        RaySweep(address)([asked_for()], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_breaks_off_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def breaks_off(address: str, **options: object) -> None:
        asked.append(address)
        if len(asked) < succeeds_at:
            raise ConnectionAbortedError("Initialization failure from server")

    monkeypatch.setattr(ray_sweep.ray, "init", breaks_off)
    monkeypatch.setattr(ray_sweep.ray, "shutdown", lambda: None)
    succeeds_at = 3
    with ray_sweep._connected("auto"):
        assert len(asked) == 3
    succeeds_at = 99
    with pytest.raises(BadInput, match="cannot join the cluster: Initialization failure"), ray_sweep._connected("auto"):
        pass
    assert len(asked) == 6


def test_joining_a_cluster_leaves_the_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    taken = lambda address, **options: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # noqa: E731
    monkeypatch.setattr(ray_sweep.ray, "init", taken)
    monkeypatch.setattr(ray_sweep.ray, "shutdown", lambda: None)
    with ray_sweep._connected("auto"):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "runtime", "declared"),
    [
        ({}, {}, (1, 0)),
        ({}, {"threads": 3}, (3, 0)),
        ({}, {"name": "workers", "workers": 4}, (4, 0)),
        ({"cpus": 0.5}, {"threads": 3}, (0.5, 0)),
        ({}, {"name": "cohort", "device": "cuda"}, (1, 1)),
        ({"gpus": 0.25}, {"name": "cohort", "device": "cuda"}, (1, 0.25)),
        ({"gpus": 0.25}, {"name": "sequential"}, (1, 0)),
    ],
)
def test_what_a_run_declares(
    options: dict[str, float], runtime: dict[str, object], declared: tuple[float, float]
) -> None:
    assert RaySweep("auto", **options)._declared(asked_for(**runtime)) == declared


def test_what_cannot_be_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Ray chooses the GPU of each run, so write cuda"):
        RaySweep("auto")._declared(asked_for(name="cohort", device="cuda:1"))
    with pytest.raises(BadInput, match=r"runtime\.workers = 0 takes all cores of a node"):
        RaySweep("auto")._declared(asked_for(name="workers"))
    with pytest.raises(BadInput, match="no run uses a GPU"):
        RaySweep("auto", gpus=1)([asked_for(name="sequential")], tmp_path)


def test_a_task_that_fits_on_no_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    monkeypatch.setattr(ray_sweep.ray, "nodes", lambda: nodes)
    ray_sweep._refuse_too_much({"a": (2, 0)})
    with pytest.raises(BadInput, match="no node of the cluster has 1 cores and 1 GPUs"):
        ray_sweep._refuse_too_much({"a": (2, 0), "b": (1, 1)})


def ended(one: Config, out: Path) -> RunFolder:
    folder = RunFolder(out / one.identity)
    folder.checkpoints.mkdir(parents=True)
    folder.begin(one.toml(), one.runtime.numerics())
    folder.end()
    return folder


def test_finished_runs_need_no_cluster(tmp_path: Path) -> None:
    one = asked_for()
    ended(one, tmp_path)
    (done,) = RaySweep("127.0.0.1:1")([one], tmp_path)
    assert done.is_done
    assert done.failure is None


def test_a_node_with_another_version_is_refused_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    task = ray_sweep._task()._function
    here = versions()
    refusal, failure, files = task({**here, "protofed": "9.9"}, None, job(asked_for(), {}), 0)
    assert f"protofed {here['protofed']} there, 9.9 here" in refusal
    assert (failure, files) == ("", {})
    refusal, _, _ = task({**here, "torch": "1.0"}, None, job(asked_for(), {}), 0)
    assert f"torch {here['torch']} there, 1.0 here" in refusal


def tasks_of(one: Config, out: Path) -> _Tasks:
    return _Tasks({one.identity: one}, {one.identity: (1, 0)}, out, 1)


def test_a_run_that_always_dies_fails_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(answer: object) -> None:
        raise WorkerCrashedError

    monkeypatch.setattr(ray_sweep.ray, "get", dead)
    one = asked_for()
    tasks = tasks_of(one, tmp_path)
    assert [tasks._has_died(one.identity, None) for _ in range(RETRIES + 1)] == [True] * RETRIES + [False]
    assert "its worker or its node died (WorkerCrashedError), for the 4th time" in tasks.failures[one.identity]


@pytest.mark.parametrize(
    ("files", "failure"),
    [
        ({"../evil": b""}, "no file of a run folder"),
        ({"config.toml": b"[task]", "done": b""}, "the folder of another run came back"),
        ("text", "no run folder but str"),
    ],
)
def test_what_comes_back_is_checked_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: object, failure: str
) -> None:
    monkeypatch.setattr(ray_sweep.ray, "get", lambda answer: ("", "", files))
    one = asked_for()
    tasks = tasks_of(one, tmp_path / "out")
    assert not tasks._has_died(one.identity, None)
    assert failure in tasks.failures[one.identity]
    assert list(tmp_path.rglob("*")) == []


def test_a_run_that_another_command_has_ended_is_kept(tmp_path: Path) -> None:
    one = asked_for()
    folder = ended(one, tmp_path)
    facts = folder.read_environment()
    files = {"config.toml": one.toml().encode(), "environment.json": b"{}"}
    tasks_of(one, tmp_path)._keep(one.identity, files)
    assert folder.read_environment() == facts
    folder.reopen()
    tasks_of(one, tmp_path)._keep(one.identity, files)
    assert folder.read_environment() == {}


def test_a_folder_in_which_another_command_works_is_left_alone(tmp_path: Path) -> None:
    one = asked_for()
    tasks = tasks_of(one, tmp_path)
    with RunFolder(tmp_path / one.identity).locked():
        with pytest.raises(BadInput, match="in use by another process"):
            tasks._keep(one.identity, {"config.toml": one.toml().encode()})
        tasks._submit(one.identity, None, None)
    assert "in use by another process" in tasks.failures[one.identity]
