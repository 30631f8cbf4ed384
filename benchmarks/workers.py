"""What processes gain: the runtime workers against the sequential one, for the clients of one round.

Both train the small CNN of `overhead.py` with FedAvg for the same clients and batches, in turns, from the same state;
the ratio is that of the medians over the repeats, and the weights that come out must be equal bit for bit. Run it with
`python benchmarks/workers.py`, on a machine with two cores that nothing else uses.
"""

import statistics
import time

import torch

from overhead import parts
from protofed import tree
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.optim.optimizers import Sgd
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers

PROCESSES, EPOCHS, REPEATS = 2, 1, 7
EQUAL = [640] * 12
UNEQUAL = [160, 1280, 320, 640, 160, 480, 960, 320, 1600, 480, 320, 960]
"""As many examples in all as EQUAL has, in no order."""


def task_of(sizes: list[int]) -> Task:
    draw = torch.Generator().manual_seed(0)
    clients = {
        f"client-{k:02d}": Data.of(
            torch.rand(size, 3, 28, 28, generator=draw), torch.randint(0, 10, (size,), generator=draw)
        )
        for k, size in enumerate(sizes)
    }
    return Task(clients=clients, tests={}, num_classes=10, model=parts)


def measured(sizes: list[int], batch: int) -> tuple[float, float]:
    """Seconds of a round, sequential and in processes."""
    training = Training(
        rounds=1, epochs=EPOCHS, batch_size=batch, optimizer=Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5)
    )
    method, task = METHODS["fedavg"](), task_of(sizes)
    federations = [Federation(method, task, training, runtime) for runtime in (Sequential(), Workers(PROCESSES))]
    start = federations[0].start()
    seconds: list[list[float]] = [[], []]
    for repeat in range(REPEATS + 1):
        servers = []
        for federation, own in zip(federations, seconds, strict=True):
            begin = time.perf_counter()
            servers.append(federation.advance(start).server)
            if repeat:  # the first is for warming up, and for starting the processes
                own.append(time.perf_counter() - begin)
        assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, servers), strict=True))
    federations[1].runtime.close()
    sequential, workers = map(statistics.median, seconds)
    return sequential, workers


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {len(EQUAL)} clients, {sum(EQUAL)} examples x {EPOCHS} epochs")
    print(f"| clients | batch | sequential, s | {PROCESSES} workers, s | ratio |\n| --- | ---: | ---: | ---: | ---: |")
    for name, sizes in (("equal", EQUAL), ("unequal", UNEQUAL)):
        for batch in (10, 64):
            sequential, workers = measured(sizes, batch)
            print(f"| {name} | {batch} | {sequential:.3f} | {workers:.3f} | {sequential / workers:.2f} |")


if __name__ == "__main__":
    main()
