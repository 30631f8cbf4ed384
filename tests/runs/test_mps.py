"""The daemon by which processes share a GPU ends with the comparison, however that ends, and is never needed."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clocks import wait_for
from protofed.methods.fedavg import FedAvg
from protofed.runs import mps, places
from protofed.runs import sweep as sweeps
from protofed.runs.config import config
from protofed.runs.config.config import Config
from protofed.runs.sweep import _shared_gpus, sweep

DAEMON = """#!/bin/sh
# Stands for nvidia-cuda-mps-control: a daemon that keeps its output open, and ends when it is told to.
echo "$* $CUDA_VISIBLE_DEVICES" >> {log}
if [ "$1" = -d ]; then
    [ -e {refuses} ] && echo no such privilege && exit 1
    setsid sh -c 'echo $$ > {pid}; for i in $(seq 600); do sleep 0.2; done' &
    while [ ! -s {pid} ]; do sleep 0.01; done
else
    cat >> {log}
    kill $(cat {pid})
fi
"""


@dataclass(frozen=True)
class Fake:
    """A program in the place of the daemon's."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        log = self.folder / "log"
        return [line.strip() for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def is_alive(self) -> bool:
        try:
            stat = Path("/proc", (self.folder / "pid").read_text().strip(), "stat")
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / mps.PROGRAM
    program.write_text(DAEMON.format(log=folder / "log", pid=folder / "pid", refuses=folder / "refuses"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "FIRST_CALL", "pass")
    for name in (mps.PIPES, mps.SWITCH, places.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    return Fake(folder)


def test_the_daemon_lives_as_long_as_it_is_needed(fake: Fake) -> None:
    with mps.shared({places.VISIBLE: "GPU-1,GPU-2"}) as environment:
        assert fake.is_alive
        assert Path(environment[mps.PIPES]).is_dir()
    assert fake.calls == ["-d GPU-1,GPU-2", "GPU-1,GPU-2", "quit -t 5"]
    assert not fake.is_alive
    assert not Path(environment[mps.PIPES]).exists()


def test_the_daemon_ends_after_an_error(fake: Fake) -> None:
    with pytest.raises(RuntimeError, match="of a run"), mps.shared({}):
        raise RuntimeError("of a run")
    assert fake.calls
    assert not fake.is_alive


PARENT = """
import sys, time
from protofed.runs import mps
mps.FIRST_CALL = "pass"
with mps.shared({}) as environment:
    print(environment[mps.PIPES], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_daemon_ends_with_its_parent(number: signal.Signals, fake: Fake) -> None:
    """The signal goes to the whole group, as Ctrl-C, `timeout` and batch systems send it."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout
        pipes = Path(parent.stdout.readline().strip())
        assert fake.is_alive
        os.killpg(parent.pid, number)
    wait_for(lambda: not fake.is_alive)
    wait_for(lambda: not pipes.exists())


@pytest.mark.parametrize(("name", "value"), [(mps.SWITCH, "off"), (mps.PIPES, "/of/the/user"), ("PATH", "/nowhere")])
def test_no_daemon_is_started_where_it_is_unwanted_or_unknown(
    name: str, value: str, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with mps.shared({}) as environment:
        assert environment == {}
    assert fake.calls == []


def test_a_daemon_that_does_not_start_is_done_without(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    (fake.folder / "refuses").touch()
    with mps.shared({}) as environment:
        assert environment == {}
    assert "no such privilege" in caplog.text
    assert fake.calls == ["-d"]


def test_a_daemon_through_which_no_gpu_is_reached_is_done_without(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mps, "FIRST_CALL", "print('CUDA error 805'); raise SystemExit(1)")
    with mps.shared({}) as environment:
        assert environment == {}
    assert "CUDA error 805" in caplog.text
    assert not fake.is_alive


def test_a_daemon_that_is_still_starting_is_waited_for(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = str(tmp_path / "tried")
    code = f"import os, sys; sys.exit(0 if os.path.exists({tried!r}) else open({tried!r}, 'w') and 75)"
    monkeypatch.setattr(mps, "FIRST_CALL", code)
    with mps.shared({}) as environment:
        assert mps.PIPES in environment


@dataclass(frozen=True)
class Sharing(FedAvg):
    """Notes whether it shares a GPU, and cannot go on if that is so."""

    notes: str = ""
    fails: str = "never"

    def from_sum(self, *given: Any) -> Any:
        pipes = os.environ.get(mps.PIPES, "")
        with Path(self.notes).open("a") as file:
            file.write(f"{bool(pipes)} {pipes == '' or Path(pipes).is_dir()}\n")
        if self.fails == "always" or (self.fails == "shared" and pipes):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().from_sum(*given)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs count as runs on the only GPU. Their processes use the CPU, and so take the GPU for lost when they fail."""
    monkeypatch.setattr(places, "is_on_gpu", lambda config: True)
    monkeypatch.setattr(sweeps, "is_on_gpu", lambda config: True)


def sharing(tmp_path: Path, fails: str) -> Config:
    sections = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}, "training": {"rounds": 1, "epochs": 1}}
    method = Sharing(notes=str(tmp_path / fails), fails=fails)
    return replace(config.parse(sections, "test"), method=method, user_code=fails)


@pytest.mark.usefixtures("on_gpu")
def test_runs_that_fail_while_they_share_the_gpu_are_resumed_once_without(fake: Fake, tmp_path: Path) -> None:
    well, badly = sweep([sharing(tmp_path, "shared"), sharing(tmp_path, "always")], tmp_path)
    assert well.is_done
    assert "illegal memory access" in (badly.failure or "")
    assert (tmp_path / "shared").read_text() == "True True\nFalse True\n"
    assert (tmp_path / "always").read_text() == "True True\nFalse True\n"
    assert fake.calls == ["-d", "", "quit -t 5"]
    assert not fake.is_alive


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("runs", "workers", "is_shared"), [(2, None, True), (2, 2, True), (2, 1, False), (1, 2, False)]
)
def test_only_runs_at_the_same_time_share(
    runs: int, workers: int | None, is_shared: bool, fake: Fake, tmp_path: Path
) -> None:
    configs = [sharing(tmp_path, str(number)) for number in range(runs)]
    where = places.places(configs, workers)
    with _shared_gpus(where, configs, workers):
        assert [mps.PIPES in place.environment for place in where] == [is_shared]
    assert bool(fake.calls) == is_shared
