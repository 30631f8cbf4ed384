"""Where the time goes from `protofed run` to the end of the first round, and how long help and lists take.

Every start is a fresh process. The first one, which reads from the disk, is not counted. The fastest of the others is
shown, since other work on a machine only adds. What round 1 takes longer than round 3 is warm-up, and on a GPU the
recording of steps. Run it with `python benchmarks/startup.py`. `--before FOLDER` measures another checkout too, in
turns with this one. `--experiment FILE` starts another experiment than FedAvg on minidigits, and shows the first time
too: kernels are compiled then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXPERIMENT = """
[task]
name = "minidigits"
[method]
name = "fedavg"
[training]
rounds = 3
"""
TOTAL = "to the end of round 1"
COMMANDS = ("--help", "run --help", "methods", "tasks", "methods fpl")


class Stopwatch:
    """Seconds by part. What one part spends in another is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def time(self, part: str, owner: Any, name: str) -> None:
        """Counts the calls of a function to a part."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)


def run_timed(begin: float, folder: Path) -> None:
    """In a process that was started at `begin`: runs the command and writes the seconds of its parts."""
    started = time.time()
    import torch

    has_torch = time.time()
    from protofed.cli import app
    from protofed.engine.federation import Federation
    from protofed.reports.progress import Plain
    from protofed.runs import runner, sweep  # noqa: F401, the last of what the command imports
    from protofed.runs.config import config
    from protofed.runs.runtime_choice import RuntimeSettings
    from protofed.runs.store.folder import RunFolder
    from protofed.runtimes.device import Residence
    from protofed.tasks import TASKS

    watch = Stopwatch()
    watch.seconds = {"Python": started - begin, "import torch": has_torch - started}
    watch.seconds["import protofed"] = time.time() - has_torch
    watch.time("settings", config, "load")
    name = tomllib.loads((folder / "first.toml").read_text())["task"]["name"]
    watch.time("data", TASKS[name], "build")
    watch.time("choice of the runtime", RuntimeSettings, "build")
    if torch.cuda.is_available():
        watch.time("first use of the GPU", torch.cuda, "_lazy_init")
        watch.time("data to the GPU", Residence, "placed")
    watch.time("rehearsal", runner, "rehearse")
    watch.time("the run's folder", RunFolder, "begin")
    watch.time("first state", Federation, "start")
    ends: list[tuple[float, dict[str, float]]] = []

    def ended(plain: Plain, result: Any) -> None:
        ends.append((time.time() - begin, result.seconds))

    Plain.round = ended  # type: ignore[method-assign]
    sys.argv = ["protofed", "run", str(folder / "first.toml"), "--out", str(folder / "out")]
    app.app(standalone_mode=False)
    (total, first), _, (_, third) = ends[:3]
    parts = watch.seconds | seconds_of_round(1, first)
    parts |= {"all else": total - sum(parts.values()), TOTAL: total} | seconds_of_round(3, third)
    (folder / "seconds.json").write_text(json.dumps(parts))


def seconds_of_round(number: int, laps: dict[str, float]) -> dict[str, float]:
    return {
        f"round {number}: clients and server": laps["train"] + laps["aggregate"],
        f"round {number}: evaluation": laps["evaluate"],
    }


def seconds_of_run(root: Path, experiment: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.toml").write_text(experiment)
        start(root, [__file__, "--child", name, "--begin", repr(time.time())])
        return dict(json.loads((folder / "seconds.json").read_text()))


def seconds_of_commands(root: Path) -> dict[str, float]:
    """Processor time of each command."""
    return {f"protofed {words}": start(root, ["-m", "protofed.cli.app", *words.split()]) for words in COMMANDS}


def start(root: Path, words: list[str]) -> float:
    """Runs Python on the sources of a checkout. Returns the processor time that it took."""
    before = os.times()
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)  # noqa: S603
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def tries_of(roots: list[Path], measure: Callable[[Path], dict[str, float]], repeats: int) -> list[list[Any]]:
    """For each checkout what was measured, in turns with the other. The first time is one too many."""
    turns = [[measure(root) for root in roots] for _ in range(repeats + 1)]
    return [list(tries) for tries in zip(*turns, strict=True)]


def print_table(title: str, columns: list[dict[str, float]]) -> None:
    names = ["before", "now"][-len(columns) :]
    print(f"| {title} | {' | '.join(names)} |\n| --- |{' ---: |' * len(columns)}")
    for part in columns[-1]:
        print(f"| {part} | {' | '.join(f'{column[part]:.2f}' for column in columns)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to be measured as well")
    parser.add_argument("--experiment", type=Path, help="of at least 3 rounds; FedAvg on minidigits if none is given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_timed(args.begin, args.child)
        return
    roots = [*([args.before.resolve()] if args.before else []), ROOT]
    experiment = args.experiment.read_text() if args.experiment else EXPERIMENT
    runs = tries_of(roots, lambda root: seconds_of_run(root, experiment), args.repeats)
    if args.experiment:
        print_table("seconds, the first time", [tries[0] for tries in runs])
    print_table("seconds", [min(tries[1:], key=lambda one: one[TOTAL]) for tries in runs])
    if args.experiment:
        return
    commands = tries_of(roots, seconds_of_commands, args.repeats)
    fastest = [{key: min(one[key] for one in tries[1:]) for key in tries[0]} for tries in commands]
    print_table("processor time, s", fastest)


if __name__ == "__main__":
    main()
