"""Runs are tracked by a real MLflow server on this machine.

The server may be installed elsewhere, since it pins many packages: PROTOFED_MLFLOW names its command, such as
/path/to/venv/bin/mlflow. The tests themselves need `pip install 'protofed[mlflow]'`.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import protofed
from models.handing import vectors
from protofed.runs.observers import LoggingSettings

COMMAND = os.environ.get("PROTOFED_MLFLOW") or shutil.which("mlflow")
SUPERVISOR = """
import os, signal, subprocess, sys, time
parent, server = os.getppid(), subprocess.Popen(sys.argv[1:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
try:
    while os.getppid() == parent and server.poll() is None:
        time.sleep(0.2)
finally:
    os.killpg(server.pid, signal.SIGKILL)
"""
"""Ends the server and its workers when the tests end, however they do."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if COMMAND is None:
        pytest.skip("no MLflow server: set PROTOFED_MLFLOW to its command")
    home = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{home / 'runs.db'}", "--artifacts-destination", str(home / "files")]
    started = subprocess.Popen([sys.executable, "-c", SUPERVISOR, COMMAND, *words], cwd=home)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):  # noqa: S310, it is our own
                    break
            except OSError:
                assert started.poll() is None, "the server ended"
                time.sleep(0.2)
        yield address
    finally:
        started.terminate()
        started.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_has_the_numbers_of_every_round(server: str, tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    result = protofed.run(
        "fedavg", vectors(), rounds=3, epochs=1, runtime="sequential", logging=LoggingSettings(mlflow=server)
    )
    client = tracking.MlflowClient(server)
    [run] = client.search_runs([client.get_experiment_by_name("protofed").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "fedavg"
    found = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "domains/low/accuracy")}
    assert found == {r.round: pytest.approx(r.domains["low"]["accuracy"]) for r in result.rounds}
    assert [*sorted(found)] == [1, 2, 3]
