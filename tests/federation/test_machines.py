"""Runs over a real SuperLink with TLS and node keys, and what is done to them."""

import hashlib
import json
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """The server's state and every site's are those of the runtime `sequential`, bit for bit, but for rounds in which
    clients were left out, for a reason that is written down."""
    config = configuration.load(experiment)
    own = sorted(client for clients in machines.clients.values() for client in clients)
    absent = left_out(machines)

    class Scripted(Federation):
        def sampled(self, round: int, *_: Any) -> tuple[str, ...]:
            return tuple(client for client in own if (round, client) not in absent)

    task = own_part(config.task.build(), own)  # type: ignore[union-attr]
    near = Scripted(config.method, task, config.training, secure=config.secure.made())
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


def left_out(machines: Machines) -> dict[tuple[int, str], str]:
    """Who failed, in which round from 0 on, and why."""
    lines = map(json.loads, (machines.results / "run" / "rounds.jsonl").read_text().splitlines())
    return {(line["round"] - 1, client): why for line in lines for client, why in line["failures"].items()}


MOMENTS = ("before", "during", "after")
COMES = "round 2, train.*came"


def ended_well(machines: Machines, experiment: Path) -> None:
    assert machines.ended("serve") == 0, machines.everything()
    assert_as_in_one_process(machines, experiment)


def begun(machines: Machines) -> Path:
    """A run whose steps take long enough to be interrupted, and whose clients keep something."""
    experiment = machines.experiment("scaffold", 3, epochs=20)
    machines.sites()
    machines.serve(experiment)
    return experiment


def wait_for_answer(machines: Machines, site: str) -> None:
    """Until the site has written the answer of round 2, while its process stands still and cannot send it."""
    state = machines.kit(site) / "state"
    # a site says that an order came before the process that works has it: stopped in between, it would never answer
    machines.wait_until(lambda: '"round": 1, ' in (state / "log.jsonl").read_text(), f"{site} was not asked")
    os.kill(machines.running[site].pid, signal.SIGSTOP)
    machines.wait_until(lambda: [*state.glob("runs/*/answers/00000002-*")], f"{site} has written no answer")


def wait_for_all_answers(machines: Machines) -> None:
    """Until all sites have sent their answers of round 2, while the server stands still and cannot take them."""
    for site in machines.clients:
        machines.wait_for(site, COMES)
    os.kill(machines.running["serve"].pid, signal.SIGSTOP)
    for site in machines.clients:
        machines.wait_for(site, "round 2, train.*bytes go")
    time.sleep(1.0)  # it is said before they have gone; if they have not, the moment is another one


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_s_worker_is_killed(machines: Machines, moment: str) -> None:
    experiment = begun(machines)
    if moment == "before":
        machines.wait_for("B", "round 1, train.*bytes go")
    else:
        machines.wait_for("B", COMES)
    if moment == "after":
        wait_for_answer(machines, "B")
    os.kill(machines.worker("B"), signal.SIGKILL)
    os.kill(machines.running["B"].pid, signal.SIGCONT)
    ended_well(machines, experiment)
    assert all(why.startswith("CLIENT_ERROR: the process that did") for why in left_out(machines).values())


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_is_killed_and_comes_back(machines: Machines, moment: str) -> None:
    experiment = begun(machines)
    if moment == "before":
        machines.wait_for_round(1)
        os.kill(machines.running["B"].pid, signal.SIGSTOP)
        machines.wait_for("A", COMES)
    else:
        machines.wait_for("B", COMES)
    if moment == "after":
        wait_for_answer(machines, "B")
    machines.kill("B")
    machines.site("B")
    ended_well(machines, experiment)
    assert left_out(machines) == {}


def test_a_site_stands_still_until_it_counts_as_gone_and_comes_back(machines: Machines) -> None:
    """As a machine does that sleeps. The SuperLink has signed it off by then."""
    experiment = begun(machines)
    machines.wait_for("B", COMES)
    processes = (machines.running["B"].pid, machines.worker("B"))
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)

    def is_away() -> bool:
        found = json.loads(machines.done("federation", "status", machines.federation, "--json"))
        return bool(found["sites"]["B"]["state"] == "away")

    machines.wait_until(is_away, "B does not count as gone")
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    ended_well(machines, experiment)
    assert all(why.startswith("LATE") for why in left_out(machines).values())  # of a busy machine: the deadline passed


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_server_is_killed_and_resumed(machines: Machines, moment: str) -> None:
    experiment = begun(machines)
    if moment == "before":
        machines.wait_for_round(1)
    else:
        machines.wait_for("B", COMES)
    if moment == "after":
        wait_for_all_answers(machines)
    machines.kill("serve")
    machines.serve(experiment, "--resume")
    ended_well(machines, experiment)
    assert left_out(machines) == {}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_superlink_is_killed(machines: Machines, moment: str) -> None:
    experiment = begun(machines)
    if moment == "before":
        machines.wait_for_round(1)
    else:
        machines.wait_for("B", COMES)
    if moment == "after":
        wait_for_all_answers(machines)
    os.kill(machines.superlink(), signal.SIGKILL)
    os.kill(machines.running["serve"].pid, signal.SIGCONT)
    ended_well(machines, experiment)
    assert "started anew" in machines.text("serve")
    assert left_out(machines) == {}


# ---- secure sums


@pytest.mark.parametrize("moment", ["sum.advertise, .*bytes go", "sum.share, .*bytes go", "sum.add.train, .*came"])
def test_a_site_is_killed_between_two_exchanges_of_a_secure_sum(machines: Machines, moment: str) -> None:
    """What it must know is in its vault. No sum can do without one of three sites."""
    experiment = machines.experiment("scaffold", 3, epochs=20, sections="[secure]\nsums = true")
    machines.sites()
    machines.serve(experiment)
    machines.wait_for("B", f"round 2, {moment}")
    machines.kill("B")
    machines.site("B")
    ended_well(machines, experiment)
    assert left_out(machines) == {}
    lines = map(json.loads, (machines.results / "run" / "rounds.jsonl").read_text().splitlines())
    assert all(not line["abandoned"] for line in lines)


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
