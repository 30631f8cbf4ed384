"""`protofed audit`: what an attacker learns from a finished run, and what attacks would have done to it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protofed.cli.console import AsJson, print_json, say, told
from protofed.cli.export import Code
from protofed.errors import BadInput

if TYPE_CHECKING:
    from protofed.runs.loading import SavedRun

Tell = Callable[[str], None]
Found = tuple[list[str], Any, list[Path]]
"""The report's paragraphs, its numbers, and the files."""
Attacks = Annotated[
    list[str] | None, typer.Option("--attack", metavar="NAME", help="With --poison: this attack; may be repeated.")
]
Rules = Annotated[
    list[str] | None, typer.Option("--rule", metavar="NAME", help="With --poison: this rule; may be repeated.")
]
Attackers = Annotated[
    list[int] | None,
    typer.Option(metavar="N", help="With --poison: so many bad clients; may be repeated. By default 1 and 2."),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option("--seed", metavar="N", help="With --poison: this seed, not the run's; may be repeated."),
]
Rounds = Annotated[
    int, typer.Option(min=0, help="With --poison or --canaries: train so many rounds, not as many as the run.")
]


def audit(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="The folder of the report; by default RUN/audit.")
    ] = None,
    min_owners: Annotated[
        int, typer.Option(min=2, help="Name classes that fewer clients have, if others are told of them.")
    ] = 2,
    poison: Annotated[
        bool, typer.Option("--poison", help="Train the run's settings under attacks, with each robust rule.")
    ] = False,
    canaries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Train them with N planted examples: a lower bound of ε.")
    ] = 0,
    attack: Attacks = None,
    rule: Rules = None,
    attackers: Attackers = None,
    seed: Seeds = None,
    rounds: Rounds = 0,
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the uploads of a finished run tell: who was trained on, which classes clients have, prototypes of
    few examples. See docs/privacy.md.

    The last round is replayed from its checkpoint, which needs the run's data. With --poison or --canaries the run's
    settings are trained anew.
    """
    from protofed.audit.poison import Wanted
    from protofed.runs.loading import open_run

    _refuse(poison, canaries, bool(attack or rule or attackers or seed), rounds)
    wanted = Wanted(attack or (), rule or (), attackers or (1, 2), seed or (), rounds)
    run, folder = open_run(run_folder, code=code), report or run_folder / "audit"
    with told() as tell:
        if poison:
            text, numbers, paths = _poisoned(run, wanted, folder, tell)
        elif canaries:
            text, numbers, paths = _with_canaries(run, canaries, rounds, folder, tell)
        else:
            text, numbers, paths = _audited(run, min_owners, folder, tell)
    if as_json:
        print_json({"found": numbers, "files": [str(path) for path in paths]})
    else:
        say("\n".join(["\n\n".join(text), *map(str, paths)]))


def _refuse(poison: bool, canaries: int, chooses: bool, rounds: int) -> None:
    if poison and canaries:
        raise BadInput("--poison and --canaries exclude each other: each trains the run anew in its own way")
    if chooses and not poison:
        raise BadInput("--attack, --rule, --attackers and --seed are for --poison")
    if rounds and not (poison or canaries):
        raise BadInput("--rounds is for --poison and --canaries: an audit replays the run's last round")


def _audited(run: "SavedRun", min_owners: int, folder: Path, tell: Tell) -> Found:
    from protofed.audit.report import audit, facts, write
    from protofed.audit.wording import markdown

    found = audit(run, min_owners, tell)
    return markdown(found), facts(found), write(found, folder)


def _poisoned(run: "SavedRun", wanted: Any, folder: Path, tell: Tell) -> Found:
    from dataclasses import asdict

    from protofed.audit.poison import campaign
    from protofed.audit.poison_report import markdown, write

    cells, rounds = campaign(run, wanted, tell), wanted.rounds or run.config.training.rounds
    return markdown(run, cells, rounds), [asdict(one) for one in cells], write(run, cells, rounds, folder)


def _with_canaries(run: "SavedRun", count: int, rounds: int, folder: Path, tell: Tell) -> Found:
    from protofed.audit.canaries import canary_audit, facts, markdown, write

    found = canary_audit(run, count, rounds, tell)
    return markdown(found), facts(found), write(found, folder)
