"""Nothing mixes tensors of the runtime's device with those of the CPU: protected runs and all methods on a pretended
device, which refuses what a GPU would. Its operations are the CPU's: the reference gives there what it gives here."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

import protofed
from doubles import tiny
from elsewhere import THERE, OnTwoDevices, pretended
from protofed import METHODS
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.device import on, unplaced
from protofed.runtimes.sequential import Sequential
from runtimes.test_cohort import after, difference
from runtimes.test_protected_runs import CASES, ended


def on_runtimes(names: Iterable[str], in_cohorts: Collection[str]) -> list[Any]:
    """All by the reference, and by the runtime for GPUs; of the latter only some are quick."""
    return [
        *(pytest.param(name, Sequential, id=f"{name}-sequential") for name in names),
        *(
            pytest.param(name, STACKED, id=f"{name}-cohort", marks=() if name in in_cohorts else pytest.mark.slow)
            for name in names
        ),
    ]


STACKED = partial(Cohort, executor="stacked")


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why work was not done together: it would hide a mistake. What is clipped and noised never is."""
    said = [record.getMessage() for record in caplog.records]
    return [text for text in said if "one by one" in text and "clipped and noised by the reference" not in text]


@pytest.mark.parametrize(("case", "runtime"), on_runtimes(CASES, ["masked, fpl, global"]))
def test_a_protected_run_works_elsewhere(
    case: str, runtime: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a vault's files, which are not what this is about
    with pretended():
        found = ended(CASES[case](runtime(str(THERE))))
    assert given_up(caplog) == []
    assert difference(found, ended(CASES[case](Sequential()))) <= (0 if runtime is Sequential else 1e-3)


@pytest.mark.parametrize(("name", "runtime"), on_runtimes(METHODS, ["fedavg", "fpl", "fedpc"]))
def test_every_method_works_elsewhere(name: str, runtime: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Three clients, two rounds of one batch each."""
    settings: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 16}
    with pretended():
        found = after(METHODS[name](), runtime(str(THERE)), tiny(3), **settings)
    assert found.failures == ()
    assert given_up(caplog) == []
    expected = after(METHODS[name](), Sequential(), tiny(3), **settings)
    assert difference(found, expected) <= (0 if runtime is Sequential else 1e-4)


CONSTANTS = """
import gc, importlib, sys, torch
with torch.device("meta"):
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ImportError as error:  # an extra that is not there
            assert error.name.partition(".")[0] != "protofed", error
print([leaf for leaf in gc.get_objects() if isinstance(leaf, torch.Tensor) and leaf.is_meta])
"""


def test_what_a_module_makes_does_not_depend_on_when_it_is_imported() -> None:
    """A module may be imported for the first time in the middle of a run, when new tensors are made on its device."""
    source = Path(protofed.__file__).parent
    paths = [path.relative_to(source.parent) for path in sorted(source.rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths if not path.name.startswith("__")]
    names = [name for name in names if not name.startswith(("protofed.testing", "protofed.federation.flower"))]
    made = subprocess.run([sys.executable, "-c", CONSTANTS, *names], capture_output=True, text=True, check=False)
    assert made.stdout.strip().splitlines()[-1:] == ["[]"], made.stdout + made.stderr


# ---- the pretended device itself


def refusals() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Of a tensor there, (3,), and one on the CPU, (3,): what a GPU refuses."""
    return {
        "sum": lambda there, here: there + here,
        "a scalar there": lambda there, here: there.sum() + here,
        "cat": lambda there, here: torch.cat([there, here]),
        "stacked scalars": lambda there, here: torch.stack([there.sum(), here.sum()]),
        "product": lambda there, here: there @ here,
        "choice": lambda there, here: torch.where(there > 0, there, here),
        "in place": lambda there, here: here.add_(there),
        "rows there of a tensor here": lambda there, here: here[there.long()],
        "other values": lambda there, here: there.index_put_((here.long(),), here),
        "comparison": torch.equal,
        "gradient": lambda there, here: torch.func.grad(lambda x: (x * here).sum())(there),
        "many at once": lambda there, here: torch.func.vmap(torch.add)(there, here),
        "numpy": lambda there, here: there.numpy(),
        "a draw": lambda there, here: torch.multinomial(there + 1, 1, generator=torch.Generator()),
    }


@pytest.mark.parametrize("what", refusals())
def test_what_a_gpu_refuses_is_refused(what: str) -> None:
    with pretended(), on(THERE), unplaced():
        there, here = torch.zeros(3, device=THERE), torch.zeros(3)
        with pytest.raises((OnTwoDevices, RuntimeError), match=r"on the same device|numpy|generator of the CPU"):
            refusals()[what](there, here)


def test_what_a_gpu_does_is_done() -> None:
    with pretended(), on(THERE):
        there, here = torch.arange(3.0), torch.ones(3, device="cpu")
        assert [leaf.device for leaf in (there, torch.tensor(1.0), here.to(there), torch.as_tensor(2))] == [THERE] * 4
        assert [leaf.device.index for leaf in (here, there.cpu(), there.to("cpu"), here.clone())] == [None] * 4
        assert (there + here.sum()).tolist() == [3.0, 4.0, 5.0]
        assert there[here.long()].tolist() == [1.0] * 3
        assert here.copy_(there) is here
        assert there[1:].copy_(here[:2])._base is there
        assert there.tolist() == [0.0, 0.0, 1.0]
        copied = there.cpu()
        there += 1
        assert copied.tolist() == [0.0, 0.0, 1.0], "a copy, though both are in the same memory"
        with unplaced():
            assert torch.zeros(1).device.index is None
    assert torch.tensor(1.0).device == torch.zeros(1).device == torch.device("cpu")
