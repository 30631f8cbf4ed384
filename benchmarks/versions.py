"""What rounds of FedAvg cost in two versions of protofed: each in a process of its own, round by round in turns.

Run it with `python benchmarks/versions.py OLD/src NEW/src`, two source trees. Measured is processor time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

import torch
from torch import nn

UNEQUAL = (160, 1280, 320, 640, 160, 480, 960, 320, 1600, 480, 320, 960)
CASES = {
    "overhead.py's work, batch 10": ((640,) * 4, 2, 10, "cnn"),
    "overhead.py's work, batch 64": ((640,) * 4, 2, 64, "cnn"),
    "workers.py's unequal clients, batch 64": (UNEQUAL, 1, 64, "cnn"),
    "100 clients, 4 steps each, CNN": ((40,) * 100, 1, 10, "cnn"),
    "100 clients, 4 steps each, two small linear layers": ((32,) * 100, 1, 8, "linear"),
}
"""Examples of each client, epochs, batch size, network."""

PLACES = {
    "Task": ("protofed.api.task", "protofed.method"),
    "Data": ("protofed.data.batches", "protofed.data"),
    "Federation": ("protofed.engine.federation", "protofed.runtimes.federation"),
    "Training": ("protofed.engine.training", "protofed.runtimes.federation"),
    "Sgd": ("protofed.optim.optimizers", "protofed.optim"),
}
"""Where the classes are, and where they were in version 0.1."""


def found(name: str) -> Any:
    for place in PLACES[name]:
        try:
            return getattr(import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"there is no {name} in {' or '.join(PLACES[name])}")


def parts(network: str) -> dict[str, nn.Module]:
    if network == "linear":
        return {"features": nn.Sequential(nn.Linear(20, 16), nn.ReLU()), "classifier": nn.Linear(16, 10)}
    features = nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(64, 10)}


def serve(case: str) -> None:
    """A round for every line that comes in, and its seconds as a line."""
    torch.set_num_threads(1)
    sizes, epochs, size, network = CASES[case]
    draw = torch.Generator().manual_seed(0)
    shape = (20,) if network == "linear" else (3, 28, 28)
    data = {
        f"client-{k}": found("Data").of(
            torch.rand(examples, *shape, generator=draw), torch.randint(0, 10, (examples,), generator=draw)
        )
        for k, examples in enumerate(sizes)
    }
    task = found("Task")(clients=data, tests={}, num_classes=10, model=lambda client: parts(network))
    optimizer = found("Sgd")(lr=0.01, momentum=0.9, weight_decay=1e-5)
    training = found("Training")(rounds=1, epochs=epochs, batch_size=size, optimizer=optimizer)
    federation = found("Federation")(import_module("protofed.methods").METHODS["fedavg"](), task, training)
    state = federation.start()
    for _ in sys.stdin:
        begin = time.process_time()
        state = federation.advance(state)
        print(time.process_time() - begin, flush=True)


def seconds(trees: list[str], case: str, rounds: int) -> list[list[float]]:
    """Of each round in each tree; the first, for warming up, is left out."""
    command = [sys.executable, __file__, "--serve", case]
    processes = [
        subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": tree}
        )
        for tree in trees
    ]
    taken: list[list[float]] = [[] for _ in trees]
    try:
        for turn in range(rounds + 1):
            for k in (0, 1) if turn % 2 else (1, 0):
                process = processes[k]
                assert process.stdin
                assert process.stdout
                process.stdin.write("\n")
                process.stdin.flush()
                taken[k].append(float(process.stdout.readline()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [times[1:] for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="SRC")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="cases whose title holds this")
    parser.add_argument("--serve", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if len(args.trees) != 2:
        parser.error("give two source trees, the older one first")
    print("| a round | ms before | ms now | median ratio | fastest |\n| --- | ---: | ---: | ---: | ---: |")
    for case in [title for title in CASES if args.only in title]:
        old, new = seconds([os.path.abspath(tree) for tree in args.trees], case, args.rounds)
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        medians = f"{1000 * statistics.median(old):.0f} | {1000 * statistics.median(new):.0f}"
        print(f"| {case} | {medians} | {ratio:.3f} | {min(new) / min(old):.3f} |", flush=True)


if __name__ == "__main__":
    main()
