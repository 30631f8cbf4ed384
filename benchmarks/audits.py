"""Audits of runs on minidigits whose clients have tests of their own: python benchmarks/audits.py OUT

Each client holds out half of its images, drawn at random. So members and others are of one source. Seeds, methods and
the length of runs are settings; the table of all audits is printed, and one report of each method stays in OUT.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import protofed
from protofed.api.task import Task
from protofed.audit.report import audit, facts, write
from protofed.runs.loading import open_run
from protofed.seeds import generator


def held_out(name: str, seed: int) -> Task:
    """A task whose clients keep half of their examples for tests."""
    task = protofed.TASKS[name]().build()
    train, tests = {}, {}
    for client, data in task.clients.items():
        order = torch.randperm(len(data), generator=generator(seed, "audit", client))
        train[client], tests[client] = (data.rows(rows.sort().values) for rows in order.chunk(2))
    return replace(task, clients=train, local_tests=tests, name=f"{name}, half held out")


def audited(method: str, task: Task, rounds: int, epochs: int, seed: int, report: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / f"{method}-seed-{seed}"
        protofed.run(method, task, rounds=rounds, epochs=epochs, seed=seed, folder=run, evaluate_every=rounds)
        found = audit(open_run(run, task=task))
        if report is not None:
            write(found, report)
        return facts(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Audits of several methods.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", default="minidigits")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fpl", "fedproto", "fednh"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    wanted = parser.parse_args()
    begin, found = time.monotonic(), []
    for method in wanted.methods:
        for seed in wanted.seeds:
            report = wanted.out / method if seed == wanted.seeds[0] else None
            found.append(audited(method, held_out(wanted.task, seed), wanted.rounds, wanted.epochs, seed, report))
            said = ", ".join(f"{one['kind']} {one['auc']:.3f} {one['interval']}" for one in found[-1]["membership"])
            print(
                f"{method}, seed {seed}: {said}; {found[-1]['labels']} ({time.monotonic() - begin:.0f} s)", flush=True
            )
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "audits.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
