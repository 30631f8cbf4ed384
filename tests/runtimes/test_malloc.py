"""A step's memory is the last step's, not new pages of the system's."""

import subprocess
import sys

import pytest

STEPS = 20
SCRIPT = f"""
import resource
import torch
from torch import nn
from protofed.data.batches import Data
from protofed.api.task import Task
from protofed.methods.fedavg import FedAvg
from protofed.optim.optimizers import Sgd
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.runtimes.sequential import Sequential

torch.set_num_threads(1)
data = Data.of(torch.rand({STEPS} * 32, 3, 28, 28), torch.arange({STEPS} * 32) % 10)
features = nn.Sequential(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
task = Task({{"a": data}}, {{}}, 10, lambda client: {{"features": features, "classifier": nn.Linear(9216, 10)}})
federation = Federation(FedAvg(), task, Training(rounds=3, batch_size=32, epochs=1, optimizer=Sgd()), Sequential())
state = federation.advance(federation.advance(federation.start()))
pages = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    federation.advance(state)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(pages))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is kept is a matter of glibc")
def test_steps_do_not_ask_the_system_for_the_same_memory_again() -> None:
    """A step needs tens of megabytes, which are thousands of pages. The fewest of three rounds: a system that is short
    of memory may take pages away in any of them."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * STEPS
