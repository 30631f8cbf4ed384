"""What differential privacy costs, by where the noise is: python benchmarks/private_utility.py FOLDER --jobs 12

Each cell is one run: a task, a method, a place of the noise, an ε and a seed. FOLDER/cells.json has those that there
are, and these are not run again, so the command can be stopped and given again. `--minutes` stops it. `--report`
prints the table and draws the picture of each task.

Rates are chosen on seed 0 by accuracy, three for each: at ε = 8 for FedAvg and FedSGD, and used for all methods with
noise in the same place, and for each method without noise. That costs privacy that no account has.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

import protofed
from protofed import PrivacySettings, SecureSettings, Sgd
from protofed.api.method import Method
from protofed.api.task import Task
from protofed.audit.examples import examples_of
from protofed.audit.report import audit
from protofed.audit.statistics import pooled_auc
from protofed.data.batches import Data
from protofed.privacy.noise import Simulated
from protofed.reports.analysis.style import MARKERS, panels, tidy
from protofed.reports.figures import save_figure
from protofed.runs.loading import open_run
from protofed.runs.results import Result
from protofed.tasks.domain_shift import OfficeCaltech10
from protofed.tasks.minidigits import Minidigits
from protofed.tasks.models import network, small_cnn

ROUNDS = 30
"""Passes over the data, wherever the noise is: so many releases of gradients."""
DELTA = 1e-5
SEEDS = (0, 1, 2)
ORDER = (
    *((0, "8"), (0, "inf"), (0, "3"), (0, "1"), (0, "clipped")),
    *((seed, epsilon) for epsilon in ("8", "inf", "3", "1") for seed in SEEDS[1:]),
)
"""Seeds and ε in the order in which they are run, as long as there is time; `clipped` is without noise."""
FPL_GLOBAL: dict[str, Any] = {"contrast_with": "global", "consistent_with": "global"}
GRACE_S = 75.0
"""So long cells that run go on after `--minutes`."""


def at_clients() -> dict[str, Callable[[], Method[Any, Any, Any, Any]]]:
    return {
        "FedAvg": protofed.FedAvg,
        "FPL (FINCH)": protofed.FPL,
        "FPL (global)": lambda: protofed.FPL(**FPL_GLOBAL),
        "FedNH": protofed.FedNH,
    }


def in_sums(rate: float) -> dict[str, Callable[[], Method[Any, Any, Any, Any]]]:
    given: dict[str, Any] = {"server_lr": rate, "momentum": 0.9}
    return {
        "FedSGD": lambda: protofed.FedSGD(**given),
        "FPL (global)": lambda: protofed.FedSGD(base=protofed.FPL(**FPL_GLOBAL), **given),
        "FedNH": lambda: protofed.FedSGD(base=protofed.FedNH(), **given),
    }


ROWS = (*(("client", name) for name in at_clients()), *(("sum", name) for name in in_sums(0.1)))
"""Places of the noise, and the methods there."""
PLAIN = {"client": "FedAvg", "sum": "FedSGD"}
"""The methods by which rates are chosen."""


@dataclass(frozen=True)
class OfTask:
    """What differs between tasks."""

    build: Callable[[], Task]
    private_rates: Mapping[str, tuple[float, ...]]
    """For gradients that are clipped, by place of the noise."""
    plain_rates: Mapping[tuple[str, str], tuple[float, ...]]
    """For those that are not: of a method, around where it learns at all."""


def minidigits() -> Task:
    return Minidigits(norm="group").build()


def office() -> Task:
    """One client for each domain, with all of its training images, and the network of minidigits."""
    domains = dict.fromkeys(("amazon", "caltech", "dslr", "webcam"), 1)
    task = OfficeCaltech10(clients=domains, fraction=1.0, pixels=28).build()
    return replace(task, model=network(small_cnn, 3, task.num_classes, False, "group"))


TASKS = {
    "minidigits": OfTask(
        minidigits,
        {"client": (2.0, 1.0, 4.0), "sum": (0.8, 0.4, 1.6)},
        {
            ("client", "FedAvg"): (0.1, 0.03, 0.3),
            ("client", "FPL (FINCH)"): (0.03, 0.01, 0.1),
            ("client", "FPL (global)"): (0.03, 0.01, 0.1),
            ("client", "FedNH"): (0.3, 0.1, 1.0),
            ("sum", "FedSGD"): (0.1, 0.05, 0.2),
            ("sum", "FPL (global)"): (0.06, 0.03, 0.1),
            ("sum", "FedNH"): (0.1, 0.03, 0.3),
        },
    ),
    "office": OfTask(
        office,
        {"client": (2.0, 1.0, 4.0), "sum": (1.6, 0.8, 3.2)},
        {
            ("client", "FedAvg"): (0.1, 0.03, 0.3),
            ("client", "FPL (FINCH)"): (0.03, 0.01, 0.1),
            ("client", "FPL (global)"): (0.03, 0.01, 0.1),
            ("client", "FedNH"): (0.3, 0.1, 1.0),
            ("sum", "FedSGD"): (0.05, 0.025, 0.1),
            ("sum", "FPL (global)"): (0.03, 0.015, 0.06),
            ("sum", "FedNH"): (0.1, 0.03, 0.3),
        },
    ),
}


@dataclass(frozen=True)
class Cell:
    task: str
    where: str
    """`client` or `sum`."""
    name: str
    epsilon: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.where}, {self.name}, ε {self.epsilon}, rate {self.rate:g}, seed {self.seed}"


def measured(cell: Cell) -> dict[str, Any]:
    settings: dict[str, Any] = {"rounds": ROUNDS, "seed": cell.seed, "evaluate_every": ROUNDS, "runtime": "sequential"}
    if cell.epsilon != "inf":
        epsilon = 1000.0 if cell.epsilon == "clipped" else float(cell.epsilon)
        settings["privacy"] = PrivacySettings("record", epsilon=epsilon, delta=DELTA, clip_features=2.0)
    if cell.where == "client":
        method = at_clients()[cell.name]()
        size = 64 if cell.epsilon == "inf" else 1024  # no client has as many images
        settings |= {"epochs": 1, "batch_size": size, "optimizer": Sgd(lr=cell.rate)}
    else:
        method = in_sums(cell.rate)[cell.name]()
        settings["secure"] = SecureSettings(sums=cell.epsilon != "inf", masks=False)
    begin, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, without_noise(cell.epsilon == "clipped"):
        run = Path(folder) / "run"
        result = protofed.run(method, task(cell.task), folder=run, progress=False, **settings)
        found = {
            "accuracy": 100 * result.metrics("last")["average"],
            "model_auc": model_auc(result),
            "upload_auc": upload_auc(run, cell.task) if cell.where == "client" and not cell.seed else None,
        }
    spent = {"wall_s": round(time.monotonic() - begin, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    return {**asdict(cell), **found, **spent, "machine": machine()}


def upload_auc(run: Path, name: str) -> float:
    """The best of the audit's attacks on what clients sent in the last round, which the server reads."""
    return max(attack.auc for attack in audit(open_run(run, task=task(name))).attacks)


def model_auc(result: Result) -> float:
    """How well the loss of the final model, which everybody reads, tells clients' examples from test images."""
    pairs = []
    for client in result.federation.ids:
        examples = examples_of(result.federation.task, client)
        assert examples is not None
        pairs.append((_losses(result, client, examples.members), _losses(result, client, examples.others)))
    return pooled_auc(pairs)


def _losses(result: Result, client: str, data: Data) -> Any:
    """Minus the loss of each example, at the last global model."""
    public = result.federation.method.public(result.server)
    assert public is not None
    params, message = public
    model = result.federation.networks_of(client).model(params)
    x = result.federation.task.transform.clean(data.inputs(data.index))
    with torch.no_grad():
        scores = result.federation.method.predict(model, x, message, None)
    return -F.cross_entropy(scores, data.labels, reduction="none").double().numpy()


@contextmanager
def without_noise(is_wanted: bool) -> Iterator[None]:
    """Clipping as with ε = 1000, and zeros in the place of noise."""
    whole = Simulated.whole
    if is_wanted:
        Simulated.whole = lambda self, count, scale: torch.zeros(count, dtype=torch.int64)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Simulated.whole = whole  # type: ignore[method-assign]


@cache
def task(name: str) -> Task:
    return TASKS[name].build()


@cache
def machine() -> str:
    """The processor and what computed with it."""
    names = [line.split(":")[1].strip() for line in _text(Path("/proc/cpuinfo")).splitlines() if "model name" in line]
    python = f"Python {platform.python_version()}"
    return f"{names[0] if names else platform.machine()}, torch {torch.__version__}, {python}, one thread"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        sys.exit("git does not know the commit here: say it with --commit")


class Cells:
    """The cells of a folder: those that are there, and new ones."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cells.json"
        names, there = [field.name for field in fields(Cell)], json.loads(_text(self.path) or "[]")
        self.known: dict[Cell, dict[str, Any]] = {Cell(**{name: one[name] for name in names}): one for one in there}

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        self.known[cell] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps([*self.known.values()], indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def rate(self, task: str, where: str, name: str, epsilon: str) -> float | None:
        """The best rate on seed 0; None if a cell that decides is not known."""
        found = [self.known.get(cell) for cell in deciding(task, where, name, epsilon)]
        return max((c for c in found if c), key=lambda c: c["accuracy"])["rate"] if all(found) else None


def deciding(task: str, where: str, name: str, epsilon: str) -> list[Cell]:
    """The cells by which a rate is chosen."""
    of = TASKS[task]
    if epsilon == "inf":
        return [Cell(task, where, name, "inf", rate, 0) for rate in of.plain_rates[where, name]]
    return [Cell(task, where, PLAIN[where], "8", rate, 0) for rate in of.private_rates[where]]


def in_order(cells: Cells, tasks: Sequence[str]) -> list[Cell]:
    """First the cells that decide rates, then those whose rates are decided."""
    rows = [(task, where, name) for task in tasks for where, name in ROWS]
    first = [cell for epsilon in ("8", "inf") for row in rows for cell in deciding(*row, epsilon)]
    rates = [(row, epsilon, seed, cells.rate(*row, epsilon)) for seed, epsilon in ORDER for row in rows]
    return [*dict.fromkeys([*first, *(Cell(*row, eps, rate, seed) for row, eps, seed, rate in rates if rate)])]


def run_all(cells: Cells, tasks: Sequence[str], jobs: int, minutes: float, commit: str) -> bool:
    """Runs what is missing, so many at a time; whether no cell failed."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for name in tasks:
        task(name)  # data that are missing are missed at once
    end, failed = time.monotonic() + 60 * minutes, set[Cell]()
    running: dict[Future[dict[str, Any]], Cell] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(jobs, get_context("spawn"), begin, (scratch,)) as pool,
        ended(running),
    ):
        while True:
            known = {*cells.known, *running.values(), *failed}
            missing = [cell for cell in in_order(cells, tasks) if cell not in known]
            for cell in missing[: jobs - len(running)] if time.monotonic() < end else []:
                running[pool.submit(measured, cell)] = cell
            done, _ = wait(running, max(0.0, end + GRACE_S - time.monotonic()), FIRST_COMPLETED)
            if not done:
                return not failed
            for one in done:
                cell = running.pop(one)
                if error := one.exception():
                    failed.add(cell)
                    print(f"{cell}: FAILED: {error!r}", flush=True)
                    continue
                found = one.result()
                cells.add(cell, {**found, "commit": commit})
                scores = f"{found['accuracy']:.1f} %, AUC {found['model_auc']:.3f}, {found['cpu_s']} s"
                print(f"{cell}: {scores}; {len(cells.known)} cells", flush=True)


def begin(scratch: str) -> None:
    """In each process of the pool."""
    tempfile.tempdir = scratch
    torch.set_num_threads(1)


@contextmanager
def ended(running: Mapping[Any, Cell]) -> Iterator[None]:
    """In the end cells that still run are given up. A run would go on to the end of its round when asked to stop."""
    try:
        yield
    finally:
        if running:
            print(f"out of time, given up: {'; '.join(map(str, running.values()))}", flush=True)
            for process in active_children():
                process.kill()


# ---- the report

LABELS = {"inf": "∞", "clipped": "clipped, no noise"}
COLUMNS = ("inf", "clipped", "8", "3", "1")
MANY_APART = ("#0072b2", "#d55e00", "#000000", "#009e73", "#cc79a7")
"""Okabe and Ito's colours, which the colour-blind can tell apart."""
Found = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]


def chosen(cells: Cells, task: str) -> Found:
    """The cells of the rates that were chosen, by place and method, and by ε; one for each seed."""
    found: Found = {}
    for where, name in ROWS:
        for epsilon in COLUMNS:
            rate = cells.rate(task, where, name, epsilon)
            own = [cells.known.get(Cell(task, where, name, epsilon, rate, seed)) for seed in SEEDS] if rate else []
            found.setdefault((where, name), {})[epsilon] = [cell for cell in own if cell]
    return found


def table(found: Found) -> str:
    heads = [f"ε = {LABELS.get(one, one)}" if one != "clipped" else LABELS[one] for one in COLUMNS]
    lines = [f"| noise | method | {' | '.join(heads)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for (where, name), by_epsilon in found.items():
        place = "at each client" if where == "client" else "in the sum"
        lines.append(f"| {place} | {name} | {' | '.join(_shown(by_epsilon[one]) for one in COLUMNS)} |")
    return "\n".join(lines)


def _shown(cells: Sequence[dict[str, Any]]) -> str:
    """Mean, the lowest and the highest, how many seeds, and the AUCs."""
    if not cells:
        return ""
    values, aucs = [cell["accuracy"] for cell in cells], [cell["model_auc"] for cell in cells]
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    sent = next((f", {cell['upload_auc']:.2f}" for cell in cells if cell["upload_auc"]), "")
    return f"{fmean(values):.1f}{spread}, {len(values)} seed{'s' * (len(values) > 1)}; AUC {fmean(aucs):.2f}{sent}"


def picture(found: Found, path: Path) -> None:
    """Accuracy over ε. Places differ in the line and in the filling of the mark, methods in colour and mark."""
    names = [*dict.fromkeys(name for _, name in found)]
    order = ("1", "3", "8", "clipped", "inf")
    figure, ((axis,),) = panels(1, 1, (6.4, 4.0))
    for (where, name), by_epsilon in found.items():
        drawn = [(x, by_epsilon[one]) for x, one in enumerate(order) if by_epsilon[one]]
        if not drawn:
            continue
        k, is_sum = names.index(name), where == "sum"
        look: dict[str, Any] = {"color": MANY_APART[k], "marker": MARKERS[k], "linestyle": "-" if is_sum else "--"}
        means = [fmean(cell["accuracy"] for cell in cells) for _, cells in drawn]
        label = f"{name}, noise {'in the sum' if is_sum else 'at each client'}"
        axis.plot([x for x, _ in drawn], means, mfc=look["color"] if is_sum else "white", label=label, **look)
        for x, cells in drawn:
            values = [cell["accuracy"] for cell in cells]
            axis.plot([x, x], [min(values), max(values)], color=look["color"], linewidth=0.9)
    axis.axhline(10, color="#999999", linewidth=0.8)
    axis.annotate("chance", (len(order) - 1, 10), va="bottom", ha="right", fontsize=8, color="#666666")
    axis.set_xticks(range(len(order)), [f"ε = {one}" for one in order[:3]] + ["clipped,\nno noise", "not private"])
    axis.set_ylim(0, 100)
    tidy(axis, "", "", "accuracy in %, mean over the domains")
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path, grows=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy over ε, by where the noise is.")
    parser.add_argument("folder", type=Path, help="has cells.json, the cells that there are")
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=["minidigits"])
    parser.add_argument("--jobs", type=int, default=1, help="how many cells are run at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="after these no cell is begun")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    parser.add_argument(
        "--report", action="store_true", help="run nothing; print tables, and draw pictures into FOLDER"
    )
    wanted = parser.parse_args()
    cells = Cells(wanted.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if wanted.report:
        for name in wanted.task:
            found = chosen(cells, name)
            print(f"{name}\n\n{table(found)}\n")
            picture(found, wanted.folder / f"accuracy_{name}.png")
    elif not run_all(cells, wanted.task, wanted.jobs, wanted.minutes, wanted.commit or commit()):
        sys.exit("cells failed; they are named above")


if __name__ == "__main__":
    main()
