"""Run folders for tests of the page and of lists of runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.runs.config.config import parse
from protofed.runs.runner import execute
from protofed.runs.store.folder import RunFolder


def trained(folder: Path, method: str = "fedavg", seed: int = 0, rounds: int = 2) -> Path:
    """A run on minidigits that was really done; the state of its first round is kept."""
    table = {
        "task": {"name": "minidigits"},
        "method": {"name": method},
        "training": {"rounds": rounds, "epochs": 1, "seed": seed},
        "runtime": {"name": "sequential"},
        "saving": {"keep": [1]},
    }
    execute(parse(table, "test").experiment(), RunFolder(folder))
    return folder


def a_round(number: int, own: float = 0.5, clients: int = 2, judged: str = "public model") -> dict[str, Any]:
    """A line of rounds.jsonl with easy numbers: domains a and b, one client of each in turn."""
    scores = {"accuracy": own}
    homes = {f"c{k:03d}": {"accuracy": own + 0.001 * (k % 7)} for k in range(clients)}
    return {
        "round": number,
        "participants": clients,
        "failures": {"c000": "LATE: no reply"} if number == 1 else {},
        "judged": judged,
        "domains": {"a": scores, "b": {"accuracy": own / 2}},
        "own_domains": {"a": scores, "b": {"accuracy": own / 2}},
        "at_home": homes,
        "summary": {"average": 0.75 * own, "own": own},
        "loss": 1 / number,
        "traffic": {client: {"down": 1000, "up": 500} for client in homes},
        "seconds": {"train": 1.5, "evaluate": 0.5},
    }


def written(
    folder: Path,
    rounds: list[dict[str, Any]],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    is_done: bool = True,
    **environment: Any,
) -> Path:
    """A run's folder as its files say, without states."""
    sections: dict[str, dict[str, Any]] = {
        "task": {"name": "minidigits"},
        "method": {"name": "fedavg"},
        "training": {"rounds": len(rounds), "seed": 0},
    }
    for name, table in (settings or {}).items():
        sections[name] = {**sections.get(name, {}), **table}
    folder.mkdir(parents=True)
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in sections.items()]
    (folder / "config.toml").write_text("\n".join(lines))
    facts = {"protofed": "0.2.0", "command": "protofed run x.toml", "runtime": {"name": "sequential"}, **environment}
    (folder / "environment.json").write_text(json.dumps(facts))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    if is_done:
        (folder / "done").write_text("")
    return folder
