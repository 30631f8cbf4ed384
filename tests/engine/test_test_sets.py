"""Which examples a client's own test set has, and all test sets as one."""

from dataclasses import replace

import pytest
import torch

from doubles import tiny
from protofed import Data, Task
from protofed.engine.test_sets import _sizes, client_tests, label_counts, local_rows, pooled_tests
from protofed.errors import BadInput


def drawn(task: Task) -> Data:
    """The test set that is drawn for client a."""
    pooled = pooled_tests(task.tests)
    assert pooled is not None
    return pooled.rows(local_rows(task, "a", 0))


def test_the_pool_is_one_set_after_another_and_copies_nothing_that_lies_in_one_store() -> None:
    store = Data.of(torch.arange(12.0)[:, None], torch.arange(12) % 3)
    tests = {"b": store.rows(torch.tensor([3, 1])), "a": store.rows(torch.tensor([1, 11, 0]))}
    pooled = pooled_tests(tests)
    assert pooled is not None
    assert pooled.inputs(pooled.index).flatten().tolist() == [3, 1, 1, 11, 0]
    assert pooled.x.data_ptr() == store.x.data_ptr()
    views = Data(store.x[4:8], store.y[4:8], torch.tensor([2])), Data(store.x[8:], store.y[8:], torch.tensor([0, 3]))
    of_views = pooled_tests(dict(zip("ab", views, strict=True)))
    assert of_views is not None
    assert of_views.inputs(of_views.index).flatten().tolist() == [6, 8, 11]
    assert of_views.labels.tolist() == [0, 2, 2]
    apart = pooled_tests(
        {"a": store.rows(torch.tensor([5])), "b": Data.of(torch.full((1, 1), 50.0), torch.tensor([2]))}
    )
    assert apart is not None
    assert apart.inputs(apart.index).flatten().tolist() == [5, 50]
    assert pooled_tests({}) is None


def labelled(labels: list[int], first: float = 0.0) -> Data:
    """Examples whose input is their number, so that they can be told apart."""
    return Data.of(first + torch.arange(len(labels)).float()[:, None], torch.tensor(labels))


def task_of(train: list[int], tests: dict[str, list[int]], domain: str | None, classes: int = 3) -> Task:
    sets = {name: labelled(labels, first=1000.0 * k) for k, (name, labels) in enumerate(tests.items())}
    homes = {} if domain is None else {"a": domain}
    return Task({"a": labelled(train)}, sets, classes, lambda client: {}, homes)


def test_the_sizes_follow_the_clients_proportions() -> None:
    # 2 : 1 : 0 with 10 and 10 available: round(s·2/3) ≤ 10 and round(s/3) ≤ 10. s = 15 gives 10 and 5; s = 16 would
    # give round(10.67) = 11 of class 0.
    task = task_of([0, 0, 1], {"t": [0, 1, 2] * 10}, "t")
    assert label_counts(drawn(task), 3).tolist() == [10, 5, 0]


def test_the_scarcest_class_limits_the_others() -> None:
    # 1 : 1 with 100 and 3 available: s/2 rounds half up, so s = 6 gives 3 and 3, and s = 7 would give 4 and 4.
    task = task_of([0, 1], {"t": [0] * 100 + [1] * 3}, "t")
    assert label_counts(drawn(task), 3).tolist() == [3, 3, 0]


def slow_sizes(wanted: list[int], available: list[int]) -> list[int]:
    """The largest s that is allowed, found by trying all; exact, since 2n(s p_c + 1/2) is a whole number."""
    pairs = [(w if a else 0, a) for w, a in zip(wanted, available, strict=True)]
    n = sum(w for w, _ in pairs)
    best: list[int] = []
    for s in range(2 * n * (max(available) + 1) + 2):
        sizes = [(2 * s * w + n) // (2 * n) for w, _ in pairs]
        if all(size <= a for size, (_, a) in zip(sizes, pairs, strict=True)):
            best = sizes
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_sizes_are_the_largest_that_there_are_examples_for(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    classes = int(torch.randint(1, 6, (1,), generator=draws))
    wanted = torch.randint(0, 12, (classes,), generator=draws).tolist()
    available = torch.randint(0, 9, (classes,), generator=draws).tolist()
    if not any(w and a for w, a in zip(wanted, available, strict=True)):
        wanted[0] = available[0] = 3
    found = _sizes(wanted, available)
    assert found == slow_sizes(wanted, available)
    assert sum(found) >= 1


def test_a_class_without_test_examples_is_left_out_and_the_others_keep_their_proportions() -> None:
    # Class 1 is not in the test set. Of classes 0 and 2, in proportion 1 : 3, s = 12 gives 3 and 9; s = 13 would give
    # round(9.75) = 10 of class 2, of which there are 9.
    task = task_of([0, 1, 1, 1, 1, 2, 2, 2], {"t": [0] * 9 + [2] * 9}, "t")
    assert label_counts(drawn(task), 3).tolist() == [3, 0, 9]


def test_a_client_whose_classes_are_not_tested_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="client 'a'"):
        local_rows(task_of([0, 0], {"t": [1, 2]}, "t"), "a", 0)


def test_a_test_set_that_the_task_names_for_a_client_is_used_as_it_is() -> None:
    task = task_of([0, 1, 1], {"t": [0, 1, 2] * 8}, "t")
    own = labelled([2, 2, 0])
    found = client_tests(replace(task, local_tests={"a": own}), "a", 0, pooled_tests(task.tests))
    assert found.own is own
    assert found.own_rows is None
    with pytest.raises(BadInput, match="local_tests names 'b', who is not a client"):
        replace(task, local_tests={"b": own})
    with pytest.raises(BadInput, match="test set of 'a' has labels 0 to 3"):
        replace(task, local_tests={"a": labelled([0, 3])})


def test_the_examples_come_from_the_clients_domain_and_none_comes_twice() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, "t")
    data = drawn(task)
    numbers = data.x[data.index].flatten().tolist()
    assert min(numbers) >= 1000.0, "there are examples of the other domain"
    assert len(set(numbers)) == len(numbers) == 12  # s = 12 gives 4 and 8; s = 13 would give round(8.67) = 9
    truth = {1000.0 + k: k % 3 for k in range(24)}
    assert [truth[x] for x in numbers] == data.labels.tolist()


def test_without_a_domain_the_examples_come_from_all_test_sets() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, None)
    data = drawn(task)
    assert label_counts(data, 3).tolist() == [8, 16, 0]
    numbers = data.inputs(data.index).flatten()
    assert 0 < int((numbers < 1000).sum()) < len(data) == len(numbers.unique())


def test_a_draw_depends_on_the_seed_and_the_clients_name_alone() -> None:
    train, tests = [0] * 9 + [1], {"t": [0, 1] * 50}  # s = 56 gives round(50.4) = 50 and round(5.6) = 6
    task = task_of(train, tests, "t")
    two = replace(task, clients={"b": task.clients["a"], **task.clients}, domain_of={"a": "t", "b": "t"})

    def rows(task: Task, client: str, seed: int) -> list[int]:
        return local_rows(task, client, seed).tolist()

    assert rows(task, "a", 3) == rows(two, "a", 3) == rows(task, "a", 3)
    assert rows(task, "a", 3) != rows(task, "a", 4)
    assert rows(two, "a", 3) != rows(two, "b", 3)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    local_rows(tiny(), "c00", 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_eligible_example_is_drawn_sometimes() -> None:
    task = task_of([0] * 9 + [1], {"t": [0, 1] * 20}, "t")
    seen = {i for seed in range(60) for i in local_rows(task, "a", seed).tolist()}
    assert seen == set(range(40))


def test_the_rows_of_a_set_that_is_itself_a_part_of_a_store_are_its_own() -> None:
    store = labelled([0, 1, 2] * 10)
    task = Task({"a": labelled([0, 1])}, {"t": store.rows(torch.arange(15, 30))}, 3, lambda client: {}, {"a": "t"})
    assert drawn(task).index.min() >= 15
