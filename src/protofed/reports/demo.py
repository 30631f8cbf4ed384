"""The demonstration: what sharing weights, prototypes, or both brings when clients see different domains."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protofed.experiments import config
from protofed.experiments.config import Config
from protofed.experiments.run import Round, summarised
from protofed.reports.figures import accuracy_over_rounds
from protofed.reports.tables import NOTE, Comparison, Row

METHODS = ("local", "fedavg", "fedproto", "fpl")
SEEDS = (0, 1, 2)
FPL_PROTOCOL = {
    "epochs": 10,
    "batch_size": 64,
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5},
}
"""How clients train in the FPL paper (CVPR 2023)."""
TITLE = "minidigits: accuracy on each domain, %; last five rounds, mean ± sd of 3 seeds"


def configs(rounds: int) -> list[Config]:
    """Each method with each seed."""
    return [
        config.parse(
            {
                "task": {"name": "minidigits"},
                "method": {"name": method},
                "training": {"rounds": rounds, "seed": seed, **FPL_PROTOCOL},
            },
            "demo",
        )
        for method, seed in itertools.product(METHODS, SEEDS)
    ]


@dataclass(frozen=True)
class Demo:
    comparison: Comparison
    table: Path
    figure: Path


def report(runs: Sequence[Sequence[Round]], out: Path) -> Demo:
    """The table and the picture of finished runs, in the order of `configs`."""
    by_method = {method: runs[k * len(SEEDS) : (k + 1) * len(SEEDS)] for k, method in enumerate(METHODS)}
    rows = [
        Row(method, seeds[0][-1].judged == "public model", [summarised(rounds, "last_five") for rounds in seeds])
        for method, seeds in by_method.items()
    ]
    demo = Demo(Comparison(rows), out / "table.md", out / "accuracy.png")
    demo.table.write_text(f"{TITLE}\n\n{demo.comparison.markdown()}\n{NOTE}\n", encoding="utf-8")
    accuracy_over_rounds(by_method, demo.figure, "minidigits: four domains, twelve clients, three seeds")
    return demo
