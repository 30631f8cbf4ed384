"""`protofed run` and `protofed show`: one experiment and its results."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import GRACE_PERIOD, AsJson, GracePeriod, HoldOut, OutDir, err, held_out, out
from protofed.cli.signals import stop_on_signal
from protofed.errors import BadInput


def run(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the file; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override training.seed.")] = None,
    hold_out: HoldOut = None,
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
    from protofed.cli.results import show_results
    from protofed.privacy.statement import promise
    from protofed.reports import progress
    from protofed.runs.config import config as configuration
    from protofed.runs.resuming import refuse_other_run, refuse_run_of_other_runtime
    from protofed.runs.run_process import folder_of
    from protofed.runs.runner import execute
    from protofed.runs.store.folder import RunFolder

    overrides = [*(set_ or []), *held_out(hold_out), *([f"training.seed={seed}"] if seed is not None else [])]
    config = configuration.load(experiment, overrides)
    folder = RunFolder(run_folder) if run_folder else folder_of(config, out_dir)
    if resume and not run_folder and not folder.path.exists():
        refuse_run_of_other_runtime(config, out_dir)
    if folder.is_done and not allow_change:
        refuse_other_run(folder, config)
    else:
        advice = f"resume with the same command and --resume ({folder.path})"
        console = err if as_json else out
        if config.privacy.is_on:
            console.print(promise(config.privacy), markup=False, highlight=False)
        with (
            stop_on_signal(advice, grace_period, console.is_terminal) as stop,
            progress.observer(console, lambda: stop.notice) as observer,
        ):
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
    show_results(folder, as_json)


def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: AsJson = False
) -> None:
    """Show the results of a run, finished or not, and all of its settings."""
    from protofed.cli.results import show_results, show_settings
    from protofed.runs.config.renames import refuse_run_of_old_version
    from protofed.runs.store.folder import COPY, RunFolder

    folder = RunFolder(run_folder)
    if not folder.has("config.toml"):
        raise BadInput(f"{run_folder} is not a run folder: it has no config.toml")
    config = tomllib.loads(folder.read_config())
    if not config:
        raise BadInput(f"{run_folder / 'config.toml'} is damaged: it is empty; {COPY}")
    refuse_run_of_old_version(config, folder.read_environment(), str(run_folder))
    show_results(folder, as_json)
    if not as_json:
        show_settings(folder)
