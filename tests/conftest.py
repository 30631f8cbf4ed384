"""What all tests share; more helpers are in `doubles.py`."""

import pytest
import torch

from doubles import tiny
from protofed.method import Task

torch.set_num_threads(1)  # the tests' tensors are small, and sums must not depend on the machine


@pytest.fixture
def tiny_task() -> Task:
    """Four clients, vectors of 12 numbers, 5 classes, a network with BatchNorm; always the same."""
    return tiny()
