"""The demonstration: what sharing weights, prototypes, or both brings when clients see different domains."""

from protofed.runs import compare
from protofed.runs.compare import Comparison

METHODS = ("local", "fedavg", "fedproto", "fpl")
FPL_PROTOCOL = {
    "epochs": 10,
    "batch_size": 64,
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5},
}
"""How clients train in the FPL paper (CVPR 2023)."""


def compared(rounds: int) -> Comparison:
    table = {
        "title": "minidigits: four domains, twelve clients, three seeds",
        "seeds": [0, 1, 2],
        "common": {"training": {"rounds": rounds, **FPL_PROTOCOL}},
        "tasks": {"minidigits": {"task": {"name": "minidigits"}}},
        "methods": {name: {"method": {"name": name}} for name in METHODS},
    }
    return compare.parse(table, "demo")
