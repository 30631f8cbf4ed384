"""What a federation of sites costs: a server, its SuperLink and three sites, processes of this machine over TLS on the
loopback address, beside the runtime `sequential`. Needs the extra `flower`.

Rounds of 3, 12 and 100 clients on three sites with the method FPL, and rounds of 3 clients with FedAvg and models of 20
and 200 MB. Each row says how long the first round takes and, as a median, the later ones; where the time of the later
ones goes; how many bytes pass between sites and SuperLink, TLS and questions for orders included, beside the bytes of
the orders and answers; and the most memory that a process needs. The server's state after the last round is compared
bit for bit with that of `sequential`. Run it with `python benchmarks/federation.py`; `--only 12 20MB` chooses rows.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import resource
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from protofed import wire
from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.federation import keys, kits, policy, serve
from protofed.federation.flower.fleet import Fleet
from protofed.federation.flower.link import FlowerLink
from protofed.federation.flower.outcomes import Delivery
from protofed.federation.server import prepared
from protofed.federation.signing import Signed
from protofed.federation.site import Site
from protofed.federation.site_data import SiteData, own_part
from protofed.federation.site_process import SiteProcess
from protofed.methods import METHODS
from protofed.nn.networks import Parts
from protofed.runs.config.config import Config
from protofed.runs.config.recording import task_table
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks.minidigits import Minidigits, MinidigitsSkewed

SITES = ("A", "B", "C")
PROCESSES = multiprocessing.get_context("fork")


# ---- what is run


class Perceptron:
    """One hidden layer, as wide as the model's size asks for. Equal ones are equal tasks at both ends."""

    def __init__(self, megabytes: int) -> None:
        self.width = megabytes * 1_000_000 // 4 // (192 + 1 + 10)

    def __call__(self, client: str = "") -> Parts:
        features = nn.Sequential(nn.Flatten(), nn.Linear(192, self.width), nn.ReLU())
        return {"features": features, "classifier": nn.Linear(self.width, 10)}


def digits(num_clients: int) -> Task:
    if num_clients > 12:
        return MinidigitsSkewed(num_clients=num_clients, concentration=10.0).build()
    task = Minidigits().build()
    return own_part(task, sorted(task.clients)[:num_clients])


def large(megabytes: int) -> Task:
    draws = torch.Generator().manual_seed(0)

    def data(size: int) -> Data:
        images = torch.randint(0, 256, (size, 3, 8, 8), generator=draws, dtype=torch.uint8)
        return Data.of(images, torch.arange(size) % 10)

    clients = {f"client-{k}": data(32) for k in range(3)}
    return Task(clients, {"all": data(20)}, 10, Perceptron(megabytes), name=f"large_{megabytes}")


@dataclass(frozen=True)
class Row:
    what: str
    method: str
    task: Callable[[], Task]
    rounds: int = 6


ROWS = {
    "3": Row("3 clients", "fpl", lambda: digits(3)),
    "12": Row("12 clients", "fpl", lambda: digits(12)),
    "100": Row("100 clients", "fpl", lambda: digits(100)),
    "20MB": Row("3 clients, 20 MB", "fedavg", lambda: large(20)),
    "200MB": Row("3 clients, 200 MB", "fedavg", lambda: large(200), rounds=3),
}


def config_of(row: Row, task: Task) -> Config:
    training = Training(rounds=row.rounds, epochs=1, batch_size=32, deadline=1800.0, on_divergence="skip")
    runtime, evaluation = RuntimeSettings(name="sequential"), EvaluationSettings(every=row.rounds)
    return Config(task, METHODS[row.method](), training, runtime, evaluation)


def rounds_of(federation: Federation, count: int) -> Iterator[tuple[float, Any]]:
    """The seconds of each round, and the server's state after it."""
    state = federation.start()
    for _ in range(count):
        begin = time.perf_counter()
        state = federation.advance(state)
        assert not state.failures, state.failures
        yield time.perf_counter() - begin, state.server


# ---- where the time goes


STEPS = {
    "sent": "all orders are sent",
    "came": "and fetched by the sites",
    "worked": "and done there",
    "answered": "and all answers sent",
    "fetched": "and fetched by the server",
}
"""What is noted, in the order of a round."""


class Notes:
    """What was done when, one line each, in a file that several processes write."""

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who

    def note(self, what: str, **facts: float) -> None:
        line = {"who": self._who, "what": what, "at": time.time(), **facts}
        with open(self._path, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


class TimedFleet(Fleet):
    notes: Notes

    def order(self, most_bytes: int) -> Delivery | None:
        found = super().order(most_bytes)
        if found is not None:
            self.notes.note("came")
        return found

    def answer(self, delivery: Delivery, message: Signed) -> None:
        super().answer(delivery, message)
        self.notes.note("answered")


@dataclass
class TimedSite:
    site: Site
    notes: Notes

    def handle(self, data: bytes) -> bytes | None:
        answer = self.site.handle(data)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.notes.note("worked", bytes=len(data) + len(answer or b""), memory=memory)
        return answer


def site(kit: Path, data: SiteData, address: str, notes: Notes) -> None:
    """The process of a site, which goes on until it is ended."""
    end_with_parent()
    torch.set_num_threads(1)
    settings = policy.read(kit)
    settings = replace(settings, policy=replace(settings.policy, min_class_count=1))
    keys.private_folder(settings.state)
    handler = TimedSite(Site(settings.state, data, settings.policy.limits()), notes)
    authority, private = keys.read_file(settings.authority), keys.read_private_key(settings.key)

    def connect() -> Fleet:
        fleet = TimedFleet(address, authority, private)
        fleet.notes = notes
        return fleet

    SiteProcess(settings, handler, connect, lambda text: None).run()


def end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---- bytes on the wire


def proxy(listen: socket.socket, port: int, total: Any) -> None:
    """Carries what sites and SuperLink say to each other, and counts it."""
    end_with_parent()
    chosen = selectors.DefaultSelector()
    chosen.register(listen, selectors.EVENT_READ)
    while True:
        for ready, _ in chosen.select():
            if ready.data is None:
                near, _ = listen.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # the SuperLink is not there yet
                    near.close()
                    continue
                chosen.register(near, selectors.EVENT_READ, far)
                chosen.register(far, selectors.EVENT_READ, near)
                continue
            one, other = ready.fileobj, ready.data
            assert isinstance(one, socket.socket)
            try:
                data = one.recv(2**20)
                other.sendall(data)
            except OSError:
                data = b""
            total.value += len(data)
            if not data:
                for each in (one, other):
                    chosen.unregister(each)
                    each.close()


# ---- one row


@dataclass(frozen=True)
class Measured:
    what: str
    sequential_first: float
    sequential: float
    first: float
    later: float
    parts: Mapping[str, float]
    """Seconds of a later round."""
    wire: float
    """Bytes of a later round."""
    messages: float
    """The same, of orders and answers alone."""
    work: Mapping[str, float]
    """Seconds of processor time of a later round."""
    memory: Mapping[str, float]
    """The most MB of the server, of a site's worker and of the SuperLink."""


@contextmanager
def federation(folder: Path, task: Task) -> Iterator[tuple[FlowerLink, Path, Any]]:
    """A link to three sites that are there, the file of notes, and how many bytes have passed."""
    listen = socket.create_server(("127.0.0.1", 0))
    own, port = f"127.0.0.1:{free_port()}", listen.getsockname()[1]
    kits.init(folder, SITES, own)
    names, total = sorted(task.clients), PROCESSES.Value(ctypes.c_longlong, 0)
    running = []
    notes = folder / "notes.jsonl"
    try:
        running.append(PROCESSES.Process(target=proxy, args=(listen, int(own.rpartition(":")[2]), total)))
        for number, name in enumerate(SITES):
            kit = folder / "kits" / name
            kit.chmod(0o700)
            key = keys.new_private_key(kit / "site.key")
            kits.enrol(folder, name, keys.public_text(key.public_key()))
            data = SiteData(own_part(task, names[number :: len(SITES)]), task_table(task))
            arguments = (kit, data, f"127.0.0.1:{port}", Notes(notes, name))
            running.append(PROCESSES.Process(target=site, args=arguments, name=f"site {name}"))
        for process in running:
            process.start()
        with serve.served(kits.read_server(folder), lambda text: None) as link:
            yield link, notes, total
    finally:
        for process in running:
            process.kill()
            process.join()
        listen.close()


def timed(link: FlowerLink, notes: Notes) -> None:
    """Notes when the server's link has sent an order, and when it has fetched an answer."""
    begin_session = link._begin

    def begin() -> Any:
        session = begin_session()
        send, received = session.send, session._received  # type: ignore[attr-defined]

        def sends(node: int, message: Signed) -> str:
            name: str = send(node, message)
            notes.note("sent")
            return name

        def fetches(*arguments: Any) -> Signed:
            found: Signed = received(*arguments)
            notes.note("fetched")
            return found

        session.send, session._received = sends, fetches  # type: ignore[method-assign,attr-defined]
        return session

    link._begin = begin


def measured(row: Row) -> Measured:
    task = row.task()
    config = config_of(row, task)
    begin = time.process_time()
    near = [*rounds_of(Federation(config.method, task, config.training), row.rounds)]
    alone = (time.process_time() - begin) / row.rounds
    with tempfile.TemporaryDirectory() as name, federation(Path(name), task) as (link, notes, total):
        timed(link, Notes(notes, "server"))
        far = prepared(link, config, "benchmark", seconds=300.0).federation
        link_pid = superlink_pid()
        marks, seconds, states, work = [(time.time(), total.value)], [], [], [processor_times(link_pid)]
        for each, state in rounds_of(far, row.rounds):
            seconds.append(each)
            states = [state]
            marks.append((time.time(), total.value))
            work.append(processor_times(link_pid))
        assert same(states[-1], near[-1][1]), "the states differ from those of sequential"
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        superlink = peak_of(link_pid)
    later = range(1, row.rounds)
    parts = [parts_of(lines, marks[k][0], marks[k + 1][0]) for k in later]
    memory = {
        "server": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker of a site": max(line.get("memory", 0.0) for line in lines),
        "SuperLink": superlink,
    }
    return Measured(
        row.what,
        near[0][0],
        statistics.median(each for each, _ in near[1:]),
        seconds[0],
        statistics.median(seconds[1:]),
        {what: statistics.median(part[what] for part in parts) for what in parts[0]},
        statistics.median(marks[k + 1][1] - marks[k][1] for k in later),
        statistics.median(payload(lines, marks[k][0], marks[k + 1][0]) for k in later),
        {"sequential": alone}
        | {who: statistics.median(work[k + 1][who] - work[k][who] for k in later) for who in work[0]},
        memory,
    )


def parts_of(lines: Sequence[Mapping[str, Any]], begin: float, end: float) -> dict[str, float]:
    """Where one round's time went: how long it took until the last one had done each thing. All do them at the same
    time, so a second of one is not always a second of the round."""
    parts, now = {}, begin
    for what, name in STEPS.items():
        last = max((line["at"] for line in lines if line["what"] == what and begin < line["at"] <= end), default=now)
        parts[name] = max(0.0, last - now)
        now = max(now, last)
    return {**parts, "the server checks and adds": end - now}


def payload(lines: Sequence[Mapping[str, Any]], begin: float, end: float) -> float:
    """Bytes of the orders and answers of a round."""
    return sum(float(line["bytes"]) for line in lines if "bytes" in line and begin < line["at"] <= end)


def same(one: Any, other: Any) -> bool:
    there, here = (wire.to_arrays(state) for state in (one, other))
    return there.keys() == here.keys() and all(there[name].equal(here[name]) for name in here)


def superlink_pid() -> int:
    own = children_of(os.getpid())
    (found,) = [pid for pid in own if b"flower.superlink" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def processor_times(superlink: int) -> dict[str, float]:
    """Seconds that each has worked, in user and system mode."""
    sites = [one.pid for one in multiprocessing.active_children() if one.name.startswith("site") and one.pid]
    workers = [pid for site in sites for pid in children_of(site)]
    own = {"the server": [os.getpid()], "all sites": [*sites, *workers], "the SuperLink": [superlink]}
    return {name: sum(map(processor_time, pids)) for name, pids in own.items()}


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def peak_of(pid: int) -> float:
    """The most MB that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---- tables


def row_in_own_process(row: Row) -> Measured:
    """Its peak of memory is its own."""
    mine, theirs = PROCESSES.Pipe()

    def work() -> None:
        torch.set_num_threads(1)
        theirs.send(measured(row))

    process = PROCESSES.Process(target=work)
    process.start()
    theirs.close()
    try:
        found: Measured = mine.recv()
    finally:
        process.join()
    print(json.dumps(asdict(found)), file=sys.stderr, flush=True)
    return found


def shown(rows: Sequence[Measured]) -> Iterator[Table]:
    times = Table("", "sequential: first", "later", "sites: first", "later", "on the wire", "messages", "more")
    for row in rows:
        seconds = (row.sequential_first, row.sequential, row.first, row.later)
        sizes = (f"{row.wire / 1e6:.2f} MB", f"{row.messages / 1e6:.2f} MB", f"{row.wire / row.messages - 1:+.1%}")
        times.add_row(row.what, *(f"{each:.2f} s" for each in seconds), *sizes)
    yield times
    parts = Table("a later round", *(row.what for row in rows))
    for what in rows[0].parts:
        parts.add_row(what, *(f"{row.parts[what]:.2f} s" for row in rows))
    for who in rows[0].work:
        parts.add_row(f"processor time: {who}", *(f"{row.work[who]:.2f} s" for row in rows))
    for who in rows[0].memory:
        parts.add_row(f"memory: {who}", *(f"{row.memory[who]:.0f} MB" for row in rows))
    yield parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ROWS], default=[*ROWS])
    options = parser.parse_args()
    rows = [row_in_own_process(ROWS[name]) for name in options.only]
    console = Console(width=160)
    for table in shown(rows):
        console.print(table)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
