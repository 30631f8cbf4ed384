"""Clients' own models on everyone's test set and on their own; which examples the latter has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from protofed.evaluation.local_tests import _sizes, label_counts, local_test
from protofed.evaluation.personal import Judge, Judged, means
from torch import Tensor

import protofed
from doubles import tiny
from protofed import METHODS, Data, Task
from protofed.api.contexts import Reply
from protofed.api.requests import Request
from protofed.engine.federation import Federation, Training
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.evaluate import evaluate
from protofed.metrics.formulas import local_index, macro_f1, owned_accuracy, proportional_accuracy, top1
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tree import Params, Tree
from run_doubles import small_experiment, small_task


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
    return Judging(federation, judge.judged(), trained)


# ---- confusion matrices


def test_the_models_that_clients_just_trained_are_counted_on_the_union_and_at_home(judging: Judging) -> None:
    federation, tests = judging.federation, judging.federation.task.tests
    assert tuple(judging.judged) == federation.ids
    for client, found in judging.judged.items():
        params = judging.trained[client]
        assert torch.equal(found.everywhere, sum(counted(federation, params, client, d) for d in tests.values()))
        (home,) = local_test(federation.task, client, federation.training.seed)
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
    assert not judge.judged()
    watched.advance(state)
    assert judge.judged().keys() == set(federation.ids)
    assert not judge.judged(), "clients are judged once"


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


def without_domains(task: Task) -> Task:
    return replace(task, domain_of={})


def with_own_sets(task: Task) -> Task:
    """Of another store and of a test set; the third client's is drawn."""
    a, b, *_ = task.clients
    near = next(iter(task.tests.values()))
    own = Data.of(near.x.clone(), near.y.clone()).rows(torch.arange(4, 11))
    return replace(task, local_tests={a: own, b: near.rows(torch.tensor([7, 2, 3]))})


def with_other_labels(task: Task) -> Task:
    a, near = next(iter(task.clients)), next(iter(task.tests.values()))
    return replace(task, local_tests={a: Data(near.x, near.y.flip(0), near.index)})


def with_training_examples(task: Task) -> Task:
    return replace(task, local_tests={client: data.rows(torch.arange(3)) for client, data in task.clients.items()})


def with_examples_twice(task: Task) -> Task:
    tests = {name: data.rows(torch.arange(len(data)).repeat(2)) for name, data in task.tests.items()}
    a, near = next(iter(task.clients)), next(iter(task.tests.values()))
    return replace(task, tests=tests, local_tests={a: near.rows(torch.tensor([7, 2, 3]))})


def with_sets_of_one_store(task: Task) -> Task:
    """Test sets that overlap, and one that has some of the examples of a client's own, but not all."""
    store = next(iter(task.tests.values()))
    a, b, *_ = task.clients
    tests = {"some": store.rows(torch.arange(20)), "others": store.rows(torch.arange(8, 30))}
    own = {a: store.rows(torch.arange(3, 24)), b: store.rows(torch.tensor([9, 12]))}
    return replace(task, tests=tests, domain_of={}, local_tests=own)


def with_a_set_within_another(task: Task) -> Task:
    store = next(iter(task.tests.values()))
    return replace(task, tests={"all": store, "hard": store.rows(torch.arange(5, 25))}, domain_of={})


def with_one_set_under_two_names(task: Task) -> Task:
    store = next(iter(task.tests.values()))
    return replace(task, tests={"a": store, "b": store}, domain_of={})


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
@pytest.mark.parametrize("held", [0, 2**29], ids=["one at a time", "together"])
@pytest.mark.parametrize(
    "change",
    [
        without_domains,
        with_own_sets,
        with_other_labels,
        with_training_examples,
        with_examples_twice,
        with_sets_of_one_store,
        with_a_set_within_another,
        with_one_set_under_two_names,
    ],
)
def test_whatever_a_local_test_set_is_made_of_it_is_counted_example_by_example(
    change: Callable[[Task], Task], held: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.evaluation.personal.HELD", held)
    before = small_experiment(method).federation
    federation = replace(before, task=change(before.task))
    judge, trained = Judge(federation), dict[str, Params]()

    def witness(client: str, message: Tree, reply: Reply) -> None:
        judge(client, message, reply)
        trained[client] = federation.method.trained_weights(reply.upload, reply.memory)

    watched = replace(federation, on_trained=witness)
    state = watched.start()
    for _ in range(2):
        state = watched.advance(state)
        for client, found in judge.judged().items():
            sets = federation.task.tests.values()
            home = local_test(federation.task, client, federation.training.seed)
            for matrix, looked_at in ((found.everywhere, sets), (found.at_home, home)):
                expected = sum(counted(federation, trained[client], client, data) for data in looked_at)
                assert torch.equal(matrix, expected)


def test_clients_are_judged_together_unless_their_weights_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Watched(Sequential):
        def answers(self, requests: Sequence[Request]) -> list:
            asked.append(len(requests))
            return super().answers(requests)

    def judged() -> list[int]:
        asked.clear()
        federation = replace(small_experiment().federation, runtime=Watched())
        judge = Judge(federation)
        watched = replace(federation, on_trained=judge)
        watched.advance(watched.start())
        assert len(judge.judged()) == 3
        return asked

    assert judged() == [3 * 2]  # three clients on two test sets
    size = sum(leaf.nbytes for leaf in small_experiment().federation.start().server.params.values())
    # once for each of two test sets: two clients' weights, and the server's, which all received
    monkeypatch.setattr("protofed.evaluation.personal.HELD", 2 * 3 * size - 1)
    assert judged() == [2 * 2, 2]
    monkeypatch.setattr("protofed.evaluation.personal.HELD", 2 * 3 * size)
    assert judged() == [3 * 2]


@pytest.mark.parametrize("name", METHODS)
def test_no_method_changes_what_waits_and_workers_see_what_one_process_sees(name: str) -> None:
    task, method = small_task(), METHODS[name]()
    found = []
    for runtime in (Sequential(), Workers(2)):
        federation = Federation(method, task, Training(rounds=2, epochs=1, batch_size=8), runtime)
        judge = Judge(federation)
        watched = replace(federation, on_trained=judge)
        state = watched.start()
        for _ in range(2):
            state = watched.advance(state)
        state = watched.finish(state)
        found.append((judge.judged(), evaluate(federation, state)))
        runtime.close()
    (mine, scores), (theirs, others) = found
    assert scores == others
    assert mine.keys() == theirs.keys() == set(task.clients)
    for client, one in mine.items():
        assert torch.equal(one.everywhere, theirs[client].everywhere)
        assert torch.equal(one.at_home, theirs[client].at_home)


class InPlace(protofed.FedAvg):
    """Adds all weights up in those of the first client."""

    def aggregate(self, server: Any, uploads: Any, central: Any) -> Any:
        (_, first), *others = uploads
        for _, upload in others:
            for name, leaf in first.params.items():
                leaf.add_(upload.params[name])
        return replace(server, params=first.params)


def test_weights_that_were_changed_before_they_are_judged_are_refused() -> None:
    federation = Federation(InPlace(), small_task(), Training(rounds=1, epochs=1, batch_size=8))
    judge = Judge(federation)
    watched = replace(federation, on_trained=judge)
    watched.advance(watched.start())
    with pytest.raises(RunFailed, match="what client c0 received, sent or keeps was changed in place"):
        judge.judged()


class Flat(protofed.FedAvg):
    def confusion(self, *given: Any) -> Tensor:
        return super().confusion(*given)[0]


def test_counts_of_another_shape_are_refused() -> None:
    federation = Federation(Flat(), small_task(), Training(rounds=1, epochs=1, batch_size=8))
    with pytest.raises(RunFailed, match=r"Flat.confusion gave numbers of shape \(3, 3\), not \(1 \+ parts, classes"):
        evaluate(federation, federation.start())


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
    assert label_counts(*local_test(task, "a", 0), 3).tolist() == [10, 5, 0]


def test_the_scarcest_class_limits_the_others() -> None:
    # 1 : 1 with 100 and 3 available: s/2 rounds half up, so s = 6 gives 3 and 3, and s = 7 would give 4 and 4.
    task = task_of([0, 1], {"t": [0] * 100 + [1] * 3}, "t")
    assert label_counts(*local_test(task, "a", 0), 3).tolist() == [3, 3, 0]


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
    assert label_counts(*local_test(task, "a", 0), 3).tolist() == [3, 0, 9]


def test_a_client_whose_classes_are_not_tested_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="client 'a'"):
        local_test(task_of([0, 0], {"t": [1, 2]}, "t"), "a", 0)


def test_a_test_set_that_the_task_names_for_a_client_is_used_as_it_is() -> None:
    task = task_of([0, 1, 1], {"t": [0, 1, 2] * 8}, "t")
    own = labelled([2, 2, 0])
    (found,) = local_test(replace(task, local_tests={"a": own}), "a", 0)
    assert found is own
    with pytest.raises(BadInput, match="local_tests names 'b', who is not a client"):
        replace(task, local_tests={"b": own})
    with pytest.raises(BadInput, match="test set of 'a' has labels 0 to 3"):
        replace(task, local_tests={"a": labelled([0, 3])})


def test_the_examples_come_from_the_clients_domain_and_none_comes_twice() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, "t")
    (data,) = local_test(task, "a", 0)
    numbers = data.x[data.index].flatten().tolist()
    assert min(numbers) >= 1000.0, "there are examples of the other domain"
    assert len(set(numbers)) == len(numbers) == 12  # s = 12 gives 4 and 8; s = 13 would give round(8.67) = 9
    truth = {1000.0 + k: k % 3 for k in range(24)}
    assert [truth[x] for x in numbers] == data.labels.tolist()


def test_without_a_domain_the_examples_come_from_all_test_sets() -> None:
    task = task_of([0, 1, 1], {"s": [0, 1, 2] * 8, "t": [0, 1, 2] * 8}, None)
    first, second = local_test(task, "a", 0)
    assert (label_counts(first, 3) + label_counts(second, 3)).tolist() == [8, 16, 0]
    assert first.x is task.tests["s"].x
    assert second.x is task.tests["t"].x
    assert len(set(first.index.tolist())) == len(first) > 0
    assert len(set(second.index.tolist())) == len(second) > 0


def test_a_draw_depends_on_the_seed_and_the_clients_name_alone() -> None:
    train, tests = [0] * 9 + [1], {"t": [0, 1] * 50}  # s = 56 gives round(50.4) = 50 and round(5.6) = 6
    task = task_of(train, tests, "t")
    two = replace(task, clients={"b": task.clients["a"], **task.clients}, domain_of={"a": "t", "b": "t"})

    def rows(task: Task, client: str, seed: int) -> list[int]:
        (data,) = local_test(task, client, seed)
        return data.index.tolist()

    assert rows(task, "a", 3) == rows(two, "a", 3) == rows(task, "a", 3)
    assert rows(task, "a", 3) != rows(task, "a", 4)
    assert rows(two, "a", 3) != rows(two, "b", 3)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    local_test(tiny(), "c00", 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_eligible_example_is_drawn_sometimes() -> None:
    task = task_of([0] * 9 + [1], {"t": [0, 1] * 20}, "t")
    seen = {i for seed in range(60) for data in local_test(task, "a", seed) for i in data.index.tolist()}
    assert seen == set(range(40))


def test_the_rows_of_a_set_that_is_itself_a_part_of_a_store_are_its_own() -> None:
    store = labelled([0, 1, 2] * 10)
    task = Task({"a": labelled([0, 1])}, {"t": store.rows(torch.arange(15, 30))}, 3, lambda client: {}, {"a": "t"})
    (data,) = local_test(task, "a", 0)
    assert data.index.min() >= 15
