"""Runs over a real SuperLink with TLS and node keys, and what is done to them."""

import hashlib
import os
import shutil
import signal
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from federation.machines import Machines
from federation.own_folders import CLIENTS, given_to_sites, write_images, write_tables
from protofed import wire
from protofed.engine.federation import Federation
from protofed.federation.site_data import own_part
from protofed.runs.config import config as configuration
from protofed.runs.config.recording import task_table
from protofed.runs.config.toml import section_text
from protofed.testing.federations import after, memories

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """A federation whose sites are enrolled; commands are slow, so it is made once."""
    return Machines(tmp_path_factory.mktemp("enrolled")).set_up()


@pytest.fixture
def machines(enrolled: Machines, tmp_path: Path) -> Iterator[Machines]:
    """The same federation with nothing done yet."""
    for left in (*enrolled.folder.glob("*.out"), *enrolled.federation.glob("server/superlink.*")):
        left.unlink()
    for name in enrolled.clients:
        state = enrolled.kit(name) / "state"
        if state.exists():
            state.rename(tmp_path / name)
    if enrolled.results.exists():
        enrolled.results.rename(tmp_path / "results")
    enrolled.running.clear()
    yield enrolled
    enrolled.close()


def assert_as_in_one_process(machines: Machines, experiment: Path) -> None:
    """The server's state and every site's are those of the runtime `sequential`, bit for bit."""
    config = configuration.load(experiment)
    own = [client for clients in machines.clients.values() for client in clients]
    near = Federation(config.method, own_part(config.task.build(), own), config.training)  # type: ignore[union-attr]
    assert_same_states(machines, near)


def assert_same_states(machines: Machines, near: Federation) -> None:
    state = near.finish(after(near.training.rounds, near))
    (last,) = sorted((machines.results / "run" / "checkpoint").glob("0*"))[-1:]
    there = wire.decode_arrays((last / "server.safetensors").read_bytes())
    here = wire.to_arrays(state.server)
    assert there.keys() == here.keys()
    assert all(there[name].equal(here[name]) for name in here), machines.everything()
    kept = memories(state)
    assert kept.keys() == {client for clients in machines.clients.values() for client in clients}
    for site, clients in machines.clients.items():
        for client in clients:
            digest = hashlib.sha256(wire.encode(kept[client])).hexdigest()
            versions = list((machines.kit(site) / "state" / "runs").glob(f"*/clients/{client}-*/*-{digest}"))
            assert versions, f"{site} has no state of {client} like that of one process"


@pytest.mark.parametrize("method", ["fedavg", "fpl"])
def test_a_run_is_that_of_one_process(machines: Machines, method: str) -> None:
    experiment = machines.experiment(method, 3)
    machines.sites()
    machines.serve(experiment)
    assert machines.ended("serve") == 0, machines.everything()
    assert_as_in_one_process(machines, experiment)


def test_a_site_is_killed_and_comes_back(machines: Machines) -> None:
    experiment = machines.experiment("fedavg", 4)
    machines.sites()
    machines.serve(experiment)
    machines.wait_for("B", "round 2, train.*came")
    machines.kill("B")
    machines.site("B")
    assert machines.ended("serve") == 0, machines.everything()
    assert_as_in_one_process(machines, experiment)


def test_the_server_is_killed_and_resumed(machines: Machines) -> None:
    experiment = machines.experiment("fpl", 4)
    machines.sites()
    machines.serve(experiment)
    machines.wait_for("B", "round 3, train.*came")
    machines.kill("serve")
    machines.serve(experiment, "--resume")
    assert machines.ended("serve") == 0, machines.everything()
    assert_as_in_one_process(machines, experiment)


def test_the_superlink_is_killed(machines: Machines) -> None:
    experiment = machines.experiment("fedavg", 4)
    machines.sites()
    machines.serve(experiment)
    machines.wait_for("B", "round 2, train.*came")
    os.kill(machines.superlink(), signal.SIGKILL)
    assert machines.ended("serve") == 0, machines.everything()
    assert "started anew" in machines.text("serve")
    assert_as_in_one_process(machines, experiment)


# ---- own files


OWN_FILES = {"tables": write_tables, "images": write_images}


@pytest.mark.parametrize(("kind", "method"), [("tables", "fpl"), ("images", "fedbn")])
def test_a_run_with_own_files_in_three_users_folders_is_that_of_one_process(
    kind: str, method: str, tmp_path: Path
) -> None:
    """Nothing but the experiment and the kits passes by hand; each site's files are in its own folder alone."""
    settings = OWN_FILES[kind](tmp_path / "all")
    folders = given_to_sites(tmp_path / "users", settings)
    machines = Machines(tmp_path, CLIENTS)
    experiment = machines.experiment(method, 3)
    own_files = section_text("task", task_table(replace(settings, path="")))
    experiment.write_text(experiment.read_text().replace('[task]\nname = "minidigits"\n', own_files))
    machines.set_up(experiment)
    for site, folder in folders.items():
        path = machines.kit(site) / "site.toml"
        text = path.read_text().replace('path = ""', f'path = "{folder}"').replace("min_rows = 5", "min_rows = 3")
        path.write_text(text)
        machines.done("site", "key", machines.kit(site))
        machines.enrol(site)
        assert "BAD" not in machines.done("site", "check", machines.kit(site), "--offline")
    try:
        machines.sites()
        machines.serve(experiment)
        assert machines.ended("serve") == 0, machines.everything()
        shutil.rmtree(tmp_path / "users")  # sites have what they need in memory, and the server never had it
        table = tomllib.loads(experiment.read_text())
        table["task"]["path"] = settings.path
        assert_same_states(machines, configuration.parse(table, "here").experiment().federation)
        for site in CLIENTS:
            assert '"event": "survey"' in (machines.kit(site) / "state/log.jsonl").read_text()
    finally:
        machines.close()


def test_nothing_is_left_when_the_server_is_killed(machines: Machines) -> None:
    machines.serve(machines.experiment("fedavg", 2))
    machines.wait_for("serve", "waiting for")
    superlink = machines.superlink()
    machines.kill("serve")
    for _ in range(100):
        if not Path(f"/proc/{superlink}").exists():
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("the SuperLink is still there")
