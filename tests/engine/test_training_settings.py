"""Settings of training that change what clients do from round to round: the same in all runtimes, and on resuming."""

import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from covering import covering
from doubles import bits, tiny
from protofed import AdamW, BadInput, ConstantRate, CosineRate, Method, RmsProp, Sgd, StepRate, tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Fit, Objective
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.methods._shared.control_variates import effective_steps, mean_gradient
from protofed.methods.families import WeightUpload
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.optim.optimizers import Optimizer
from protofed.runs.config import config
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort import executors
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers

ROUNDS = 4
PLAIN = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
CHANGING = {
    "cosine": {"schedule": CosineRate(warmup=2)},
    "step": {"schedule": StepRate(every=2, factor=0.5)},
    "slow": {"slow_share": 0.75, "epochs": 4},
    "last": {"fraction": 0.5, "full_last_round": True},
}
each_change = pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING)


def federation(
    method: Method[Any, Any, Any, Any] | None = None, runtime: Any = None, clients: int = 4, **training: Any
) -> Federation:
    settings = {"rounds": ROUNDS, "epochs": 2, "batch_size": 4, "optimizer": Sgd(lr=0.08, momentum=0.5), **training}
    return Federation(method or FedAvg(), tiny(clients), Training(**settings), runtime or Sequential())


def after_all(of: Federation) -> State:
    state = of.start()
    for _ in range(of.training.rounds):
        state = of.advance(state)
    return of.finish(state)


def fit_of(client: ClientContext, **changes: Any) -> Fit:
    """The request that a client makes when it asks for training."""
    step = client.fit(Objective(FedAvg().loss), params=client.initial_params(), **changes)
    request = step.send(None)
    step.close()
    assert isinstance(request, Fit)
    return request


# ---- in every runtime


@each_change
def test_each_of_these_settings_changes_the_result(change: dict[str, Any]) -> None:
    plain = {key: value for key, value in change.items() if key in ("epochs", "fraction")}
    assert bits(after_all(federation(**change)).server) != bits(after_all(federation(**plain)).server)


@covering(method=["fedavg", "scaffold", "fednova", "feddc"], change=CHANGING)
def test_workers_give_the_bits_of_the_sequential_runtime(method: str, change: dict[str, Any]) -> None:
    workers = Workers(2)
    found = after_all(federation(METHODS[method](), workers, **change))
    workers.close()
    expected = after_all(federation(METHODS[method](), **change))
    assert bits((found.server, found.memories)) == bits((expected.server, expected.memories))
    assert found.failures == expected.failures == ()


@pytest.mark.parametrize("executor", executors.EXECUTORS)
@covering(method=["fedavg", "scaffold", "fednova", "feddyn", "feddc", "fedasam"], change=CHANGING)
def test_a_cohort_gives_what_the_reference_gives_with_one_recorded_program(
    method: str, executor: Any, change: dict[str, Any]
) -> None:
    runtime = Cohort("cpu", executor=executor)
    found, expected = (after_all(federation(METHODS[method](), r, **change)) for r in (runtime, Sequential()))
    for name, leaf in tree.named_leaves((expected.server, expected.memories)).items():
        other = tree.named_leaves((found.server, found.memories))[name]
        torch.testing.assert_close(other, leaf, atol=1e-4, rtol=1e-4, msg=name)
    assert len(runtime._programs) == 1
    assert found.failures == expected.failures == ()


@each_change
def test_stopped_and_resumed_it_ends_with_the_same_bits(change: dict[str, Any], tmp_path: Path) -> None:
    def experiment() -> Experiment:
        return Experiment(federation(METHODS["moon"](), **change), identity="one")

    whole = execute(experiment(), RunFolder(tmp_path / "whole"))
    folder = RunFolder(tmp_path / "parts")
    for stop in (1, 3):
        part = execute(experiment(), folder, resume=True, should_stop=lambda stop=stop: folder.rounds_saved >= stop)
        assert len(part.rounds) == stop
    assert bits(execute(experiment(), folder, resume=True).server) == bits(whole.server)


# ---- the schedule


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.08), AdamW(lr=0.08), RmsProp(lr=0.08)], ids=lambda o: type(o).__name__)
def test_a_fit_has_the_rate_of_its_round(optimizer: Optimizer) -> None:
    of = federation(optimizer=optimizer, schedule=StepRate(every=2, factor=0.5, warmup=2), rounds=5)
    # shares 1/2 and 1 in the warm-up, then a half after every two rounds
    rates = [fit_of(of.client_context("c00", t)).optimizer.lr for t in range(5)]  # type: ignore[attr-defined]
    assert rates == [0.04, 0.08, 0.08, 0.04, 0.04]


def test_the_decay_of_the_optimiser_is_on_top_of_the_schedule() -> None:
    of = federation(optimizer=Sgd(lr=0.08, lr_decay=0.5), schedule=StepRate(every=1, factor=0.1))
    rates = [fit_of(of.client_context("c00", t)).optimizer.lr for t in range(3)]  # type: ignore[attr-defined]
    assert rates == pytest.approx([0.08, 0.08 * 0.05, 0.08 * 0.0025])


def test_a_constant_schedule_leaves_the_optimiser_alone() -> None:
    of = federation()
    assert of.client_context("c00", 3).optimizer is of.training.optimizer
    assert not fit_of(of.client_context("c00", 3)).rate_changes


def test_only_training_in_rounds_with_the_configured_optimiser_is_scheduled() -> None:
    of, own = federation(schedule=CosineRate()), Sgd(lr=0.3)
    client = of.client_context("c00", 2)
    assert fit_of(client, optimizer=own).optimizer == own
    assert fit_of(client).rate_changes
    assert not fit_of(client, optimizer=own).rate_changes
    for phase in ("setup", "finish", "evaluate"):
        assert of.client_context("c00", 2, phase).optimizer == of.training.optimizer
    assert of.server_context(2, "round").optimizer == of.training.optimizer


@pytest.mark.parametrize("name", ["scaffold", "feddc"])
def test_the_mean_gradient_knows_the_rate_and_the_steps_of_the_round(name: str) -> None:
    of = federation(METHODS[name](), optimizer=Sgd(lr=0.4), schedule=StepRate(every=1, factor=0.5), slow_share=1.0)
    of = replace(of, training=replace(of.training, epochs=6))
    client = of.client_context("c01", 2)
    assert client.epochs < 6, "the test needs a round in which the client is slow"
    start = client.initial_params()
    end = {key: leaf - 0.8 for key, leaf in start.items()}
    # In round 2 the rate is 0.4 · 0.5² = 0.1.
    steps = client.epochs * ceil(len(client.data) / 4)
    for leaf in mean_gradient(client, start, end, name).values():
        torch.testing.assert_close(leaf, torch.full_like(leaf, 0.8 / (0.1 * steps)))


def test_a_method_that_wraps_the_configured_optimiser_follows_the_schedule() -> None:
    settings = {"schedule": StepRate(every=1, factor=0.25), "rounds": 2}
    of = federation(FedASAM(averaging=False), optimizer=Sgd(lr=0.08), **settings)
    slower = federation(FedASAM(averaging=False), optimizer=Sgd(lr=0.02), rounds=2)
    state = of.advance(of.start())
    assert bits(of.advance(state).server) == bits(slower.advance(state).server)


@dataclass(frozen=True)
class Fragile(FedAvg):
    """c01 diverges at a rate of 0.05 and above."""

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[WeightUpload, Any]:
        if client.id == "c01" and fit_of(client).optimizer.lr >= 0.05:  # type: ignore[attr-defined]
            objective = Objective(lambda model, batch: batch.cross_entropy(model.logits(batch.x)) / 0)
            await client.fit(objective, params=message.params)
        return await super().train(client, message, memory)


@pytest.mark.parametrize("runtime", [Sequential(), Cohort("cpu")], ids=lambda r: type(r).__name__)
def test_a_client_that_diverges_repeats_its_round_at_half_the_scheduled_rate(runtime: Any) -> None:
    of = federation(
        Fragile(), runtime, optimizer=Sgd(lr=0.16), schedule=ConstantRate(warmup=2), on_divergence="retry_half_lr"
    )
    first = of.advance(of.start())
    assert first.repeats == {"c01": 1}  # 0.08, the rate of the warm-up, and 0.04
    assert of.advance(first).repeats == {"c01": 2}  # 0.16, 0.08, 0.04
    assert first.failures == ()


class Odd:
    """Has no learning rate."""

    for_round = init = step = None


def test_an_optimiser_without_a_rate_has_no_schedule() -> None:
    with pytest.raises(BadInput, match=r"training\.schedule: .*Odd.* has no learning rate to be changed"):
        federation(optimizer=Odd(), schedule=CosineRate())
    federation(optimizer=Odd())


# ---- slow clients


def epochs(of: Federation, rounds: int) -> dict[str, list[int]]:
    return {client: [of.client_context(client, t).epochs for t in range(rounds)] for client in of.ids}


def test_slow_clients_are_drawn_once_and_make_one_to_all_epochs() -> None:
    of = federation(clients=10, slow_share=0.4, epochs=5)
    made = epochs(of, 300)
    assert len(of.slow) == 4
    for client, numbers in made.items():
        if client in of.slow:
            counts = Counter(numbers)
            assert set(counts) == {1, 2, 3, 4, 5}
            assert all(30 < count < 90 for count in counts.values()), "each is equally likely: 60 of 300"
        else:
            assert set(numbers) == {5}
    assert len({tuple(made[client]) for client in of.slow}) == 4, "each draws for itself"


def test_who_is_slow_depends_on_the_seed_alone() -> None:
    def drawn(**settings: Any) -> frozenset[str]:
        return federation(clients=10, slow_share=0.5, **settings).slow

    assert drawn() == drawn(epochs=7, fraction=0.3, optimizer=Sgd(lr=1.0))
    assert len({drawn(seed=seed) for seed in range(10)}) > 5
    assert federation(slow_share=0.0).slow == frozenset()
    assert federation(slow_share=1.0).slow == frozenset(federation().ids)


def test_slow_clients_are_slow_in_rounds_only() -> None:
    of = federation(slow_share=1.0, epochs=50)
    assert of.client_context("c00", 1).epochs < 50
    assert {of.client_context("c00", 1, phase).epochs for phase in ("setup", "finish", "evaluate")} == {50}


def test_the_number_of_steps_that_a_method_counts_is_that_of_the_slow_client() -> None:
    of = federation(METHODS["fednova"](), optimizer=Sgd(lr=0.1), slow_share=0.5, epochs=6)
    for client in of.ids:
        context = of.client_context(client, 1)
        request = fit_of(context)
        steps = request.epochs * ceil(len(request.data) / 4)
        assert effective_steps(context, "FedNova") == steps
    assert len({of.client_context(client, 1).epochs for client in of.ids}) > 1, "the test needs clients that differ"


# ---- the last round


def test_all_clients_take_part_in_a_full_last_round() -> None:
    of, usual = (federation(clients=10, fraction=0.3, full_last_round=full) for full in (True, False))
    assert [len(of.sampled(t)) for t in range(ROUNDS)] == [3, 3, 3, 10]
    assert [of.sampled(t) for t in range(ROUNDS - 1)] == [usual.sampled(t) for t in range(ROUNDS - 1)]
    assert len(usual.sampled(ROUNDS - 1)) == 3
    assert len(of.sampled(ROUNDS - 1, strikes={"c01": 3})) == 9, "those in quarantine are still passed over"


# ---- in configurations


@pytest.mark.parametrize(
    ("table", "schedule"),
    [
        ({"name": "cosine", "final": 0.1, "warmup": 3}, CosineRate(warmup=3, final=0.1)),
        ({"name": "step", "every": 5, "factor": 0.5}, StepRate(every=5, factor=0.5)),
        ({"warmup": 2}, ConstantRate(warmup=2)),
    ],
    ids=["cosine", "step", "constant"],
)
def test_a_schedule_is_read_recorded_and_hashed(table: dict[str, Any], schedule: Any) -> None:
    parsed = config.parse({**PLAIN, "training": {"schedule": table}}, "test")
    assert parsed.training.schedule == schedule
    again = config.parse(tomllib.loads(parsed.toml()), "again")
    assert again == parsed
    assert again.identity == parsed.identity != config.parse(PLAIN, "test").identity


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"schedule": {"name": "cosin"}}, "training.schedule.name: 'cosin' is unknown; did you mean 'cosine'?"),
        ({"schedule": {"name": "cosine", "every": 3}}, "training.schedule.every: unknown key"),
        ({"schedule": {"name": "cosine", "final": 2.0}}, "training.schedule.final: must be less than or equal to 1"),
        ({"schedule": {"name": "step", "every": 0}}, "training.schedule.every: must be greater than or equal to 1"),
        ({"schedule": {"name": "step", "factor": 0.0}}, "training.schedule.factor: must be greater than 0"),
        ({"schedule": {"warmup": -1}}, "training.schedule.warmup: must be greater than or equal to 0"),
        ({"schedule": {"warmup": 21}}, "training.schedule.warmup: is 21, but the run has only 20 rounds"),
        ({"schedule": "cosine"}, "training.schedule: must be a section, [training.schedule], not 'cosine'"),
        ({"slow_share": 1.5}, "training.slow_share: must be less than or equal to 1"),
        ({"full_last_round": 1}, "training.full_last_round: must be a valid boolean"),
        ({"warmup": 3}, "training.warmup: unknown key; it is a key of [training.schedule]"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_mistake_in_these_settings_names_its_key(training: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        config.parse({**PLAIN, "training": training}, "test")
    assert message in str(caught.value)


def test_a_run_from_python_takes_these_settings() -> None:
    settings = {"schedule": CosineRate(warmup=2), "slow_share": 0.5, "fraction": 0.5, "full_last_round": True}
    found = protofed.run("fedavg", tiny(), rounds=3, epochs=3, batch_size=4, runtime="sequential", **settings)
    training = Training(rounds=3, epochs=3, batch_size=4, **settings)
    assert bits(found.server) == bits(after_all(Federation(FedAvg(), tiny(), training)).server)
    with pytest.raises(BadInput, match=r"CosineRate\.final: must be less than or equal to 1"):
        protofed.run("fedavg", tiny(), schedule=CosineRate(final=3.0))
    with pytest.raises(BadInput, match=r"training\.schedule\.warmup: is 9"):
        protofed.run("fedavg", tiny(), rounds=3, schedule=CosineRate(warmup=9))


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_an_optimiser_is_named_in_a_configuration_alone_or_inside_another(name: str) -> None:
    kind = {"adamw": AdamW, "rmsprop": RmsProp}[name]
    alone = config.parse({**PLAIN, "training": {"optimizer": {"name": name, "lr": 0.02}}}, "test")
    assert alone.training.optimizer == kind(lr=0.02)
    inside = config.parse(
        {**PLAIN, "training": {"optimizer": {"name": "sam", "base": {"name": name, "lr": 0.02}}}}, "test"
    )
    assert inside.training.optimizer == protofed.Sam(base=kind(lr=0.02))
    for parsed in (alone, inside):
        assert config.parse(tomllib.loads(parsed.toml()), "again") == parsed
