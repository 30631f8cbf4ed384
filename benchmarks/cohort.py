"""What a client's step costs on a GPU when a whole cohort is trained together, and how far that is from the floor.

Examples are random; sizes, shapes and networks are those of the papers' protocols. `step` is the time that the GPU
spends on the clients' optimiser steps, with gathering and varying of the examples, over their number; `round` is the
wall-clock time of whole rounds, with the server's work and an evaluation on all test sets, over that of the steps;
`protocol` is the same with an evaluation as often as our experiments have it, in every tenth round of FedPC's. The
floor is one model that takes the batches of all clients as one, in a plain loop with channels last: the same arithmetic
in the largest pieces. Rows are measured one after another in one process; medians of all rounds but the first.

Run it with `python benchmarks/cohort.py --out cohort.json`; `--read cohort.json --figure cohort.svg` draws what a run
has found. `--kernels` says instead what the GPU spends a ResNet-10's step on, and what the floor's.
"""

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.methods import METHODS
from protofed.nn.precision import Precision
from protofed.optim.optimizers import Sgd
from protofed.runs.store.folder import commit
from protofed.runtimes.cohort import executors
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.tasks.models import conv2, lenet_projected, resnet10

OPTIMIZER = Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5)
PICTURES = Transform(mean=(0.48, 0.46, 0.41), std=(0.25, 0.24, 0.26), pad=4, flip=True)
ROUNDS = 5


@dataclass(frozen=True)
class Work:
    """A protocol: so many examples at each client, so many in each test set."""

    title: str
    sizes: tuple[int, ...]
    tests: tuple[int, ...]
    parts: Callable[[int, int], Any]
    batch_size: int
    epochs: int
    every: int = 1
    """An evaluation after so many rounds."""

    @property
    def steps(self) -> int:
        """Client steps of a round."""
        return self.epochs * sum(ceil(size / self.batch_size) for size in self.sizes)

    def task(self) -> Task:
        draw = torch.Generator().manual_seed(0)

        def examples(count: int) -> Data:
            x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)
            return Data.of(x, torch.randint(0, 10, (count,), generator=draw))

        clients = {f"client-{k:03d}": examples(size) for k, size in enumerate(self.sizes)}
        tests = {f"domain-{k}": examples(size) for k, size in enumerate(self.tests)}
        return Task(clients, tests, 10, lambda client: self.parts(3, 10), transform=PICTURES)


DIGITS_SIZES = (600,) * 3 + (73,) * 7 + (733,) * 6 + (100,) * 4
DIGITS = Work(
    "ResNet-10, batch 64, 20 clients of FPL's Digits", DIGITS_SIZES, (10_000, 2_007, 26_032, 2_000), resnet10, 64, 10
)
FEDPC = Work("conv2, batch 10, 100 clients", (500,) * 100, (10_000,), conv2, 10, 5, every=10)
LENET = Work("LeNet, batch 10, 20 clients", (500,) * 20, (10_000,), lenet_projected, 10, 5)
SKEWED_SIZES = (5431, 3133, 6232, 5143, 6026, 5522, 5511, 4370, 4721, 3911)
SKEWED = Work("LeNet, batch 64, 10 clients of pFedCSPC's CIFAR-10", SKEWED_SIZES, (10_000,), lenet_projected, 64, 10)

ROWS: list[tuple[Work, str, Precision, bool, Literal["auto", "streams"]]] = [
    (DIGITS, "fedavg", "bf16", True, "auto"),
    (DIGITS, "fpl", "bf16", True, "auto"),
    (DIGITS, "moon", "bf16", True, "auto"),
    (DIGITS, "fedavg", "tf32", True, "auto"),
    (DIGITS, "fedavg", "bf16", False, "streams"),
    (DIGITS, "fedavg", "tf32", False, "streams"),
    (FEDPC, "fedavg", "tf32", True, "auto"),
    (FEDPC, "fedpc", "tf32", True, "auto"),
    (FEDPC, "fedavg", "bf16", True, "auto"),
    (LENET, "fedavg", "tf32", True, "auto"),
    *((SKEWED, method, "tf32", True, "auto") for method in ("fedavg", "fedgh", "ga", "fednh", "fpl")),
    *((SKEWED, method, "tf32", True, "auto") for method in ("moon", "fedsr", "pfedcspc", "fedseproto")),
]
"""Work, method, precision, whether only repeatable algorithms may be used, and the executor: to try both while cuDNN
looks for its fastest algorithms takes half a minute."""


def measured(work: Work, method: str, runtime: Any, rounds: int) -> dict[str, Any]:
    training = Training(rounds=rounds, epochs=work.epochs, batch_size=work.batch_size, optimizer=OPTIMIZER)
    federation = Federation(METHODS[method](), work.task(), training, runtime)
    state, whole, steps, clients, looks = federation.start(), [], [], [], []
    spans = getattr(runtime, "spans", [])
    for _ in range(rounds):
        if spans:
            spans.clear()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        state = federation.advance(state)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        evaluate(federation, state)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
        looks.append(time.perf_counter() - middle)
        clients.append(state.client_seconds)
        steps.append(sum(s.begin.elapsed_time(s.end) for s in spans if s.body == "FitBody") / 1000)
    rest = slice(1, None) if rounds > 1 else slice(None)
    trained = statistics.median(steps[rest]) or statistics.median(clients[rest])
    between = [seconds - look + look / work.every for seconds, look in zip(whole, looks, strict=True)]
    return {
        "step_ms": 1000 * trained / work.steps,
        "round_s": statistics.median(whole[rest]),
        "clients_s": statistics.median(clients[rest]),
        "evaluation_s": statistics.median(looks[rest]),
        "round_over_steps": statistics.median(whole[rest]) / trained,
        "protocol_over_steps": statistics.median(between[rest]) / trained,
        "first_round_s": whole[0],
        "executor": next((s.executor.lower() for s in spans if s.body == "FitBody"), "-"),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def plain_step(work: Work, precision: Precision, models: int = 1) -> Callable[[], None]:
    """A plain eager step: one model at the batch of all clients, or, with a model for each, one after another."""
    clients = len(work.sizes)
    batch = work.batch_size * clients // models
    networks = [
        nn.Sequential(*work.parts(3, 10).values()).cuda().to(memory_format=torch.channels_last) for _ in range(models)
    ]
    optimizers = [
        torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, foreach=True) for n in networks
    ]
    x = torch.rand(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"

    def step() -> None:
        for model, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()

    return step


def floor(work: Work, precision: Precision, models: int = 1) -> float:
    """Milliseconds of a plain step over the number of clients."""
    step, times = plain_step(work, precision, models), []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[3:]) / len(work.sizes)


KINDS = {
    "convolutions, gradient of the weights": "wgrad",
    "convolutions, gradient of the inputs": "dgrad",
    "convolutions, forward": "fprop|convolve|ImplicitGemm",
    "BatchNorm": "batch_?norm|bn_fw|bn_bw",
    "optimiser": "multi_tensor",
    "gathering and varying examples": "index|flip",
    "activations, sums and casts": "elementwise",
    "layouts and cleared memory": "memset|memcpy|convert|nchw|nhwc|workspace|transform",
}
"""What a kernel does, by what is in its name; the first that fits."""


def by_kind(action: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds of the GPU for a client's step, by what it does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    found = dict.fromkeys([*KINDS, "all else"], 0.0)
    for kernel in profiler.key_averages():
        kind = next((kind for kind, words in KINDS.items() if re.search(words, kernel.key, re.IGNORECASE)), "all else")
        found[kind] += kernel.self_device_time_total / 1000 / steps
    return found


def kernels(work: Work, precision: Precision) -> None:
    """Prints what a step is spent on, if nothing runs beside it, and what the floor's is."""
    executors.NUM_STREAMS = 1
    runtime = Cohort("cuda", precision, "streams")
    training = Training(rounds=3, epochs=1, batch_size=work.batch_size, optimizer=OPTIMIZER)
    federation = Federation(METHODS["fedavg"](), work.task(), training, runtime)
    state = federation.advance(federation.start())
    mine = by_kind(lambda: federation.advance(state), replace(work, epochs=1).steps)
    step = plain_step(work, precision)
    for _ in range(5):
        step()
    theirs = by_kind(step, len(work.sizes))
    print(f"\n{work.title}, {precision}\n\n| ms a client step | one client | floor |\n| --- | ---: | ---: |")
    for kind in mine:
        print(f"| {kind} | {mine[kind]:.3f} | {theirs[kind]:.3f} |")
    print(f"| together | {sum(mine.values()):.3f} | {sum(theirs.values()):.3f} |", flush=True)


def hardware() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": commit() or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
    }


BARS = {
    "plain eager loop": ("plain loop, tf32", "#bbbbbb"),
    "protofed, sequential": ("protofed, sequential", "#66ccee"),
    "protofed, cohort": ("fedavg", "#4477aa"),
    "one model at the batch of all": ("floor, tf32", "#ccbb44"),
}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """A client's step by each way of training, in tf32, one panel for each protocol."""
    from matplotlib.figure import Figure

    works = list(dict.fromkeys(row["work"] for row in found))
    figure = Figure(figsize=(4.2 * len(works), 2.5), layout="constrained")
    for axis, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        for height, (method, colour) in enumerate(reversed(BARS.values())):
            rows = [r for r in found if r["work"] == work and r["method"] == method]
            value = next(
                r["step_ms"] for r in rows if r.get("precision", "tf32") == "tf32" and r.get("repeatable", True)
            )
            axis.barh(height, value, color=colour)
            axis.text(value * 1.1, height, f"{value:.3g}", va="center", fontsize=9)
        axis.set(xscale="log", xlim=(0.01, 40), xlabel="ms for a client's step")
        axis.set_yticks(range(len(BARS)), list(reversed(BARS)) if work == works[0] else [])
        axis.set_title(work, fontsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=Path, help="draw what this file holds, and measure nothing")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose title holds this")
    parser.add_argument("--rows", action="store_true", help="without the plain loops and the floor")
    parser.add_argument("--kernels", action="store_true", help="only what a step is spent on")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as runs have
    if options.kernels:
        for precision in ("tf32", "bf16"):
            kernels(DIGITS, precision)
        return
    if options.read:
        draw(json.loads(options.read.read_text())["rows"], options.figure)
        return
    torch.set_num_threads(1)  # as a run does
    found: list[dict[str, Any]] = []
    print("| work | method | precision | repeatable | ms a step | round | protocol | executor | first, s | GiB |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for work, method, precision, repeatable, executor in ROWS:
        if options.only not in f"{work.title} {method} {precision} {repeatable}":
            continue
        torch.cuda.reset_peak_memory_stats()
        runtime = Cohort("cuda", precision, executor, repeatable)
        row = measured(work, method, runtime, ROUNDS)
        runtime.close()
        del runtime
        gc.collect()
        torch.cuda.empty_cache()
        found.append({"work": work.title, "method": method, "precision": precision, "repeatable": repeatable, **row})
        cells = [work.title, method, precision, "yes" if repeatable else "no", f"{row['step_ms']:.4f}"]
        cells += [f"{row[f'{what}_over_steps']:.2f}" for what in ("round", "protocol")]
        cells += [row["executor"], f"{row['first_round_s']:.1f}"]
        print(f"| {' | '.join(cells)} | {row['peak_GiB']:.1f} |", flush=True)
    for work in (DIGITS, FEDPC, LENET, SKEWED):
        if options.only in work.title and not options.rows:
            row = measured(replace(work, epochs=1), "fedavg", Sequential("cuda", "tf32"), 1)  # else it takes minutes
            others = {"protofed, sequential": row["step_ms"]}
            for precision in ("bf16", "tf32"):
                others[f"plain loop, {precision}"] = floor(work, precision, len(work.sizes))
                others[f"floor, {precision}"] = floor(work, precision)
            for title, value in others.items():
                found.append({"work": work.title, "method": title, "step_ms": value})
                print(f"| {work.title} | {title} | | | {value:.4f} | | | | | |", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"hardware": hardware(), "rows": found}, indent=1) + "\n")
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
