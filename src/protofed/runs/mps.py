"""NVIDIA's Multi-Process Service (MPS) for the processes of one comparison.

Without it processes take turns on a GPU. With it their kernels run at the same time. The service is a daemon of our
own, in a private folder, and ends with this process in any case (mps_daemon.py).
"""

import contextlib
import logging
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from protofed.runs import mps_daemon
from protofed.runs.mps_daemon import PROGRAM

log = logging.getLogger(__name__)

SWITCH = "PROTOFED_MPS"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
SYSTEM_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108
"""Where CUDA looks for a daemon unless it is told otherwise."""
START_SECONDS = mps_daemon.START_SECONDS + 10
END_SECONDS = mps_daemon.QUIT_SECONDS + 10
FIRST_CALL_SECONDS = 20.0
NOT_READY = 75
"""The exit code of FIRST_CALL while the service is still starting, which is CUDA's error 807."""
FIRST_CALL = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
print(f"CUDA error {error}")
sys.exit(75 if error == 807 else bool(error))
"""
"""Uses a GPU as a run will, in a process of its own."""


@contextlib.contextmanager
def shared(gpus: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What processes need in their environment to share GPUs through a daemon of our own; nothing if there is none.
    `gpus`: the environment by which the daemon sees the GPUs."""
    refusal = _refusal()
    if refusal:
        log.info("%s", refusal)
        yield {}
        return
    command = [sys.executable, "-I", mps_daemon.__file__]
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **gpus},
        start_new_session=True,  # Ctrl-C is for this process
    ) as daemon:
        assert daemon.stdin
        try:
            said = _line(daemon)
            ready = said.startswith("ready ")
            pipes = {PIPES: said.removeprefix("ready ")}
            failure = _failure({**gpus, **pipes}) if ready else said or "it did not answer"
            if failure:
                log.warning("processes take turns on the GPU: %s does not work here: %s", PROGRAM, failure)
            else:
                log.info("processes share the GPU through NVIDIA's Multi-Process Service")
            yield {} if failure else pipes
        finally:
            daemon.stdin.close()
            _end(daemon)


def _refusal() -> str:
    """Why no daemon of our own is started; nothing if one may be."""
    if os.environ.get(SWITCH, "on") == "off":
        return f"processes take turns on the GPU, as {SWITCH}=off says"
    if os.environ.get(PIPES):
        return f"processes use the Multi-Process Service that {PIPES} names"
    if (SYSTEM_PIPES / "control").exists():
        return f"processes use the Multi-Process Service of this machine, in {SYSTEM_PIPES}"
    if shutil.which(PROGRAM) is None:
        return f"processes take turns on the GPU: {PROGRAM}, which comes with NVIDIA's driver, is not here"
    return ""


def _line(daemon: "subprocess.Popen[str]") -> str:
    assert daemon.stdout
    readable, _, _ = select.select([daemon.stdout], [], [], START_SECONDS)
    return daemon.stdout.readline().strip() if readable else ""


def _failure(environment: Mapping[str, str]) -> str:
    """Why a first use of the GPU through the daemon fails; nothing if it works."""
    end = time.monotonic() + FIRST_CALL_SECONDS
    while True:
        try:
            tried = subprocess.run(  # noqa: S603
                [sys.executable, "-I", "-c", FIRST_CALL],
                capture_output=True,
                text=True,
                env={**os.environ, **environment},
                timeout=FIRST_CALL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"a first process waited for {FIRST_CALL_SECONDS:g} s"
        if tried.returncode == 0:
            return ""
        if tried.returncode != NOT_READY or time.monotonic() > end:
            said = tried.stdout.strip() or tried.stderr.strip()
            return said.rpartition("\n")[2] or f"a first process ended with exit code {tried.returncode}"
        time.sleep(0.5)


def _end(daemon: "subprocess.Popen[str]") -> None:
    assert daemon.stdout
    try:
        daemon.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("%s did not end within %d s", PROGRAM, END_SECONDS)
        daemon.kill()
    for line in daemon.stdout:
        log.warning("%s", line.strip())
