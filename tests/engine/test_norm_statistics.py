"""Running statistics of normalisation: averaged, kept by each client, or dropped, whatever the method."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protofed
from covering import covering
from doubles import tiny
from methods.conformance import (
    CHECKS,
    SIZES,
    TASK,
    TRAINING,
    after,
    assert_close,
    assert_same,
    federation,
    loaded,
    mean_cross_entropy,
    small_network,
    trained_by_hand,
    whole,
)
from methods.sampling import some_methods
from protofed import METHODS, BadInput, Method, tree
from protofed.engine.around import unwrapped
from protofed.engine.federation import Federation
from protofed.engine.norm_statistics import NoStatistics, OwnStatistics, placed, taken, with_norm_statistics
from protofed.engine.state import State
from protofed.evaluation.evaluate import evaluate
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Parts
from protofed.runs.config import config
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.testing.federations import Elsewhere
from protofed.transforms.chain import UploadSettings
from protofed.tree import Params, record

MEAN, VAR = STATISTICS = ("features.1.running_mean", "features.1.running_var")
CHOICES = ("local", "dropped")
REPRESENTATIVE = ("fedavg", "fedprox", "scaffold", "fpl", "fedrep", "ditto", "fedpc")
INITIAL = {MEAN: torch.zeros(8), VAR: torch.ones(8)}

each_choice = pytest.mark.parametrize("choice", CHOICES)


def around(name: str, choice: Any) -> Method:
    return with_norm_statistics(METHODS[name](), choice, TASK.spec, TRAINING.optimizer, TRAINING.seed)


def statistics(params: Params) -> Params:
    return tree.select(params, STATISTICS)


def by_hand(choice: str, rounds: int) -> tuple[Params, dict[str, Params]]:
    """FedAvg in plain torch: the server's weights, and the statistics that each client has."""
    server = federation(FedAvg()).start().server.params
    own = dict.fromkeys(SIZES, statistics(server))
    for t in range(rounds):
        sums: Params = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in server.items()}
        for client, size in SIZES.items():
            trained, _ = trained_by_hand({**server, **own[client]}, client, mean_cross_entropy, round=t)
            own[client] = statistics(trained) if choice == "local" else own[client]
            sums = {name: total + size * trained[name].double() for name, total in sums.items()}
        means = {name: (total / sum(SIZES.values())).float() for name, total in sums.items()}
        server = {**means, **statistics(server)}
    return server, own


# ---- numbers


def test_local_statistics_are_those_of_a_plain_loop_that_goes_on_from_them() -> None:
    of = federation(FedAvg(), norm_statistics="local")
    state = after(3, of)
    server, own = by_hand("local", 3)
    assert_close(state.server.params, server, "the server after three rounds", within=1e-5)
    for client in SIZES:
        assert_close(state.memories[client].own, own[client], f"the statistics of {client}", within=1e-5)
        message = of.method.message_for(state.server, client)
        used = of.method.local_weights(message, state.memories[client])
        assert_close(used, {**server, **own[client]}, f"the model of {client}", within=1e-5)
    assert not torch.allclose(own["ann"][MEAN], own["bob"][MEAN], atol=1e-3), "the test needs clients that differ"


def test_dropped_statistics_begin_anew_in_every_round() -> None:
    of = federation(FedAvg(), norm_statistics="dropped")
    state = after(3, of)
    server, _ = by_hand("dropped", 3)
    assert_close(state.server.params, server, "the server after three rounds", within=1e-5)
    assert_same(statistics(state.server.params), INITIAL, "the server's statistics")


def test_by_default_they_are_averaged() -> None:
    plain, named = (after(2, federation(FedAvg(), **s)) for s in ({}, {"norm_statistics": "averaged"}))
    assert_same(whole(named), whole(plain), "the default by name")
    assert not torch.equal(plain.server.params[MEAN], INITIAL[MEAN])
    assert isinstance(federation(FedAvg()).method, FedAvg)


def test_scale_and_shift_are_still_shared() -> None:
    state = after(1, federation(FedAvg(), norm_statistics="local"))
    assert state.memories["ann"].own.keys() == set(STATISTICS)
    assert not torch.equal(state.server.params["features.1.weight"], torch.ones(8))


# ---- what travels, and what is kept


@each_choice
@some_methods
def test_uploads_and_the_server_hold_initial_statistics_only_and_dropped_ones_are_not_kept(
    name: str, choice: Any
) -> None:
    sent: list[Any] = []

    class Watched(Sequential):
        def reply(self, job: Any, memory: Any) -> Any:
            reply = super().reply(job, memory)
            sent.append(reply.upload)
            return reply

    of = federation(METHODS[name](), runtime=Watched(), norm_statistics=choice)
    trained = after(2, of)
    state = of.finish(trained)
    assert sent
    kept = [*trained.memories.items()] if choice == "dropped" else []
    for what, value in [*(("an upload", upload) for upload in sent), ("the server", state.server), *kept]:
        found = {path: leaf for path, leaf in tree.named_leaves(value).items() if path.endswith(STATISTICS)}
        for path, leaf in found.items():
            initial = INITIAL[MEAN] if path.endswith(MEAN) else INITIAL[VAR]
            assert torch.equal(leaf, initial.expand_as(leaf)), f"{what} of {name} has {path}"


@each_choice
def test_a_server_does_not_read_statistics_that_are_sent_all_the_same(choice: Any) -> None:
    class Dishonest(Sequential):
        def reply(self, job: Any, memory: Any) -> Any:
            reply = super().reply(job, memory)
            params = {**reply.upload.params, MEAN: torch.full((8,), 7.0)}
            return dataclasses.replace(reply, upload=dataclasses.replace(reply.upload, params=params))

    state = after(1, federation(FedAvg(), runtime=Dishonest(), norm_statistics=choice))
    assert_same(statistics(state.server.params), INITIAL, "the server's statistics")


@pytest.mark.parametrize("name", ["fedbn", "local", "lg_fed", "fedproto"])
def test_local_is_what_a_method_does_that_sends_none(name: str) -> None:
    of = federation(METHODS[name](), norm_statistics="local")
    assert type(of.method) is METHODS[name]
    assert_same(whole(after(2, of)), whole(after(2, federation(METHODS[name]()))), name)


# ---- every method, every runtime


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@each_choice
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_conformance(name: str, choice: Any, check: Callable[[Method], None]) -> None:
    check(around(name, choice))


def ended(of: Federation, rounds: int = 2) -> State:
    return of.finish(after(rounds, of))


@covering(name=[*REPRESENTATIVE, "fedavg_ft", "ifca", "fedfomo", "ga"], choice=CHOICES)
def test_workers_give_the_bits_of_the_sequential_runtime(name: str, choice: Any) -> None:
    workers = Workers(2)
    found = ended(federation(METHODS[name](), runtime=workers, norm_statistics=choice))
    workers.close()
    expected = ended(federation(METHODS[name](), norm_statistics=choice))
    assert_same(whole(found), whole(expected), f"{name} with workers")
    assert found.failures == ()


@pytest.mark.parametrize("executor", ["streams", "stacked"])
@covering(name=[*REPRESENTATIVE, "ifca", "fedfomo"], choice=CHOICES)
def test_a_cohort_gives_what_the_reference_gives(name: str, executor: Any, choice: Any) -> None:
    near = federation(METHODS[name](), norm_statistics=choice)
    far = federation(METHODS[name](), runtime=Cohort("cpu", executor=executor), norm_statistics=choice)
    found, expected = ended(far), ended(near)
    assert_close(whole(found), whole(expected), f"{name} in a cohort", within=1e-4)
    assert found.failures == ()


@each_choice
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedpc"])
def test_clients_elsewhere_keep_their_own(name: str, choice: Any) -> None:
    near, far = (federation(METHODS[name](), runtime=r, norm_statistics=choice) for r in (None, Elsewhere()))
    states = [ended(of) for of in (near, far)]
    assert_same(states[1].server, states[0].server, "the server, with clients elsewhere")
    assert evaluate(far, states[1]) == evaluate(near, states[0])


@each_choice
def test_stopped_and_resumed_it_ends_with_the_same_bits(choice: Any, tmp_path: Path) -> None:
    def experiment() -> Experiment:
        return Experiment(federation(METHODS["moon"](), norm_statistics=choice, fraction=0.6), identity="one")

    complete = execute(experiment(), RunFolder(tmp_path / "whole"))
    folder = RunFolder(tmp_path / "parts")
    part = execute(experiment(), folder, resume=True, should_stop=lambda: folder.rounds_saved >= 1)
    assert len(part.rounds) == 1
    resumed = execute(experiment(), folder, resume=True)
    assert_same(resumed.server, complete.server, "the server of a run that was stopped")
    for client in complete.state.receipts:
        mine, theirs = (r.model_for(client).params for r in (resumed, complete))
        assert_same(mine, theirs, f"the model of {client}")


@each_choice
def test_uploads_in_half_the_bytes_change_nothing_of_statistics(choice: Any) -> None:
    training = dataclasses.replace(TRAINING, norm_statistics=choice)
    of = Federation(FedAvg(), TASK, training, uploads=UploadSettings(precision="bfloat16", clip="median").pipeline())
    assert_same(statistics(after(2, of).server.params), INITIAL, "the server's statistics")


# ---- what is tested


def right(parts: Parts, data: protofed.Data) -> float:
    with torch.no_grad():
        scores = parts["classifier"](parts["features"](TASK.transform.clean(data.x[data.index])))
    return float((scores.argmax(-1) == data.labels).double().mean())


def test_a_run_with_own_statistics_is_judged_by_own_models() -> None:
    of = federation(FedAvg(), norm_statistics="local")
    state = after(3, of)
    server, own = by_hand("local", 3)
    found = evaluate(of, state)
    assert found.models == of.clients_use == "own models"
    assert not found.public, "the server has no statistics that go with its weights"
    models = [loaded({**server, **own[client]}, training=False) for client in sorted(SIZES)]
    for domain, data in TASK.tests.items():
        expected = sum(right(parts, data) for parts in models) / len(models)
        assert found.domains[domain]["accuracy"] == pytest.approx(expected)


def test_a_run_without_statistics_is_tested_with_the_initial_ones() -> None:
    of = federation(FedAvg(), norm_statistics="dropped")
    state, (server, _) = after(3, of), by_hand("dropped", 3)
    found = evaluate(of, state)
    assert found.models == "public model"
    for domain, data in TASK.tests.items():
        assert found.domains[domain]["accuracy"] == pytest.approx(
            right(loaded({**server, **INITIAL}, training=False), data)
        )


def test_what_a_client_has_just_trained_is_tested_with_its_own_statistics() -> None:
    of = federation(FedAvg(), norm_statistics="local")
    start = of.start()
    state = of.advance(start, evaluates=True)
    for client in SIZES:
        trained, _ = trained_by_hand(start.server.params, client, mean_cross_entropy)
        pooled = of.test_sets(client).pooled
        assert pooled is not None
        rows = state.evaluations[client].confusion
        assert (rows.diagonal(dim1=1, dim2=2).sum() / rows.sum()).item() == pytest.approx(
            right(loaded(trained, training=False), pooled)
        )


@each_choice
def test_a_held_out_client_has_the_initial_statistics(choice: Any) -> None:
    of = federation(FedAvg(), norm_statistics=choice, held_out_clients=1)
    state, (new,) = after(2, of), of.new_ids
    message = of.method.message_for(state.server, new)
    used = of.method.local_weights(message, of.client_state(state, new, message))
    assert_same(statistics(used), INITIAL, "the statistics of a new client")
    found = evaluate(of, state)
    assert found.new.keys() == {new}
    assert found.at_home.keys() == SIZES.keys() - {new}
    tuned = dataclasses.replace(of, fine_tune=2)
    evaluate(tuned, state)
    assert new not in state.receipts


# ---- other networks


class Gauge(nn.Module):
    """Has a persistent buffer that is no statistic of a layer of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x


def gauged(client: str = "") -> Parts:
    parts = small_network(client)
    return {"features": nn.Sequential(*parts["features"], Gauge()), "classifier": parts["classifier"]}


@each_choice
def test_other_buffers_are_averaged_still(choice: Any) -> None:
    task = dataclasses.replace(TASK, model=gauged)
    state = after(1, Federation(FedAvg(), task, dataclasses.replace(TRAINING, norm_statistics=choice)))
    assert state.server.params["features.5.seen"].min() > 0
    assert_same(statistics(state.server.params), INITIAL, "the statistics of BatchNorm")


def grouped(client: str = "") -> Parts:
    features = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GroupNorm(2, 8))
    return {"features": features, "classifier": nn.Linear(8, 4)}


@each_choice
def test_a_network_without_statistics_is_refused_before_the_run(choice: Any) -> None:
    with pytest.raises(BadInput, match=rf'training\.norm_statistics = "{choice}": the network has no layers with'):
        Federation(
            FedAvg(), dataclasses.replace(TASK, model=grouped), dataclasses.replace(TRAINING, norm_statistics=choice)
        )


def mixed(client: str) -> Parts:
    return grouped() if client == "ann" else small_network()


@each_choice
def test_clients_whose_networks_have_none_may_be_among_others(choice: Any) -> None:
    task = dataclasses.replace(TASK, model=mixed)
    of = Federation(METHODS["fedproto"](), task, dataclasses.replace(TRAINING, norm_statistics=choice))
    assert not after(2, of).failures


# ---- trees


@record
class Holder:
    params: Params
    others: tuple[Params, ...]
    number: Tensor


def test_statistics_are_placed_by_name_wherever_weights_are() -> None:
    model = {"a.mean": torch.zeros(2), "a.weight": torch.ones(2)}
    several = {"a.mean": torch.zeros(3, 2), "a.weight": torch.ones(3, 2)}
    other_shape = {"a.mean": torch.zeros(5)}
    held = Holder(model, (several, other_shape), torch.tensor(1))
    own = {"a.mean": torch.tensor([4.0, 5.0])}
    found = placed(held, own)
    assert found.params["a.mean"].tolist() == [4.0, 5.0]
    assert found.params["a.weight"] is model["a.weight"]
    assert found.others[0]["a.mean"].tolist() == [[4.0, 5.0]] * 3
    assert found.others[1]["a.mean"] is other_shape["a.mean"]
    assert held.params["a.mean"].tolist() == [0.0, 0.0], "the tree itself is left alone"
    assert taken(found, own)["a.mean"].tolist() == [4.0, 5.0]
    assert taken(Holder({}, (several,), torch.tensor(1)), own) == {}


def test_a_copy_of_a_federation_is_wrapped_once() -> None:
    for choice, kind in (("local", OwnStatistics), ("dropped", NoStatistics)):
        of = dataclasses.replace(federation(FedAvg(), norm_statistics=choice), fine_tune=1)
        assert isinstance(of.method, kind)
        assert unwrapped(of.method) is of.method.base
        assert isinstance(of.method.base, FedAvg)


# ---- in configurations


def test_the_setting_is_read_recorded_and_hashed() -> None:
    table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    parsed = config.parse({**table, "training": {"norm_statistics": "local"}}, "test")
    assert parsed.training.norm_statistics == "local"
    again = config.parse(tomllib.loads(parsed.toml()), "again")
    assert again.identity == parsed.identity != config.parse(table, "test").identity
    with pytest.raises(BadInput, match=r"training\.norm_statistics: "):
        config.parse({**table, "training": {"norm_statistics": "none"}}, "test")


def test_a_run_from_python_takes_it() -> None:
    result = protofed.run(
        "fedavg", tiny(), rounds=2, epochs=1, batch_size=4, norm_statistics="local", runtime="sequential"
    )
    assert result.rounds[-1].judged == "own models"
    models = [result.model_for(client).params for client in ("c00", "c01")]
    assert not torch.equal(models[0][MEAN], models[1][MEAN])
    assert torch.equal(models[0]["features.0.weight"], models[1]["features.0.weight"])
