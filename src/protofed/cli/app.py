"""The command `protofed`. Exit codes: 0 done, 2 bad input, 3 run failed, 130 stopped."""

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from protofed.api.describe import about, settings_of
from protofed.api.method import Method, Tag
from protofed.api.task import Task
from protofed.errors import BadInput, RunFailed
from protofed.inspection import inspect as inspected
from protofed.methods import METHODS, bases_of
from protofed.reports import comparison as reporting
from protofed.reports import demo as demonstration
from protofed.reports import progress
from protofed.reports.federation import contact_sheet, who_holds_what
from protofed.reports.tables import NOTE, domain_sheet
from protofed.runs import compare as comparisons
from protofed.runs.compare import Comparison
from protofed.runs.config import config as configuration
from protofed.runs.config.config_diff import refuse_changes
from protofed.runs.config.schema import chosen, nearest
from protofed.runs.runner import METRICS, Round, execute, parsed, summarised
from protofed.runs.store.checkpoint import refuse_other_data
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep import folder_of, sweep
from protofed.tasks import TASKS

BAD_INPUT, RUN_FAILED, SIGNALLED = 2, 3, 128
SHOW_CURSOR = b"\x1b[?25h"
TAGS = get_args(Tag)

app = typer.Typer(
    help="Federated learning with prototypes.",
    epilog="Exit codes: 0 done, 2 bad input, 3 run failed, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


class Scale(StrEnum):
    FULL = "full"
    SMALL = "small"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OutDir = Annotated[Path, typer.Option("--out", help="Where run folders go.")]
Grace = Annotated[
    float, typer.Option("--grace", min=0, help="Seconds that Ctrl-C or SIGTERM leaves for the end of the round.")
]


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="A TOML file.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, overriding the file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides training.seed.")] = None,
    out_dir: OutDir = Path("results"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue where the run was stopped.")] = False,
    run_folder: Annotated[
        Path | None, typer.Option("--folder", help="The run's folder, instead of one in --out.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option("--allow-config-change", help="With --folder and --resume: a setting that may have changed."),
    ] = None,
    steal_lock: Annotated[
        bool, typer.Option("--steal-lock", help="Take a folder that another machine has not given back.")
    ] = False,
    grace: Grace = 30.0,
    as_json: AsJson = False,
) -> None:
    """Run an experiment; its folder is named by the hash of its configuration."""
    overrides = [*(set_ or []), *([f"training.seed={seed}"] if seed is not None else [])]
    config = configuration.load(experiment, overrides)
    folder = RunFolder(run_folder) if run_folder else folder_of(config, out_dir)
    if folder.is_done and not allow_change:
        refuse_changes(folder.read_config(), config.toml(), (), str(folder.path))
        refuse_other_data(folder.checkpoints, config.identity)
        folder.warn_of_other_versions()
    else:
        advice = f"resume with the same command and --resume ({folder.path})"
        with _stop_signal(advice, grace) as stop, progress.observer(err if as_json else out) as observer:
            result = execute(
                config.experiment(),
                folder,
                resume=resume,
                allowed_changes=allow_change or (),
                steal_lock=steal_lock,
                observer=observer,
                should_stop=stop.is_asked,
            )
        if not result.is_complete:
            raise typer.Exit(stop.code)  # guard: exit-codes-signals
    _show(folder, as_json)


@app.command()
def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")], as_json: AsJson = False
) -> None:
    """Show how a run went, finished or not."""
    folder = RunFolder(run_folder)
    if not (folder.path / "config.toml").exists():
        raise BadInput(f"{run_folder} is not a run's folder: it has no config.toml")
    _show(folder, as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help=f"Only these kinds: {', '.join(TAGS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or describe one with its hyper-parameters."""
    for word in tag or []:
        if word not in TAGS:
            raise BadInput(f"no method has the tag {word!r}{nearest(word, TAGS)}")
    if name is None:
        _list_methods({key: cls for key, cls in METHODS.items() if set(tag or []) <= set(cls.tags)}, as_json)
        return
    cls = chosen(METHODS, name, "method")
    settings = settings_of(cls)
    if as_json:
        facts = {"name": name, "tags": cls.tags, "about": about(cls), "settings": [asdict(own) for own in settings]}
        _print_json({**facts, "bases": bases_of(cls)})
        return
    out.print(about(cls), highlight=False, markup=False)
    if bases_of(cls):
        out.print(f"\nBases: {', '.join(bases_of(cls))}", highlight=False, markup=False)
    if settings:
        out.print("\nSettings:", highlight=False)
    for setting in settings:
        out.print(f"{setting.name} = {json.dumps(setting.default)}  ({setting.kind})", highlight=False, markup=False)
        out.print(f"    {setting.meaning}", highlight=False, markup=False)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="One task.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, a setting of the task.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw who holds what, and some images of each domain.")] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Where pictures go.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the tasks, or describe one with its clients; --plot draws it."""
    if name is None:
        _list(TASKS, "task", as_json)
        return
    cls = chosen(TASKS, name, "task")
    task = configuration.task_settings(name, set_ or []).build()
    if plot:
        _plot(task, out_dir)
        return
    tests = {domain: len(data) for domain, data in task.tests.items()}
    clients = {c: {"domain": task.domain_of.get(c), "examples": len(d)} for c, d in task.clients.items()}
    if as_json:
        facts = {"name": name, "about": about(cls), "classes": task.num_classes, "tests": tests, "clients": clients}
        _print_json(facts)
        return
    out.print(f"{name}: {about(cls)}\n", highlight=False, markup=False)
    table = Table("client", "domain", "training examples", "test examples of the domain")
    for client, own in clients.items():
        table.add_row(
            escape(client), escape(str(own["domain"])), str(own["examples"]), str(tests.get(str(own["domain"]), "–"))
        )
    out.print(table)


data_app = typer.Typer(help="Your own data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")


@data_app.callback()
def data() -> None:
    """Look at your own data before you train on them."""


@data_app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder with a folder or a table for each site.")],
    label: Annotated[str | None, typer.Option(help="Of tables: the column that is to be predicted.")] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="Of tables: a column that is not used.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="Of tables: a column whose numbers are codes.")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out images that are damaged.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write an experiment that is ready to run.")] = None,
) -> None:
    """Say what a folder of sites holds, what is wrong with it and what to do; docs/your-data.md explains."""
    found = inspected(folder, label, skip_damaged, write, leave_out or (), categorical or ())
    out.print(found.text, highlight=False, markup=False, soft_wrap=True)
    if found.errors:
        raise typer.Exit(BAD_INPUT)


def _plot(task: Task, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"{task.name}-clients.png"]
    who_holds_what(task, pictures[0])
    if task.spec.input.kind == "image":
        pictures.append(folder / f"{task.name}-images.png")
        contact_sheet(task, pictures[1])
    for picture in pictures:
        out.print(f"picture {picture}", highlight=False, soft_wrap=True)


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 10,
    out_dir: OutDir = Path("results/demo"),
    as_json: AsJson = False,
) -> None:
    """Compare four methods on minidigits with three seeds: tables and a picture, in a few minutes."""
    _compare(demonstration.compared(rounds), out_dir, out_dir, as_json)


@app.command()
def compare(
    comparison_file: Annotated[Path, typer.Argument(metavar="COMPARISON", help="A TOML file.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, in every run.")] = None,
    out_dir: OutDir = Path("results"),
    report: Annotated[Path | None, typer.Option(help="Where the report goes; by default below --out.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task, by its label; may be given again.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method, likewise.")] = None,
    scale: Annotated[Scale, typer.Option(help="small: a sliver, to see that everything works.")] = Scale.FULL,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one for each core.")] = None,
    grace: Grace = 30.0,
    as_json: AsJson = False,
) -> None:
    """Compare methods on tasks with several seeds: tables and pictures, with the published numbers beside ours."""
    compared = comparisons.load(
        comparison_file,
        is_small=scale == Scale.SMALL,
        overrides=set_ or [],
        tasks=task or [],
        methods=method or [],
    )
    _compare(compared, out_dir, report or out_dir / "reports" / comparison_file.stem, as_json, jobs, grace)


def _compare(
    compared: Comparison, out_dir: Path, report: Path, as_json: bool, jobs: int | None = None, grace: float = 30.0
) -> None:
    """Runs what is not done yet, then reports on all; a failed run is a line of the report."""
    console, configs = err if as_json else out, compared.configs
    total = sum(config.training.rounds for config in configs)
    methods = ", ".join(next(iter(compared.runs.values())))
    if report.exists() and not report.is_dir():
        raise BadInput(f"the report would go into the folder {report}, which is a file")
    console.print(f"{len(configs)} runs, {total} rounds: {methods}", highlight=False, markup=False)
    with _stop_signal("run the same command again to continue", grace) as stop, progress.bar(console) as bar:
        line = bar.add_task("rounds of all runs", total=total)
        outcomes = sweep(
            configs,
            out_dir,
            workers=jobs,
            progress=lambda done: bar.update(line, completed=done),
            should_stop=stop.is_asked,
        )
    failed = [outcome.failure for outcome in outcomes if outcome.failure]
    if not all(outcome.is_done or outcome.failure for outcome in outcomes):
        if not stop.is_asked():
            raise RunFailed("a run did not come to its end, and nobody stopped it: did its data change meanwhile?")
        raise typer.Exit(stop.code)
    path = reporting.write(compared, outcomes, report)
    parts = reporting.reports(compared, outcomes)
    if as_json:
        _print_json({part.task: {row.label: list(row.seeds) for row in part.rows} for part in parts})
    else:
        for part in parts:
            title = f"{part.task}: accuracy on each domain, %; mean ± sd of {len(compared.seeds)} seeds"
            out.print(domain_sheet(part.rows, part.domains).rich(title, out.width))
        out.print(NOTE, highlight=False)
        out.print(f"report {path}", highlight=False, soft_wrap=True, markup=False)
    if failed:
        raise RunFailed(f"{len(failed)} of {len(configs)} runs failed; {path} names them. The first: {failed[0]}")


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=err, show_path=False)]
    )
    try:
        app()
    except BadInput as error:
        _fail(error, BAD_INPUT)
    except RunFailed as error:
        _fail(error, RUN_FAILED)
    except KeyboardInterrupt:
        _fail("stopped at once; what was saved is intact", SIGNALLED + signal.SIGINT)


def _fail(error: Exception | str, code: int) -> None:
    err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


class _Stop:
    """The wish to stop."""

    def __init__(self) -> None:
        self.signal = 0

    def is_asked(self) -> bool:
        return bool(self.signal)

    @property
    def code(self) -> int:
        return SIGNALLED + self.signal


@contextlib.contextmanager
def _stop_signal(advice: str, grace: float) -> Iterator[_Stop]:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop after the round. A second one, or the end of the grace,
    ends the process at once: whatever it was writing is whole or not there, and processes that work for it end too."""
    stop = _Stop()
    # A signal may come while rich prints, or while a module is imported: what is said then is bytes that are ready.
    wish = f"\nstopping after this round, or in {grace:g} s; {advice}\n".encode()
    end = (SHOW_CURSOR if err.is_terminal else b"") + b"\nstopped at once; what was saved is intact\n"

    def ask(number: int, frame: Any) -> None:
        if stop.is_asked():  # guard: second-signal-ends-at-once
            end_at_once(number, frame)  # guard: second-signal-ends-at-once
        stop.signal = number
        signal.setitimer(signal.ITIMER_REAL, max(grace, 1e-3))  # guard: grace-ends, first-signal-waits-for-round
        with contextlib.suppress(OSError):
            os.write(2, wish)  # guard: signal-handler-says-ready-bytes

    def end_at_once(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, end)
        os._exit(stop.code)

    handlers = {signal.SIGINT: ask, signal.SIGTERM: ask, signal.SIGALRM: end_at_once}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(folder: RunFolder, as_json: bool) -> None:
    rounds = parsed(folder.read_rounds())
    evaluated = [r for r in rounds if r.is_evaluated]
    summary = summarised(rounds, "last_five") if evaluated else {}
    if as_json:
        rows = [asdict(r) for r in rounds]
        _print_json({"folder": str(folder.path), "done": folder.is_done, "accuracy": summary, "rounds": rows})
        return
    state = "done" if folder.is_done else f"not finished: {sum(r.round > 0 for r in rounds)} rounds so far"
    out.print(f"{folder.path}: {state}", highlight=False, soft_wrap=True, markup=False)
    if evaluated:
        out.print(_rounds_table(evaluated, summary))
        out.print(_metrics_table(summary))
    failures = sum(len(r.failures) for r in rounds)
    if failures:
        out.print(f"{failures} replies were left out; rounds.jsonl says which and why", style="yellow")


def _rounds_table(rounds: list[Round], summary: Mapping[str, float]) -> Table:
    """About ten rounds, and the mean of the last five."""
    table = Table(title=f"accuracy, % ({rounds[-1].judged})", title_justify="left")
    for name in ("round", *rounds[-1].domains, "average"):
        table.add_column(escape(name), justify="right")
    step = max(1, len(rounds) // 10)
    for r in rounds[-1::-step][::-1]:
        table.add_row(str(r.round), *(f"{100 * v:.1f}" for v in (*r.domains.values(), r.average or 0.0)))
    table.add_section()
    columns = (*rounds[-1].domains, "average")
    table.add_row("last five", *(f"{100 * summary[c]:.1f}" for c in columns), style="bold")
    return table


def _metrics_table(summary: Mapping[str, float]) -> Table:
    """Every metric that was measured, with what it is."""
    table = Table("metric", "last five, %", "what it is", title="metrics", title_justify="left")
    for name, meaning in METRICS.items():
        if name in summary:
            table.add_row(name, f"{100 * summary[name]:.1f}", meaning)
    return table


def _list_methods(chosen: Mapping[str, type[Method[Any, Any, Any, Any]]], as_json: bool) -> None:
    if as_json:
        first = {key: about(cls).split("\n\n")[0] for key, cls in chosen.items()}
        _print_json({key: {"about": first[key], "tags": cls.tags} for key, cls in chosen.items()})
        return
    table = Table("method", "what it is", "tags")
    for key, cls in chosen.items():
        table.add_row(key, about(cls).split("\n\n")[0], ", ".join(cls.tags))
    out.print(table)


def _list(registry: Mapping[str, type], kind: str, as_json: bool) -> None:
    lines = {key: about(cls).split("\n\n")[0] for key, cls in registry.items()}
    if as_json:
        _print_json(lines)
        return
    table = Table(kind, "what it is")
    for key, text in lines.items():
        table.add_row(key, text)
    out.print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
