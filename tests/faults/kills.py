"""Processes that are killed and resumed. They are forked from one that has imported everything, so that a kill costs
milliseconds. What is killed is any function: a run in this process, a server, a client."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from clocks import PATIENCE
from doubles import memories
from protofed import wire
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store import checkpoint
from protofed.runs.store.checkpoint import Checkpoint
from protofed.runs.store.folder import RunFolder

Work = Callable[[], object]


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder that no real disk slows down, where the system has such: hundreds of runs are written and removed."""
    memory = Path("/dev/shm")  # noqa: S108, its subfolder has a random name
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def forked(work: Work) -> int:
    """The process id of a child that does the work. It exits with 0, as the work says, or with 1 and a traceback."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except Exception:
            traceback.print_exc()
    except KeyboardInterrupt:  # also between the lines above
        code = 128 + signal.SIGINT
    finally:  # whatever happens: what comes after belongs to the parent
        os._exit(code)


class Ended(NamedTuple):
    """How a child ended."""

    code: int
    """Its exit code, or less than 0 for the signal that ended it."""
    processor_seconds: float
    """What it used from beginning to end."""


def awaited(child: int) -> Ended:
    limit = time.monotonic() + PATIENCE
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child did not end within {PATIENCE:g} s")
        time.sleep(0.001)


def ended(child: int) -> int:
    """The exit code of a child, or less than 0 for the signal that ended it."""
    return awaited(child).code


def killed_after(work: Work, seconds: float) -> bool:
    """Whether a child was killed at its work, after so much processor time. The system does that by SIGPROF, for which
    nobody has a handler: like SIGKILL it ends the process between any two instructions."""

    def timed() -> None:
        signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))
        work()
        signal.setitimer(signal.ITIMER_PROF, 0)

    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    code = ended(forked(timed))
    assert code in (0, -signal.SIGPROF), "the child failed by itself"
    return code != 0


@dataclass
class Acknowledged(Silent):
    """Tells another process of every round whose save has returned."""

    pipe: tuple[int, int] = field(default_factory=os.pipe)

    def round(self, result: object) -> None:
        os.write(self.pipe[1], b".")

    def count(self) -> int:
        """The rounds that were told since the last time."""
        os.set_blocking(self.pipe[0], False)
        try:
            return len(os.read(self.pipe[0], 100_000))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        for handle in self.pipe:
            os.close(handle)


def run_killed_after(experiment: Experiment, folder: RunFolder, seconds: float) -> bool:
    """Whether a run, begun or resumed, was killed after so much processor time and before its end. What it had
    acknowledged must be there."""
    before, acknowledged = folder.rounds_saved, Acknowledged()
    try:
        was_killed = killed_after(lambda: execute(experiment, folder, resume=True, observer=acknowledged), seconds)
        assert folder.rounds_saved >= before + acknowledged.count(), "more than the round under way was lost"
    finally:
        acknowledged.close()
    return was_killed


def fingerprint(folder: Path, experiment: Experiment) -> str:
    """SHA-256 over all that a run ends with: the server, every client's memory, and rounds.jsonl, which says who took
    part, without the time that it took."""
    saved = checkpoint.load(folder / "checkpoint", experiment.federation, experiment.identity)
    assert saved is not None
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8")
    assert lines == saved.rounds, "the rounds outside are not those of the checkpoint"
    return fingerprint_of(saved)


def fingerprint_of(saved: Checkpoint) -> str:
    """The same of a state."""
    digest = hashlib.sha256(f"round {saved.state.round} strikes {sorted(saved.state.strikes.items())}".encode())
    digest.update(wire.encode(saved.state.server))
    for client, memory in sorted(memories(saved.state).items()):
        digest.update(client.encode() + wire.encode(memory))
    for line in saved.rounds.splitlines():
        facts = {key: value for key, value in json.loads(line).items() if key != "seconds"}
        digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


def in_own_process(function: str, *words: object) -> Any:
    """What a function of a module, such as `faults.test_scale.measured`, gives in a process that does nothing else."""
    module, _, name = function.rpartition(".")
    code = f"import json, sys; from {module} import {name}; print(json.dumps({name}(*sys.argv[1:])))"
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
