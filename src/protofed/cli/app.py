"""The command `protofed`. Exit codes: 0 done, 2 bad input, 3 run failed, 130 Ctrl-C, 143 SIGTERM.

The modules of commands import torch, and what needs it, only inside functions: help and lists come at once.
"""

import contextlib
import logging
import signal
import sys
from typing import Annotated

import typer
from rich.logging import RichHandler

from protofed.cli import data, federation, site
from protofed.cli.analyse import analyse
from protofed.cli.audit import audit
from protofed.cli.compare import compare, demo
from protofed.cli.console import CannotPrint, err
from protofed.cli.export import export
from protofed.cli.list import list_
from protofed.cli.methods import methods
from protofed.cli.predict import evaluate, predict
from protofed.cli.report import report
from protofed.cli.run import run, show
from protofed.cli.serve import serve
from protofed.cli.signals import SIGNALLED
from protofed.cli.tasks import tasks
from protofed.cli.watch import watch
from protofed.errors import BadInput, RunFailed
from protofed.version import __version__

BAD_INPUT, RUN_FAILED = 2, 3

app = typer.Typer(
    epilog="Exit codes: 0 done, 2 bad input, 3 run failed, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run,
    show,
    serve,
    compare,
    report,
    watch,
    analyse,
    audit,
    export,
    predict,
    evaluate,
    demo,
    methods,
    tasks,
):
    app.command()(command)
app.command("list")(list_)
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")
app.add_typer(site.app, name="site")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"protofed {__version__}")
        raise typer.Exit


@app.callback()
def protofed(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning with prototypes."""


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=err, show_path=False)]
    )
    try:
        app()
    except BadInput as error:
        _fail(error, BAD_INPUT)
    except CannotPrint as error:
        _fail("" if error.is_unheard else error, RUN_FAILED)
    except RunFailed as error:
        _fail(error, RUN_FAILED)
    except KeyboardInterrupt:
        _fail("stopped at once; what was saved is intact", SIGNALLED + signal.SIGINT)


def _fail(error: Exception | str, code: int) -> None:
    with contextlib.suppress(OSError):  # standard error may be full too
        if str(error):
            err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
