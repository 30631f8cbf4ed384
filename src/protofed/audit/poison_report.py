"""The outcome of a campaign of attacks, as numbers, as text and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from protofed.audit.pictures import lines_by_attackers
from protofed.audit.poison import RULES, Cell
from protofed.audit.wording import table
from protofed.printable import one_line
from protofed.reports.figures import save_figure
from protofed.runs.loading import SavedRun
from protofed.runs.store.checkpoint import write_atomically
from protofed.runs.store.folder import environment

REPORT, NUMBERS, PICTURE = "poison.md", "poison.json", "poison_{}.png"


def write(run: SavedRun, cells: Sequence[Cell], rounds: int, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths, shown = [], []
    for what in [kind for kind in RULES if any(cell.what == kind for cell in cells)]:
        paths.append(folder / PICTURE.format(what))
        save_figure(lines_by_attackers(_lines(cells, what), "accuracy, %"), paths[-1], grows=True)
        shown.append(f"![Accuracy by the number of attackers, rules for {what}]({paths[-1].name})")
    paths += [folder / REPORT, folder / NUMBERS]
    text = [*markdown(run, cells, rounds), *shown, ""]
    write_atomically(folder / REPORT, "\n\n".join(text).encode())
    write_atomically(folder / NUMBERS, (json.dumps([asdict(cell) for cell in cells], indent=2) + "\n").encode())
    return paths


def markdown(run: SavedRun, cells: Sequence[Cell], rounds: int) -> list[str]:
    """The report, paragraph by paragraph."""
    name, task = run.config.resolved()["method"]["name"], run.federation.task
    seeds = sorted({cell.seed for cell in cells})
    software = environment()
    found = [
        f"# Attacks on {name}, {one_line(task.name)}",
        f"{len(task.clients)} clients, {rounds} round{'s' if rounds > 1 else ''}, {'seeds' if seeds[1:] else 'seed'} "
        f"{', '.join(map(str, seeds))}; clients count equally. "
        f"protofed {software['protofed']}, commit {software['commit']}, torch {software['torch']}.",
        "Accuracy after the last round in %, mean over the domains and the seeds, in brackets the worst seed. `fails`: "
        "no seed came to its end, since too few clients replied well; `2 failed`: so many seeds did not. Rules are set "
        "for as many bad clients as there are. Rows without an attack are what a rule costs that is set for so many. "
        "In pictures, a run that failed has 0.",
    ]
    for what in RULES:
        own = [cell for cell in cells if cell.what == what]
        if own:
            found += [f"## Rules for {what}", _table(own, "accuracy")]
        if any(cell.success is not None for cell in own):
            found += [
                "Success of the back-door in %: the share of test images of other classes that, with the trigger, are "
                "taken for its target. Mean over the seeds, in brackets the highest.",
                _table([cell for cell in own if cell.success is not None], "success"),
            ]
    return found


def _table(cells: Sequence[Cell], value: str) -> str:
    rules = [rule for rule in RULES[cells[0].what] if any(cell.rule == rule for cell in cells)]
    rows = [
        [attack, str(count), *(_cell(of(cells, attack, rule, count), value) for rule in rules)]
        for attack in dict.fromkeys(cell.attack for cell in cells)
        for count in sorted({cell.attackers for cell in cells if cell.attack == attack} - {0}) or [0]
    ]
    return table(["attack", "bad clients", *rules], rows)


def of(cells: Sequence[Cell], attack: str, rule: str, attackers: int) -> list[Cell]:
    """The cells of all seeds. A rule that does not ask how many are bad is the same for all numbers without attack."""
    return [c for c in cells if (c.attack, c.rule) == (attack, rule) and c.attackers in (attackers, 0)]


def _cell(cells: Sequence[Cell], value: str) -> str:
    found = [getattr(cell, value) for cell in cells if getattr(cell, value) is not None]
    if not found:
        return "fails" if cells else ""
    worst = max(found) if value == "success" else min(found)
    failed = f", {len(cells) - len(found)} failed" if len(found) < len(cells) else ""
    return f"{100 * fmean(found):.0f} ({100 * worst:.0f}){failed}"


def _lines(cells: Sequence[Cell], what: str) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Per cent by attack, rule and number of bad clients; none of them is the run without an attack, with the rule set
    for as few as were tried. A run that failed has 0."""
    own = [cell for cell in cells if cell.what == what]
    rules = [rule for rule in RULES[what] if any(cell.rule == rule for cell in own)]
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for attack in dict.fromkeys(cell.attack for cell in own if cell.attack != "none"):
        for rule in rules:
            counts = sorted({cell.attackers for cell in own if cell.attack == attack})
            line = {n: [100 * (cell.accuracy or 0.0) for cell in of(own, attack, rule, n)] for n in counts}
            without = [cell for cell in own if cell.attack == "none" and cell.rule == rule]
            if without:
                least = min(cell.attackers for cell in without)
                line[0] = [100 * (cell.accuracy or 0.0) for cell in without if cell.attackers == least]
            found.setdefault(attack, {})[rule] = {n: values for n, values in line.items() if values}
    return found or {"none": {rule: {0: [100 * (c.accuracy or 0.0) for c in own if c.rule == rule]} for rule in rules}}
