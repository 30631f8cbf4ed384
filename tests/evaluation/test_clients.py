"""Clients' own models on everyone's test set and on their own; which examples the latter has."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from doubles import tiny
from experiment_doubles import small_experiment
from protofed import Data, Task
from protofed.data import Transform
from protofed.errors import BadInput
from protofed.evaluation.clients import Judge, Judged, _sizes, label_counts, local_test, means, union
from protofed.evaluation.metrics import local_index, macro_f1, owned_accuracy, proportional_accuracy, top1
from protofed.method import Reply
from protofed.runtimes.federation import Federation
from protofed.tree import Params, Tree


def counted(federation: Federation, params: Params, client: str, data: Data) -> Tensor:
    """The confusion matrix of a client's model, counted one example at a time."""
    model, task = federation.networks_of(client).model(params), federation.task
    matrix = torch.zeros(task.num_classes, task.num_classes, dtype=torch.float64)
    with torch.no_grad():
        for i in data.index.tolist():
            scores = federation.method.predict(model, task.transform.clean(data.x[i : i + 1]), None, None)
            matrix[data.y[i], scores.argmax()] += 1
    return matrix


@dataclass
class Judging:
    """A round in which every client was judged, and the weights that each had trained."""

    federation: Federation
    judged: dict[str, Judged]
    trained: dict[str, Params]


@pytest.fixture(params=["fedavg", "local", "fedrep", "fedpc", "pfedcspc", "fedseproto"])
def judging(request: pytest.FixtureRequest) -> Judging:
    federation = small_experiment(request.param).federation
    state = federation.advance(federation.start())
    judge, trained = Judge(federation), {}

    def witness(client: str, message: Tree, reply: Reply) -> None:
        judge(client, message, reply)
        kept = getattr(reply.memory, "params", {})
        sent = getattr(reply.upload, "base", reply.upload)  # pFedCSPC wraps the upload of its base
        trained[client] = {**getattr(sent, "params", {}), **kept}

    replace(federation, on_trained=witness).advance(state)
    return Judging(federation, judge.clients, trained)


# ---- confusion matrices


def test_the_models_that_clients_just_trained_are_counted_on_the_union_and_at_home(judging: Judging) -> None:
    federation, tests = judging.federation, judging.federation.task.tests
    assert tuple(judging.judged) == federation.ids
    for client, found in judging.judged.items():
        params = judging.trained[client]
        assert torch.equal(found.everywhere, sum(counted(federation, params, client, d) for d in tests.values()))
        home = local_test(federation.task, client, federation.training.seed)
        assert torch.equal(found.at_home, counted(federation, params, client, home))


def test_every_example_is_counted_once(judging: Judging) -> None:
    for client, found in judging.judged.items():
        assert found.everywhere.dtype == found.at_home.dtype == torch.float64
        assert found.everywhere.sum(-1).tolist() == [20.0, 20.0, 20.0]  # 10 of each class in each of two domains
        task = judging.federation.task
        assert torch.equal(found.counts, torch.bincount(task.clients[client].labels, minlength=3))


def test_only_rounds_in_which_clients_train_are_judged() -> None:
    """FedPC's setup asks the clients for prototypes, and trains nothing."""
    federation = small_experiment("fedpc").federation
    judge = Judge(federation)
    watched = replace(federation, on_trained=judge)
    state = watched.start()
    assert state.traffic
    assert not judge.clients
    watched.advance(state)
    assert judge.clients.keys() == set(federation.ids)


def test_the_scores_are_the_metrics_and_their_means_are_plain(judging: Judging) -> None:
    scores = {client: one.scores() for client, one in judging.judged.items()}
    for client, one in judging.judged.items():
        assert scores[client] == {
            "owned": owned_accuracy(one.everywhere, one.counts),
            "proportional": proportional_accuracy(one.everywhere, one.counts),
            "accuracy": top1(one.at_home),
            "macro_f1": macro_f1(one.at_home),
            "local_index": local_index(one.at_home),
        }
    a, b, c = scores.values()
    assert means(scores) == pytest.approx({name: (a[name] + b[name] + c[name]) / 3 for name in a})
    assert means({}) == {}


# ---- local test sets


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
    assert label_counts(local_test(task, "a", 0), 3).tolist() == [10, 5, 0]


def test_the_scarcest_class_limits_the_others() -> None:
    # 1 : 1 with 100 and 3 available: s/2 rounds half up, so s = 6 gives 3 and 3, and s = 7 would give 4 and 4.
    task = task_of([0, 1], {"t": [0] * 100 + [1] * 3}, "t")
    assert label_counts(local_test(task, "a", 0), 3).tolist() == [3, 3, 0]


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
    assert label_counts(local_test(task, "a", 0), 3).tolist() == [3, 0, 9]


def test_a_client_whose_classes_are_not_tested_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="client 'a'"):
        local_test(task_of([0, 0], {"t": [1, 2]}, "t"), "a", 0)


def test_a_test_set_that_the_task_names_for_a_client_is_used_as_it_is() -> None:
    task = task_of([0, 1, 1], {"t": [0, 1, 2] * 8}, "t")
    own = labelled([2, 2, 0])
    assert local_test(replace(task, local_tests={"a": own}), "a", 0) is own
    with pytest.raises(BadInput, match="local_tests names 'b', who is not a client"):
        replace(task, local_tests={"b": own})
    with pytest.raises(BadInput, match="test set of 'a' has labels 0 to 3"):
        replace(task, local_tests={"a": labelled([0, 3])})


def test_the_examples_come_from_the_clients_domain_and_none_comes_twice() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, "t")
    data = local_test(task, "a", 0)
    numbers = data.x[data.index].flatten().tolist()
    assert min(numbers) >= 1000.0, "there are examples of the other domain"
    assert len(set(numbers)) == len(numbers) == 12  # s = 12 gives 4 and 8; s = 13 would give round(8.67) = 9
    truth = {1000.0 + k: k % 3 for k in range(24)}
    assert [truth[x] for x in numbers] == data.labels.tolist()


def test_without_a_domain_the_examples_come_from_all_test_sets() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, None)
    data = local_test(task, "a", 0)
    numbers = data.x[data.index].flatten()
    assert label_counts(data, 3).tolist() == [8, 16, 0]
    assert (numbers < 1000).sum() > 0
    assert (numbers >= 1000).sum() > 0


def test_a_draw_depends_on_the_seed_and_the_clients_name_alone() -> None:
    train, tests = [0] * 9 + [1], {"t": [0, 1] * 50}  # s = 56 gives round(50.4) = 50 and round(5.6) = 6
    task = task_of(train, tests, "t")
    two = replace(task, clients={"b": task.clients["a"], **task.clients}, domain_of={"a": "t", "b": "t"})

    def rows(task: Task, client: str, seed: int) -> list[int]:
        return local_test(task, client, seed).index.tolist()

    assert rows(task, "a", 3) == rows(two, "a", 3) == rows(task, "a", 3)
    assert rows(task, "a", 3) != rows(task, "a", 4)
    assert rows(two, "a", 3) != rows(two, "b", 3)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    local_test(tiny(), "c00", 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_eligible_example_is_drawn_sometimes() -> None:
    task = task_of([0] * 9 + [1], {"t": [0, 1] * 20}, "t")
    seen = {i for seed in range(60) for i in local_test(task, "a", seed).index.tolist()}
    assert seen == set(range(40))


def test_the_rows_of_a_set_that_is_itself_a_part_of_a_store_are_its_own() -> None:
    store = labelled([0, 1, 2] * 10)
    task = Task({"a": labelled([0, 1])}, {"t": store.rows(torch.arange(15, 30))}, 3, lambda client: {}, {"a": "t"})
    for data in (local_test(task, "a", 0), union(task)):
        assert data.index.min() >= 15
    assert torch.equal(union(task).labels, store.y[15:])


# ---- the union


def test_the_union_has_every_test_example_once_in_the_order_of_names() -> None:
    task = task_of([0], {"t": [2, 1], "s": [0, 1, 1]}, None)  # t has numbers from 0, s from 1000
    found = union(task)
    assert found.x.flatten().tolist() == [1000.0, 1001.0, 1002.0, 0.0, 1.0]
    assert found.labels.tolist() == [0, 1, 1, 2, 1]


def test_a_union_of_bytes_and_floats_scales_the_bytes() -> None:
    images = {"b": torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), "f": torch.full((1, 1, 2, 2), 0.5)}
    sets = {name: Data.of(x, torch.tensor([0])) for name, x in images.items()}
    task = Task({"a": sets["b"]}, sets, 1, lambda client: {}, transform=Transform(mean=(0.5,), std=(0.5,)))
    clean = task.transform.clean(union(task).x)
    assert clean[:, 0, 0, 0].tolist() == [1.0, 0.0]  # (1 − 0.5) / 0.5 and (0.5 − 0.5) / 0.5
