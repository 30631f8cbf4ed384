"""Runs small enough to hand over models in a second."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import protofed
from protofed import METHODS, Data, Result, Task
from protofed.nn.networks import Parts
from protofed.runs.config.config import Config, parse
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder
from protofed.tasks.models import mlp, network

CLASSES, SIZE = 3, 6


def normed(inputs: int, num_classes: int, width: int) -> Parts:
    """A network of the user's own, with normalisation."""
    features = nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU())
    return {"features": features, "classifier": nn.Linear(width, num_classes)}


def vectors(clients: int = 3, build: Callable[..., Parts] = mlp) -> Task:
    """Three classes that differ by a direction, and a network that has a name."""
    draw = torch.Generator().manual_seed(7)
    directions = torch.randn(CLASSES, SIZE, generator=draw)

    def examples(count: int, shift: float) -> Data:
        y = torch.arange(count) % CLASSES
        return Data.of(2 * directions[y] + shift + torch.randn(count, SIZE, generator=draw), y)

    own = {f"c{k}": examples(12 + 5 * k, shift=float(k % 2)) for k in range(clients)}
    tests = {"low": examples(30, 0.0), "high": examples(30, 1.0)}
    domain_of = {client: "high" if k % 2 else "low" for k, client in enumerate(own)}
    names = ("ann", "bob", "eve")
    model = network(build, SIZE, CLASSES, 8)
    return Task(own, tests, CLASSES, model, domain_of, public=examples(9, 2.0), class_names=names)


def run_of(name: str, settings: dict[str, Any] | None = None, folder: Path | None = None, rounds: int = 1) -> Result:
    method, task = METHODS[name](**(settings or {})), vectors(build=normed if name == "fedbn" else mlp)
    return protofed.run(
        method, task, rounds=rounds, epochs=1, batch_size=8, runtime="sequential", folder=folder, progress=False
    )


def write_images(folder: Path, sites: Sequence[str] = ("north", "south"), count: int = 8) -> None:
    """Dark and bright images, with noise."""
    draw = np.random.default_rng(3)
    for site in sites:
        for name, level in (("bright", 170), ("dark", 60)):
            (folder / site / name).mkdir(parents=True)
            for k in range(count):
                pixels = np.clip(draw.normal(level, 25, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / site / name / f"{k}.png")


COLUMNS = ("age", "ward", "score", "outcome")


def write_tables(folder: Path, sites: Sequence[str] = ("north", "south"), count: int = 40) -> None:
    """The outcome depends on the score; some ages are missing."""
    draw = np.random.default_rng(4)
    folder.mkdir(parents=True)
    for site in sites:
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for k in range(count):
                score = draw.normal(0, 1)
                age = "" if k % 9 == 0 else f"{draw.integers(20, 90)}"
                writer.writerow([age, ("A", "B", "C")[k % 3], f"{score:.4f}", "ill" if score > 0 else "well"])


def config_of(task: dict[str, Any], method: str = "fpl", rounds: int = 2) -> Config:
    table = {
        "task": {"name": "custom", **task},
        "method": {"name": method},
        "training": {"rounds": rounds, "epochs": 2, "batch_size": 8},
        "runtime": {"name": "sequential"},
    }
    return parse(table, "a test")


def executed(config: Config, folder: Path) -> Result:
    return replace(execute(config.experiment(), RunFolder(folder)), config=config)


TABLES: dict[str, Any] = {"kind": "tables", "label": "outcome", "categorical": ["ward"]}
IMAGES: dict[str, Any] = {"kind": "images", "pixels": 16, "model": "cnn2"}
