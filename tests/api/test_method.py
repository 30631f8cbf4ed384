"""What a task refuses, and what a federation takes in its stride."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import protofed
from methods.sampling import some_methods
from protofed import METHODS, BadInput, Data, Task, Transform, wire
from run_doubles import small_task


def examples(count: int = 6, label: int | None = None) -> Data:
    y = torch.arange(count) % 3 if label is None else torch.full((count,), label)
    return Data.of(torch.randn(count, 6, generator=torch.Generator().manual_seed(count)), y)


def with_client(data: Data, **changes: Any) -> Task:
    task = small_task()
    return replace(task, clients={**task.clients, "new": data}, **changes)


def labelled(y: Tensor) -> Data:
    return Data(torch.randn(len(y), 6), y, torch.arange(len(y)))


def test_a_client_without_examples_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Row D4: it is never asked, and everything is as if it had not been named."""
    task = small_task()
    with_empty = replace(
        task,
        clients={"a": examples(0), **task.clients},
        domain_of={"a": "low", **task.domain_of},
        local_tests={"a": examples(2)},
    )
    assert "EMPTY_CLIENT: task custom: no examples, left out: a" in caplog.text
    assert (with_empty.clients, with_empty.domain_of, with_empty.local_tests) == (task.clients, task.domain_of, {})
    found, usual = (protofed.run("fpl", t, rounds=1, epochs=1, batch_size=8) for t in (with_empty, task))
    assert wire.encode(found.server) == wire.encode(usual.server)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(small_task(), clients={}), "task custom: there are no clients"),
        (lambda: replace(small_task(), clients={"a": examples(0), "b": examples(0)}), "no clients with examples"),
        (lambda: with_client(labelled(torch.tensor([0, 3]))), r"client 'new' has labels 0 to 3, outside 0\.\.2"),
        (lambda: with_client(labelled(torch.tensor([-1, 0]))), "client 'new' has labels -1 to 0"),
        (
            lambda: with_client(labelled(torch.tensor([0.0, 1.0]))),
            "labels of type torch.float32: make them",
        ),
        (lambda: with_client(Data(torch.zeros(3, 6), torch.tensor([0]), torch.tensor([0]))), "3 inputs and 1 labels"),
        (lambda: with_client(Data(torch.zeros(1, 6), torch.tensor([0]), torch.tensor([7]))), r"rows outside 0\.\.0"),
        (lambda: replace(small_task(), clients={"a/b": examples()}), "a client cannot be called 'a/b'"),
        (lambda: replace(small_task(), tests={"low": examples(0)}, domain_of={}), "test set 'low' has no examples"),
        (lambda: replace(small_task(), clients={1: examples()}), "a client cannot be called 1"),
        (lambda: replace(small_task(), domain_of={"ghost": "low"}), "domain_of names 'ghost', who is not a client"),
        (lambda: with_client(Data.of(torch.zeros(1, 6).double(), torch.tensor([0]))), "inputs of type torch.float64"),
        (lambda: replace(small_task(), domain_of={"c0": "moon"}), "is of domain 'moon', which has no test set"),
        (lambda: with_client(examples(), transform=Transform(flip=True)), "the transform is for images"),
        (lambda: Transform(mean=(0.5,)), "as many means as standard deviations"),
    ],
)
def test_a_task_that_cannot_work_is_refused_with_its_reason(build: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build()


def test_means_for_other_channels_are_refused() -> None:
    images = Data.of(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
    with pytest.raises(BadInput, match="3 means for images of 1 channels"):
        Task({"a": images}, {}, 3, lambda client: {}, transform=Transform((0.5,) * 3, (0.5,) * 3))


HARD = {"one example, with BatchNorm": examples(1), "one class": examples(7, label=2)}


@pytest.mark.parametrize("data", HARD.values(), ids=HARD)
@some_methods
def test_a_client_with_hardly_any_data_takes_part(name: str, data: Data) -> None:
    result = protofed.run(METHODS[name](), with_client(data), rounds=2, epochs=1, batch_size=8)
    assert all(not r.failures for r in result.rounds)
    assert all(torch.isfinite(leaf).all() for leaf in result.model_for("new").params.values())


@some_methods
def test_a_class_that_nobody_has_is_possible(name: str) -> None:
    task = small_task()
    without = {c: d.rows(torch.where(d.labels != 1)[0]) for c, d in task.clients.items()}
    result = protofed.run(METHODS[name](), replace(task, clients=without), rounds=2, epochs=1, batch_size=8)
    assert all(not r.failures for r in result.rounds)
    assert 0 <= result.metrics("last")["average"] <= 1
