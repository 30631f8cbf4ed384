"""What the server's part of the methods costs: time and memory for the prototypes of 20, 1 000 and 100 000 clients.

Each row is a process of its own, on two threads. Prototypes have 512 dimensions and lie in a few clumps, the domains,
unless the row says noise. Seconds are those of the fastest try, CPU seconds those of the same try; the column `timed`
says what was done in them. Peak memory is that of the whole process, with Python and PyTorch, which `start` is without
any work. What would take too long or not fit is named and has no number. Run it with `python benchmarks/server.py`.
"""

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from protofed.api.requests import Objective
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.pfedcspc import HEAD, PFedCSPC, calibration
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes, mean_over_owners, no_prototypes
from protofed.prototypes.finch import finch
from protofed.prototypes.kmeans import kmeans, partitioned
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import environment
from protofed.tasks.models import resnet10
from protofed.tree import Mean, Params

THREADS = 2
DOMAINS, NOISE = 5, 0.3
SLOTS = PFedCSPC().slots_per_class
STEPS = 30
"""Steps of a calibration that are timed; all take the same time."""
BANK = 64
"""Clients whose prototypes are drawn; a stream of more repeats them."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    what: str
    clients: int
    classes: int
    dim: int
    timed: str
    prepare: Callable[["Row"], Work] | None
    """Makes the data and gives what is timed; None for a cell that is not measured."""
    tries: int = 3


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    start_gib: float
    peak_gib: float


# ---- data


def clumps(count: int, dim: int, seed: int = 0) -> Tensor:
    """Prototypes of one class: the mean of a domain, not negative as after a ReLU, and noise, (N, D)."""
    draw = torch.Generator().manual_seed(seed)
    domains = torch.randn(DOMAINS, dim, generator=draw).relu()
    points = torch.randn(count, dim, generator=draw).mul_(NOISE)
    return points.add_(domains[torch.randint(DOMAINS, (count,), generator=draw)])


def sent(row: Row) -> Iterator[Prototypes]:
    """The class prototypes of one client after another."""
    classes = torch.stack([clumps(BANK, row.dim, seed) for seed in range(row.classes)], 1)  # (BANK, C, D)
    return (Prototypes(classes[k % BANK], torch.ones(row.classes)) for k in range(row.clients))


def uploads(count: int) -> Iterator[tuple[Params, float]]:
    """Weights of a ResNet-10 and numbers of examples, made when they are asked for."""
    params = nn.ModuleDict(resnet10(3, 10)).state_dict()
    for k in range(count):
        yield {name: leaf + k for name, leaf in params.items()}, 100.0 + k


# ---- what is timed


def finch_of_classes(row: Row) -> Work:
    classes = [clumps(row.clients, row.dim, seed) for seed in range(row.classes)]
    return lambda: [finch(points) for points in classes]


def finch_of_noise(row: Row) -> Work:
    points = torch.randn(row.clients, row.dim, generator=torch.Generator().manual_seed(0))
    return lambda: finch(points)


def fedpc_setup(row: Row) -> Work:
    points = torch.cat([clumps(row.clients, row.dim, seed) for seed in range(row.classes)], 1)  # (N, C·D)
    return lambda: partitioned(points, 5, 10, torch.Generator().manual_seed(0))


def fedpc_kmeans(row: Row) -> Work:
    points = clumps(row.clients, 10)
    return lambda: kmeans(points, 5, torch.Generator().manual_seed(0))


def pfedcspc_kmeans(row: Row) -> Work:
    points = clumps(row.clients, row.dim)
    return lambda: kmeans(points, 3, torch.Generator().manual_seed(0), restarts=1)


def pool_of(row: Row) -> calibration.Pool:
    """What pFedCSPC's server holds: `SLOTS` prototypes of each class from each client."""
    mean = torch.cat([clumps(row.clients * SLOTS, row.dim, seed) for seed in range(row.classes)])
    client = torch.arange(row.clients).repeat_interleave(SLOTS).repeat(row.classes)
    return calibration.Pool(mean, torch.arange(row.classes).repeat_interleave(row.clients * SLOTS), client)


def partners(row: Row) -> Work:
    pool, count = pool_of(row), PFedCSPC().augmentations
    return lambda: calibration.drawn_partners(pool, count, torch.Generator().manual_seed(0))


def calibration_steps(row: Row) -> Work:
    def parts(client: str) -> Parts:
        projection = nn.Sequential(nn.Linear(row.dim, 512), nn.ReLU(), nn.Linear(512, 256))
        return {"features": nn.Flatten(), "projection": projection, "classifier": nn.Linear(256, row.classes)}

    method, pool = PFedCSPC(), pool_of(row)
    drawn = calibration.drawn_partners(pool, method.augmentations, torch.Generator().manual_seed(0))
    some = torch.randperm(len(pool.label), generator=torch.Generator().manual_seed(0))[: STEPS * calibration.BATCH]
    task = Task({"one": Data.of(pool.mean[:1], pool.label[:1])}, {}, row.classes, parts)
    central = Federation(method, task, Training()).server_context(0, "round")
    return lambda: central.fit(
        Objective(method.calibration_loss, trains=HEAD),
        params=central.initial_params(),
        data=Data(pool.mean, pool.label, some),
        context=(pool, drawn, torch.ones(row.classes, dtype=torch.bool)),
        batch_size=calibration.BATCH,
        optimizer=Sgd(lr=method.calibration_rate, weight_decay=1e-5),
    )


def centres(row: Row) -> Work:
    pool = pool_of(row)
    return lambda: calibration.class_centres(pool.mean, pool, no_prototypes(row.classes, row.dim))


def mean_of_prototypes(row: Row) -> Work:
    return lambda: mean_over_owners(sent(row), no_prototypes(row.classes, row.dim))


def mean_of_uploads(row: Row) -> Work:
    def fold() -> object:
        mean = Mean()
        for params, num_examples in uploads(row.clients):
            mean.add(params, num_examples)
        return mean.value()

    return fold


# ---- rows


def rows(small: bool) -> Iterator[Row]:
    few, some, many = (5, 30, 600) if small else (20, 1_000, 100_000)
    kinds, dim = ((2, 4), 32) if small else ((10, 100), 512)
    yield from finch_rows(few, some, many, kinds, dim)
    yield from kmeans_rows(few, some, many, kinds, dim)
    yield from calibration_rows(few, some, many, kinds, dim)
    for clients in (few, some, many):
        for classes in kinds:
            timed = f"all, as a stream that repeats {BANK} clients"
            yield Row(
                "mean of prototypes", clients, classes, dim, timed, mean_of_prototypes, 1 if clients == many else 3
            )
    for clients in (2, 4, 6) if small else (10, 100, 1_000):
        timed = "all, as a stream; making each upload is in the time"
        yield Row("mean of ResNet-10 weights", clients, 10, 512, timed, mean_of_uploads, 1)


def finch_rows(few: int, some: int, many: int, kinds: tuple[int, int], dim: int) -> Iterator[Row]:
    for clients in (few, some):
        for classes in kinds:
            yield Row("FINCH", clients, classes, dim, "all classes", finch_of_classes)
    whole = f"one class, of which a round has {kinds[0]} or {kinds[1]}"
    yield Row("FINCH", many, 1, dim, whole, finch_of_classes, 2)
    yield Row("FINCH of noise", many, 1, dim, whole, finch_of_noise, 2)


def kmeans_rows(few: int, some: int, many: int, kinds: tuple[int, int], dim: int) -> Iterator[Row]:
    for clients in (few, some):
        for classes in kinds:
            timed = "principal axes, and 5 clusters in 10 restarts"
            yield Row("k-means of FedPC", clients, classes, dim, timed, fedpc_setup, 1 if clients == some else 3)
    yield Row("k-means of FedPC", many, 1, 10, "5 clusters in 10 restarts, of 10 given components", fedpc_kmeans, 1)
    for classes in kinds:
        timed = f"not measured: the axes need several times {many * classes * dim * 8 / 2**30:.0f} GiB"
        yield Row("k-means of FedPC", many, classes, dim, timed, None)
    for points in (few, some, many):
        timed = "a client with so many examples of one class: 3 clusters, once"
        yield Row("k-means of pFedCSPC", points, 1, dim, timed, pfedcspc_kmeans, 1 if points == many else 3)


def calibration_rows(few: int, some: int, many: int, kinds: tuple[int, int], dim: int) -> Iterator[Row]:
    for clients, classes in ((few, kinds[0]), (few, kinds[1]), (some, kinds[0])):
        in_all = PFedCSPC().calibration_epochs * -(-clients * classes * SLOTS // calibration.BATCH)
        timed = f"{STEPS} of the {in_all} steps, {clients * classes * SLOTS} prototypes"
        yield Row("calibration: partners", clients, classes, dim, "all", partners, 1)
        yield Row("calibration: steps", clients, classes, dim, timed, calibration_steps)
        yield Row("calibration: class centres", clients, classes, dim, "all, once of two times", centres)
    for clients, classes in ((some, kinds[1]), (many, kinds[0]), (many, kinds[1])):
        size = clients * classes * SLOTS * dim * 4 / 2**30
        yield Row("calibration", clients, classes, dim, f"not measured: the prototypes alone are {size:.0f} GiB", None)


# ---- measuring


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(row: Row) -> Cost:
    """Runs in a process of its own, since the peak of a process never falls."""
    assert row.prepare is not None
    torch.set_num_threads(THREADS)
    start, work, found = peak_gib(), row.prepare(row), []
    for _ in range(row.tries):
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        found.append((time.perf_counter() - begin, time.process_time() - cpu))
    return Cost(*min(found), start, peak_gib())


def in_a_child(row: Row) -> Cost | None:
    if row.prepare is None:
        return None
    context = multiprocessing.get_context("forkserver")  # as spawn, but imports PyTorch once
    context.set_forkserver_preload(["protofed"])
    with ProcessPoolExecutor(1, mp_context=context) as child:
        return child.submit(measured, row).result()


def as_json(row: Row, cost: Cost | None) -> dict[str, object]:
    facts = {key: getattr(row, key) for key in ("what", "clients", "classes", "dim", "timed", "tries")}
    return {**facts, **(asdict(cost) if cost else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for hardware, versions and numbers")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    console, results = Console(width=max(Console().width, 140)), []
    table = Table(*("what", "clients", "classes", "timed", "tries", "seconds", "CPU seconds", "peak GiB"))
    for row in rows(options.small):
        if options.only in row.what and (row.prepare or not options.small):
            cost = in_a_child(row)
            results.append(as_json(row, cost))
            numbers = (f"{cost.seconds:.4g}", f"{cost.cpu_seconds:.4g}", f"{cost.peak_gib:.2f}") if cost else ("",) * 3
            tries = str(row.tries) if cost else ""
            table.add_row(row.what, str(row.clients), str(row.classes), row.timed, tries, *numbers)
            console.print(f"{row.what}, {row.clients} clients, {row.classes} classes: {numbers[0] or row.timed}")
    console.print(table)
    if options.json:
        facts = {"environment": environment(), "rows": results}
        write_atomically(options.json, json.dumps(facts, indent=2).encode())


if __name__ == "__main__":
    main()
