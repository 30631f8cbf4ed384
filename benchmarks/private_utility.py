"""What differential privacy costs on minidigits, by where the noise is: python benchmarks/private_utility.py OUT

Each cell is one run: a method, a place of the noise, an ε and a seed. A cell that is in OUT is not run again, so the
command can be stopped and given again; `--where` divides the work between two processes. `--report` writes the table
and the picture of what is there.

Rates are chosen on seed 0 by accuracy, three for each: at ε = 8 for FedAvg and FedSGD, and used for all methods with
noise in the same place, and for each method without noise. That costs privacy that no account has.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
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
from protofed.tasks.minidigits import Minidigits

ROUNDS = 30
"""Passes over the data, wherever the noise is: so many releases of gradients."""
DELTA = 1e-5
SEEDS = (0, 1, 2)
ORDER = (
    *((0, "8"), (0, "inf"), (0, "1"), (0, "3"), (1, "8"), (1, "inf"), (0, "clipped"), (2, "8"), (2, "inf")),
    *((1, "3"), (2, "3"), (1, "1"), (2, "1")),
)
"""Seeds and ε in the order in which they are run, as long as there is time; `clipped` is without noise."""
FPL_GLOBAL = {"contrast_with": "global", "consistent_with": "global"}


def at_clients() -> dict[str, Callable[[], Method[Any, Any, Any, Any]]]:
    return {
        "FedAvg": protofed.FedAvg,
        "FPL (FINCH)": protofed.FPL,
        "FPL (global)": lambda: protofed.FPL(**FPL_GLOBAL),
        "FedNH": protofed.FedNH,
    }


def in_sums(rate: float) -> dict[str, Callable[[], Method[Any, Any, Any, Any]]]:
    given = {"server_lr": rate, "momentum": 0.9}
    return {
        "FedSGD": lambda: protofed.FedSGD(**given),
        "FPL (global)": lambda: protofed.FedSGD(base=protofed.FPL(**FPL_GLOBAL), **given),
        "FedNH": lambda: protofed.FedSGD(base=protofed.FedNH(), **given),
    }


PRIVATE_RATES = {"client": (2.0, 1.0, 4.0), "sum": (0.2, 0.1, 0.4)}
"""For gradients that are clipped."""
PLAIN_RATES = {
    "client": {
        "FedAvg": (0.1, 0.03, 0.3),
        "FPL (FINCH)": (0.03, 0.01, 0.1),
        "FPL (global)": (0.03, 0.01, 0.1),
        "FedNH": (0.3, 0.1, 1.0),
    },
    "sum": {"FedSGD": (0.1, 0.05, 0.2), "FPL (global)": (0.06, 0.03, 0.1), "FedNH": (0.1, 0.03, 0.3)},
}
"""For those that are not: of a method, around where it learns at all."""
MANY_APART = ("#0072b2", "#d55e00", "#000000", "#009e73", "#cc79a7")
"""Okabe and Ito's colours, which the colour-blind can tell apart."""
PLAIN = {"client": "FedAvg", "sum": "FedSGD"}
"""The methods by which rates are chosen."""


@dataclass(frozen=True)
class Cell:
    where: str
    """`client` or `sum`."""
    name: str
    epsilon: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        short = "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-")
        return f"{self.where}_{short}_{self.epsilon}_{self.rate:g}_{self.seed}"


def measured(cell: Cell) -> dict[str, Any]:
    settings: dict[str, Any] = {"rounds": ROUNDS, "seed": cell.seed, "evaluate_every": ROUNDS, "runtime": "sequential"}
    if cell.epsilon != "inf":
        epsilon = 1000.0 if cell.epsilon == "clipped" else float(cell.epsilon)
        settings["privacy"] = PrivacySettings("record", epsilon=epsilon, delta=DELTA, clip_features=2.0)
    if cell.where == "client":
        method = at_clients()[cell.name]()
        size = 64 if cell.epsilon == "inf" else 512  # a client has at most 290 images
        settings |= {"epochs": 1, "batch_size": size, "optimizer": Sgd(lr=cell.rate)}
    else:
        method = in_sums(cell.rate)[cell.name]()
        settings["secure"] = SecureSettings(sums=cell.epsilon != "inf", masks=False)
    begin, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, without_noise(cell.epsilon == "clipped"):
        run = Path(folder) / "run"
        result = protofed.run(method, task(), folder=run, progress=False, **settings)
        found = {
            "accuracy": 100 * result.metrics("last")["average"],
            "model_auc": model_auc(result),
            "upload_auc": upload_auc(run) if cell.where == "client" and not cell.seed else None,
        }
    spent = {"wall_s": round(time.monotonic() - begin, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    return {**asdict(cell), **found, **spent, "commit": commit()}


def upload_auc(run: Path) -> float:
    """The best of the audit's attacks on what clients sent in the last round, which the server reads."""
    return max(attack.auc for attack in audit(open_run(run, task=task())).attacks)


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
    params, message = result.federation.method.public(result.server)
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
def task() -> Task:
    return Minidigits(norm="group").build()


@cache
def commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


class Cells:
    """The cells of OUT: those that are there, and new ones."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "cells"
        self.folder.mkdir(parents=True, exist_ok=True)

    def known(self, cell: Cell) -> dict[str, Any] | None:
        path = self.folder / f"{cell.key}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def found(self, cell: Cell) -> dict[str, Any]:
        known = self.known(cell)
        if known is None:
            known = measured(cell)
            path = self.folder / f"{cell.key}.json"
            path.with_suffix(".part").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".part").rename(path)
            print(
                f"{cell.key}: {known['accuracy']:.1f} %, AUC {known['model_auc']:.3f}, {known['cpu_s']} s", flush=True
            )
        return known

    def rate(self, where: str, name: str, epsilon: str, of: Callable[[Cell], dict[str, Any] | None]) -> float | None:
        """The best rate on seed 0; None if a cell that decides is not known."""
        rates = PLAIN_RATES[where][name]
        if epsilon != "inf":
            name, epsilon, rates = PLAIN[where], "8", PRIVATE_RATES[where]
        cells = [of(Cell(where, name, epsilon, rate, 0)) for rate in rates]
        return max((c for c in cells if c), key=lambda c: c["accuracy"])["rate"] if all(cells) else None


def run_all(out: Path, where: str) -> None:
    cells, names = Cells(out), [*(at_clients() if where == "client" else in_sums(0.1))]
    for seed, epsilon in ORDER:
        for name in names:
            if name == "FPL (FINCH)" and (seed or epsilon not in ("8", "inf")):
                continue  # at ε = 8 it is the same as with global targets: no prototype passes
            cells.found(Cell(where, name, epsilon, cells.rate(where, name, epsilon, cells.found), seed))


# ---- the report

LABELS = {"inf": "∞", "clipped": "clipped, no noise"}
COLUMNS = ("inf", "clipped", "8", "3", "1")


def chosen(out: Path) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """The cells of the rates that were chosen, by place and method, and by ε; one for each seed."""
    cells, found = Cells(out), dict[tuple[str, str], dict[str, list[dict[str, Any]]]]()
    for where, names in (("client", at_clients()), ("sum", in_sums(0.1))):
        for name in names:
            for epsilon in COLUMNS:
                rate = cells.rate(where, name, epsilon, cells.known)
                own = [cells.known(Cell(where, name, epsilon, rate, seed)) for seed in SEEDS] if rate else []
                found.setdefault((where, name), {})[epsilon] = [cell for cell in own if cell]
    return found


def table(out: Path) -> str:
    heads = [f"ε = {LABELS.get(one, one)}" if one != "clipped" else LABELS[one] for one in COLUMNS]
    lines = [f"| noise | method | {' | '.join(heads)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for (where, name), by_epsilon in chosen(out).items():
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


def picture(out: Path, path: Path) -> None:
    """Accuracy over ε. Places differ in the line and in the filling of the mark, methods in colour and mark."""
    names = [*dict.fromkeys(name for _, name in chosen(out))]
    order = ("1", "3", "8", "clipped", "inf")
    figure, ((axis,),) = panels(1, 1, (6.4, 4.0))
    for (where, name), by_epsilon in chosen(out).items():
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
    parser.add_argument("out", type=Path)
    parser.add_argument("--where", choices=["client", "sum"], help="only these; both by default")
    parser.add_argument(
        "--report", type=Path, help="run nothing; print the table, and draw the picture into this folder"
    )
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if wanted.report is not None:
        print(table(wanted.out))
        picture(wanted.out, wanted.report / "accuracy.png")
        return
    for where in [wanted.where] if wanted.where else ["client", "sum"]:
        run_all(wanted.out, where)


if __name__ == "__main__":
    main()
