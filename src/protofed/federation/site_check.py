"""What `protofed site check` tries: everything that a run needs, without sending anything of the site's data."""

import datetime
import email.utils
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import NamedTuple

import torch

from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.federation import certificates, keys
from protofed.federation.addresses import host_and_port
from protofed.federation.own_data import OwnData
from protofed.federation.policy import SiteSettings
from protofed.federation.signing import CLOCKS_DIFFER
from protofed.federation.site_data import SiteData
from protofed.federation.site_privacy import Spent
from protofed.methods import METHODS
from protofed.runtimes.sequential import Sequential
from protofed.version import __version__

FLOWER = "1.41.0"
"""The version of Flower whose inner parts are used here."""
SECONDS = 10.0


class Finding(NamedTuple):
    is_good: bool
    text: str


def check(settings: SiteSettings, reach: bool = True) -> Iterator[Finding]:
    """One finding after another. None of them ends the check."""
    yield from _caught("the files", lambda: _files(settings))
    yield from _versions()
    yield from _caught("the other sites' keys", lambda: _peers(settings))
    yield from _caught("what was released", lambda: _released(settings))
    yield from _caught("the data", lambda: _data(settings))
    if reach:
        yield from _caught(f"the server {settings.site.server}", lambda: _server(settings))


def _caught(what: str, findings: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from findings()
    except (BadInput, OSError, ValueError) as error:
        yield Finding(False, f"{what}: {error}")


def _files(settings: SiteSettings) -> Iterator[Finding]:
    key = settings.private_key()
    yield Finding(True, f"this site's key: {keys.fingerprint(key.public_key())}")
    server = keys.read_public_key(settings.server_key)
    yield Finding(True, f"the server's key: {keys.fingerprint(server)} (is that what they say on the telephone?)")
    keys.private_folder(settings.state)
    yield Finding(True, f"{settings.state} is for this user alone")


def _peers(settings: SiteSettings) -> Iterator[Finding]:
    """Whose signatures are believed in secure sums."""
    for site, mark in settings.keyring(keys.read_private_key(settings.key)).known().items():
        yield Finding(True, f"the key of {site}, by the server: {mark} (is that what {site} says on the telephone?)")


def _released(settings: SiteSettings) -> Iterator[Finding]:
    """What clients have released in private runs."""
    policy = settings.policy
    bound = f" of {policy.max_epsilon:g}" if policy.max_epsilon else ""
    for client, epsilon in Spent(settings.state).epsilons(policy.max_epsilon_delta).items():
        good = not policy.max_epsilon or epsilon <= policy.max_epsilon * (1 + 1e-6)
        text = f"{client} has released ε = {epsilon:.4g}{bound} in all runs, at δ = {policy.max_epsilon_delta:g}"
        yield Finding(good, text)


def _versions() -> Iterator[Finding]:
    yield Finding(True, f"protofed {__version__}, torch {torch.__version__}")
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        found = "none"
    yield Finding(found == FLOWER, f"flwr {found}" + ("" if found == FLOWER else f": {FLOWER} is needed"))


def _data(settings: SiteSettings) -> Iterator[Finding]:
    found = settings.data()
    if isinstance(found, OwnData):
        data = found.alone()
        if data is None:
            yield Finding(True, "own files of a single class: no step is tried, and other sites must have more classes")
            return
        yield Finding(True, f"own files of {', '.join(found.clients)}: classes {', '.join(data.task.classes)}")
    else:
        data = found
    for client in data.clients:
        smallest = data.smallest_class[client]
        is_rare = smallest < settings.policy.min_class_count
        why = f": nothing is said of classes below {settings.policy.min_class_count}" if is_rare else ""
        examples = len(data.task.clients[client])
        yield Finding(True, f"{client}: {examples} examples, {smallest} in its smallest class{why}")
    allowed = settings.policy.networks
    for name in sorted(data.network_names()):
        good = not allowed or name in allowed
        yield Finding(good, f"network {name}" + ("" if good else ": the policy does not allow it"))
    begin = time.monotonic()
    loss = _one_step(data)
    yield Finding(True, f"one step on one batch: loss {loss:.3f}, {time.monotonic() - begin:.1f} s")


def _one_step(data: SiteData) -> float:
    """A step of FedAvg on a few examples of one client, here."""
    training = Training(rounds=1, epochs=1)
    client = data.clients[0]
    own = data.task.clients[client]
    few = own.rows(torch.arange(min(training.batch_size, len(own))))
    task = replace(data.task, clients={client: few}, held_out=(), tests={}, domain_of={}, local_tests={}, validation={})
    federation = Federation(METHODS["fedavg"](), task, training, Sequential())
    loss = federation.advance(federation.start()).loss
    if loss is None:
        raise BadInput("one step on one batch gave no loss")
    return loss


def _server(settings: SiteSettings) -> Iterator[Finding]:
    host, port = host_and_port(settings.site.server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = keys.read_file(settings.authority)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    try:
        with (
            socket.create_connection((host, port), SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as own,
        ):
            own.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
            head = _head(own)
    except ssl.SSLError as error:
        yield Finding(False, f"the server's certificate: {error.reason or error}")
        return
    except OSError as error:
        why = f"{error.strerror or error}. It is there while `protofed serve` runs; --offline leaves this out"
        yield Finding(False, f"{settings.site.server} is out of reach: {why}")
        return
    yield Finding(True, f"{settings.site.server} is there, with the certificate of this federation")
    days = certificates.days_left(authority, datetime.datetime.now(datetime.UTC))
    yield Finding(days > 0, f"the authority's certificate: {days:.0f} days left")
    yield from _clock(head)


def _clock(head: str) -> Iterator[Finding]:
    dates = [line.partition(":")[2].strip() for line in head.split("\r\n") if line.lower().startswith("date:")]
    if not dates:
        yield Finding(True, "the server does not say what time it is")
        return
    differ = time.time() - email.utils.parsedate_to_datetime(dates[0]).timestamp()
    good = abs(differ) < CLOCKS_DIFFER / 2
    yield Finding(good, f"this clock and the server's differ by {differ:.0f} s" + ("" if good else ": set it"))


def _head(connection: ssl.SSLSocket) -> str:
    data = b""
    while b"\r\n\r\n" not in data and len(data) < 65536:
        piece = connection.recv(4096)
        if not piece:
            break
        data += piece
    return data.partition(b"\r\n\r\n")[0].decode("latin-1")
