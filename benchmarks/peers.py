"""protofed beside Flower's simulation, pfl-research and a loop written by hand, on the CPU.

All do the same FedAvg work: the same clients and examples, the same network from the same weights, the same steps.
Each run is a fresh process (the systems take turns, and medians count). The end of the first round is timed twice: from
the start of the process, and from the moment when the system's modules are imported, as somebody finds it who starts
runs from a notebook. Every process computes on one thread; systems that can run two clients at once do so. Flower is
there twice: so, and as it comes, which on two cores is one client at a time on two threads.

    pip install -c constraints-peers.txt torch && pip install -c constraints-peers.txt -e '.[peers]'
    python benchmarks/peers.py --out peers.json --figure peers.svg
"""

import argparse
import copy
import datetime
import functools
import importlib.util
import itertools
import json
import logging
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Children import this file by its name. Nothing of any system is imported here: each pays for its own imports only.

LR, MOMENTUM, CLASSES = 0.01, 0.9, 10
LIMIT = 600
"""Seconds after which a run is given up."""
BUSY = 1.25
"""Load per core above which other work must have taken part of the machine; ours alone makes up to 1."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""One thread for each process; nobody calls home."""

Weights = dict[str, Tensor]
Tick = Callable[[], None]
"""Called at the end of every round."""


# The work


@dataclass(frozen=True)
class Work:
    """What every system does."""

    clients: int = 20
    examples: int = 160
    """Of each client."""
    batch: int = 32
    epochs: int = 1
    rounds: int = 6
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of all clients in one round."""
        return self.clients * self.epochs * math.ceil(self.examples / self.batch)


def parts(client: str = "") -> dict[str, nn.Module]:
    """The network of `overhead.py`, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = nn.Sequential(
            *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
        )
        return {"features": features, "classifier": nn.Linear(64, CLASSES)}


def network() -> nn.Module:
    return nn.Sequential(*parts().values())


@functools.cache
def shard(work: Work, client: int) -> tuple[Tensor, Tensor]:
    """A client's examples: noise, and labels that have nothing to do with it."""
    draw = torch.Generator().manual_seed(1000 * work.seed + client)
    x = torch.rand(work.examples, 3, 28, 28, generator=draw)
    return x, torch.randint(0, CLASSES, (work.examples,), generator=draw)


def batches(work: Work, client: int, passes: int) -> tuple[Tensor, ...]:
    """The rows of a client's batches, after so many passes over its examples; protofed draws its own."""
    draw = torch.Generator().manual_seed(work.clients * passes + client)
    return torch.randperm(work.examples, generator=draw).split(work.batch)


def fit(model: nn.Module, work: Work, client: int, round: int) -> None:
    """A client's training as one would write it by hand."""
    x, y = shard(work, client)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for epoch in range(work.epochs):
        for rows in batches(work, client, work.epochs * round + epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def checked(work: Work, weights: list[Tensor]) -> dict[str, float]:
    """What shows that the work was done: the loss over all clients' examples, and how far the weights went."""
    model, begin = network(), list(network().parameters())
    for own, new in zip(model.parameters(), weights, strict=True):
        own.copy_(new)
    shards = [shard(work, k) for k in range(work.clients)]
    loss = statistics.fmean(F.cross_entropy(model(x), y).item() for x, y in shards)
    moved = math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in zip(weights, begin, strict=True)))
    return {"loss": loss, "moved": moved}


# The systems: each takes the work and gives back the weights in the order of the network's parameters


def plain(work: Work, tick: Tick) -> list[Tensor]:
    server = network()
    for index in range(work.rounds):
        total: Weights = {}
        for client in range(work.clients):
            model = copy.deepcopy(server)
            fit(model, work, client, index)
            share = 1 / work.clients  # all have equally many examples
            total = {n: total.get(n, 0) + share * leaf for n, leaf in model.state_dict().items()}
        server.load_state_dict(total)
        tick()
    return [leaf.detach() for leaf in server.parameters()]


def protofed(work: Work, tick: Tick, processes: int = 1) -> list[Tensor]:
    from protofed.api.task import Task
    from protofed.data.batches import Data
    from protofed.engine.federation import Federation
    from protofed.engine.training import Training
    from protofed.methods.fedavg import FedAvg
    from protofed.optim.optimizers import Sgd
    from protofed.runtimes.sequential import Sequential

    runtime: Any = Sequential()
    if processes > 1:
        from protofed.runtimes.workers import Workers

        runtime = Workers(count=processes)
    clients = {f"client-{k:04}": Data.of(*shard(work, k)) for k in range(work.clients)}
    task = Task(clients=clients, tests={}, num_classes=CLASSES, model=parts)
    training = Training(
        rounds=work.rounds,
        epochs=work.epochs,
        batch_size=work.batch,
        seed=work.seed,
        optimizer=Sgd(lr=LR, momentum=MOMENTUM, weight_decay=0.0),
    )
    federation = Federation(FedAvg(), task, training, runtime)
    state = federation.start()
    for _ in range(work.rounds):
        state = federation.advance(state)
        tick()
    runtime.close()
    names = [f"{part}.{name}" for part, module in parts().items() for name, _ in module.named_parameters()]
    return [state.server.params[name] for name in names]


def flower(work: Work, tick: Tick, processes: int | None = 2) -> list[Tensor]:
    """With so many actors of one thread, or as Flower comes: two cores for each client, and so one at a time on two."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    client_app, server_app, final = ClientApp(), ServerApp(), []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        if processes:
            torch.set_num_threads(1)
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        fit(model, work, context.node_config["partition-id"], message.content["config"]["server-round"] - 1)
        count = MetricRecord({"num-examples": work.examples})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": count})
        return Message(content=content, reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network().state_dict()),
            num_rounds=work.rounds,
            evaluate_fn=lambda number, arrays: tick() if number else None,
        )
        final.extend(result.arrays.to_torch_state_dict().values())

    quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    backend: dict[str, Any] = {"init_args": quiet}
    if processes:
        backend = {"init_args": {**quiet, "num_cpus": processes}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, work.clients, backend_config=backend)
    return final


def pfl(work: Work, tick: Tick) -> list[Tensor]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Classifier(nn.Sequential):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}  # never asked for

    class Averaging(FederatedAveraging):
        """pfl's own evaluates every client before and after its training in the first round."""

        def get_next_central_contexts(self, *words: Any, **named: Any) -> Any:
            contexts, *rest = super().get_next_central_contexts(*words, **named)
            return contexts and tuple(replace(context, do_evaluation=False) for context in contexts), *rest

    class Ticking(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            tick()
            return False, Metrics()

    class Shuffled(Dataset):
        """pfl's own reads the examples in the same order every time."""

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            x, y = self.raw_data
            for rows in batches(work, int(self.user_id), next(self.metadata["passes"])):
                yield x[rows], y[rows]

    def dataset(client: int) -> Dataset:
        passes = itertools.count(work.epochs * algorithm._current_central_iteration)
        return Shuffled(shard(work, client), user_id=str(client), metadata={"passes": passes})

    module = Classifier(*parts().values())
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, functools.partial(torch.optim.SGD, momentum=MOMENTUM), central)
    data = FederatedDataset(dataset, MinimizeReuseUserSampler(list(range(work.clients))))
    algorithm = Averaging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(work.rounds, work.rounds + 1, work.clients, None),
        backend=SimulatedBackend(data, data, [WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(work.batch, work.epochs, LR),
        callbacks=[Ticking()],
        send_metrics_to_platform=False,
    )
    return [leaf.detach() for leaf in module.parameters()]


@dataclass(frozen=True)
class System:
    name: str
    needs: tuple[str, ...]
    """Modules without which it cannot run; they are imported before it is called."""
    packages: tuple[str, ...]
    """Whose versions are reported."""
    run: Callable[[Work, Tick], list[Tensor]]
    processes: int = 1
    """That compute at the same time."""
    ranks: int = 1
    """Processes to start, for one that does not start its own."""
    decides: bool = False
    """Whether it is left to itself how many threads it computes on."""

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        absent = [name for name in self.needs if not _is_there(name)]
        if not absent:
            return ""
        if absent[0].startswith("protofed"):
            return f"not there: {absent[0]} is no part of this version"
        return "not installed: see the first lines of benchmarks/peers.py"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


WORKERS = "protofed.runtimes.workers"
FLOWER = ("flwr.simulation", "flwr.clientapp", "flwr.serverapp.strategy", "ray")
PFL = ("pfl.aggregate.simulate", "pfl.algorithm.federated_averaging", "pfl.data.federated_dataset", "pfl.model.pytorch")
OUT_OF_THE_BOX = functools.partial(flower, processes=None)
SYSTEMS = {
    "plain": System("plain PyTorch loop", (), (), plain),
    "sequential": System("protofed, sequential", ("protofed",), (), protofed),
    "workers": System("protofed, 2 workers", ("protofed", WORKERS), (), functools.partial(protofed, processes=2), 2),
    "flower": System("Flower simulation, 2 actors", FLOWER, ("flwr", "ray"), flower, 2),
    "flower0": System("Flower simulation, as it comes", FLOWER, ("flwr", "ray"), OUT_OF_THE_BOX, decides=True),
    "pfl": System("pfl-research, 1 process", PFL, ("pfl",), pfl),
    "pfl2": System("pfl-research, 2 processes", PFL, ("pfl",), pfl, 2, ranks=2),
}


# One run, in a process of its own


def child(name: str, work: Work) -> None:
    """Runs one system and prints when its rounds ended, on the clock that all processes share."""
    system = SYSTEMS[name]
    if not system.decides:
        torch.set_num_threads(1)
    ends: list[float] = []
    for module in system.needs:
        importlib.import_module(module)
    called = time.monotonic()
    weights = system.run(work, lambda: ends.append(time.monotonic()))
    versions = {p: metadata.version(p) for p in system.packages}
    print(
        "\n" + json.dumps({"ends": ends, "called": called, "versions": versions, **checked(work, weights)}), flush=True
    )


def run_once(name: str, work: Work) -> dict[str, Any]:
    """Starts a system afresh and waits for it; what it reports, with seconds since its start."""
    words = f"from {Path(__file__).stem} import Work, child; child({name!r}, {work!r})"
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | QUIET | {"PYTHONPATH": here, "FLWR_HOME": folder, "RAY_TMPDIR": folder}
        if SYSTEMS[name].decides:
            environment = {key: value for key, value in environment.items() if not key.endswith("_NUM_THREADS")}
        load, begin, processes = os.getloadavg()[0], time.monotonic(), []
        for extra in _ranks(SYSTEMS[name].ranks):
            command = [sys.executable, "-c", words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started = subprocess.Popen(command, env=environment | extra, text=True, process_group=0, **pipes)  # noqa: S603
            processes.append(started)
        try:
            outputs = [process.communicate(timeout=LIMIT) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with all that it started
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{name} failed:\n{errors[-2000:]}")
    lines = [line for line in outputs[0][0].splitlines() if line.startswith('{"ends"')]
    report = json.loads(lines[-1])
    ends, called = report.pop("ends"), report.pop("called")
    rounds = [b - a for a, b in itertools.pairwise(ends)]
    first = {"first_round_s": ends[0] - begin, "first_round_from_call_s": ends[0] - called}
    return {**first, "rounds_s": rounds, "load": load, **report}


def _ranks(count: int) -> list[dict[str, str]]:
    """What tells pfl's processes of each other."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = ",".join([f"127.0.0.1:{port}"] * count)
    return [{"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)} for rank in range(count)]


# All runs


def measured(names: list[str], work: Work, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """The runs of every system, which take turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat, name in itertools.product(range(repeats), names):
        print(f"repeat {repeat + 1}: {SYSTEMS[name].name}", file=sys.stderr, flush=True)
        try:
            runs[name].append(run_once(name, work))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr, flush=True)
    return runs


def summary(name: str, work: Work, runs: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    system = SYSTEMS[name]
    if len(runs) < repeats:
        return {"system": system.name, "missing": f"failed in {repeats - len(runs)} of {repeats} runs"}
    per_round = statistics.median(statistics.median(run["rounds_s"]) for run in runs)
    return {
        "system": system.name,
        "processes": system.processes,
        "first_round_s": statistics.median(run["first_round_s"] for run in runs),
        "first_round_from_call_s": statistics.median(run["first_round_from_call_s"] for run in runs),
        "round_s": per_round,
        "steps_per_s": work.steps / per_round,
        "loss": runs[0]["loss"],
        "moved": runs[0]["moved"],
        "versions": runs[0]["versions"],
        "runs": runs,
    }


def agree(found: dict[str, dict[str, Any]], loss: float = 0.002, moved: float = 0.1) -> bool:
    """Whether all ended with nearly one loss, as far from the start: relative differences from the median."""
    for key, tolerance in (("loss", loss), ("moved", moved)):
        values = [row[key] for row in found.values() if key in row]
        middle = statistics.median(values or [1.0])
        if any(abs(value / middle - 1) > tolerance for value in values):
            return False
    return True


def table(found: dict[str, dict[str, Any]]) -> str:
    heads = ["system", "first round after s", "from the call, s", "s per round", "client steps/s"]
    heads += ["first round, × Flower", "from the call, × Flower", "per round, × Flower", "final loss", "weights moved"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    base = found.get("flower", {})
    for row in found.values():
        if "missing" in row:
            lines.append([row["system"], row["missing"], *[""] * (len(heads) - 2)])
            continue
        times = ("first_round_s", "first_round_from_call_s", "round_s")
        ratios = [f"{base[key] / row[key]:.2f}" if key in base else "" for key in times]
        numbers = [*(f"{row[key]:.3f}" for key in times), f"{row['steps_per_s']:.0f}"]
        lines.append([row["system"], *numbers, *ratios, f"{row['loss']:.5f}", f"{row['moved']:.4f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Two panels of bars on a logarithmic scale, with the values at the bars."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "peers"
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    rows = [row for row in found.values() if "missing" not in row][::-1]
    colours = ["#0072B2" if row["system"].startswith("protofed") else "#999999" for row in rows]  # Okabe and Ito's
    figure = Figure(figsize=(9, 0.6 + 0.42 * len(rows)), layout="constrained")
    titles = {"first_round_s": "seconds until the first round is done", "round_s": "seconds per later round"}
    for axis, (key, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        values = [row[key] for row in rows]
        bars = axis.barh([row["system"] for row in rows], values, color=colours, height=0.6)
        axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 3, max(values) * 2)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
    figure.savefig(path, metadata={"Date": None})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for size in fields(Work):
        parser.add_argument(f"--{size.name}", type=int, default=size.default)
    parser.add_argument("--repeats", type=int, default=3, help="fresh runs of every system")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--out", type=Path, help="where the results go as JSON")
    parser.add_argument("--figure", type=Path, help="where the figure goes as SVG")
    return parser.parse_args()


def main() -> int:
    from protofed.runs.store.folder import environment

    chosen = arguments()
    work = Work(**{size.name: getattr(chosen, size.name) for size in fields(Work)})
    missing = {name: SYSTEMS[name].missing for name in chosen.systems}
    runs = measured([name for name in chosen.systems if not missing[name]], work, chosen.repeats)
    found = {
        name: {"system": SYSTEMS[name].name, "missing": why} if why else summary(name, work, runs[name], chosen.repeats)
        for name, why in missing.items()
    }
    same = agree(found)
    load = statistics.median([run["load"] for row in runs.values() for run in row] or [math.nan])
    facts = {**environment(), "date": datetime.date.today().isoformat(), "load": load, "threads": 1}
    print(table(found))
    print(f"\n{facts['processor']}, {facts['cores']} cores, load {load:.1f}; commit {facts['commit']}")
    print("All systems agree on the result." if same else "The systems do NOT agree on the result.")
    if load > BUSY * facts["cores"]:
        print("The machine was busy with other work: these figures are not a comparison.")
    if chosen.out:
        result = {
            "work": asdict(work),
            "repeats": chosen.repeats,
            "agree": same,
            "environment": facts,
            "systems": found,
        }
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if chosen.figure:
        draw(found, chosen.figure)
    return 0 if same and all(why or "round_s" in found[name] for name, why in missing.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
