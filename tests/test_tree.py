"""Records are immutable trees with names, and their mean does not depend on the order of arrival."""

from collections import OrderedDict, deque
from dataclasses import FrozenInstanceError, replace
from itertools import count
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from doubles import bits
from protofed import RunFailed, tree
from protofed.tree import Mean, Nothing, Params, Ragged, record


@record
class Inner:
    count: Tensor
    parts: list[Tensor]


@record
class Outer:
    params: Params
    inner: Inner
    pair: tuple[Tensor, Tensor]


def outer() -> Outer:
    a, b, c, d, e, f = (torch.tensor(float(i)) for i in range(6))
    return Outer({"net.0.weight": a, "net.0.bias": b}, Inner(c, [d]), (e, f))


PATHS = ["params/net.0.weight", "params/net.0.bias", "inner/count", "inner/parts/0", "pair/0", "pair/1"]


def test_a_record_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        outer().inner.count = torch.tensor(1.0)  # type: ignore[misc]


def test_leaves_are_named_by_their_path_in_the_order_of_the_tree() -> None:
    named = tree.named_leaves(outer())
    assert list(named) == PATHS
    assert [leaf.item() for leaf in named.values()] == [0, 1, 2, 3, 4, 5]


@record
class Rows:
    fixed: Tensor
    rows: Annotated[Tensor, Ragged(fill=-1)]
    more: Annotated[Tensor | None, Ragged(fill=0)] = None


class Side(NamedTuple):
    left: Tensor
    right: Rows


def test_ragged_fields_are_found_wherever_their_record_stands() -> None:
    def marked(leaf: Tensor, ragged: Ragged) -> Tensor:
        return leaf + 10 + ragged.fill

    rows = Rows(torch.tensor(0.0), torch.tensor([1.0]))
    mapped = tree.map_ragged(marked, ({"a": [rows]}, Side(torch.tensor(5.0), replace(rows, more=torch.tensor([2.0])))))
    assert {name: leaf.tolist() for name, leaf in tree.named_leaves(mapped).items()} == {
        "0/a/0/fixed": 0.0,
        "0/a/0/rows": [10.0],
        "1/left": 5.0,
        "1/right/fixed": 0.0,
        "1/right/rows": [10.0],
        "1/right/more": [12.0],
    }
    whole = outer()
    assert bits(tree.map_ragged(marked, whole)) == bits(whole)


def test_the_record_of_nothing_has_no_leaves() -> None:
    assert tree.named_leaves(Nothing()) == {}
    assert tree.leaves(Nothing()) == []


def test_a_slash_in_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a/b' cannot name a leaf"):
        tree.named_leaves({"a/b": torch.zeros(1)})


def test_two_leaves_of_one_name_are_refused() -> None:
    """Else one of them would silently not be sent."""
    with pytest.raises(ValueError, match="1"):
        tree.named_leaves({"1": torch.zeros(1), 1: torch.ones(1)})


def test_map_keeps_the_structure_and_reads_the_others_by_name() -> None:
    mapped = tree.map(lambda a, b: 10 * a + b, outer(), outer())
    assert isinstance(mapped, Outer)
    assert isinstance(mapped.inner, Inner)
    assert [leaf.item() for leaf in tree.leaves(mapped)] == [0, 11, 22, 33, 44, 55]
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    difference = tree.map(lambda x, y: x - y, {"a": a, "b": b}, {"b": b, "a": a})
    assert [leaf.item() for leaf in difference.values()] == [0, 0]


def test_with_leaves_undoes_leaves() -> None:
    assert bits(tree.with_leaves(outer(), tree.leaves(outer()))) == bits(outer())
    rebuilt = tree.with_leaves(outer(), [torch.tensor(-float(i)) for i in range(6)])
    assert rebuilt.params["net.0.bias"] == -1
    assert rebuilt.pair[1] == -5


def test_squared_distance_by_hand() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    b = {"b": torch.tensor([[5.0]]), "w": torch.tensor([0.0, 4.0]), "more": torch.tensor([9.0])}
    assert tree.squared_distance(a, b) == 1 + 4 + 4


def test_select_takes_the_named_entries() -> None:
    params = {name: torch.tensor(0) for name in "abc"}
    assert list(tree.select(params, ["c", "a"])) == ["c", "a"]


def twenty_clients() -> tuple[list[Params], list[int]]:
    random = np.random.default_rng(0)
    trees = [{"w": torch.from_numpy(random.standard_normal(1000).astype(np.float32))} for _ in range(20)]
    return trees, random.integers(1, 500, 20).tolist()


def mean_in(order: list[int], trees: list[Params], weights: list[int]) -> Params:
    mean = Mean()
    for i in order:
        mean.add(trees[i], weights[i])
    value: Params = mean.value()
    return value


def test_mean_is_the_weighted_mean_of_float64_in_the_dtype_of_the_leaves() -> None:
    trees, weights = twenty_clients()
    mean = mean_in(list(range(20)), trees, weights)["w"]
    reference = np.average([t["w"].numpy().astype(np.float64) for t in trees], axis=0, weights=weights)
    assert mean.dtype == torch.float32
    assert np.array_equal(mean.numpy(), reference.astype(np.float32))


def test_the_order_of_arrival_does_not_change_a_bit_of_the_mean() -> None:
    trees, weights = twenty_clients()
    random = np.random.default_rng(1)
    orders = [random.permutation(20).tolist() for _ in range(50)]
    assert len({mean_in(order, trees, weights)["w"].numpy().tobytes() for order in orders}) == 1
    naive = {sum(trees[i]["w"] * weights[i] for i in order).numpy().tobytes() for order in orders}
    assert len(naive) > 1  # the same sums in float32 do depend on it, so the test could fail


def test_the_order_of_the_names_does_not_change_the_mean() -> None:
    mean = Mean()
    mean.add({"a": torch.tensor(1.0), "b": torch.tensor(10.0)})
    mean.add({"b": torch.tensor(10.0), "a": torch.tensor(1.0)})
    assert mean.value() == {"a": torch.tensor(1.0), "b": torch.tensor(10.0)}


def test_mean_leaves_what_it_adds_alone() -> None:
    trees, weights = twenty_clients()
    before = bits(trees)
    mean_in(list(range(20)), trees, weights)
    assert bits(trees) == before


def test_trees_of_different_structure_have_no_mean() -> None:
    mean = Mean()
    mean.add({"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="different leaves"):
        mean.add({"a": torch.zeros(1), "b": torch.zeros(1)})


@pytest.mark.parametrize("weights", [[], [0.0], [0.0, 0.0]])
def test_a_mean_without_weight_is_an_error(weights: list[float]) -> None:
    mean = Mean()
    for weight in weights:
        mean.add({"a": torch.zeros(1)}, weight)
    with pytest.raises(RunFailed, match="there is no mean"):
        mean.value()


def test_norms_by_hand() -> None:
    leaves = [torch.tensor([3.0, 4.0]), torch.tensor([7]), torch.empty(0), torch.tensor([[-5.0]], dtype=torch.float64)]
    assert tree.norms(leaves).tolist() == [5.0, 5.0]
    assert tree.norms(leaves, torch.inf).tolist() == [4.0, 5.0]
    assert tree.norms([torch.tensor([1])]).tolist() == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("order", [2, torch.inf])
def test_a_norm_is_finite_only_if_all_its_numbers_are(bad: float, order: float) -> None:
    for place in range(40):  # short tensors and long ones are gone through in different ways
        leaf = torch.zeros(40)
        leaf[place] = bad
        assert not tree.norms([leaf, leaf[place:].clone()], order).isfinite().any()
    assert tree.norms([torch.tensor([3e38, -3e38])], torch.inf).isfinite().all()


def word(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


TREES = pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1),
        None,
        {"b": torch.zeros(1), "a": [torch.ones(1), ()], "": {"": torch.ones(2)}},
        OrderedDict(b=torch.zeros(1), a={3: torch.ones(1)}),
        Pair(torch.zeros(1), torch.ones(1)),
        [Nothing(), {"x": None}, (torch.zeros(1),), outer(), Inner(None, [torch.zeros(1)])],  # type: ignore[arg-type]
    ],
)


@TREES
def test_names_are_those_of_torch_in_the_order_of_the_leaves(value: Any) -> None:
    pairs, _ = pytree.tree_flatten_with_path(value)
    named = tree.named_leaves(value)
    assert list(named) == ["/".join(word(key) for key in path) for path, _ in pairs]
    assert all(mine is other for mine, (_, other) in zip(named.values(), pairs, strict=True))


@TREES
def test_trees_are_walked_as_torch_walks_them(value: Any) -> None:
    theirs, structure = pytree.tree_flatten(value)
    mine = tree.leaves(value)
    assert all(a is b for a, b in zip(mine, theirs, strict=True))
    new, numbers = list(range(len(mine))), count()
    for rebuilt in (tree.with_leaves(value, new), tree.map(lambda _: next(numbers), value)):
        assert pytree.tree_flatten(rebuilt) == (new, structure)


def test_leaves_must_be_as_many_as_the_tree_has() -> None:
    with pytest.raises(ValueError, match="5 leaves are too few"):
        tree.with_leaves(outer(), tree.leaves(outer())[:5])
    with pytest.raises(ValueError, match="7 leaves are 1 too many"):
        tree.with_leaves(outer(), [*tree.leaves(outer()), torch.zeros(1)])


def test_other_containers_are_refused() -> None:
    with pytest.raises(TypeError, match="deque cannot hold leaves: use records, dicts, lists and tuples"):
        tree.named_leaves({"a": deque([torch.zeros(1)])})


def test_leaves_are_those_that_map_goes_through_in_its_order() -> None:
    a, b, c, d, e, f = (torch.full((), float(i)) for i in range(6))
    ordered = OrderedDict(y=torch.nn.Parameter(d), x="word")
    odd: Any = {"z": [a, (b, 7)], "side": Side(c, Rows(e, f)), "ordered": ordered}
    seen: list[Any] = []
    tree.map(lambda leaf: seen.append(leaf) or leaf, odd)  # type: ignore[func-returns-value]
    assert len(seen) == 8
    assert all(x is y for x, y in zip(tree.leaves(odd), seen, strict=True))
