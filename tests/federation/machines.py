"""A federation of real processes on the loopback address, by the commands that people use. All of them end with this
process, also when it is killed."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from typer.testing import CliRunner

from clocks import PATIENCE
from protofed.cli.app import app

SOURCE = Path(__file__).parent.parent.parent / "src"
KILL_ME_WITH_MY_PARENT = 1  # PR_SET_PDEATHSIG
CLIENTS = {"A": ["pen-3"], "B": ["ink-1"], "C": ["print-2"]}
EXPERIMENT = """
[task]
name = "minidigits"
[method]
{method}
[training]
rounds = {rounds}
epochs = {epochs}
batch_size = 32
deadline = 120.0
on_divergence = "skip"
[evaluation]
every = {rounds}
{sections}
"""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(KILL_ME_WITH_MY_PARENT, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Machines:
    """A server and its sites."""

    def __init__(self, folder: Path, clients: Mapping[str, Sequence[str]] = CLIENTS) -> None:
        self.folder, self.clients = folder, clients
        self.federation, self.results = folder / "fed", folder / "results"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    def set_up(self, experiment: Path | None = None) -> "Machines":
        """With an experiment on own files, sites still have to say where these are, and to be enrolled."""
        words = ["--sites", ",".join(self.clients), "--address", f"127.0.0.1:{free_port()}"]
        words += ["--experiment", str(experiment)] if experiment else []
        self.done("federation", "init", self.federation, *words)
        for site, own in self.clients.items():
            kit = self.kit(site)
            kit.chmod(0o700)
            text = (kit / "site.toml").read_text()
            text = re.sub("^clients = .*", f"clients = {list(own)}".replace("'", '"'), text, flags=re.MULTILINE)
            (kit / "site.toml").write_text(text.replace("min_class_count = 5", "min_class_count = 1"))
            if experiment is None:
                self.done("site", "key", kit)
                self.enrol(site)
        return self

    def enrol(self, site: str) -> None:
        clients = ",".join(self.clients[site])
        self.done("federation", "enrol", self.federation, site, self.kit(site) / f"{site}.pub", "--clients", clients)

    def kit(self, site: str) -> Path:
        return self.federation / "kits" / site

    def experiment(self, method: str, rounds: int, epochs: int = 1, sections: str = "", **settings: str) -> Path:
        name = "-".join([method, *settings.values(), *re.findall(r"\[(\w+)\]", sections)])
        path = self.folder / f"{name}.toml"
        lines = [f'{key} = "{value}"' for key, value in {"name": method, **settings}.items()]
        path.write_text(EXPERIMENT.format(method="\n".join(lines), rounds=rounds, epochs=epochs, sections=sections))
        return path

    def done(self, *words: object, code: int = 0) -> str:
        """The output of a command that ends by itself. It is done in this process, which is quicker."""
        ended = CliRunner().invoke(app, [*map(str, words)])
        assert ended.exit_code == code, ended.output + repr(ended.exception)
        return ended.output

    def site(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(name, "site", "run", self.kit(name))

    def sites(self) -> None:
        for name in self.clients:
            self.site(name)

    def serve(self, experiment: Path, *words: object, folder: str = "run") -> subprocess.Popen[bytes]:
        options = ("--federation", self.federation, "--folder", self.results / folder, *words)
        return self._start("serve", "serve", experiment, *options)

    def flower_superlink(self) -> None:
        """A SuperLink that somebody else has started, as the how-to says, for several runs one after another."""
        own, port = self.federation / "server", free_port()
        certificates = ("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")
        self._popen(
            "superlink",
            [
                *(str(Path(sys.executable).parent / "flower-superlink"), "--host", "127.0.0.1", "--port", str(port)),
                *(word for name, file in certificates for word in (f"--ssl-{name}", str(own / file))),
                *("--isolation", "process", "--enable-supernode-auth", "--disable-runtime-dependency-installation"),
                *("--database", str(self.folder / "superlink.db")),
            ],
        )
        for path in (own / "server.toml", *self.federation.glob("kits/*/site.toml")):
            text = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", path.read_text())
            path.write_text(text.replace('superlink = ""', f'superlink = "127.0.0.1:{port}"'))

    def text(self, name: str) -> str:
        """What the processes of this name have said, all of them so far."""
        paths = sorted(self.folder.glob(f"{name}.*.out"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def wait_for(self, name: str, words: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not re.search(words, self.text(name)):
            process = self.running.get(name)
            is_over = process is not None and process.poll() is not None and not re.search(words, self.text(name))
            if is_over or time.monotonic() > end:
                raise AssertionError(f"{name} did not say {words!r}:\n{self.everything()}")
            time.sleep(0.05)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}:\n{self.everything()}"
            time.sleep(0.01)

    def wait_for_round(self, number: int) -> None:
        """Until the server has written down that so many rounds are done."""
        path = self.results / "run" / "rounds.jsonl"
        what = f"round {number} was not done"
        self.wait_until(lambda: path.exists() and f'"round": {number},' in path.read_text(), what)

    def ended(self, name: str, seconds: float = PATIENCE) -> int:
        try:
            return self.running[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.everything()) from None

    def superlink(self) -> int:
        """The number of the SuperLink's process."""
        (found,) = [pid for pid in self._children("serve") if b"superlink" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found

    def worker(self, site: str) -> int:
        """The number of the process that does a site's work."""
        (found,) = self._children(site)
        return found

    def _children(self, name: str) -> list[int]:
        parent = self.running[name].pid
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def everything(self) -> str:
        texts = [f"== {name}\n{self.text(name)}" for name in self.running]
        log = self.federation / "server" / "superlink.log"
        return "\n".join([*texts, f"== superlink\n{log.read_text(errors='replace')[-4000:] if log.exists() else ''}"])

    @property
    def _env(self) -> dict[str, str]:
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        return {**keep, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    @staticmethod
    def _command(words: Sequence[object]) -> list[str]:
        return [sys.executable, "-m", "protofed.cli.start", *map(str, words)]

    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        return self._popen(name, self._command(words))

    def _popen(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._starts += 1
        with open(self.folder / f"{name}.{self._starts:03d}.out", "wb") as output:
            self.running[name] = subprocess.Popen(
                command,
                env={**self._env, "FLWR_HOME": str(self.folder / "flower"), "FLWR_TELEMETRY_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_end_with_parent,
            )
        return self.running[name]
