"""What all tests share; more helpers are in `doubles.py`."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from doubles import memories, tiny
from methods import sampling
from protofed.api.task import Task
from protofed.engine.state import State
from protofed.methods import METHODS

State.memories = property(memories)  # type: ignore[attr-defined]  # what clients keep, for tests to look at
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # how long an example takes depends on what else the machine does
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and then runs kernels on the CPU
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the package anew
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background job; what tests start would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tests' tensors are small, and sums must not depend on the machine

TESTS = Path(__file__).parent
QUICK_METHODS = ("fedavg", "scaffold", "fpl", "fedpc", "pfedcspc")
"""One of each kind: weights, a state at both ends, prototypes, clusters, retraining at the server."""
QUICK_PATHS = (
    "api",
    "data",
    "engine",
    "evaluation",
    "golden",
    "methods/test_conformance.py",
    *(f"methods/test_{name}.py" for name in QUICK_METHODS),
    "nn",
    "optim",
    "prototypes",
    "runs/test_config.py",
    "runtimes/test_sequential.py",
    "transforms",
    "test_layers.py",
    "test_seeds.py",
    "test_tree.py",
    "test_wire.py",
)
"""What `pytest --quick` runs, below tests/."""
NOT_QUICK = (
    "test_conformance",
    "test_it_conforms",
    "test_settings_that_take_another_path_conform",
    "test_a_setting_makes_a_difference",
    "test_the_checks_catch_what_is_broken_and_nothing_else",
    "test_the_order_of_arrival_changes_no_bit",
)
"""Tests there that take long: mostly other settings of the five methods."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="small unit tests, and five methods instead of all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("quick") or collection_path.is_dir():
        return None
    return not any(collection_path.is_relative_to(TESTS / path) for path in QUICK_PATHS) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        sampling.mark(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        left_out = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_quick(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return True
    arguments = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.originalname not in NOT_QUICK and not any(map(_is_other_method, arguments))


def _is_other_method(argument: object) -> bool:
    """Whether a test's argument names a method that is left out, such as "moon", or other settings: "fpl, global"."""
    return isinstance(argument, str) and argument.partition(",")[0] in METHODS and argument not in QUICK_METHODS


@pytest.fixture
def real_data() -> Path:
    """The folder of the publishers' files; tests that need it are skipped without."""
    folder = os.environ.get("PROTOFED_DATA")
    if not folder:
        pytest.skip("needs the published files: set PROTOFED_DATA to their folder")
    return Path(folder)


@pytest.fixture
def tiny_task() -> Task:
    """Four clients, vectors of 12 numbers, 5 classes, a network with BatchNorm; always the same."""
    return tiny()
