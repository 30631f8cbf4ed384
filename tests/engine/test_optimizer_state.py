"""The state of a client's optimiser, fresh in every training or kept from round to round."""

import dataclasses
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    trained_by_hand,
    whole,
)
from methods.sampling import OF_EACH_KIND
from protofed import METHODS, Adam, AdamW, BadInput, Method, RmsProp, Sgd, tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Objective
from protofed.data.batches import batch_at, training_plan
from protofed.engine.federation import Federation
from protofed.engine.norm_statistics import OwnStatistics
from protofed.engine.optimizer_state import KeptOptimizer
from protofed.engine.state import State
from protofed.evaluation.evaluate import evaluate
from protofed.methods.ditto import Ditto
from protofed.methods.families import WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedrep import FedRep
from protofed.methods.fedseproto import FedSeProto
from protofed.optim.kept import part_of, why_not_kept, with_part
from protofed.optim.optimizers import Optimizer, Sam
from protofed.runs.config import config
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.workers import Workers
from protofed.seeds import derive_seed
from protofed.testing.federations import Elsewhere
from protofed.tree import Params

ALONE = dataclasses.replace(TASK, clients={"ann": TASK.clients["ann"]})
EPS = 1e-2
"""Large, since the gradient of a bias below BatchNorm is rounding, which a small one would blow up."""
TORCHS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (Sgd(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        Sgd(lr=0.05, momentum=0.8, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=1e-3),
    ),
    "adam": (Adam(lr=0.01, eps=EPS), lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS)),
    "adamw": (AdamW(lr=0.01, eps=EPS), lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS)),
    "rmsprop": (RmsProp(lr=0.003, eps=EPS), lambda p: torch.optim.RMSprop(p, lr=0.003, eps=EPS)),
    "centred": (
        RmsProp(lr=0.003, centered=True, momentum=0.5, eps=EPS),
        lambda p: torch.optim.RMSprop(p, lr=0.003, centered=True, momentum=0.5, eps=EPS),
    ),
}
each_optimizer = pytest.mark.parametrize("name", TORCHS)
KEPT = {"optimizer_state": "kept"}


class ByHand:
    """A client in plain torch, with one optimiser for the whole run."""

    def __init__(self, client: str, params: Params, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.client, self.names = client, list(params)
        self.parts = loaded(params, client, training=True)
        self.optimizer = optimizer([p for module in self.parts.values() for p in module.parameters()])

    def trained(self, params: Params, round: int, fit: int = 0) -> Params:
        """The weights after a round that begins with these."""
        for part, module in self.parts.items():
            own = {n.removeprefix(f"{part}."): leaf for n, leaf in params.items() if n.startswith(f"{part}.")}
            module.load_state_dict(own, strict=False)
        step = derive_seed(TRAINING.seed, "step", self.client, round, "round", 1)
        draws = torch.Generator().manual_seed(derive_seed(step, "request", fit))
        data = TASK.clients[self.client]
        plan = training_plan(data, TRAINING.batch_size, TRAINING.epochs, TASK.transform, draws)
        for i in range(len(plan.index)):
            batch = batch_at(data, plan, i, TASK.transform)
            self.optimizer.zero_grad()
            mean_cross_entropy(self.parts, self.parts["features"](batch.x), batch).backward()
            self.optimizer.step()
        found = {f"{part}.{n}": leaf for part, module in self.parts.items() for n, leaf in module.state_dict().items()}
        return {name: found[name].clone() for name in self.names}


# ---- numbers


@each_optimizer
def test_rounds_of_one_client_are_one_long_run_of_torch(name: str) -> None:
    optimizer, of_torch = TORCHS[name]
    of = federation(FedAvg(), ALONE, optimizer=optimizer, **KEPT)
    state = of.start()
    hand = ByHand("ann", state.server.params, of_torch)
    expected = state.server.params
    for t in range(3):
        state = of.advance(state)
        expected = hand.trained(expected, t)
        assert_close(state.server.params, expected, f"{name} after round {t + 1}", within=2e-5)
    fresh = after(3, federation(FedAvg(), ALONE, optimizer=optimizer)).server.params
    gap = max((fresh[key] - leaf).abs().max() for key, leaf in state.server.params.items())
    assert gap > 1e-3, "the test needs a state that matters"


def test_every_client_goes_on_from_its_own_state_also_after_rounds_without_it() -> None:
    optimizer, of_torch = TORCHS["momentum"]
    of = federation(FedAvg(), optimizer=optimizer, fraction=0.4, rounds=5, **KEPT)
    state = of.start()
    hands = {client: ByHand(client, state.server.params, of_torch) for client in SIZES}
    expected = state.server.params
    for t in range(5):
        state = of.advance(state)
        replies = {client: hands[client].trained(expected, t) for client in of.sampled(t)}
        total = sum(SIZES[client] for client in replies)
        expected = {
            name: (sum(SIZES[c] * replies[c][name].double() for c in replies) / total).float() for name in expected
        }
        assert_close(state.server.params, expected, f"the server after round {t + 1}", within=5e-5)
    taken_part = [sum(client in of.sampled(t) for t in range(5)) for client in SIZES]
    assert max(taken_part) > 1, "the test needs a client that comes back"


def test_by_default_it_is_fresh() -> None:
    plain, named = (after(2, federation(FedAvg(), **s)) for s in ({}, {"optimizer_state": "fresh"}))
    assert_same(whole(named), whole(plain), "the default by name")
    assert isinstance(federation(FedAvg()).method, FedAvg)


def test_only_the_main_training_goes_on() -> None:
    """Ditto's global model goes on, and its own model, whose optimiser the method chooses, begins afresh."""
    of = federation(Ditto(proximal_weight=0.0), ALONE, **KEPT)
    sgd = TRAINING.optimizer
    start = of.start()
    hand = ByHand(
        "ann",
        start.server.params,
        lambda p: torch.optim.SGD(p, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay),
    )
    state, expected, own = start, start.server.params, start.server.params
    for t in range(2):
        state = of.advance(state)
        expected = hand.trained(expected, t)
        own, _ = trained_by_hand(own, "ann", mean_cross_entropy, round=t, fit=1)
    assert_close(state.server.params, expected, "the global model", within=2e-5)
    assert_close(state.memories["ann"].base.params, own, "the own model", within=2e-5)


def test_weights_that_the_main_training_leaves_alone_have_no_state() -> None:
    """FedRep's body trains with the configured optimiser as it is, its head with one that the method makes."""
    state = after(2, federation(FedRep(head_epochs=1), **KEPT))
    names = federation(FedRep()).networks_of("ann").trainable
    momenta = dict(zip(names, state.memories["ann"].own, strict=True))
    for name, momentum in momenta.items():
        assert bool(momentum.any()) == (not name.startswith("classifier")), name


@dataclass(frozen=True)
class Twice(FedAvg):
    """Trains twice in a round, and once more in the end."""

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[WeightUpload, Any]:
        params = message.params
        for _ in range(2):
            params = await client.fit(Objective(self.loss), params=params, context=(message, memory))
        return Reply(WeightUpload(params, client.num_examples), memory)

    def finish(self, state: Any, clients: Any) -> Any:
        uploads = clients.run(self.train, lambda _: state, self.upload_spec(state, clients.server))
        return self.aggregate(state, uploads, clients.server)


def test_a_second_training_of_a_round_begins_afresh() -> None:
    of, (_, of_torch) = federation(Twice(), ALONE, optimizer=TORCHS["momentum"][0], **KEPT), TORCHS["momentum"]
    state = of.start()
    hand = ByHand("ann", state.server.params, of_torch)
    expected = state.server.params
    for t in range(3):
        state, first = of.advance(state), hand.trained(expected, t)
        expected = ByHand("ann", first, of_torch).trained(first, t, fit=1)
    assert_close(state.server.params, expected, "the server after three rounds", within=2e-5)


def test_training_after_the_last_round_begins_afresh_and_leaves_the_state_alone() -> None:
    of = federation(Twice(), ALONE, **KEPT)
    state = after(2, of)
    found = of.finish(state)
    fresh = federation(Twice(), ALONE)
    assert_same(found.server, fresh.finish(State(2, state.server, {})).server, "the server at the end")
    assert_same(found.memories["ann"].own, state.memories["ann"].own, "the state of the optimiser")


def test_fine_tuning_before_a_test_begins_afresh_and_leaves_nothing() -> None:
    of = dataclasses.replace(federation(FedAvg(), **KEPT, held_out_clients=1), fine_tune=1)
    state, (new,) = after(2, of), of.new_ids
    plain = dataclasses.replace(of, training=dataclasses.replace(of.training, optimizer_state="fresh"))
    plain = dataclasses.replace(plain, method=FedAvg())
    without = State(state.round, state.server, {})
    assert evaluate(of, state).at_home == evaluate(plain, without).at_home
    assert evaluate(of, state).new == evaluate(plain, without).new
    assert new not in state.receipts


# ---- every method, every runtime


def around(name: str) -> Method:
    return KeptOptimizer(METHODS[name]())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ["fedavg", "fpl", "fedrep", "ditto", "fedpc", "fedala"])
def test_conformance(name: str, check: Callable[[Method], None]) -> None:
    check(around(name))


def ended(of: Federation, rounds: int = 3) -> State:
    return of.finish(after(rounds, of))


WORKING = [name for name in METHODS if not METHODS[name]().needs_fresh_optimizer]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OF_EACH_KIND else pytest.mark.slow) for n in WORKING]
)
def test_every_method_that_is_not_refused_works(name: str) -> None:
    rounds = 3 if name == "fedpcl" else 2  # in the first round of FedPCL nothing trains
    state = ended(federation(METHODS[name](), **KEPT), rounds)
    assert not state.failures
    plain = ended(federation(METHODS[name]()), rounds)
    assert any(momentum.any() for momentum in state.memories["ann"].own)
    changed = tree.named_leaves((state.server, {c: m.base for c, m in state.memories.items()}))
    others = tree.named_leaves((plain.server, plain.memories))
    assert any(not torch.equal(leaf, others[path]) for path, leaf in changed.items()), f"{name} is as without it"


@covering(name=list(TORCHS), method=["fedavg", "fpl", "fedrep"])
def test_workers_give_the_bits_of_the_sequential_runtime(method: str, name: str) -> None:
    workers, settings = Workers(2), {"optimizer": TORCHS[name][0], **KEPT}
    found = ended(federation(METHODS[method](), runtime=workers, **settings))
    workers.close()
    assert_same(whole(found), whole(ended(federation(METHODS[method](), **settings))), f"{method} with workers")
    assert found.failures == ()


def without_states(state: State) -> dict[str, Any]:
    return {"server": state.server, "memories": {client: kept.base for client, kept in state.memories.items()}}


@pytest.mark.parametrize("executor", ["streams", "stacked"])
@covering(
    method=["fedavg", "fpl", "fedrep"], optimizer=[*(o for o, _ in TORCHS.values()), Sam(Sgd(lr=0.05, momentum=0.9))]
)
def test_a_cohort_gives_what_the_reference_gives(method: str, executor: Any, optimizer: Optimizer) -> None:
    runtime = Cohort("cpu", executor=executor)
    settings = {"optimizer": optimizer, **KEPT}
    near, far = federation(METHODS[method](), **settings), federation(METHODS[method](), runtime=runtime, **settings)
    found, expected = ended(far), ended(near)
    assert_close(without_states(found), without_states(expected), f"{method} in a cohort", within=1e-4)
    # The momentum of a bias below BatchNorm is one of rounding, so that a little more may differ in a state.
    states = [{client: kept.own for client, kept in state.memories.items()} for state in (found, expected)]
    assert_close(*states, f"states of {method} in a cohort", within=1e-3)
    assert found.failures == ()


def test_a_cohort_needs_no_program_more_for_kept_states() -> None:
    runtime = Cohort("cpu")
    after(3, federation(FedAvg(), runtime=runtime, schedule=protofed.CosineRate(), **KEPT))
    assert len(runtime._programs) == 1


def test_clients_elsewhere_keep_their_own() -> None:
    near, far = federation(FedAvg(), **KEPT), federation(FedAvg(), runtime=Elsewhere(), **KEPT)
    assert_same(ended(far).server, ended(near).server, "the server, with clients elsewhere")


@each_optimizer
def test_stopped_and_resumed_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    def experiment() -> Experiment:
        settings = {"optimizer": TORCHS[name][0], "fraction": 0.6, **KEPT}
        return Experiment(federation(METHODS["moon"](), **settings), identity="one")

    complete = execute(experiment(), RunFolder(tmp_path / "whole"))
    folder = RunFolder(tmp_path / "parts")
    part = execute(experiment(), folder, resume=True, should_stop=lambda: folder.rounds_saved >= 1)
    assert len(part.rounds) == 1
    resumed = execute(experiment(), folder, resume=True)
    assert_same(resumed.server, complete.server, "the server of a run that was stopped")


def test_it_goes_together_with_own_statistics() -> None:
    settings = {"norm_statistics": "local", **KEPT}
    of = dataclasses.replace(federation(FedAvg(), **settings), fine_tune=0)
    assert isinstance(of.method, KeptOptimizer)
    assert isinstance(of.method.base, OwnStatistics)
    assert isinstance(of.method.base.base, FedAvg)
    workers = Workers(2)
    found = ended(federation(FedAvg(), runtime=workers, **settings))
    workers.close()
    expected = ended(of)
    assert_same(whole(found), whole(expected), "both settings, with workers")
    assert any(momentum.any() for momentum in expected.memories["ann"].own)
    assert expected.memories["ann"].base.own["features.1.running_mean"].any()
    assert evaluate(of, expected).models == "own models"


# ---- states by weight


def test_a_part_of_a_state_is_taken_and_put_back() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2, 2)}
    for optimizer in (Sgd(momentum=0.9), Adam(), RmsProp(), RmsProp(centered=True, momentum=0.1)):
        state = tree.map(lambda leaf: leaf + 1, optimizer.init(weights))
        part = part_of(state, weights, ["a", "c"])
        alone = optimizer.init({"a": weights["a"], "c": weights["c"]})
        assert [leaf.shape for leaf in tree.leaves(part)] == [leaf.shape for leaf in tree.leaves(alone)]
        doubled = with_part(state, weights, ["a", "c"], tree.map(lambda leaf: 2 * leaf, part))
        for path, leaf in tree.named_leaves(doubled).items():
            assert set(leaf.flatten().tolist()) == ({1.0} if leaf.shape == (3,) else {2.0}), path


# ---- what is refused


@dataclass(frozen=True)
class Whole:
    """Has one state for all weights together."""

    lr: float = 0.1

    def for_round(self, round: int) -> "Whole":
        return self

    def init(self, params: Params) -> Tensor:
        return torch.cat([torch.zeros_like(leaf).flatten() for leaf in params.values()])

    def step(self, gradient: Any, params: Params, state: Tensor) -> tuple[Params, Tensor]:
        return params, state


def test_an_optimiser_whose_state_cannot_be_kept_is_refused_before_the_run() -> None:
    with pytest.raises(BadInput, match=r'training\.optimizer_state = "kept": Sgd\(.*\) has no state'):
        federation(FedAvg(), optimizer=Sgd(lr=0.1), **KEPT)
    with pytest.raises(BadInput, match=r'training\.optimizer_state = "kept": the state of Whole.* is not by weight'):
        federation(FedAvg(), optimizer=Whole(), **KEPT)
    assert why_not_kept(Sam(Sgd(momentum=0.9)), {"a": torch.zeros(2)}) == ""


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddc", "fedseproto"])
def test_methods_that_need_a_fresh_state_are_refused_before_the_run(name: str) -> None:
    message = rf'training\.optimizer_state = "kept": {METHODS[name].__name__} needs a fresh one in every round: '
    with pytest.raises(BadInput, match=message):
        federation(METHODS[name](), **KEPT)
    if "prototype" not in METHODS[name].tags:
        with pytest.raises(BadInput, match=r'training\.optimizer_state = "kept": GA needs'):
            federation(METHODS["ga"](base=METHODS[name]()), **KEPT)


def test_a_method_of_phases_that_take_one_step_together_is_not() -> None:
    assert not after(1, federation(FedSeProto(phase_mode="joint"), **KEPT)).failures


@dataclass(frozen=True)
class InTurns(FedAvg):
    """Two objectives, which may train the same weights."""

    second: str = "classifier.*"

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[WeightUpload, Any]:
        objectives = (Objective(self.loss, trains=("features.*",)), Objective(self.loss, trains=(self.second,)))
        params = await client.fit(*objectives, params=message.params, context=(message, memory))
        return Reply(WeightUpload(params, client.num_examples), memory)


def test_objectives_keep_their_states_if_they_train_different_weights() -> None:
    for optimizer in (TORCHS["momentum"][0], TORCHS["adam"][0]):
        near, far = (federation(InTurns(), runtime=r, optimizer=optimizer, **KEPT) for r in (None, Cohort("cpu")))
        expected = after(2, near)
        assert_close(whole(after(2, far)), whole(expected), "in a cohort", within=1e-4)
        assert all(leaf.any() for leaf in tree.leaves(expected.memories["ann"].own))
    with pytest.raises(protofed.RunFailed, match=r"training\.optimizer_state.*two objectives train the same weights"):
        after(1, federation(InTurns(second="*"), **KEPT))


# ---- in configurations


def test_the_setting_is_read_recorded_and_hashed() -> None:
    table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    parsed = config.parse({**table, "training": {"optimizer_state": "kept"}}, "test")
    assert parsed.training.optimizer_state == "kept"
    again = config.parse(tomllib.loads(parsed.toml()), "again")
    assert again.identity == parsed.identity != config.parse(table, "test").identity
    with pytest.raises(BadInput, match=r"training\.optimizer_state: "):
        config.parse({**table, "training": {"optimizer_state": "old"}}, "test")


def test_a_run_from_python_takes_it() -> None:
    settings = {"rounds": 2, "epochs": 1, "batch_size": 4, "runtime": "sequential"}
    kept, fresh = (protofed.run("fedavg", tiny(), optimizer_state=s, **settings) for s in ("kept", "fresh"))
    assert not torch.equal(kept.server.params["features.0.weight"], fresh.server.params["features.0.weight"])
