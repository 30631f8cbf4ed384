"""The folders of a federation: the server's, and a kit for each site, which holds no secret.

DIR/server/     stays with the server: authority, certificate, key, and the keys of the sites that were enrolled
DIR/kits/A/     goes to site A: who the server is, and a file for the site's own settings
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protofed.errors import BadInput
from protofed.federation import certificates, keys
from protofed.federation.addresses import EVERYWHERE, host_and_port, is_loopback
from protofed.federation.keys import PublicKey, write_private, write_public
from protofed.federation.policy import FEDERATION, FILE, SITE_NAME
from protofed.runs.config.messages import listed
from protofed.runs.config.schema import Problem, Problems, UnknownKey, filled
from protofed.runs.config.toml import document, section_text
from protofed.runs.store import disk, opening

SERVER_FILE = "server.toml"
MOST_SITES = 1000
MINIDIGITS: Mapping[str, Any] = MappingProxyType({"name": "minidigits"})


@dataclass(frozen=True)
class ServerSettings:
    federation: str
    address: str
    """HOST:PORT under which sites reach the server."""
    listen: str
    """HOST:PORT where the SuperLink listens, if the server starts it."""
    superlink: str = ""
    """HOST:PORT of a SuperLink that somebody else starts. Empty: the server starts its own."""


@dataclass(frozen=True)
class EnrolledSite:
    public_key: str = ""
    """Empty: its key has not come yet."""
    clients: tuple[str, ...] = ()
    """The clients that it may speak for. None are named: all that it declares, if no other site has them."""


@dataclass(frozen=True)
class ServerFolder:
    """The server's folder, read."""

    path: Path
    settings: ServerSettings
    sites: Mapping[str, EnrolledSite]

    @property
    def keys(self) -> dict[str, PublicKey]:
        """Of the sites that were enrolled."""
        return {
            name: keys.public_key(site.public_key, f"the key of {name}")
            for name, site in self.sites.items()
            if site.public_key
        }

    @property
    def authority(self) -> bytes:
        return keys.read_file(self.path / "ca.crt")

    @property
    def token(self) -> str:
        return keys.read_private(self.path / "control.token").decode("ascii").strip()


def init(
    folder: Path, sites: Sequence[str], address: str, listen: str = "", task: Mapping[str, Any] = MINIDIGITS
) -> ServerFolder:
    """Makes the folders of a new federation. `task` is the section [task] of its experiments, for the kits."""
    _check_names(sites)
    host, port = host_and_port(address)
    listen = listen or (address if is_loopback(host) else f"0.0.0.0:{port}")
    names = _names(host, listen)
    own, kits = folder / "server", folder / "kits"
    if own.exists() or kits.exists():
        raise BadInput(f"{folder}: a federation is there already")
    settings = ServerSettings(os.urandom(16).hex(), address, listen)
    issuer = certificates.authority(settings.federation)
    certificate = certificates.server(issuer, names)  # refuses a bad name before anything is written
    keys.private_folder(folder)
    keys.private_folder(own)
    write_public(own / "ca.crt", issuer.certificate.decode())
    write_private(own / "ca.key", issuer.private_key)
    write_public(own / "server.crt", certificate.certificate.decode())
    write_private(own / "server.key", certificate.private_key)
    signing = keys.new_private_key(own / "signing.key")
    write_private(own / "control.token", os.urandom(32).hex().encode())
    enrolled = dict.fromkeys(sites, EnrolledSite())
    _write_settings(own, settings, enrolled)
    for site in sites:
        signer = keys.public_text(signing.public_key())
        _write_kit(kits / site, site, settings, issuer.certificate.decode(), signer, task)
    return ServerFolder(own, settings, enrolled)


def enrol(folder: Path, site: str, public_key: str, clients: Sequence[str] = ()) -> ServerFolder:
    """Lets a site in, with its key. A site that has one already gets this one instead."""
    server = read_server(folder)
    if site not in server.sites:
        known = ", ".join(server.sites)
        raise BadInput(f"{site!r} is none of the sites of this federation: {known}")
    key = keys.public_key(public_key, f"the key of {site}")
    for other, one in server.keys.items():
        if other != site and keys.public_text(one) == keys.public_text(key):  # guard: federation-key-of-one-site
            raise BadInput(f"{site} has the key of {other}: each site makes its own")
    for other, enrolled in server.sites.items():
        if other != site and (both := {*clients} & {*enrolled.clients}):  # guard: federation-client-of-one-site
            raise BadInput(f"{', '.join(sorted(both))}: already spoken for by {other}")
    sites = {**server.sites, site: EnrolledSite(keys.public_text(key), tuple(clients))}
    _write_settings(server.path, server.settings, sites)
    return ServerFolder(server.path, server.settings, sites)


def renew(folder: Path, address: str = "") -> ServerFolder:
    """A new certificate for the server, from the same authority: sites need nothing new, unless the address changed."""
    server = read_server(folder)
    address = address or server.settings.address
    host, _ = host_and_port(address)
    issuer = certificates.Certified(server.authority, keys.read_private(server.path / "ca.key"))
    certificate = certificates.server(issuer, _names(host, server.settings.listen))
    settings = ServerSettings(**{**vars(server.settings), "address": address})
    for name in ("server.crt", "server.key"):
        (server.path / name).unlink(missing_ok=True)
    write_public(server.path / "server.crt", certificate.certificate.decode())
    write_private(server.path / "server.key", certificate.private_key)
    _write_settings(server.path, settings, server.sites)
    return ServerFolder(server.path, settings, server.sites)


def read_server(folder: Path) -> ServerFolder:
    """The server's folder of a federation. Raises one BadInput with all that is wrong with its settings."""
    own = folder / "server"
    if own.exists():
        keys.private_folder(own)
    path = own / SERVER_FILE
    table, place = document(path)
    problems: list[Problem] = [
        UnknownKey((key,), "unknown section", known=("server", "sites"))
        for key in table
        if key not in ("server", "sites")
    ]
    settings: ServerSettings | None = None
    sites: dict[str, EnrolledSite] = {}
    try:
        settings = filled(ServerSettings, _section(table, "server"), "server")
    except Problems as error:
        problems += error.all
    for name, own_table in _section(table, "sites").items():
        try:
            given = own_table if isinstance(own_table, dict) else {"": own_table}
            if "clients" in given and isinstance(given["clients"], list):
                given = {**given, "clients": tuple(given["clients"])}
            sites[name] = filled(EnrolledSite, given, f"sites.{name}")
        except Problems as error:
            problems += error.all
    if settings is not None and not FEDERATION.fullmatch(settings.federation):
        problems.append(Problem(("server", "federation"), "must be 32 letters"))
    if problems or settings is None:
        raise BadInput(listed(problems, {}, place))
    _check_names([*sites])
    return ServerFolder(own, settings, sites)


def _names(host: str, listen: str) -> list[str]:
    """What a server is called by sites, and by itself."""
    own, _ = host_and_port(listen)
    return list(dict.fromkeys([host, *([own] if own not in EVERYWHERE else []), "localhost", "127.0.0.1"]))


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    return found if isinstance(found, dict) else {}


def _check_names(sites: Sequence[str]) -> None:
    if not 0 < len(sites) <= MOST_SITES:
        raise BadInput("name the sites, such as --sites A,B,C")
    for site in sites:
        if not SITE_NAME.fullmatch(site):  # guard: federation-site-names
            raise BadInput(f"{site!r} cannot name a site: use letters, digits, - and _")
    if len({site.lower() for site in sites}) != len(sites):
        raise BadInput("two sites have the same name, in letters of whatever size")


def _write_settings(own: Path, settings: ServerSettings, sites: Mapping[str, EnrolledSite]) -> None:
    sections = [section_text("server", vars(settings))]
    sections += [section_text(f"sites.{name}", vars(site)) for name, site in sites.items()]
    with opening.folder(own) as handle:
        disk.put(handle, SERVER_FILE, "\n".join(sections).encode())


def _write_kit(
    kit: Path, site: str, settings: ServerSettings, authority: str, server_key: str, task: Mapping[str, Any]
) -> None:
    kit.mkdir(parents=True)
    write_public(kit / "ca.crt", authority)
    write_public(kit / "server.pub", server_key)
    facts = {"site": site, "federation": settings.federation, "server": settings.address}
    write_public(kit / FILE, SITE_FILE.format(**facts, task=section_text("data.task", task).strip()))
    mark = keys.fingerprint(keys.public_key(server_key, "the server's key"))
    write_public(kit / "README.md", KIT_README.format(site=site, server=settings.address, fingerprint=mark))


SITE_FILE = """\
# The settings of site {site}. They are the site's own: no server can change or loosen them.

[site]
name = "{site}"
federation = "{federation}"
server = "{server}"
device = "cpu"

# What data this site has: the clients of the task that are here.
[data]
clients = ["{site}"]

# The server and all sites must have the same settings of the task. Only the path of own files is the site's own:
# name = "custom" is for images PATH/{site}/CLASS/FILE, or, with kind = "tables", a table PATH/{site}.csv or .parquet.
# PATH is a full path, such as "/srv/scans".
{task}

# What this site lets a server ask for. An empty list allows all.
[policy]
methods = []
networks = []
steps = []
most_epochs = 100
most_rounds = 1000
most_bytes = 1073741824
most_hours = 24.0
order_minutes = 60.0
min_class_count = 5
min_rows = 5
columns = []
tell_classes = true
require_secure_sums = false
believed_keys = []
require_privacy = false
max_epsilon = 0.0
max_epsilon_delta = 1e-5
dry_run = false
"""

KIT_README = """\
# Site {site}

This folder makes a machine of yours site {site} of a federation. The server is {server}.
There is no secret in it. Its key has the fingerprint

    {fingerprint}

Ask for it by telephone, and compare it with what `protofed site check` prints.

1. Install protofed with its extra `flower`, in the version that the server has.
2. Put this folder where only you can write: `chmod 700 .`
3. Edit `site.toml`: your data, and what you allow. With files of your own, put them below one folder and write its
   full path into `[data.task]`: images as `PATH/{site}/CLASS/FILE`, or a table as `PATH/{site}.csv`. They are read
   there, and stay there. Before the first round the names of classes and columns, counts, sums and the words of
   columns are told, as far as `[policy]` allows; never a row or an image. `protofed data inspect PATH` shows faults.
4. `protofed site key .` makes your private key. It stays in this folder. Send the file `{site}.pub` back.
5. `protofed site check .` tries everything without sending anything of your data.
6. `protofed site run .` takes part until you stop it. Nothing listens on your machine: one connection goes out.

`state/log.jsonl` has every order and every answer.
"""
