"""`protofed serve`: a run whose clients are at the sites of a federation."""

import time
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.console import GRACE_PERIOD, AsJson, GracePeriod, OutDir, err, out
from protofed.cli.signals import stop_on_signal


def serve(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    federation: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the federation.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the file; may be repeated."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="Go without this site; may be repeated.")
    ] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until all sites are there.")] = 600.0,
    start_afresh: Annotated[
        bool,
        typer.Option("--start-afresh", help="A client whose state its site has lost begins anew; else it is left out."),
    ] = False,
    out_dir: OutDir = Path("results"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-config-change",
            metavar="KEY",
            help="With --folder and --resume: accept that this setting or section has changed; may be repeated.",
        ),
    ] = None,
    run_folder: Annotated[
        Path | None, typer.Option("--folder", help="Use this run folder instead of one below --out.")
    ] = None,
    grace_period: GracePeriod = GRACE_PERIOD,
    as_json: AsJson = False,
) -> None:
    """Run an experiment with the sites of a federation, and show its results.

    Starts the SuperLink, unless the federation's server.toml names another one. Each site must be at `protofed site
    run`. The run can be stopped and killed: the same command with --resume goes on after its last round.
    """
    from protofed.cli.results import show_results
    from protofed.federation import kits
    from protofed.federation import serve as serving
    from protofed.federation.messages import OnMemoryLost
    from protofed.federation.server import check_remote, prepared
    from protofed.reports import progress
    from protofed.runs.config import config as configuration
    from protofed.runs.config.messages import refuse
    from protofed.runs.resuming import refuse_other_run
    from protofed.runs.run_process import folder_of
    from protofed.runs.runner import execute
    from protofed.runs.store.folder import RunFolder

    def tell(text: str) -> None:
        err.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    config = configuration.load(experiment, set_ or [], data_elsewhere=True)
    refuse([*check_remote(config)])  # before anything starts, and sites wait
    server = serving.present(kits.read_server(federation), without or ())
    folder = RunFolder(run_folder) if run_folder else folder_of(config, out_dir)
    if folder.is_done and not allow_change:
        refuse_other_run(folder, config, data_elsewhere=True)
        show_results(folder, as_json)
        return
    advice = f"resume with the same command and --resume ({folder.path})"
    console = err if as_json else out
    with stop_on_signal(advice, grace_period, console.is_terminal) as stop:
        with serving.served(server, tell) as link:
            tell(f"waiting for {', '.join(link.sites())}")
            name = serving.run_name(folder, resume)
            memory: OnMemoryLost = "start afresh" if start_afresh else "leave out"
            ready = prepared(
                link,
                config,
                name,
                seconds=wait,
                resend_after=serving.RESENDS,
                on_memory_lost=memory,
                speakers=serving.speakers(server),
            )
            serving.note(server, folder, config.training.rounds)
            tell("all sites take part")
            with progress.observer(console, lambda: stop.notice) as observer:
                result = execute(
                    ready,
                    folder,
                    resume=resume,
                    observer=observer,
                    should_stop=stop.is_made,
                    allowed_changes=allow_change or (),
                )
        if not result.is_complete:
            raise typer.Exit(stop.exit_code)
    show_results(folder, as_json)
