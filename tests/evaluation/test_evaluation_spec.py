"""What an evaluation looks like is known before it takes place, on whatever device the runtime works."""

import torch

from doubles import tiny
from protofed.api.evaluation import evaluation_spec
from protofed.engine.test_sets import client_tests, pooled_tests
from protofed.metrics.registry import of_group


def test_names_are_known_where_new_tensors_are_made_on_another_device() -> None:
    task = tiny()
    tests = client_tests(task, next(iter(task.clients)), 0, pooled_tests(task.tests))
    with torch.device("meta"):
        spec = evaluation_spec(tests, task.num_classes)
    assert set(spec.scores) == {metric.name for metric in of_group("personal")}
