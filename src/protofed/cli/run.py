"""`protofed run` and `protofed show`: one experiment and its results."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.console import GRACE_PERIOD, AsJson, GracePeriod, OutDir, err, out, print_json, say
from protofed.cli.signals import stop_on_signal
from protofed.errors import BadInput
from protofed.evaluation.evaluate import Scores
from protofed.metrics.registry import METRICS
from protofed.reports import progress
from protofed.runs.config import config as configuration
from protofed.runs.config.renames import refuse_run_of_old_version
from protofed.runs.results import Round, Summed, parsed, summed
from protofed.runs.resuming import refuse_other_run, refuse_run_of_other_runtime
from protofed.runs.runner import execute
from protofed.runs.store.folder import COPY, RunFolder
from protofed.runs.sweep import folder_of


def run(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the file; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override training.seed.")] = None,
    out_dir: OutDir = Path("results"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    run_folder: Annotated[
        Path | None, typer.Option("--folder", help="Use this run folder instead of one below --out.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-config-change",
            metavar="KEY",
            help="With --folder and --resume: accept that this setting or section has changed; may be repeated.",
        ),
    ] = None,
    steal_lock: Annotated[
        bool, typer.Option("--steal-lock", help="Take over a run folder that a process on another machine left locked.")
    ] = False,
    grace_period: GracePeriod = GRACE_PERIOD,
    as_json: AsJson = False,
) -> None:
    """Run one experiment and show its results.

    The run folder is named by the hash of the settings. A finished run is shown and not run again.
    """
    overrides = [*(set_ or []), *([f"training.seed={seed}"] if seed is not None else [])]
    config = configuration.load(experiment, overrides)
    folder = RunFolder(run_folder) if run_folder else folder_of(config, out_dir)
    if resume and not run_folder and not folder.path.exists():
        refuse_run_of_other_runtime(config, out_dir)
    if folder.is_done and not allow_change:
        refuse_other_run(folder, config)
    else:
        advice = f"resume with the same command and --resume ({folder.path})"
        with stop_on_signal(advice, grace_period) as stop, progress.observer(err if as_json else out) as observer:
            result = execute(
                config.experiment(),
                folder,
                resume=resume,
                allowed_changes=allow_change or (),
                steal_lock=steal_lock,
                observer=observer,
                should_stop=stop.is_made,
            )
        if not result.is_complete:
            raise typer.Exit(stop.exit_code)  # guard: exit-codes-signals
    _show(folder, as_json)


def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: AsJson = False
) -> None:
    """Show the results of a run, finished or not."""
    folder = RunFolder(run_folder)
    if not folder.has("config.toml"):
        raise BadInput(f"{run_folder} is not a run folder: it has no config.toml")
    config = tomllib.loads(folder.read_config())
    if not config:
        raise BadInput(f"{run_folder / 'config.toml'} is damaged: it is empty; {COPY}")
    refuse_run_of_old_version(config, folder.read_environment(), str(run_folder))
    _show(folder, as_json)


def _show(folder: RunFolder, as_json: bool) -> None:
    rounds = parsed(folder.read_rounds(), str(folder.path / "rounds.jsonl"))
    evaluated = [r for r in rounds if r.is_evaluated]
    scores = summed(rounds, "last_five") if evaluated else None
    if as_json:
        means = asdict(scores) if scores else {}
        rows = [asdict(r) for r in rounds]
        print_json({"folder": str(folder.path), "done": folder.is_done, "last_five": means, "rounds": rows})
        return
    state = "done" if folder.is_done else f"not finished: {sum(r.round > 0 for r in rounds)} rounds so far"
    say(f"{folder.path}: {state}")
    if scores:
        out.print(_rounds_table(evaluated, scores))
        out.print(_metrics_table(scores))
    failures = sum(len(r.failures) for r in rounds)
    if failures:
        out.print(f"{failures} replies did not count; rounds.jsonl says which and why", style="yellow")


def _rounds_table(rounds: list[Round], scores: Summed) -> Table:
    """About ten rounds, and the mean of the last five: what clients see at home with models of their own, or how the
    public model does on each domain."""
    uses_own, has_homes = rounds[-1].judged == "own models", "own" in rounds[-1].summary
    at_home = uses_own and has_homes
    domains = [domain for domain in rounds[-1].domains if not at_home or len(rounds[-1].domains) > 1]
    what = "at home, with clients' own models" if at_home else "own models" if uses_own else "public model"
    table = Table(title=f"accuracy, % ({what})", title_justify="left")
    for name in ("round", *domains, "own" if at_home else "average"):
        table.add_column(escape(name), justify="right")
    step = max(1, len(rounds) // 10)

    def cells(by_domain: Mapping[str, Scores], mean: float) -> list[str]:
        return _percent([*(by_domain[d]["accuracy"] for d in domains), mean])

    for r in rounds[-1::-step][::-1]:
        table.add_row(str(r.round), *cells(r.own_domains if at_home else r.domains, r.headline or 0.0))
    table.add_section()
    mean = scores.metrics["own" if at_home else "average"]
    table.add_row("last five", *cells(scores.own_domains if at_home else scores.domains, mean), style="bold")
    return table


def _metrics_table(scores: Summed) -> Table:
    """Every metric that was measured, with its meaning."""
    table = Table("metric", "last five, %", "what it is", title="metrics", title_justify="left")
    for metric in METRICS:
        if metric.id in scores.metrics:
            table.add_row(metric.id, *_percent([scores.metrics[metric.id]]), metric.note)
    return table


def _percent(values: list[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]
