"""Every kind of method over a real SuperLink: three sites with four clients each, started by the written commands. The
server's state, the clients' states at their sites and the report are those of `protofed run`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from clocks import PATIENCE
from federation.machines import Machines
from protofed import wire
from protofed.runs.loading import load
from protofed.runs.results import Result
from protofed.testing.federations import memories

pytestmark = pytest.mark.slow

CLIENTS = {
    "A": ["pen-0", "pen-1", "pen-2", "pen-3"],
    "B": ["ink-0", "ink-1", "street-0", "street-1"],
    "C": ["street-2", "print-0", "print-1", "print-2"],
}
SUMS = {"sections": "[secure]\nsums = true"}
RUNS: list[tuple[str, dict[str, str]]] = [
    ("fedavg", {}),
    ("fpl", {}),
    ("fedseproto", {"shares": "weights"}),
    ("fedseproto", {"shares": "prototypes"}),
    ("fedpc", {}),
    ("pfedcspc", {}),
    ("fedrep", {}),
    ("scaffold", {}),
    ("fedavg", SUMS),
    ("fpl_sums", SUMS),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """One SuperLink and three sites, which take part in one run after another."""
    found = Machines(tmp_path_factory.mktemp("methods"), CLIENTS)
    try:
        found.set_up()
        found.flower_superlink()
        found.sites()
        yield found
    finally:
        found.close()


def reported(text: str) -> Any:
    """What --json prints, without what differs between any two runs of one experiment."""
    found = json.loads(text)
    for key in ("folder", "environment", "settings"):
        del found[key]
    for each in found["rounds"]:
        del each["seconds"]
    return found


NAMES = ["-".join([method, *(["sums"] if settings is SUMS else settings.values())]) for method, settings in RUNS]


@pytest.mark.parametrize(("method", "settings"), RUNS, ids=NAMES)
def test_a_run_over_a_superlink_is_that_of_one_process(
    machines: Machines, method: str, settings: dict[str, str], tmp_path: Path
) -> None:
    experiment = machines.experiment(method, 3, **settings)  # type: ignore[arg-type]
    longer = ("--set", "training.deadline=900.0") if settings is SUMS else ()  # a sum is five exchanges
    machines.serve(experiment, "--json", *longer, folder=experiment.stem)
    assert machines.ended("serve", 2 * PATIENCE) == 0, machines.everything()

    options = ("--set", "runtime.name=sequential", "--folder", tmp_path / "run")
    machines.done("run", experiment, *options)
    near = load(tmp_path / "run")
    assert isinstance(near, Result)

    far = machines.results / experiment.stem
    here, there = (wire.decode_arrays(last_state(folder)) for folder in (tmp_path / "run", far))
    assert there.keys() == here.keys()
    assert not [name for name in here if not there[name].equal(here[name])]

    kept, own = memories(near.state), {client: site for site, clients in CLIENTS.items() for client in clients}
    assert kept.keys() == own.keys()
    for client, state in kept.items():
        digest = hashlib.sha256(wire.encode(state)).hexdigest()
        run = method.replace("_", "-")
        versions = machines.kit(own[client]).glob(f"state/runs/{run}-*/clients/{client}-*/*-{digest}")
        assert [*versions], f"{own[client]} has no state of {client} like that of one process"

    shown = [machines.done("show", folder, "--json") for folder in (far, tmp_path / "run")]
    assert reported(shown[0]) == reported(shown[1])
    assert all(each["failures"] == {} for each in reported(shown[0])["rounds"])


def last_state(folder: Path) -> bytes:
    return sorted(folder.glob("checkpoint/0*/server.safetensors"))[-1].read_bytes()
