"""What all tests share; more helpers are in `doubles.py`."""

import os
from pathlib import Path

import pytest
import torch

from doubles import tiny
from protofed.api.task import Task

torch.set_num_threads(1)  # the tests' tensors are small, and sums must not depend on the machine


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
