"""An attacker's campaign against runs, for as long as one likes.

    python tests/faults/campaign.py --minutes 60 --seed 1

Until the time is up it draws trials of three kinds, and counts them:

- signals: `protofed run` is sent signals at random moments (to it, to one of its processes, to all of them), and is
  resumed until it comes to its end. The end must have the bits of the run that nobody disturbed. A worker process that
  is killed alone costs its client the round, by name: such a run is counted apart.
- folders: links, pipes, checkpoints from a copy and flipped bits are put into the folder of a stopped run. Resuming
  must give the same end or refuse by name, and nothing outside may change.
- clients: hostile steps and changed messages. The bad ones are refused, and the round is the one without them.

It ends by itself, with exit code 1 if anything differed. A second process ends what it has begun and removes its files,
also when it is killed.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from faults import test_hostile_clients as hostile  # noqa: E402
from faults.commands import Command, children_of, written  # noqa: E402
from faults.kills import fingerprint, forked  # noqa: E402
from faults.test_run_folders import NAMES, TRAPS, contents, flipped  # noqa: E402
from faults.test_uploads import fuzzed  # noqa: E402
from protofed.errors import BadInput, RunFailed  # noqa: E402
from protofed.runs.config import config as configuration  # noqa: E402
from protofed.runs.runner import Experiment, execute  # noqa: E402
from protofed.runs.store.folder import RunFolder  # noqa: E402
from run_doubles import small_experiment  # noqa: E402

METHODS = ("moon", "fedavg", "fpl", "fedproto", "scaffold", "fedpc", "ditto", "fedrep")
RUNTIMES = ("sequential", "workers")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP)
TARGETS = ("program", "process", "all", "group")
HANGS = 120.0
"""Seconds in which any resumed run must come to its end."""
ROUNDS, EPOCHS = 12, 8


class Differs(Exception):
    """What the campaign looks for."""


@dataclass
class Tally:
    trials: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """How trials ended, and processes that were disturbed."""
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

        return "\n".join(
            [
                f"{sum(self.trials.values())} trials: {listed(self.trials)}",
                f"{sum(self.signals.values())} signals: {listed(self.signals)}",
                f"ends: {listed(self.ends)}",
                f"{len(self.differences)} differ",
                *self.differences,
            ]
        )


# ---- what is begun is ended


@dataclass
class Caretaker:
    """A process that kills the groups that it was told of, and removes the folder, when the campaign is gone."""

    folder: Path
    pipe: int

    def told(self) -> None:
        """To be called in a process that leads a group of its own, before it does anything."""
        os.write(self.pipe, f"{os.getpid()}\n".encode())
        os.close(self.pipe)  # or the campaign's end would not be seen
        logging.disable(logging.NOTSET)  # a run may say what it likes


@contextmanager
def caretaker() -> Iterator[Caretaker]:
    memory = Path("/dev/shm")  # noqa: S108, its subfolder has a random name
    folder = Path(mkdtemp(prefix="campaign-", dir=memory if os.access(memory, os.W_OK) else None))
    ears, mouth = os.pipe()

    def work() -> None:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.close(mouth)
        with os.fdopen(ears) as told:
            groups = [int(line) for line in told]
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)

    child = forked(work)
    os.close(ears)
    try:
        yield Caretaker(folder, mouth)
    finally:
        os.close(mouth)
        os.waitpid(child, 0)


def ended(pid: int) -> int:
    """The exit code of a process, or less than 0 for the signal that ended it. One that hangs is killed."""
    limit = time.monotonic() + HANGS
    while time.monotonic() < limit:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise Differs(f"a process did not end within {HANGS:g} s")


# ---- signals


@dataclass
class Disturbed:
    """Trials in which a run is sent signals."""

    care: Caretaker
    draw: random.Random
    tally: Tally
    expected: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Of each method: what a run ends with that nobody disturbed, and its seconds."""

    def trial(self, number: int) -> str:
        method, runtime = self.draw.choice(METHODS), self.draw.choice(RUNTIMES)
        folder = self.care.folder / f"signals-{number}"
        folder.mkdir()
        path = written(folder, ROUNDS, EPOCHS, runtime, method)
        experiment = configuration.load(path).experiment()
        expected, seconds = self._expected(method)
        run = Command(path, RunFolder(folder / "run"), ("--grace-period", "2"), True, self.care.told)
        for _ in range(self.draw.randint(1, 4)):
            if run.folder.is_done:
                break
            self._disturb(run, seconds)
        while not run.folder.is_done:
            if (code := ended(run.begin())) != 0:
                raise Differs(f"{method}, {runtime}: undisturbed, it ended with {code}: {said(run)}")
        if "Traceback" in said(run):
            raise Differs(f"{method}, {runtime}: a traceback: {said(run)}")
        end = self._end(run, experiment, expected)
        shutil.rmtree(folder)
        return end

    def _end(self, run: Command, experiment: Experiment, expected: str) -> str:
        """Whether the end is the expected one, or one in which the loss of a process is named."""
        if fingerprint(run.folder.path, experiment) == expected:
            return "equal"
        lines = [json.loads(line) for line in run.folder.read_rounds().splitlines()]
        named = [why for line in lines for why in (*line["failures"].values(), *line.get("abandoned", ()))]
        if named and all("died (signal 9)" in why for why in named):
            return "a killed process named"
        raise Differs(f"{run.experiment.stem}: another end, with the failures {named} and {said(run)}")

    def _expected(self, method: str) -> tuple[str, float]:
        """One for both runtimes, which give equal bits."""
        if method not in self.expected:
            folder = self.care.folder / f"whole-{method}"
            folder.mkdir()
            path = written(folder, ROUNDS, EPOCHS, "sequential", method)
            begin = time.monotonic()
            code = ended(Command(path, RunFolder(folder / "run"), (), True, self.care.told).begin())
            assert code == 0, code
            seconds = time.monotonic() - begin
            experiment = configuration.load(path).experiment()
            self.expected[method] = fingerprint(folder / "run", experiment), seconds
        return self.expected[method]

    def _disturb(self, run: Command, seconds: float) -> None:
        """One begun or resumed run, with signals until it ends."""
        pid = run.begin()
        end = None
        for _ in range(self.draw.randint(1, 3)):
            time.sleep(self.draw.uniform(0, seconds))
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                end = os.waitstatus_to_exitcode(status)
                break
            self._send(pid)
        if end is None:
            end = ended(pid)
        with suppress(ProcessLookupError):  # those that were left behind, such as stopped ones
            os.killpg(pid, signal.SIGKILL)
        allowed = {0, 130, 143, 129, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
        self.tally.ends[f"exit {end}"] += 1
        if end not in allowed:
            raise Differs(f"ended with {end}: {said(run)}")

    def _send(self, pid: int) -> None:
        number, target = self.draw.choice(SIGNALS), self.draw.choice(TARGETS)
        own = sorted(children_of(pid))
        pids = {
            "program": [pid],
            "process": [self.draw.choice(own)] if own else [pid],
            "all": [*own, pid] if self.draw.random() < 0.5 else [pid, *own],
            "group": [-pid],
        }[target]
        self.tally.signals[f"{number.name} to {target}"] += 1
        for one in pids:
            with suppress(ProcessLookupError):
                os.kill(one, number)
        if number == signal.SIGSTOP:
            time.sleep(self.draw.uniform(0, 0.3))
            for one in pids:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGCONT)


def said(run: Command) -> str:
    return run.errors.read_text(errors="replace")[-2000:] if run.errors.exists() else ""


# ---- folders


@dataclass
class Tampered:
    """Trials in which somebody changes the folder of a stopped run."""

    care: Caretaker
    draw: random.Random

    def __post_init__(self) -> None:
        whole = replace(small_experiment("moon", 5), config="[task]\nname = 'small'\n")
        training = replace(whole.federation.training, fraction=0.5)
        self.experiment = replace(whole, federation=replace(whole.federation, training=training))
        folder = self.care.folder / "whole"
        execute(self.experiment, RunFolder(folder))
        self.expected = fingerprint(folder, self.experiment)
        self.saved = [self._stopped(rounds) for rounds in (2, 3, 4)]

    def _stopped(self, rounds: int) -> Path:
        folder = RunFolder(self.care.folder / f"stopped-{rounds}")
        execute(self.experiment, folder, should_stop=lambda: folder.rounds_saved >= rounds)
        return folder.path

    def trial(self, number: int) -> str:
        around = self.care.folder / f"folders-{number}"
        run, outside = around / "run", around / "outside"
        shutil.copytree(self.draw.choice(self.saved), run)
        (outside / "folder").mkdir(parents=True)
        (outside / "folder" / "precious").write_text("somebody's")
        (outside / "file").write_text("somebody's too")
        deeds = [self._deed(run, outside) for _ in range(self.draw.randint(1, 4))]
        before = contents(outside)
        end = ended(forked(lambda: self._resumed(run)))
        if end not in (0, 2):
            raise Differs(f"{', '.join(deeds)}: resuming ended with {end}")
        if contents(outside) != before:
            raise Differs(f"{', '.join(deeds)}: something outside was changed")
        if end == 0 and fingerprint(run, self.experiment) != self.expected:
            raise Differs(f"{', '.join(deeds)}: another end")
        shutil.rmtree(around)
        return "refused by name" if end else "equal"

    def _resumed(self, run: Path) -> None:
        os.setpgid(0, 0)
        self.care.told()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            execute(self.experiment, RunFolder(run), resume=True)
        except (BadInput, RunFailed):
            sys.exit(2)

    def _deed(self, run: Path, outside: Path) -> str:
        deeds: list[Callable[[Path, Path], str]] = [self._trap, self._trap, self._restored, self._flipped, self._cut]
        with suppress(OSError):  # what an earlier deed has removed, or put a pipe in the place of
            return self.draw.choice(deeds)(run, outside)
        return "nothing"

    def _trap(self, run: Path, outside: Path) -> str:
        trap, name = self.draw.choice(sorted(TRAPS)), self.draw.choice(NAMES)
        TRAPS[trap](run / name, outside)
        return f"{trap} at {name}"

    def _restored(self, run: Path, outside: Path) -> str:
        """Checkpoints from a copy of the folder, older or newer, with their memories or without."""
        copy = self.draw.choice(self.saved) / "checkpoint"
        name = self.draw.choice(sorted(path.name for path in copy.iterdir()))
        target = run / "checkpoint" / name
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            return "nothing"
        shutil.copytree(copy / name, target, dirs_exist_ok=True)
        return f"{name} from a copy"

    def _flipped(self, run: Path, outside: Path) -> str:
        path = self._file(run)
        flipped(path, self.draw.randrange(path.stat().st_size))
        return f"a bit of {path.relative_to(run)}"

    def _cut(self, run: Path, outside: Path) -> str:
        path = self._file(run)
        os.truncate(path, self.draw.randrange(path.stat().st_size))
        return f"{path.relative_to(run)} cut"

    def _file(self, run: Path) -> Path:
        files = [path for path in sorted((run / "checkpoint").rglob("*")) if path.is_file() and not path.is_symlink()]
        files = [path for path in files if path.stat().st_nlink == 1 and path.stat().st_size]
        if not files:
            raise FileNotFoundError("nothing to change")
        return self.draw.choice(files)


# ---- clients


@dataclass
class Misbehaving:
    """Trials with hostile clients."""

    draw: random.Random

    def trial(self, number: int) -> str:
        kind = self.draw.choice(["deed", "deed", "messages"])
        try:
            return self._messages() if kind == "messages" else self._deed()
        except AssertionError as error:
            raise Differs(f"{kind}: {str(error)[:500]}") from error

    def _deed(self) -> str:
        runtime, deeds = self.draw.choice(sorted(hostile.RUNTIMES)), dict[str, Callable[[], object]]()
        for name, change in hostile.CHANGES.items():
            deeds[f"changes {name}"] = lambda c=change: hostile.same_without(runtime, "CHANGED_SHARED", deed=c)
        for name, error in hostile.EXITS.items():
            left = hostile.left(error)
            deeds[f"leaves by {name}"] = lambda c=left: hostile.same_without(runtime, "CLIENT_ERROR", deed=c)
        for name, (memory, why) in hostile.MEMORIES.items():
            kept = hostile.remembered(memory)
            deeds[f"remembers {name}"] = lambda c=kept, why=why: hostile.same_without(runtime, why, deed=c)
        for name in hostile.LEAVES:
            sent = hostile.uploaded(name)
            deeds[f"sends {name}"] = lambda c=sent: hostile.same_without(runtime, "DTYPE_MISMATCH", deed=c)
        name = self.draw.choice(sorted(deeds))
        try:
            deeds[name]()
        except AssertionError as error:
            raise AssertionError(f"{runtime}: {name}: {error}") from error
        return "left out alone"

    def _messages(self) -> str:
        experiment, runtime = fuzzed(200, seed=self.draw.randrange(2**31))
        of = experiment.federation
        state = of.start()
        for _ in range(of.training.rounds):
            state = of.advance(state)
        good = sorted((number, client) for number, client, is_good in runtime.sent if is_good)
        assert sorted(of.method.accepted) == good, "a message was judged wrongly"  # type: ignore[attr-defined]
        return "messages judged"


# ---- the whole


def campaign(minutes: float, seed: int) -> Tally:
    """What trials came to, drawn until the time is up."""
    draw, tally, end = random.Random(seed), Tally(), time.monotonic() + 60 * minutes
    with caretaker() as care:
        kinds = {
            "signals": Disturbed(care, draw, tally),
            "folders": Tampered(care, draw),
            "clients": Misbehaving(draw),
        }
        for number in range(10**9):
            if time.monotonic() > end:
                break
            name = draw.choice(["signals", "signals", "folders", "clients"])
            tally.trials[name] += 1
            try:
                tally.ends[f"{name}: {kinds[name].trial(number)}"] += 1  # type: ignore[attr-defined]
            except Exception as error:  # nothing is expected to be raised
                what = str(error) if isinstance(error, Differs) else "".join(traceback.format_exception(error))
                tally.differences.append(f"trial {number} of seed {seed}, {name}: {what}")
                print(tally.differences[-1], flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Random attacks on runs, counted; ends with 1 if anything differed.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    tally = campaign(wanted.minutes, wanted.seed)
    print(f"seed {wanted.seed}, {wanted.minutes:g} minutes\n{tally}")
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
