"""The area under the ROC curve: against scikit-learn, and whose model ranks which test set."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from protofed import METHODS, Data, Task
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.evaluation.evaluate import Judged, evaluate, own_scores
from protofed.metrics.formulas import area
from protofed.nn.networks import Model, Parts
from run_doubles import small_experiment

NEAR = 1e-3
"""Scores that are equal in one batch may differ in their last bits in another, which moves a few pairs of thousands."""


def test_the_area_is_the_share_of_pairs_in_the_right_order_with_ties_at_one_half() -> None:
    # Positives 1, 2 against negatives 0, 1, 3: of six pairs, (1, 0), (2, 0) and (2, 1) are right and (1, 1) is a tie.
    assert area(torch.tensor([1.0, 2, 0, 1, 3]), torch.tensor([1, 1, 0, 0, 0])) == 3.5 / 6


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40))
def test_the_area_is_that_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    scores, labels = torch.tensor([float(s) for s, _ in rows]), torch.tensor([y for _, y in rows])
    if len(labels.unique()) < 2:
        assert area(scores, labels) is None
    else:
        assert area(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_scores_that_are_infinite_count_and_those_that_are_not_numbers_have_no_area() -> None:
    labels = torch.tensor([1, 0, 0])
    assert area(torch.tensor([torch.inf, 1.0, torch.inf]), labels) == 0.75
    assert area(torch.tensor([0.0, torch.nan, 1.0]), labels) is None


def parts(client: str) -> Parts:
    return {"features": nn.Sequential(nn.Linear(4, 6), nn.ReLU()), "classifier": nn.Linear(6, 2)}


def two_class_task() -> Task:
    draw = torch.Generator().manual_seed(3)

    def examples(count: int, shift: float) -> Data:
        y = torch.arange(count) % 2
        data = Data.of(y[:, None] * torch.tensor([1.0, 0, 0, shift]) + torch.randn(count, 4, generator=draw), y)
        return data.rows(torch.arange(count - 1, 2, -1))  # not all of the store, and not in its order

    clients = {"a": examples(20, 2.0), "b": examples(24, -2.0), "c": examples(16, 2.0)}
    return Task(clients, {"up": examples(300, 2.0), "down": examples(40, -2.0)}, 2, parts, {"a": "up", "b": "down"})


def trained(method: str, **settings: str) -> tuple[Federation, State]:
    federation = Federation(METHODS[method](**settings), two_class_task(), Training(rounds=2, epochs=2, batch_size=8))
    state = federation.start()
    for _ in range(2):
        state = federation.advance(state)
    return federation, state


def expected(federation: Federation, state: State, client: str, domain: str) -> float:
    """By scikit-learn, from probabilities of a client's model one example at a time."""
    method, data = federation.method, federation.task.tests[domain]
    message = method.message_for(state.server, client)
    memory = federation.client_state(state, client, message)
    model = federation.networks_of(client).model(method.local_weights(message, memory))

    def chance(row: int) -> Tensor:
        return method.predict(model, data.x[row : row + 1], message, memory).double().softmax(-1)[0, 1]

    with torch.no_grad():
        found = roc_auc_score(data.labels, torch.stack([chance(row) for row in data.index.tolist()]))
    return float(found)


def areas_of(found: Judged) -> dict[str, float | None]:
    return {domain: scores.get("auc") for domain, scores in found.domains.items()}


def at_home(found: Judged) -> dict[str, float | None]:
    return {domain: scores.get("auc") for domain, scores in found.own_domains.items()}


def test_a_public_model_is_judged_as_it_is() -> None:
    federation, state = trained("fedavg")
    found = evaluate(federation, state)
    assert found.models == "public model"
    areas = {domain: pytest.approx(expected(federation, state, "a", domain), abs=NEAR) for domain in ("up", "down")}
    assert areas_of(found) == at_home(found) == areas
    assert found.domains["up"] != found.domains["down"]


@pytest.mark.parametrize(("method", "settings"), [("local", {}), ("fedproto", {"inference": "prototypes"})])
def test_own_models_are_judged_by_their_mean_and_each_at_home(method: str, settings: dict[str, str]) -> None:
    federation, state = trained(method, **settings)
    found = evaluate(federation, state)
    assert found.models == "own models"
    for domain in ("up", "down"):
        own = [expected(federation, state, client, domain) for client in "abc"]
        assert areas_of(found)[domain] == pytest.approx(fmean(own), abs=NEAR)
    assert at_home(found) == {
        "up": pytest.approx(expected(federation, state, "a", "up"), abs=NEAR),
        "down": pytest.approx(expected(federation, state, "b", "down"), abs=NEAR),
    }
    assert own_scores(federation, federation.evaluated(state)["c"])["down"]["auc"] == pytest.approx(
        expected(federation, state, "c", "down"), abs=NEAR
    )


def test_a_client_predicts_with_its_own_memory_and_the_public_model_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, has_memory in (("local", True), ("fedavg", False)):
        federation, state = trained(name)
        seen: list[bool] = []

        def predict(self: object, model: Model, x: Tensor, message: object, memory: object) -> Tensor:
            seen.append(memory is not None)  # noqa: B023, called below and never later
            return model.logits(x)

        monkeypatch.setattr(METHODS[name], "predict", predict)
        evaluate(federation, state)
        assert set(seen) == {has_memory}


def test_classes_without_prototypes_are_ties_and_not_an_error() -> None:
    method = METHODS["fedproto"](inference="prototypes")
    federation = Federation(method, two_class_task(), Training(rounds=1, epochs=1))
    assert areas_of(evaluate(federation, federation.start())) == {"up": 0.5, "down": 0.5}


def test_a_test_set_of_one_class_has_no_area() -> None:
    federation, state = trained("local")
    tests = dict(federation.task.tests)
    tests["up"] = tests["up"].rows(torch.nonzero(tests["up"].labels == 1).flatten())
    found = evaluate(replace(federation, task=replace(federation.task, tests=tests)), state)
    assert areas_of(found)["up"] is None
    assert at_home(found)["up"] is None
    assert areas_of(found)["down"] is not None


def test_more_than_two_classes_have_no_area() -> None:
    federation = small_experiment("fedavg").federation
    assert set(areas_of(evaluate(federation, federation.start())).values()) == {None}
