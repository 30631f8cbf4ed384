"""`protofed compare` and `protofed demo`: many runs and one report."""

import logging
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.console import GRACE_PERIOD, AsJson, GracePeriod, HoldOut, OutDir, err, held_out, out, print_json, say
from protofed.cli.signals import stop_on_signal
from protofed.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from protofed.runs.compare import Comparison
    from protofed.runs.sweep import Outcome, Sweep


class Scale(StrEnum):
    FULL = "full"
    SMALL = "small"


def compare(
    comparison_file: Annotated[Path, typer.Argument(metavar="COMPARISON", help="The comparison, a TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting in every run; may be repeated."),
    ] = None,
    hold_out: HoldOut = None,
    out_dir: OutDir = Path("results"),
    report: Annotated[
        Path | None, typer.Option(help="The folder for the report; by default OUT/reports/COMPARISON.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Run only the task with this label; may be repeated.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Run only the method with this label; may be repeated.")
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="small: the [small] settings of the file and one seed, for a quick test.")
    ] = Scale.FULL,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at a time; by default one per core, on a GPU by measurement, with --ray as many as fit.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Run on this Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Trust its nodes."
        ),
    ] = None,
    ray_cpus: Annotated[
        float | None, typer.Option(min=0.01, help="Cores that Ray keeps for a run; by default those it uses.")
    ] = None,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0.01, help="GPUs that Ray keeps for a run on a GPU, such as 0.5; by default 1.")
    ] = None,
    grace_period: GracePeriod = GRACE_PERIOD,
    as_json: AsJson = False,
) -> None:
    """Compare methods on tasks with several seeds.

    Writes tables and pictures, with published numbers next to ours. Runs that are done are not run again.
    """
    from protofed.runs import compare as comparisons

    comparison = comparisons.load(
        comparison_file,
        is_small=scale == Scale.SMALL,
        overrides=[*(set_ or []), *held_out(hold_out)],
        tasks=task or [],
        methods=method or [],
    )
    folder = report or out_dir / "reports" / comparison_file.stem
    _run_and_report(comparison, out_dir, folder, as_json, jobs, grace_period, _chosen_sweep(ray, ray_cpus, ray_gpus))


def _chosen_sweep(address: str | None, cpus: float | None, gpus: float | None) -> "Sweep | None":
    """On a Ray cluster; None for this machine. ray is imported only if it is asked for."""
    if address is None:
        if cpus is not None or gpus is not None:
            raise BadInput("--ray-cpus and --ray-gpus are for --ray ADDRESS, which is not given")
        return None
    try:
        from protofed.runs.ray_sweep import RaySweep
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise BadInput("--ray needs ray: pip install 'protofed[ray]'") from None
    return RaySweep(address, cpus, gpus)


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 10,
    out_dir: OutDir = Path("results/demo"),
    as_json: AsJson = False,
) -> None:
    """Compare four methods on minidigits with three seeds. Takes a few minutes."""
    from protofed.reports import demo as demonstration

    _run_and_report(demonstration.compared(rounds), out_dir, out_dir, as_json)


def _run_and_report(
    comparison: "Comparison",
    out_dir: Path,
    report: Path,
    as_json: bool,
    jobs: int | None = None,
    grace_period: float = GRACE_PERIOD,
    run_all: "Sweep | None" = None,
) -> None:
    """Runs what is not done yet, then reports on all runs. A failed run is a line of the report."""
    if report.exists() and not report.is_dir():
        raise BadInput(f"the report cannot go into the folder {report}, which is a file")
    from protofed.reports import comparison as reporting
    from protofed.reports.site_tables import note_of, sheets_of
    from protofed.runs.sweep import sweep

    outcomes, exit_code = _outcomes(comparison, out_dir, as_json, jobs, grace_period, run_all or sweep)
    path = reporting.write(comparison, outcomes, report)
    parts = reporting.reports(comparison, outcomes)
    if as_json:
        print_json(
            {part.task: {row.label: [asdict(seed) for seed in row.seeds] for row in part.rows} for part in parts}
        )
    else:
        for part in parts:
            for what, sheet, _ in sheets_of(part.rows, part.domains, part.is_own_data)[: 2 if part.is_own_data else 1]:
                title = f"{part.task}: {what}; mean ± sd of {len(comparison.seeds)} seeds"
                out.print(sheet.rich(title, out.width))
        for note in dict.fromkeys(note_of(part.rows, part.is_own_data) for part in parts):
            out.print(note, highlight=False)
        for remark in (remark for part in parts for remark in part.remarks):
            out.print(f"! {remark}", style="yellow", highlight=False, markup=False)
        for line in (line for part in parts for line in part.stopped):
            say(f"not done: {line}")
        say(f"{'partial ' if exit_code else ''}report {path}")
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    said = (
        f"{len(failures)} of {len(outcomes)} runs failed; {path} names them. First: {failures[0]}" if failures else ""
    )
    if exit_code:
        if failures:
            err.print(said, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(exit_code)
    if failures:
        raise RunFailed(said)


def _outcomes(
    comparison: "Comparison", out_dir: Path, as_json: bool, jobs: int | None, grace_period: float, run_all: "Sweep"
) -> "tuple[list[Outcome], int]":
    """The outcome of every run, and the exit code if the command was told to stop before they were done; else 0."""
    from protofed.reports import progress

    for name in ("mps", "places", "sweep"):  # how runs share a GPU
        logging.getLogger(f"protofed.runs.{name}").setLevel(logging.INFO)
    console, configs = err if as_json else out, comparison.configs
    total = sum(config.training.rounds for config in configs)
    methods = ", ".join(next(iter(comparison.runs.values())))
    console.print(f"{len(configs)} runs, {total} rounds: {methods}", highlight=False, markup=False)
    advice = "run the same command again to continue"
    totals = {label: one.training.rounds for label, one in zip(comparison.labels, configs, strict=True)}
    with (
        stop_on_signal(advice, grace_period, console.is_terminal) as stop,
        progress.runs(console, totals, lambda: stop.notice) as shown,
    ):
        outcomes = run_all(configs, out_dir, workers=jobs, progress=shown.update, should_stop=stop.is_made)
    if all(outcome.is_done or outcome.failure for outcome in outcomes):
        return outcomes, 0
    if not stop.is_made():
        raise RunFailed("a run ended early although nobody stopped it: did its data change meanwhile?")
    return outcomes, stop.exit_code
