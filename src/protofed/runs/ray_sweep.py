"""Many runs at once on a Ray cluster: one task for each run, and all results in one folder on this machine.

A task works in a temporary folder of its node and gives the run folder back as bytes, so nodes need not share a disk. A
run whose worker or node died begins again from what is in the folder here. This is the only module that imports ray.
"""

import contextlib
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from protofed.errors import BadInput, RunFailed
from protofed.runs.config.config import Config
from protofed.runs.remote import Job, job, versions
from protofed.runs.run_process import folder_of, reason
from protofed.runs.store.parcel import Parcel, checked, packed, unpack
from protofed.runs.sweep import Outcome, outcome, rounds_saved, unfinished

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
RETRIES = 3
"""How often a run begins again after its worker or node died."""
CONNECT_SECONDS = 10.0
JOINS = 3
"""How often a cluster is asked that breaks the connection off."""
ADDRESS = re.compile(r"auto|(ray://)?(?P<host>[^\s/:]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
HEAD = {"node:__internal_head__": 0.001}
"""The board lives where the cluster itself lives: no other node's death can take it."""


@dataclass(frozen=True)
class RaySweep:
    """Does what `sweep` does, on a Ray cluster."""

    address: str
    """`auto`, `host:port` or `ray://host:port`."""
    cpus: float | None = None
    """Cores declared for a run; None: as many as its settings use."""
    gpus: float | None = None
    """GPUs declared for a run on a GPU, also a part of one; None: one."""

    def __call__(
        self,
        configs: Sequence[Config],
        out: Path,
        *,
        workers: int | None = None,
        progress: Callable[[Sequence[int]], None] = lambda rounds: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """The outcome of every run; see `sweep`. `workers`: at most so many runs at the same time."""
        waiting, failures = unfinished(configs, out), dict[str, str]()
        needs = {identity: self._declared(config) for identity, config in waiting.items()}
        if self.gpus is not None and waiting and not any(gpus for _, gpus in needs.values()):
            raise BadInput(
                "--ray-gpus: no run uses a GPU. This machine has none, so the runtime `auto` is one for the CPU: "
                "add --set runtime.name=cohort --set runtime.device=cuda"
            )
        for config in waiting.values():
            job(config, {})
        if waiting:
            with _connected(self.address):
                _refuse_too_much(needs)
                tasks = _Tasks(waiting, needs, out, workers or len(waiting))
                failures = tasks.go(lambda rounds: progress(_rounds(configs, out, rounds)), should_stop)
        progress(_rounds(configs, out, {}))
        return [outcome(config, out, failures.get(config.identity)) for config in configs]

    def _declared(self, config: Config) -> tuple[float, float]:
        """The cores and GPUs of a run."""
        runtime = config.runtime
        is_on_gpu = runtime.numerics()["device"] == "cuda"
        if is_on_gpu and runtime.device not in ("", "cuda"):
            raise BadInput(f"runtime.device = {runtime.device!r}: Ray chooses the GPU of each run, so write cuda")
        if runtime.name == "workers" and not runtime.workers and self.cpus is None:
            raise BadInput("runtime.workers = 0 takes all cores of a node: give a number, or say --ray-cpus")
        gpus = 1.0 if self.gpus is None else self.gpus
        return self.cpus or max(runtime.threads, runtime.workers), gpus if is_on_gpu else 0.0


@dataclass
class _Tasks:
    """The tasks of a sweep."""

    configs: dict[str, Config]
    needs: dict[str, tuple[float, float]]
    out: Path
    at_once: int
    failures: dict[str, str] = field(default_factory=dict)
    deaths: dict[str, int] = field(default_factory=dict)
    running: dict[Any, str] = field(default_factory=dict)
    """The identity of each task's run, by the reference to its answer."""

    def go(self, progress: Callable[[dict[str, int]], None], should_stop: Callable[[], bool]) -> dict[str, str]:
        """Why runs failed, by identity."""
        board, task = _board(), _task()
        queue, is_stopping = list(self.configs), False
        while queue or self.running:
            while queue and len(self.running) < self.at_once:
                self._submit(queue.pop(0), board, task)
            ended, _ = ray.wait(list(self.running), timeout=POLL_SECONDS) if self.running else ([], [])
            for answer in ended:
                identity = self.running.pop(answer)
                if self._has_died(identity, answer) and not is_stopping:
                    queue.append(identity)
            rounds = ray.get(board.all.remote())
            progress(rounds)
            if should_stop() and not is_stopping:
                queue, is_stopping = [], True
                ray.get(board.stop.remote())
                for answer, identity in self.running.items():
                    if identity not in rounds:  # it waits for a place, and need not begin
                        ray.cancel(answer)
        return self.failures

    def _submit(self, identity: str, board: Any, task: Any) -> None:
        config, (cpus, gpus) = self.configs[identity], self.needs[identity]
        folder, files = folder_of(config, self.out), Parcel()
        try:
            if folder.path.exists():
                with folder.locked():
                    files = packed(folder)
        except (BadInput, RunFailed) as error:
            self.failures[identity] = reason(error)
            return
        work = task.options(num_cpus=cpus, num_gpus=gpus)
        self.running[work.remote(versions(), board, dict(job(config, files)), gpus)] = identity

    def _has_died(self, identity: str, answer: Any) -> bool:
        """Whether the run has to begin again. Otherwise its folder is written here, or its failure is noted."""
        try:
            refusal, failure, files = ray.get(answer)
        except TaskCancelledError:
            return False
        except RayTaskError as error:
            self.failures[identity] = f"a node could not begin the run: {error.cause or error}"
            return False
        except RayError as error:
            deaths = self.deaths[identity] = self.deaths.get(identity, 0) + 1
            what = f"its worker or its node died ({type(error).__name__})"
            if deaths > RETRIES:
                self.failures[identity] = f"{what}, for the {deaths}th time; perhaps the node has too little memory"
                return False
            log.warning("run %s: %s; it begins again, time %d of %d", identity, what, deaths, RETRIES)
            return True
        if refusal:
            raise BadInput(str(refusal))
        try:
            self._keep(identity, files)
        except (BadInput, RunFailed) as error:
            failure = failure or reason(error)
        if failure:
            self.failures[identity] = str(failure)
        return False

    def _keep(self, identity: str, files: Any) -> None:
        """Writes a run folder that has come back, once it is found to be one."""
        config, files = self.configs[identity], checked(files, f"run {identity}")
        folder = folder_of(config, self.out)
        if files and files.get("config.toml") != config.toml().encode():
            raise RunFailed(f"run {identity}: the folder of another run came back; nothing was written")
        if files:
            with folder.locked():
                if not folder.is_done:  # another command may have ended the run meanwhile
                    unpack(files, folder)


def _board() -> Any:
    """An actor on which runs write how many rounds they have done, and read whether to stop. Its class is local so
    that it travels as it is: the head of the cluster need not import torch for it."""

    class Board:
        def __init__(self) -> None:
            self.rounds: dict[str, int] = {}
            self.is_stopping = False

        def write(self, identity: str, rounds: int) -> bool:
            self.rounds[identity] = rounds
            return self.is_stopping

        def all(self) -> dict[str, int]:
            return self.rounds

        def stop(self) -> None:
            self.is_stopping = True

    return ray.remote(Board).options(num_cpus=0, resources=HEAD).remote()


def _task() -> Any:
    """The task of a run. It is local so that it travels as it is: it can say that a node has another protofed."""

    def run(wanted: dict[str, str], board: Any, job: Job, gpus: float) -> tuple[str, str, Parcel]:
        """Why the node is refused, why the run failed, and the run's folder; each may be empty."""
        import os
        import socket
        from importlib import metadata

        def version(name: str) -> str:
            try:
                return metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                return "no version"

        def should_stop(rounds: int) -> bool:
            try:
                # Not by ray.get: Ray would give the run's cores to another task while this one waits.
                return bool(board.write.remote(job["identity"], rounds).future().result(timeout=60))
            except (RayError, TimeoutError):
                return False

        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no version of Ray may show it a GPU that was not declared
        found = {name: version(name) for name in wanted}
        if found == wanted | {"protofed": found["protofed"]}:
            from protofed.version import __version__

            found["protofed"] = __version__
        other = [f"{name} {found[name]} there, {wanted[name]} here" for name in wanted if found[name] != wanted[name]]
        if other:
            return f"the node {socket.gethostname()} has other versions: {'; '.join(other)}; install the same", "", {}
        if should_stop(0):
            return "", "", {}
        from protofed.runs.remote import run_here

        return "", *run_here(job, should_stop)

    return ray.remote(max_calls=1, max_retries=0)(run)


def _rounds(configs: Sequence[Config], out: Path, running: dict[str, int]) -> list[int]:
    """The rounds that are done in each run, here and on the nodes."""
    return [max(rounds_saved(folder_of(config, out)), running.get(config.identity, 0)) for config in configs]


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Ends all tasks of this process when it leaves."""
    _refuse_unreachable(address)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        _join(address)
    except Exception as error:
        raise BadInput(f"--ray {address}: cannot join the cluster: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where Ray prints what happens to nodes; results are for stdout
            yield
    except RayError as error:
        raise RunFailed(f"the Ray cluster at {address} was lost ({error}); run the same command again") from error
    finally:
        ray.shutdown()


def _join(address: str, times: int = JOINS) -> None:
    """Ray's server for ray:// addresses now and then fails to start a process, and succeeds the next time."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionAbortedError:
        if times == 1:
            raise
        _join(address, times - 1)


def _refuse_unreachable(address: str) -> None:
    """Ray itself waits long for a host that does not answer, and may then end the process."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise BadInput(f"--ray {address!r}: write auto, HOST:PORT or ray://HOST:PORT")
    if match["host"]:
        try:
            socket.create_connection((match["host"].strip("[]"), int(match["port"])), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise BadInput(f"--ray {address}: no Ray cluster answers there ({error}); see `ray status`") from error


def _refuse_too_much(needs: dict[str, tuple[float, float]]) -> None:
    """A task that fits on no node would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for cpus, gpus in dict.fromkeys(needs.values()):
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            has = ", ".join(f"{node.get('CPU', 0):g} and {node.get('GPU', 0):g}" for node in nodes)
            raise BadInput(
                f"no node of the cluster has {cpus:g} cores and {gpus:g} GPUs, as a run declares (nodes have {has}): "
                "change runtime.threads, --ray-cpus or --ray-gpus, or add a node"
            )
