"""`protofed federation`: makes a federation of sites on several machines, and says how it is."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.console import AsJson, print_json, say
from protofed.errors import BadInput

app = typer.Typer(help="Make a federation of sites on several machines.", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the federation.")]
Clients = Annotated[
    str, typer.Option(metavar="A,B", help="The clients that the site may speak for; else all that it declares.")
]


@app.callback()
def federation() -> None:
    """Make a federation of sites on several machines, enrol their keys, and see who is there."""


@app.command()
def init(
    folder: Folder,
    sites: Annotated[str, typer.Option(metavar="A,B,C", help="The names of the sites.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where sites reach the server.")] = "127.0.0.1:8000",
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where the server listens; by default on all networks of the machine."),
    ] = "",
    experiment: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An experiment, whose task is written into the kits; else minidigits is."),
    ] = None,
) -> None:
    """Make the server's folder and a kit for each site, and say what goes to whom."""
    from protofed.federation import keys, kits

    task = {"name": "minidigits"}
    if experiment is not None:
        from protofed.runs.config import config as configuration

        task = configuration.load(experiment, data_elsewhere=True).resolved()["task"]
    server = kits.init(folder, [name.strip() for name in sites.split(",")], address, listen, task)
    say(f"{server.path}  stays here. It holds secrets: nobody else may read it")
    for site in server.sites:
        say(f"{folder / 'kits' / site}  goes to site {site}. It holds no secret")
    mark = keys.fingerprint(keys.read_private_key(server.path / "signing.key").public_key())
    say(f"\nThe server's key has the fingerprint {mark}. Tell it to each site by telephone.")
    say("Each site makes its key with `protofed site key KIT` and sends back a file, such as A.pub. Then, for each:")
    say(f"    protofed federation enrol {folder} A A.pub")


@app.command()
def enrol(
    folder: Folder,
    site: Annotated[str, typer.Argument(help="The name of the site.")],
    public_key: Annotated[Path, typer.Argument(metavar="PUBKEY", help="The file that the site sent.")],
    clients: Clients = "",
) -> None:
    """Let a site in, by its public key."""
    from protofed.federation import keys, kits

    data = keys.read_file(public_key)
    key = keys.public_key(data, str(public_key))
    names = [name.strip() for name in clients.split(",") if name.strip()]
    server = kits.enrol(folder, site, keys.public_text(key), names)
    say(f"{site} is enrolled with the key {keys.fingerprint(key)}. Is that what they say on the telephone?")
    if missing := [name for name, one in server.sites.items() if not one.public_key]:
        say(f"Still missing: {', '.join(missing)}")


@app.command()
def renew(
    folder: Folder,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where sites reach the server from now on.")] = "",
) -> None:
    """Make a new certificate for the server. Sites need nothing new, unless the address changes."""
    from protofed.federation import kits

    server = kits.renew(folder, address)
    say(f"{server.path / 'server.crt'} is new. Start `protofed serve` again")
    if address:
        say(f'Each site writes server = "{address}" into its site.toml')


@app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show the sites, which of them are there, and how far the run is."""
    from protofed.errors import RunFailed
    from protofed.federation import kits
    from protofed.federation.serve import status as nodes_of

    server = kits.read_server(folder)
    why = ""
    try:
        nodes = dict(nodes_of(server))
    except RunFailed as error:
        nodes, why = {}, str(error)
    rows = {name: _row(one, nodes.get(name)) for name, one in server.sites.items()}
    run = _run(server.path)
    if as_json:
        print_json({"superlink": why or "there", "sites": rows, "run": run})
        return
    say(why or f"the SuperLink is there ({server.settings.address})")
    for name, row in rows.items():
        since = f" since {row['since']}" if row["state"] == "there" else ""
        say(f"{name}: {row['state']}{since}" + (f", {row['key']}" if row["key"] else ""))
    if run:
        say(f"{run['run']}: {run['done']} of {run['rounds']} rounds done")


def _row(site: Any, node: Any) -> dict[str, Any]:
    from protofed.federation import keys

    if not site.public_key:
        return {"state": "its key has not come", "key": "", "clients": [*site.clients], "since": ""}
    mark = keys.fingerprint(keys.public_key(site.public_key, "its key"))
    state = "there" if node is not None and node.is_online else "away"
    since = node.since if node is not None else ""
    return {"state": state, "key": mark, "clients": [*site.clients], "since": since}


def _run(own: Path) -> dict[str, Any]:
    """The run that was served last."""
    from protofed.runs.results import parsed
    from protofed.runs.store import opening
    from protofed.runs.store.folder import RunFolder

    try:
        facts = json.loads(opening.read(own, "run.json", most=10_000))
        folder = RunFolder(Path(facts["run"]))
        rounds = parsed(folder.read_rounds()) if folder.has("rounds.jsonl") else []
        done = sum(one.round > 0 for one in rounds)
        return {"run": str(folder.path), "rounds": int(facts["rounds"]), "done": done, "is_done": folder.is_done}
    except (OSError, ValueError, KeyError, TypeError, BadInput):
        return {}
