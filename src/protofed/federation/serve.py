"""The server: its SuperLink, the link to its sites, and a run that can be stopped and resumed."""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from protofed.errors import BadInput, RunFailed
from protofed.federation import keys
from protofed.federation.addresses import EVERYWHERE, host_and_port
from protofed.federation.flower.control import Access, Control, Session
from protofed.federation.flower.link import FlowerLink
from protofed.federation.flower.outcomes import RunOver, SiteNode, Turned, Unreachable
from protofed.federation.flower.superlink import STARTS, SuperLinkProcess
from protofed.federation.kits import ServerFolder
from protofed.federation.site_store import RUN
from protofed.runs.store import disk, opening
from protofed.runs.store.folder import RunFolder

RESENDS = 600.0
"""Seconds without an answer after which an order is sent again, in case Flower has lost one without a word."""


def present(server: ServerFolder, without: Collection[str] = ()) -> ServerFolder:
    """The server's folder with the sites that take part. Refused if one has no key yet."""
    if unknown := {*without} - {*server.sites}:
        raise BadInput(f"{', '.join(sorted(unknown))}: no site of this federation")
    sites = {name: site for name, site in server.sites.items() if name not in without}
    if missing := [name for name, site in sites.items() if not site.public_key]:
        raise BadInput(
            f"the keys of {', '.join(missing)} have not come yet: protofed federation enrol, or --without for each"
        )
    return replace(server, sites=sites)


def speakers(server: ServerFolder) -> dict[str, tuple[str, ...]]:
    """The clients that sites may speak for, of those sites for which that was said."""
    return {name: site.clients for name, site in server.sites.items() if site.clients}


@contextmanager
def served(server: ServerFolder, tell: Callable[[str], None]) -> Iterator[FlowerLink]:
    """A link to all sites, and the SuperLink of this server for as long."""
    with only_server(server.path):
        access = access_of(server)
        superlink = None if server.settings.superlink else SuperLinkProcess(server.path, server.settings.listen, tell)
        keep_alive = superlink.keep_alive if superlink else lambda: None
        key = keys.read_private_key(server.path / "signing.key")
        try:
            _await_superlink(access, server, keep_alive)
            federation, sites = server.settings.federation, server.keys
            link = FlowerLink(lambda: Session(access, sites), federation, key, sites, keep_alive, tell)
            try:
                yield link
            finally:
                link.close()
        finally:
            if superlink is not None:
                superlink.close()


@contextmanager
def only_server(own: Path) -> Iterator[None]:
    """Refuses a second server in one folder."""
    handle = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"another process serves this federation ({own})") from None
    else:
        yield
    finally:
        os.close(handle)


def access_of(server: ServerFolder) -> Access:
    """How this server reaches its SuperLink: one of its own by the loopback address."""
    settings = server.settings
    if settings.superlink:
        return Access(settings.superlink, server.authority, "")
    host, port = host_and_port(settings.listen)
    return Access(f"{'127.0.0.1' if host in EVERYWHERE else host}:{port}", server.authority, server.token)


def status(server: ServerFolder) -> Mapping[str, SiteNode]:
    """The sites that the SuperLink knows now."""
    control = Control(access_of(server))
    try:
        return control.nodes(server.keys)
    except (Unreachable, Turned, RunOver) as error:
        raise RunFailed(f"the SuperLink is not there: {error}; protofed serve starts it") from error
    finally:
        control.close()


def run_name(folder: RunFolder, resume: bool) -> str:
    """The name under which sites know a run. It lies beside the run's folder, and stays the same for as long as that is
    there: what sites keep for the run is found by it."""
    above, name = folder.path.absolute().parent, f"{folder.path.name}.name"
    is_known = folder.path.exists() and name in opening.names_in(above)
    if is_known or (resume and folder.path.exists()):
        try:
            found = opening.read(above, name, most=200).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{above / name}: cannot be read: {error}; without it sites cannot go on") from error
        if not RUN.fullmatch(found):
            raise BadInput(f"{above / name}: is not the name of a run")
        return found
    words = re.sub(r"[^A-Za-z0-9]+", "-", folder.path.name)[:40].strip("-")
    new = f"{words or 'run'}-{os.urandom(6).hex()}"
    disk.make(above)
    with opening.folder(above) as handle:
        disk.put(handle, name, new.encode())
    return new


def note(server: ServerFolder, folder: RunFolder, num_rounds: int) -> None:
    """Writes down what is going on, for `protofed federation status`."""
    facts = {"run": str(folder.path.absolute()), "rounds": num_rounds, "begun": round(time.time())}
    with opening.folder(server.path) as handle:
        disk.put(handle, "run.json", json.dumps(facts).encode())


def _await_superlink(access: Access, server: ServerFolder, keep_alive: Callable[[], None]) -> None:
    end = time.monotonic() + STARTS
    while True:
        keep_alive()
        control = Control(access)
        try:
            control.register(server.keys)
            return
        except Turned as error:
            raise RunFailed(f"the SuperLink refuses this server: {error}") from error
        except (Unreachable, RunOver) as error:
            if time.monotonic() > end:
                raise RunFailed(f"the SuperLink at {access.address} is not there: {error}") from error
        finally:
            control.close()
        time.sleep(0.3)
