"""Global models that can be made of clients' own, each by its reading."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from doubles import memories, tiny
from protofed import METHODS, run
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.nn.networks import matching
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential

READINGS = {
    "fedper": {"mean_heads", "initial_head"},
    "fedrep": {"mean_heads", "initial_head"},
    "fedpc": {"mean_heads", "initial_head", "nearest_prototype"},
}


def federation(name: str, runtime: Any = None, **settings: Any) -> Federation:
    training = Training(**{"rounds": 2, "epochs": 2, "batch_size": 4, **settings})
    return Federation(METHODS[name](), tiny(), training, runtime or Sequential())


def after_two(of: Federation) -> State:
    return of.advance(of.advance(of.start()))


@pytest.mark.parametrize("name", READINGS)
def test_each_is_measured_under_its_name_and_only_if_asked_for(name: str) -> None:
    of = federation(name)
    state = after_two(of)
    found = evaluate(of, state, global_models=True)
    assert found.public.keys() == READINGS[name]
    without = evaluate(of, state)
    assert without.public == {}
    assert (without.domains, without.summary) == (found.domains, found.summary)


def test_the_mean_of_heads_by_hand() -> None:
    of = federation("fedper")
    state = after_two(of)
    heads = [matching(memory.params, ("classifier.*",)) for memory in memories(state).values()]
    mean = {name: torch.stack([head[name].double() for head in heads]).mean(0).float() for name in heads[0]}
    assert len(heads) == 4
    model = of.networks_of("c00").model({**state.server.params, **mean})
    right = total = 0
    for data in of.task.tests.values():
        with torch.no_grad():
            right += int((model.logits(data.x).argmax(-1) == data.y).sum())
        total += len(data.y)
    assert evaluate(of, state, global_models=True).public["mean_heads"] == right / total


def test_a_method_with_a_public_model_keeps_it() -> None:
    of = federation("fedavg")
    state = after_two(of)
    assert evaluate(of, state, global_models=True) == evaluate(of, state)


@pytest.mark.parametrize("settings", [{"norm_statistics": "local"}, {"optimizer_state": "kept"}], ids=str)
def test_what_a_setting_keeps_at_clients_is_not_a_head(settings: dict[str, Any]) -> None:
    of = federation("fedpc", **settings)
    assert evaluate(of, after_two(of), global_models=True).public.keys() == READINGS["fedpc"]


def test_the_cohort_finds_the_same() -> None:
    near, far = federation("fedpc"), federation("fedpc", Cohort("cpu"))
    expected = evaluate(near, after_two(near), global_models=True).public
    assert evaluate(far, after_two(far), global_models=True).public == pytest.approx(expected, abs=0.03)


def test_the_public_models_index_at_home_is_of_the_public_model_alone() -> None:
    """I_local of the global model without fine-tuning: what clients see of it on their own test sets."""
    task = replace(tiny(), domain_of={})
    training = Training(rounds=1, epochs=1, batch_size=4)
    of = Federation(METHODS["fedavg"](), task, training, Sequential())
    found = evaluate(of, of.advance(of.start()))
    assert found.public["local_index"] == fmean(scores["local_index"] for scores in found.at_home.values())
    tuned = replace(of, fine_tune=3, _networks={}, _tests={})
    after = evaluate(tuned, tuned.advance(tuned.start()))
    assert "local_index" not in after.public, "clients then use models of their own"
    assert after.summary["own_local_index"] != found.public["local_index"]
    own = Federation(METHODS["ditto"](), task, training, Sequential())
    assert "local_index" not in evaluate(own, own.advance(own.start())).public


def test_a_run_has_them_in_its_rounds() -> None:
    result = run("fedrep", tiny(), rounds=1, epochs=1, global_models=True)
    assert result.rounds[-1].metric("public.initial_head") is not None
