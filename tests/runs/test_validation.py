"""Validation examples choose the round and end the run; a run that is resumed does the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protofed import METHODS, BadInput, Data, Task, load, run, tree
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate, validation_scores
from protofed.runs.results import Round, best_by_validation
from protofed.runs.runner import Experiment, execute
from protofed.runs.store import verify
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.workers import Workers
from run_doubles import CLASSES, SIZE, small_task


def task() -> Task:
    """Validation examples of noise: soon no round is better on them than one before."""
    draw = torch.Generator().manual_seed(3)
    plain = small_task()
    noise = {c: Data.of(torch.randn(12, SIZE, generator=draw), torch.arange(12) % CLASSES) for c in plain.clients}
    return replace(plain, validation=noise)


def experiment(method: str = "fedavg", rounds: int = 12, patience: int = 2) -> Experiment:
    training = Training(rounds=rounds, epochs=1, batch_size=8)
    return Experiment(Federation(METHODS[method](), task(), training), patience=patience, identity=f"{method}-{rounds}")


def without_times(rounds: tuple[Round, ...]) -> list[Round]:
    return [replace(r, seconds={}) for r in rounds]


def test_a_run_ends_when_patience_does_and_keeps_its_best_round(tmp_path: Path) -> None:
    result = execute(experiment(), RunFolder(tmp_path / "run"))
    best = best_by_validation(result.rounds)
    assert best is not None
    assert result.rounds[-1].round == best.round + 2 < 12
    assert (result.is_complete, RunFolder(tmp_path / "run").is_done) == (True, True)
    assert result.rounds[-1].stopped == "no better validation score in 2 evaluations"
    assert [r.stopped for r in result.rounds[:-1]] == [""] * (len(result.rounds) - 1)
    assert verify.rounds_there(tmp_path / "run/checkpoint") == [best.round, best.round + 2]
    # Without patience the rounds are the same, and they go on.
    longer = execute(experiment(patience=0))
    assert [r.validation for r in longer.rounds[: len(result.rounds)]] == [r.validation for r in result.rounds]
    assert len(longer.rounds) == 12


def test_only_the_last_best_round_stays(tmp_path: Path) -> None:
    result = execute(experiment(patience=0), RunFolder(tmp_path / "run"))
    bests = {best_by_validation(result.rounds[:k]).round for k in range(1, 13)}  # type: ignore[union-attr]
    assert len(bests) > 1
    there = verify.rounds_there(tmp_path / "run/checkpoint")
    assert there == sorted({max(bests), 12})


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedavg_ft"])  # the last one does something at the end
@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_is_resumed_ends_in_the_same_round_with_the_same_bits(
    tmp_path: Path, method: str, stop: int
) -> None:
    whole = execute(experiment(method), RunFolder(tmp_path / "whole"))
    folder = RunFolder(tmp_path / "halves")
    asked = iter(range(100))
    execute(experiment(method), folder, should_stop=lambda: next(asked) >= stop)
    assert not folder.is_done
    resumed = execute(experiment(method), folder, resume=True)
    assert without_times(resumed.rounds) == without_times(whole.rounds)
    ours, theirs = tree.leaves(resumed.server), tree.leaves(whole.server)
    assert all(map(torch.equal, ours, theirs))


def test_a_run_killed_after_its_last_round_is_ended_and_not_gone_on_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    whole = execute(experiment(), folder)
    (tmp_path / "run/done").unlink()
    again = execute(experiment(), folder, resume=True)
    assert folder.is_done
    assert without_times(again.rounds) == without_times(whole.rounds)


def test_validation_is_of_the_model_that_a_client_uses_on_its_own_examples() -> None:
    federation = replace(experiment("fedavg").federation)
    state = federation.advance(federation.start())
    validation = dict(federation.task.validation)
    tested = replace(federation.task, domain_of={}, tests=validation, local_tests=validation)
    expected = evaluate(replace(federation, task=tested, _tests={}), state).at_home
    found = validation_scores(federation, state)
    assert found.keys() == {*federation.ids}
    for client in found:
        assert found[client]["balanced_accuracy"] == expected[client]["balanced_accuracy"]


@pytest.mark.parametrize("runtime", [Cohort("cpu"), Workers(2)])
def test_other_runtimes_validate_alike(runtime: Cohort | Workers) -> None:
    here, there = experiment("fedbn", rounds=2).federation, experiment("fedbn", rounds=2).federation
    there = replace(there, runtime=runtime)
    try:
        scores = [validation_scores(one, one.advance(one.start())) for one in (here, there)]
    finally:
        runtime.close()
    assert scores[0].keys() == scores[1].keys()
    for client in scores[0]:
        assert scores[0][client]["accuracy"] == pytest.approx(scores[1][client]["accuracy"])


def test_patience_needs_validation_examples(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"patience: the task .* has no validation examples"):
        run("fedavg", small_task(), patience=3, rounds=1)
    result = run("fedavg", task(), patience=1, rounds=6, epochs=1, folder=tmp_path / "run")
    best = best_by_validation(result.rounds)
    assert best is not None
    assert load(tmp_path / "run", round=best.round, task=task()).rounds[-1] == best
