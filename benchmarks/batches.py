"""What the rows of a last batch do to accuracy: FedAvg with BatchNorm under several ways to make batches.

The protocol is that of FPL (ten local epochs, SGD 0.01 with momentum 0.9), with fewer rounds. Shuffles are the same in
all. Run it with `PROTOFED_DATA=... python benchmarks/batches.py office_caltech10 --rounds 40`.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor, nn

import protofed
from protofed.api.task import Task
from protofed.data.batches import FEWEST_ROWS, Batch, Data, Plan, batch_at, rows_of_batch, sources, training_plan
from protofed.data.transforms import Draws, Transform
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runtimes import sequential
from protofed.tasks.domain_shift import Digits, OfficeCaltech10
from protofed.tasks.models import resnet10

TESTED = 2000
"""Test images of a domain."""


def from_the_start(n: int, size: int) -> Tensor:
    """The last batch is filled from the start of the epoch, and batches are never smaller than `size`."""
    return torch.arange(ceil(n / size) * size).view(-1, size) % n


def own_rows_exact(n: int, size: int) -> Tensor:
    """As protofed does, with batches of all examples where these are fewer than `size`."""
    size = min(size, max(n, FEWEST_ROWS))
    return sources(n, size).view(-1, size)


def own_rows_of_one(n: int, size: int) -> Tensor:
    """As protofed does, but a last batch of one is copies of that row."""
    size = rows_of_batch(n, size)
    rows = sources(n, size).view(-1, size)
    if n % size == 1:
        rows[-1] = n - 1
    return rows


def even(n: int, size: int) -> Tensor:
    """As many batches, of sizes that differ by one at most; smaller ones repeat a row."""
    parts = torch.arange(n).tensor_split(ceil(n / size))
    most = max(len(parts[0]), min(size, FEWEST_ROWS))
    return torch.stack([part[torch.arange(most) % len(part)] for part in parts])


def without_the_last(n: int, size: int) -> Tensor:
    """No batch that is not full, unless there is no other."""
    return torch.arange(n // size * size).view(-1, size) if n >= size else own_rows_exact(n, size)


FILLS: dict[str, Callable[[int, int], Tensor] | None] = {
    "from the start of the epoch (before)": from_the_start,
    "own rows (now)": None,
    "own rows, one shape for each number of examples": own_rows_exact,
    "own rows, also where there is one": own_rows_of_one,
    "even batches": even,
    "short last batch (DataLoader)": None,
    "drop_last": without_the_last,
}
"""How the n examples of an epoch are put into batches, (steps, rows). None: as protofed does."""
SHORT = "short last batch (DataLoader)"

Planner = Callable[[Data, int, int, Transform, torch.Generator], Plan]


def plan_by(fill: Callable[[int, int], Tensor]) -> Planner:
    """As `training_plan`, with batches made in this way. Copies of a row have that row's augmentation, but for those
    from the start of the epoch."""

    def plan(data: Data, size: int, epochs: int, transform: Transform, generator: torch.Generator) -> Plan:
        n, rows = len(data), fill(len(data), size)
        order = torch.stack([torch.randperm(n, generator=generator) for _ in range(epochs)])

        def placed(values: Tensor) -> Tensor:
            return values[:, rows].flatten(0, 1)

        if fill is from_the_start:
            draws = transform.draw(generator, epochs * len(rows), rows.shape[1])
        else:
            drawn = transform.draw(generator, epochs, n)
            draws = Draws(*(d if d is None else placed(d) for d in (drawn.offset, drawn.flip, drawn.angle)))
        number = torch.randint(2**62, (epochs * len(rows),), generator=generator)
        place = torch.arange(rows.numel()).view(rows.shape)
        first = torch.full((n,), rows.numel()).scatter_reduce(0, rows.flatten(), place.flatten(), "amin")
        weight = (first[rows] == place).float().repeat(epochs, 1)
        last = torch.arange(epochs * len(rows)) >= (epochs - 1) * len(rows)
        return Plan(data.index[placed(order)], weight, last, number, draws)

    return plan


def short_batch(data: Data, plan: Plan, step: int, transform: Transform) -> Batch:
    """The rows that count, alone."""
    batch, counts = batch_at(data, plan, step, transform), plan.weight[step] > 0
    return replace(batch, x=batch.x[counts], y=batch.y[counts], weight=batch.weight[counts], index=batch.index[counts])


def small(channels: int, num_classes: int) -> Parts:
    features = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(64, num_classes)}


def small_1d(channels: int, num_classes: int) -> Parts:
    """With a BatchNorm that sees one value of each channel in a row."""
    parts = small(channels, num_classes)
    assert isinstance(parts["features"], nn.Sequential)
    parts["features"].insert(-1, nn.BatchNorm1d(64))
    return parts


NETWORKS: dict[str, Callable[[int, int], Parts]] = {"small": small, "small_1d": small_1d, "resnet10": resnet10}


def task_of(name: str) -> Task:
    if name == "office_caltech10":
        return OfficeCaltech10().build()
    return Digits(clients={"mnist": 3, "usps": 7, "svhn": 6}, test_limit=TESTED).build()


@dataclass(frozen=True)
class Run:
    task: str
    fill: str
    seed: int
    rounds: int
    batch: int
    network: str
    device: str

    def accuracies(self) -> dict[str, float]:
        """Of each domain, in %, the mean over the last five evaluations."""
        fill = FILLS[self.fill]
        vars(sequential)["training_plan"] = training_plan if fill is None else plan_by(fill)
        vars(sequential)["batch_at"] = short_batch if self.fill == SHORT else batch_at
        task, build = task_of(self.task), NETWORKS[self.network]
        task = replace(task, model=lambda client: build(3, task.num_classes))
        result = protofed.run(
            "fedavg",
            task,
            rounds=self.rounds,
            epochs=10,
            batch_size=self.batch,
            optimizer=Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5),
            seed=self.seed,
            evaluate_every=2,
            minimum_replies=len(task.clients),
            runtime=RuntimeSettings("sequential", device=self.device),
        )
        found = {domain: 100 * value for domain, value in result.accuracy("last_five").items()}
        return {**found, "mean": statistics.mean(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["office_caltech10", "digits"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--network", choices=list(NETWORKS), default="small")
    parser.add_argument("--fills", nargs="+", choices=list(FILLS), default=list(FILLS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {
        (fill, seed): Run(args.task, fill, seed, args.rounds, args.batch, args.network, args.device)
        for seed in args.seeds
        for fill in args.fills
    }
    found: dict[tuple[str, int], dict[str, float]] = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (fill, seed), future in [(key, pool.submit(run.accuracies)) for key, run in runs.items()]:
            try:
                found[fill, seed] = future.result()
                print(f"seed {seed}, {fill}: {found[fill, seed]['mean']:.2f}", flush=True)
            except Exception as error:
                print(f"seed {seed}, {fill}: {type(error).__name__}: {error}", flush=True)
    columns = list(next(iter(found.values())))
    print(f"torch {torch.__version__}, {args.device}; {args}")
    print(f"| {args.task} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for fill in args.fills:
        rows = [found[fill, seed] for seed in args.seeds if (fill, seed) in found]
        if len(rows) == len(args.seeds):
            cells = [_cell([row[column] for row in rows]) for column in columns]
            print(f"| {fill} | {' | '.join(cells)} |")


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
