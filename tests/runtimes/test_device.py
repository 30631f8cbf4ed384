"""Tensors are made where a runtime wants them, draws are the same everywhere, and nothing of it stays behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import tiny
from protofed.runtimes.device import Residence, _SeededDraws, on, unplaced, working

META = torch.device("meta")  # a device that every machine has


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_new_tensors_and_draws_are_made_on_the_device() -> None:
    with on(META):
        assert torch.zeros(2).device == META
        assert torch.randperm(4, generator=seeded()).device == META
        assert torch.rand(2, generator=seeded()).device == META
        with torch.device("cpu"):
            assert torch.equal(torch.rand(2, generator=seeded()), drawn), "an inner device goes first"
        with unplaced():
            assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros(2).device == META, "the device is back"
    assert torch.zeros(2).device.type == "cpu"


drawn = torch.rand(2, generator=seeded())


def test_a_draw_from_a_tensor_is_where_the_tensor_is() -> None:
    """Also where code on the CPU works inside a runtime of another device, as k-means does."""
    with on(META), torch.device("cpu"):
        weights = torch.tensor([0.1, 0.2, 0.7])
        found = torch.multinomial(weights, 2, generator=seeded())
    assert torch.equal(found, torch.multinomial(weights, 2, generator=seeded()))


def test_what_is_drawn_does_not_depend_on_the_device() -> None:
    weights = torch.tensor([0.1, 0.2, 0.7])
    with _SeededDraws():
        found = torch.multinomial(weights, 2, generator=seeded()), torch.randint(9, (4,), generator=seeded())
    plain = torch.multinomial(weights, 2, generator=seeded()), torch.randint(9, (4,), generator=seeded())
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("fill", [Tensor.normal_, nn.init.xavier_uniform_, nn.init.normal_, Tensor.random_])
def test_draws_in_place_arrive(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cpu", Tensor.clone)  # as of a tensor on a GPU
    expected, given = torch.zeros(2, 3), nn.Parameter(torch.zeros(2, 3))
    fill(expected, generator=seeded())
    with _SeededDraws(), torch.no_grad():
        made = fill(given, generator=seeded())
    assert made is given
    assert torch.equal(given, expected)
    assert expected.count_nonzero() > 0


def test_devices_come_back_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), on(META), unplaced():
        raise ZeroDivisionError
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.parametrize(("precision", "is_rounded"), [("float32", False), ("tf32", True), ("bf16", False)])
def test_products_are_rounded_in_tf32_only(precision: Any, is_rounded: bool) -> None:
    """With bf16 the networks work in it, and what they give is a loss's, which is float32."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    with working(torch.device("cuda"), precision, deterministic=True):
        assert [flag.allow_tf32 for flag in flags] == [is_rounded, is_rounded]
    assert [flag.allow_tf32 for flag in flags] == before


def test_working_on_the_cpu_changes_no_setting() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with working(torch.device("cpu"), "tf32", deterministic=True):
        assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before


def test_a_task_is_placed_once_and_its_examples_are_views_of_one_store() -> None:
    task, residence = tiny(3), Residence(torch.device("cpu"))
    placed = residence.placed(task)
    assert residence.placed(task) is placed
    assert residence.placed(placed) is placed
    sets = [*placed.clients.values(), *placed.tests.values(), placed.public]
    originals = [*task.clients.values(), *task.tests.values(), task.public]
    stores = {id(residence.store_of(data)) for data in sets if data}
    assert len(stores) == 1
    for data, original in zip(sets, originals, strict=True):
        assert data is not None
        assert original is not None
        assert torch.equal(data.x, original.x)
        assert torch.equal(data.labels, original.labels)
    assert residence.store_of(task.clients["c00"]) is None


def test_clients_that_share_a_store_still_do() -> None:
    task = tiny(2)
    whole = task.clients["c00"]
    first, second = whole.rows(torch.arange(2)), whole.rows(torch.arange(2, len(whole)))
    placed = Residence(torch.device("cpu")).placed(type(task)({"a": first, "b": second}, {}, 5, task.model))
    assert placed.clients["a"].x is placed.clients["b"].x
