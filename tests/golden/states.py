"""What a run leaves behind, as digests that a refactoring must not change.

Every method runs for three rounds on minidigits and on its skewed form under `sequential`. Kept are the SHA-256 of the
server's state and of all clients' states, over the numbers alone: records and fields may be renamed. Beside them stand
the norms, which another kind of processor reproduces although its last bits differ.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import protofed
from protofed import tree
from protofed.methods import METHODS
from protofed.methods.fedavg import FedAvg

FILE = Path(__file__).with_name("states.json")
TASKS = ("minidigits", "minidigits_skewed")
ROUNDS = 3
OTHER_PATHS: dict[str, dict[str, Any]] = {
    "fpl, recomputed": {"prototype_mode": "recomputed"},
    "fpl, global": {"contrast_with": "global", "consistent_with": "global"},
    "fedproto, recomputed": {"prototype_mode": "recomputed"},
    "fedproto_avg, recomputed": {"prototype_mode": "recomputed"},
    "fedpc, running": {"prototype_mode": "running"},
    "fedpc, mean square": {"distance": "mean_square_examples"},
    "pfedcspc, global": {"personalised": False},
    "scaffold, by examples": {"weighting": "examples"},
    "feddc, by examples": {"weighting": "examples"},
}
"""Settings that take another path through a method than its defaults do."""
RECORDED_WITH: dict[str, dict[str, Any]] = {
    **{name: {"weighting": "uniform"} for name in ("feddc", "feddyn", "fedbn", "fedsr", "ifca", "lg_fed", "scaffold")},
    "fedpc": {"weighting": "uniform", "distance": "norm"},
    "fedasam": {"rho": 0.7, "averaging": True},
    "fedpcl": {"encoder": "frozen"},
    "fedtgp": {"pull_weight": 10.0},
    "feddecorr": {"decorrelation_weight": 0.1},
    "fednh": {"initial_scale": 1.0, "weighting": "uniform"},
    "fedopt": {"server_lr": 0.01},
    "ga": {"base": FedAvg(weighting="uniform")},
}
"""Settings that were defaults when the states were recorded."""
CASES = (*METHODS, *OTHER_PATHS)


@dataclass(frozen=True)
class Golden:
    """What is kept of one run."""

    server: str
    clients: str
    server_norm: float
    clients_norm: float


def golden(case: str, task: str) -> Golden:
    """The digests of a run that takes place now."""
    name = case.partition(",")[0]
    method = METHODS[name](**{**RECORDED_WITH.get(name, {}), **OTHER_PATHS.get(case, {})})
    result = protofed.run(
        method=method, task=task, rounds=ROUNDS, epochs=1, evaluate_every=ROUNDS, runtime="sequential"
    )
    states = {
        c: result.federation.runtime.store.load(c, receipt) for c, receipt in sorted(result.state.receipts.items())
    }
    clients = tree.leaves(states)
    server = tree.leaves(result.state.server)
    return Golden(digest(server), digest(clients), norm(server), norm(clients))


def digest(leaves: list[Tensor]) -> str:
    """SHA-256 of types, shapes and values, in the order of the tree."""
    found = hashlib.sha256()
    for leaf in leaves:
        found.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
        found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def norm(leaves: list[Tensor]) -> float:
    return float(sum(leaf.double().square().sum().item() for leaf in leaves) ** 0.5)


def processor() -> str:
    """Equal only where sums are rounded alike: torch's version, its instruction set, and the bits of a small network's
    gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 26 * 26, 10)
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        loss = network(torch.randn(64, 3, 28, 28)).logsumexp(-1).mean()
        grads = torch.autograd.grad(loss, list(network.parameters()))
        torch.set_num_threads(threads)
    facts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), digest(list(grads))[:16])
    return " ".join(facts)


def recorded() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FILE.read_text())
    return kept
