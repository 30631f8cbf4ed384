"""What the engine costs: the sequential runtime over a bare PyTorch loop that takes the same FedAvg steps.

Both train a small CNN for the same clients, batches and optimiser, in turns, in one process on one thread; the ratio is
that of the medians over the repeats. Run it with `python benchmarks/overhead.py`.
"""

import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd

CLIENTS, EXAMPLES, EPOCHS, REPEATS = 4, 640, 2, 9


def parts(client: str = "") -> Parts:
    features = nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
    )
    return {"features": features, "classifier": nn.Linear(64, 10)}


def bare_round(server: nn.Module, shards: list[tuple[Tensor, Tensor]], size: int) -> None:
    """One round of FedAvg as one would write it by hand."""
    states = []
    for x, y in shards:
        model = copy.deepcopy(server)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        for _ in range(EPOCHS):
            order = torch.randperm(len(y))
            for start in range(0, len(y), size):
                rows = order[start : start + size]
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        states.append(model.state_dict())
    mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
    server.load_state_dict(mean)


def measured(size: int) -> tuple[float, float]:
    """Seconds of a round, ours and bare."""
    draw = torch.Generator().manual_seed(0)
    shards = [
        (torch.rand(EXAMPLES, 3, 28, 28, generator=draw), torch.randint(0, 10, (EXAMPLES,), generator=draw))
        for _ in range(CLIENTS)
    ]
    clients = {f"client-{k}": Data.of(x, y) for k, (x, y) in enumerate(shards)}
    task = Task(clients=clients, tests={}, num_classes=10, model=parts)
    optimizer = Sgd(lr=0.01, momentum=0.9, weight_decay=1e-5)
    training = Training(rounds=1, epochs=EPOCHS, batch_size=size, optimizer=optimizer)
    federation = Federation(METHODS["fedavg"](), task, training)
    state, server = federation.start(), nn.Sequential(*parts().values())
    ours, bare = [], []
    for repeat in range(REPEATS + 1):
        begin = time.perf_counter()
        state = federation.advance(state)
        middle = time.perf_counter()
        bare_round(server, shards, size)
        if repeat:  # the first is for warming up
            ours.append(middle - begin)
            bare.append(time.perf_counter() - middle)
    return statistics.median(ours), statistics.median(bare)


def main() -> None:
    torch.set_num_threads(1)
    steps = CLIENTS * EPOCHS * EXAMPLES
    print(f"torch {torch.__version__}, 1 thread, {CLIENTS} clients x {EXAMPLES} examples x {EPOCHS} epochs")
    print("| batch | protofed, ms per step | bare loop, ms per step | ratio |\n| --- | --- | --- | --- |")
    for size in (10, 64):
        ours, bare = measured(size)
        scale = 1000 * size / steps
        print(f"| {size} | {ours * scale:.3f} | {bare * scale:.3f} | {ours / bare:.3f} |")


if __name__ == "__main__":
    main()
