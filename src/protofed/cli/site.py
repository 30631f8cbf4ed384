"""`protofed site`: a machine with data as a site of a federation."""

import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.console import say
from protofed.errors import BadInput
from protofed.stop_signals import STOP_SIGNALS

PROBLEMS_FOUND = 2

app = typer.Typer(
    help="Take part in a federation with this machine's data.", no_args_is_help=True, rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(metavar="KIT", help="The folder that came from the server.")]


@app.callback()
def site() -> None:
    """Take part in a federation with data that stay on this machine."""


@app.command()
def key(folder: Folder) -> None:
    """Make this site's private key, if it has none, and write the public one, which goes to the server."""
    from protofed.federation import keys, policy

    settings = policy.read(folder)
    private = keys.read_private_key(settings.key) if settings.key.exists() else keys.new_private_key(settings.key)
    text = keys.public_text(private.public_key())
    path = folder / f"{settings.site.name}.pub"
    if not path.exists():
        keys.write_public(path, text)
    elif keys.read_file(path).decode("ascii", "replace") != text:
        raise BadInput(f"{path}: is another key than that of {settings.key}: remove it")
    say(text.strip())
    say(f"Send {path} to the server. Its fingerprint, for the telephone: {keys.fingerprint(private.public_key())}")
    say(f"{settings.key} is secret, and never leaves this machine.")


@app.command()
def check(
    folder: Folder,
    offline: Annotated[bool, typer.Option("--offline", help="Do not try whether the server is there.")] = False,
) -> None:
    """Try data, keys, clock, versions, the server and one step of training. Nothing of the data is sent."""
    from protofed.federation import policy
    from protofed.federation.site_check import check as findings

    bad = 0
    for finding in findings(policy.read(folder), reach=not offline):
        say(f"{'ok  ' if finding.is_good else 'BAD '} {finding.text}")
        bad += not finding.is_good
    if bad:
        raise typer.Exit(PROBLEMS_FOUND)


@app.command()
def run(folder: Folder) -> None:
    """Take part until Ctrl-C. One connection goes out, and nothing listens here."""
    import torch

    from protofed.federation import keys, policy
    from protofed.federation.flower.fleet import Fleet
    from protofed.federation.site import Site
    from protofed.federation.site_process import SiteProcess, only_process

    settings = policy.read(folder)
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)

    with only_process(settings.state):
        torch.set_num_threads(1)  # before processes are forked
        data = settings.data()
        tell(f"site {settings.site.name}: {', '.join(data.clients)}")
        limits, dry_run = settings.policy.limits(), settings.policy.dry_run
        authority, private = keys.read_file(settings.authority), settings.private_key()
        keyring = settings.keyring(private)
        handler = Site(settings.state, data, limits, dry_run, settings.site.device, keyring)
        process = SiteProcess(
            settings,
            handler,
            lambda: Fleet(settings.site.server, authority, private),
            tell,
            lambda: bool(asked),
        )
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, ask)
        process.run()
    tell("stopped; what the clients remember is kept")


def tell(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}")
