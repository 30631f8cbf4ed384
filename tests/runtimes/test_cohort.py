"""The cohort runtime gives what the reference gives, by either executor, for every method."""

import gc
import logging
import traceback
import weakref
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, tiny
from protofed import METHODS, BadInput, Data, Method, RunFailed, Task, tree
from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Objective
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.methods.families import WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Adam, AdamW, Asam, Optimizer, RmsProp, Sam, Sgd
from protofed.prototypes.class_means import FeatureSums
from protofed.runtimes.cohort import executors
from protofed.runtimes.cohort.bodies import by_autograd
from protofed.runtimes.cohort.buffers import Buffers
from protofed.runtimes.cohort.cohort import Cohort, _freed
from protofed.runtimes.cohort.executors import Phase, _phases, _width
from protofed.runtimes.cohort.lowering import Lowering
from protofed.runtimes.jobs import failure_of
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tree import Params, Ragged, record

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ROUNDS = 3
IN_STREAMS = ("fedavg", "scaffold", "fpl", "fedpc", "pfedcspc", "fedmd", "fedrep", "ifca")
"""Methods that train in different ways."""
STEEP = ("fedplvm", "fpl_sums", "grace", "per_fedavg")
"""Methods that blow up what is rounded where batches have four rows: weights of 1e-7 more give 2e-5 to 7e-4 more after
three rounds, and less than 2e-6 with eight. Two of them halve their batches, and BatchNorm then sees two rows. FedPLVM
takes roots of small cosines, and FPL by sums assigns features to the nearest centre."""

every_executor = pytest.mark.parametrize("executor", list(executors.EXECUTORS))
on_every_device = pytest.mark.parametrize("device", DEVICES)


def after(method: Method[Any, Any, Any, Any], runtime: Any, task: Task | None = None, **training: Any) -> State:
    settings = {"rounds": ROUNDS, "epochs": 2, "batch_size": 4, **training}
    federation = Federation(method, task or tiny(), Training(**settings), runtime)
    state = federation.start()
    for _ in range(federation.training.rounds):
        state = federation.advance(state)
    return federation.finish(state)


def named(state: State) -> dict[str, Tensor]:
    return tree.named_leaves({"server": state.server, "memories": state.memories})


def difference(a: State, b: State) -> float:
    first, second = named(a), named(b)
    assert first.keys() == second.keys()
    gaps = [(first[name].cpu().double() - second[name].cpu().double()).abs() for name in first]
    return max(gap.max().item() for gap in gaps if gap.numel())


def executors_of_methods() -> list[Any]:
    """All. On a CPU the executor of streams does what the reference does, client by client: it is slow for all but some
    methods, and the other one never."""
    return [
        pytest.param(name, executor, marks=pytest.mark.slow if executor == "streams" and name not in IN_STREAMS else ())
        for executor in executors.EXECUTORS
        for name in METHODS
    ]


@on_every_device
@pytest.mark.parametrize(("name", "executor"), executors_of_methods())
def test_every_method_gives_what_the_reference_gives(
    name: str, executor: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = 8 if name in STEEP else 4
    reference = after(METHODS[name](), Sequential(device), batch_size=size)
    found = after(METHODS[name](), Cohort(device, executor=executor), batch_size=size)
    assert difference(reference, found) <= 1e-4
    assert found.failures == reference.failures == ()
    given_up = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert given_up == [], "work that could not be done together"


@on_every_device
@every_executor
@pytest.mark.parametrize("name", ["fedavg", "fpl"])
def test_the_same_seed_gives_the_same_bytes(name: str, executor: Any, device: str) -> None:
    first, second = (after(METHODS[name](), Cohort(device, executor=executor)) for _ in range(2))
    assert [leaf.cpu().numpy().tobytes() for leaf in named(first).values()] == [
        leaf.cpu().numpy().tobytes() for leaf in named(second).values()
    ]


# ---- what goes on around the methods


@every_executor
@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
        Sgd(lr=0.05, clip_norm=0.5),
        Adam(lr=0.01, weight_decay=1e-3, clip_norm=0.5),
        AdamW(lr=0.001, clip_norm=0.5, eps=0.01),
        RmsProp(lr=0.001, weight_decay=1e-3, momentum=0.5, centered=True, clip_norm=0.5, eps=0.01),
        Sam(Sgd(lr=0.05, momentum=0.5), rho=0.1),
        Asam(Adam(lr=0.01, weight_decay=1e-3), rho=0.2),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_every_optimiser_works_for_each_client_on_its_own(optimizer: Optimizer, executor: Any) -> None:
    """Norms, for one, are taken over one client's gradients, not over those of all. Without decay of the weights Adam
    would make steps of full size out of the rounding errors that are the gradient of a bias before BatchNorm."""
    reference = after(FedAvg(), Sequential(), optimizer=optimizer)
    assert difference(reference, after(FedAvg(), Cohort("cpu", executor=executor), optimizer=optimizer)) <= 1e-4


@every_executor
@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.05), Adam(lr=0.05), AdamW(lr=0.05), RmsProp(lr=0.005)], ids=lambda o: type(o).__name__
)
def test_a_learning_rate_that_decays_needs_nothing_recorded_anew(optimizer: Any, executor: Any) -> None:
    optimizer, task = replace(optimizer, lr_decay=0.5), replace(tiny(), model=plain)
    runtime = Cohort("cpu", executor=executor)
    found = after(FedAvg(), runtime, task, optimizer=optimizer)
    assert difference(after(FedAvg(), Sequential(), task, optimizer=optimizer), found) <= 1e-5
    assert len(runtime._programs) == 1


@dataclass(frozen=True)
class Folding(FedAvg):
    """FedAvg whose clients upload the mean of the classifier, moved by what they folded."""

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Any:
        fold = FeatureSums(client.num_classes)
        params, sums = await client.fit(
            Objective(self.loss), params=message.params, context=(message, memory), fold=fold
        )
        params = {**params, "classifier.weight": params["classifier.weight"] + sums.prototypes().mean}
        assert sums.count.sum() == len(client.data)
        return Reply(WeightUpload(params, client.num_examples), memory)


@on_every_device
@every_executor
@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1, lr_decay=0.9), Sam(Sgd(lr=0.05))], ids=["sgd", "sam"])
def test_what_is_folded_is_what_the_reference_folds(
    optimizer: Optimizer, executor: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = after(Folding(), Sequential(device), optimizer=optimizer, epochs=3)
    runtime = Cohort(device, executor=executor)
    assert difference(reference, after(Folding(), runtime, optimizer=optimizer, epochs=3)) <= 1e-4
    assert len(runtime._programs) == 1
    assert reference.failures == ()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@record
class Anchors:
    """As many as the round asks for."""

    place: Annotated[Tensor, Ragged(fill=0)]  # (M, D)
    label: Annotated[Tensor, Ragged(fill=-1)]  # (M,)


@dataclass(frozen=True)
class Anchored(FedAvg):
    """Clients are drawn to anchors, of which every round has others and more."""

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Any:
        count = 3 + 7 * client.round
        anchors = Anchors(torch.linspace(-1, 1, count * FEATURES).view(count, -1), torch.arange(count) % CLASSES)
        objective = Objective(self.anchored_loss)
        params = await client.fit(objective, params=message.params, context=({"deep": [anchors]},))
        size = await client.total(self.distance, params, (anchors,))
        params = {**params, "classifier.bias": params["classifier.bias"] + size / 1000}
        return Reply(WeightUpload(params, client.num_examples), memory)

    def anchored_loss(self, model: Any, batch: Any, context: Any) -> Tensor:
        (anchors,) = context["deep"]
        return batch.cross_entropy(model.logits(batch.x)) + self.distance(model, batch, anchors) / len(batch.y)

    def distance(self, model: Any, batch: Any, anchors: Anchors) -> Tensor:
        gaps = (model.features(batch.x)[:, None] - anchors.place).square().sum(-1)  # (B, M)
        counts = (batch.y[:, None] == anchors.label) * batch.weight[:, None]
        return (gaps * counts).sum()


@on_every_device
@every_executor
def test_a_ragged_context_needs_nothing_recorded_anew(executor: Any, device: str) -> None:
    runtime = Cohort(device, executor=executor)
    found = after(Anchored(), runtime, rounds=4)
    assert difference(after(Anchored(), Sequential(device), rounds=4), found) <= 1e-4
    assert found.failures == ()
    bodies = [type(program.buffers.body).__name__ for program in runtime._programs.values()]
    assert sorted(set(bodies)) == ["FitBody", "TotalBody"]
    assert bodies.count("FitBody") == 1


def test_clients_that_share_a_ragged_context_share_the_padded_one() -> None:
    federation = Federation(FedAvg(), tiny(), Training(), Sequential())
    anchors = Anchors(torch.ones(33, FEATURES), torch.zeros(33, dtype=torch.int64))
    lowering, contexts = Lowering("float32"), []
    for name in ("c00", "c01"):
        client = federation.client_context(name, 0)
        step = client.total(Anchored().distance, client.initial_params(), (anchors,))
        contexts.append(lowering.of(step.send(None)).inputs[1][0])
        step.close()
    one, other = contexts
    assert one.place is other.place
    assert one.place.shape == (64, FEATURES)
    assert one.place[33:].eq(0).all()
    assert one.label.tolist() == [0] * 33 + [-1] * 31
    empty = Anchors(torch.ones(0, FEATURES), torch.zeros(0, dtype=torch.int64))
    assert tree.map_ragged(lowering._pad, empty).label.tolist() == [-1] * 32


def test_the_number_of_clusters_may_change_without_anything_recorded_anew() -> None:
    runtime = Cohort("cpu")
    federation = Federation(METHODS["fpl"](), tiny(6), Training(rounds=4, epochs=1, batch_size=4), runtime)
    state, numbers = federation.start(), set()
    for _ in range(4):
        state = federation.advance(state)
        numbers.add(len(state.server.prototypes.label))
    assert len(numbers) > 1, "the test needs clusters that come and go"
    assert len(runtime._programs) == 1


@every_executor
def test_a_cohort_that_does_not_fit_goes_in_waves(
    executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def load(self: Buffers, loops: Any) -> None:
        sizes.append(len(loops))
        if len(loops) > 2:
            raise torch.OutOfMemoryError("no room")
        whole(self, loops)

    whole = Buffers.load
    monkeypatch.setattr(Buffers, "load", load)
    found = after(FedAvg(), Cohort("cpu", executor=executor), tiny(7), rounds=1)
    assert difference(after(FedAvg(), Sequential(), tiny(7), rounds=1), found) <= 1e-6
    assert sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert "out of memory with 7 clients at once; retrying with 3" in caplog.text


def test_one_client_that_does_not_fit_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Buffers, loops: Any) -> None:
        if any(len(loop.data) > 10 for loop in loops):
            raise torch.OutOfMemoryError("no room")
        whole(self, loops)

    whole = Buffers.load
    monkeypatch.setattr(Buffers, "load", load)
    state = after(FedAvg(), Cohort("cpu"), tiny(4), rounds=1)
    large = [name for name, data in tiny(4).clients.items() if len(data) > 10]
    assert [failure.client for failure in state.failures] == large
    assert all("OutOfMemoryError" in failure.detail for failure in state.failures)


@dataclass(frozen=True)
class Picky(FedAvg):
    """Cannot work for one client."""

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if local.id == "c01":
            raise ValueError("not with me")
        return await super().train(local, message, memory)


@dataclass(frozen=True)
class Broken(FedAvg):
    """Its loss can be computed only if a client has no example of class 0."""

    def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
        if (batch.y == 0).any():
            raise ValueError("a class that I do not know")
        return super().loss(model, batch, message, memory)


@every_executor
def test_a_client_that_fails_fails_alone(executor: Any) -> None:
    found = after(Picky(), Cohort("cpu", executor=executor))
    assert difference(after(Picky(), Sequential()), found) <= 1e-5
    assert [failure.client for failure in found.failures] == ["c01"]
    assert "ValueError: not with me" in found.failures[0].detail


def test_what_fails_for_some_of_a_group_is_done_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    found, reference = after(Broken(), Cohort("cpu"), rounds=1), after(Broken(), Sequential(), rounds=1)
    assert [f.client for f in found.failures] == [f.client for f in reference.failures] == ["c01", "c02", "c03"]
    assert all("ValueError: a class that I do not know" in failure.detail for failure in found.failures)
    assert difference(reference, found) == 0
    assert "a group of 4 was given up (ValueError: a class that I do not know); one by one" in caplog.text


@dataclass(frozen=True)
class Careful(Broken):
    """Keeps what it was given if it cannot train."""

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        try:
            return await super().train(local, message, memory)
        except ValueError:
            return Reply(WeightUpload(message.params, local.num_examples), memory)


@pytest.mark.parametrize("runtime", [Sequential(), Workers(2), Cohort("cpu")], ids=lambda r: type(r).__name__)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot fork one that trains")
def test_a_method_may_catch_what_its_requests_raise(runtime: Any) -> None:
    found = after(Careful(), runtime, rounds=1)
    runtime.close()
    assert found.failures == ()
    assert difference(after(Careful(), Sequential(), rounds=1), found) == 0


def plain(client: str = "") -> Parts:
    return {"features": nn.Sequential(nn.Linear(12, 8), nn.ReLU()), "classifier": nn.Linear(8, 5)}


def dropping(client: str = "") -> Parts:
    features = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5))
    return {"features": features, "classifier": nn.Linear(8, 5)}


class Recurrent(nn.Module):
    """Drops within a layer that is no layer of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(4, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.rows(x.view(-1, 3, 4))[0]
        return states[:, -1]


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


DRAWING = {
    "layer": dropping,
    "within": lambda client="": {"features": Recurrent(), "classifier": nn.Linear(8, 5)},
    "function": lambda client="": {"features": Functional(12, 8), "classifier": nn.Linear(8, 5)},
}


@on_every_device
@every_executor
@pytest.mark.parametrize("model", DRAWING)
def test_networks_that_draw_are_trained_as_the_reference_does(
    model: str, executor: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One by one, and the log says so once; nobody else's draws are touched."""
    task = replace(tiny(), model=DRAWING[model])
    reference = after(FedAvg(), Sequential(device), task)
    before = torch.get_rng_state()
    found = after(FedAvg(), Cohort(device, executor=executor), task)
    assert difference(reference, found) <= (1e-6 if device == "cuda" else 0)
    assert torch.equal(before, torch.get_rng_state())
    assert caplog.text.count("one by one: their work draws from torch's own generator") == 1


@dataclass(frozen=True)
class OwnData(FedAvg):
    """Trains on examples of its own making."""

    make: Any = None

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        data = self.make(local.data)
        params = await local.fit(Objective(self.loss), params=message.params, context=(message, memory), data=data)
        return Reply(WeightUpload(params, local.num_examples), memory)


MADE = {
    "other labels": lambda data: replace(data, y=(data.y + 1) % 5),
    "other rows of labels": lambda data: Data.of(data.x[:-2], data.y[2:]),
    "every second": lambda data: Data.of(data.x[::2], data.y[::2]),
    "every second label": lambda data: Data.of(data.x[: len(data.y[::2])], data.y[::2]),
    "the last ones": lambda data: Data.of(data.x[3:], data.y[3:]),
    "half of each": lambda data: Data.of(data.x.unflatten(1, (2, 6))[:, 1].repeat(1, 2), data.y),
    "none": lambda data: data.rows(torch.arange(0)),
}


@on_every_device
@every_executor
@pytest.mark.parametrize("made", MADE)
def test_methods_may_train_on_examples_that_they_made(made: str, executor: Any, device: str) -> None:
    task = replace(tiny(), model=plain)
    reference = after(OwnData(make=MADE[made]), Sequential(device), task)
    found = after(OwnData(make=MADE[made]), Cohort(device, executor=executor), task)
    assert difference(reference, found) <= 1e-6
    assert found.failures == reference.failures == ()


@every_executor
@pytest.mark.parametrize("fits", [True, False])
def test_clients_may_store_their_examples_differently(
    fits: bool, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.runtimes.device.Residence._fits", lambda self, num_bytes: fits)
    clients = {
        name: replace(data, x=(255 * data.x.sigmoid()).to(torch.uint8)) if name < "c02" else data
        for name, data in tiny().clients.items()
    }
    task = replace(tiny(), clients=clients, model=plain)
    found = after(FedAvg(), Cohort("cpu", executor=executor), task)
    assert difference(after(FedAvg(), Sequential(), task), found) <= 1e-6


@dataclass(frozen=True)
class Numbered(FedAvg):
    """Has a number in its context that is no tensor."""

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        params = await local.fit(Objective(self.scaled), params=message.params, context=(0.5,))
        return Reply(WeightUpload(params, local.num_examples), memory)

    def scaled(self, model: Any, batch: Any, factor: float) -> Tensor:
        loss: Tensor = factor * batch.cross_entropy(model.logits(batch.x))
        return loss


@dataclass
class Unhashable:
    """An optimiser as one may write it in haste."""

    lr: float = 0.1

    def for_round(self, round: int) -> "Unhashable":
        return self

    def init(self, params: Params) -> tuple[()]:
        return ()

    def step(self, gradient: Any, params: Params, state: tuple[()]) -> tuple[Params, tuple[()]]:
        slopes = gradient(params)
        return {name: leaf - self.lr * slopes[name] for name, leaf in params.items()}, state


@pytest.mark.parametrize(
    ("method", "training"), [(Numbered(), {}), (FedAvg(), {"optimizer": Unhashable()})], ids=["context", "optimiser"]
)
def test_what_cannot_be_grouped_is_done_one_by_one(
    method: Any, training: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = after(method, Cohort("cpu"), **training)
    assert difference(after(method, Sequential(), **training), found) == 0
    assert found.failures == ()
    assert caplog.text.count("one by one") == 1


class Counting(nn.Linear):
    """Counts its calls, where nobody saves it or where everybody does."""

    calls: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__(12, 8)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


@every_executor
def test_networks_that_keep_what_is_not_saved_are_refused(executor: Any) -> None:
    task = replace(tiny(), model=lambda client="": {"features": Counting(False), "classifier": nn.Linear(8, 5)})
    with pytest.raises(RunFailed, match="which is not saved"):
        after(FedAvg(), Cohort("cpu", executor=executor), task)


@pytest.mark.parametrize("runtime", [Sequential(), Cohort("cpu")], ids=["sequential", "cohort"])
def test_judging_changes_no_weights(runtime: Any) -> None:
    task = replace(tiny(), model=lambda client="": {"features": Counting(True), "classifier": nn.Linear(8, 5)})
    federation = Federation(FedAvg(), task, Training(rounds=1, epochs=1), runtime)
    state = federation.advance(federation.start())
    before = state.server.params["features.calls"].item()
    evaluate(federation, state)
    assert state.server.params["features.calls"].item() == before > 0


@dataclass(frozen=True)
class Capturing(FedAvg):
    """Asks for another sum in every round, each of which holds something."""

    held: Any = None

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        large = torch.ones(3)
        self.held.append(weakref.ref(large))
        await local.total(lambda model, batch: batch.weight.sum() + large.sum(), message.params)
        return await super().train(local, message, memory)


@pytest.mark.parametrize(("rounds", "most"), [(2, 8), (60, 160)])
def test_what_requests_hold_is_let_go(rounds: int, most: int) -> None:
    held: list[Any] = []
    runtime = Cohort("cpu")
    after(Capturing(held=held), runtime, rounds=rounds, epochs=1)
    gc.collect()
    assert sum(one() is not None for one in held) <= most
    runtime.close()
    gc.collect()
    assert not any(one() is not None for one in held)


def test_a_failure_holds_nothing_of_the_work_that_failed() -> None:
    """Its memory is for those who work next; and where it was raised is still to be seen."""
    held: list[Any] = []

    def work() -> None:
        large = torch.ones(3)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no room")

    def caught() -> Exception:
        try:
            work()
        except Exception as error:
            return _freed(error)
        raise AssertionError

    failure = failure_of("c00", caught())
    error = caught()
    assert [one() for one in held] == [None, None]
    assert "in work" in "".join(traceback.format_tb(error.__traceback__))
    assert failure.detail.endswith("work)")


def test_what_all_look_at_is_held_once_where_it_is_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.runtimes.device.Residence._fits", lambda self, num_bytes: False)
    runtime = Cohort("cpu", executor="stacked")
    federation = Federation(METHODS["fedrep"](), tiny(9), Training(rounds=1, epochs=1), runtime)
    evaluate(federation, federation.advance(federation.start()))
    looks = [program.buffers for program in runtime._programs.values() if program.buffers.common]
    assert looks
    assert all(len(buffers.x) == buffers.rows for buffers in looks)


@every_executor
def test_networks_in_which_clients_differ_form_groups(executor: Any) -> None:
    def own(client: str) -> Parts:
        width = 8 if client < "c02" else 16
        features = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 8))
        return {"features": features, "classifier": nn.Linear(8, 5)}

    task = replace(tiny(), model=own)
    runtime = Cohort("cpu", executor=executor)
    found = after(METHODS["local"](), runtime, task)
    assert difference(after(METHODS["local"](), Sequential(), task), found) <= 1e-5
    assert sorted(program.buffers.size for program in runtime._programs.values()) == [2, 2]


@every_executor
def test_examples_that_do_not_fit_on_the_device_are_brought_there_for_a_round(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.runtimes.device.Residence._fits", lambda self, num_bytes: False)
    found = after(METHODS["fedmd"](), Cohort("cpu", executor=executor))
    monkeypatch.undo()
    assert difference(after(METHODS["fedmd"](), Sequential()), found) <= 1e-5


def test_what_all_clients_share_is_held_once() -> None:
    runtime = Cohort("cpu")
    after(METHODS["moon"](), runtime, rounds=2)
    (program,) = runtime._programs.values()
    buffers = program.buffers
    for buffer, is_shared in zip(buffers.inputs, buffers.shared, strict=True):
        assert is_shared or len(buffer) == 4
    assert sum(buffers.shared) >= len(program.buffers.body.networks.trainable), "the received weights, at least"


JUDGED = {
    "fedavg": [True],  # one model at two test sets, side by side
    "local": [True],  # no two models are alike in anything
    "fedrep": [False],  # all have the same features, and all test sets are one to a client
    "fedpc": [False] * 3,  # those of a cluster have, and there are three
}
"""For each look at some examples, whether there are features for every model."""


@on_every_device
@every_executor
@pytest.mark.parametrize("name", JUDGED)
def test_clients_are_judged_as_by_the_reference(name: str, executor: Any, device: str) -> None:
    """And features that models have in common are computed once for all of them."""
    method = METHODS[name](num_clusters=3) if name == "fedpc" else METHODS[name]()
    scores, seen = [], list[bool]()
    for runtime in (Sequential(device), Cohort(device, executor=executor)):
        federation = Federation(method, tiny(9), Training(rounds=2, epochs=1), runtime)
        state = federation.advance(federation.start())
        runtime.close()
        networks = federation.networks_of("c00")
        networks._modes[False]["features"].register_forward_hook(
            lambda _, inputs, output: seen.append(torch._C._functorch.is_batchedtensor(output))
        )
        scores.append(evaluate(federation, state))
        if isinstance(runtime, Sequential):
            seen.clear()
    assert scores[0] == scores[1]
    if executor == "stacked" and device == "cpu":  # a GPU takes a step to warm up, and another to record
        assert seen[1:] == JUDGED[name]  # the first is one example, to see what comes


def test_bf16_works_in_bf16_and_keeps_weights_and_losses_in_float32() -> None:
    seen: set[torch.dtype] = set()

    @dataclass(frozen=True)
    class Watching(FedAvg):
        def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
            seen.update({model.features(batch.x).dtype, model.logits(batch.x).dtype})
            return super().loss(model, batch, message, memory)

    reference = after(Watching(), Sequential())
    found = after(Watching(), Cohort("cpu", "bf16", "streams"))
    assert seen == {torch.float32}
    assert {leaf.dtype for leaf in found.server.params.values()} == {torch.float32}
    assert 1e-5 < difference(reference, found) < 0.05


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BadInput, match="torch finds no CUDA device here"):
        Cohort("cuda")


# ---- who takes a step together


def test_phases_by_hand() -> None:
    # Eight clients; five stop after 2 steps, two after 3, the last after 5. Widths go 8, 6, 4, 3, 2, 1: three clients
    # fit into 3, one into 1.
    steps = [5, 3, 3, 2, 2, 2, 2, 2]
    assert _phases(steps, 8) == [Phase(8, 2, slice(3, 8)), Phase(3, 1, slice(1, 3)), Phase(1, 2, slice(0, 1))]
    # With seven left of eight the width stays, and the eighth goes on beside them.
    assert _phases([4, 4, 4, 4, 4, 4, 4, 1], 8) == [Phase(8, 1, slice(7, 8)), Phase(8, 3, slice(0, 7))]
    assert [_width(active, 8) for active in (8, 7, 6, 5, 4, 3, 2, 1)] == [8, 8, 6, 6, 4, 3, 2, 1]


@every_executor
@pytest.mark.parametrize("sizes", [(3, 30), (1, 2, 3, 4, 5, 6, 7, 8, 9, 40)])
def test_clients_of_any_sizes_end_when_they_are_done(sizes: tuple[int, ...], executor: Any) -> None:
    draws = torch.Generator().manual_seed(1)
    clients = {
        f"c{k:02d}": Data.of(torch.randn(n, 12, generator=draws), torch.randint(0, 5, (n,), generator=draws))
        for k, n in enumerate(sizes)
    }
    task = Task(clients, {}, 5, tiny().model)
    found = after(FedAvg(), Cohort("cpu", executor=executor), task)
    assert difference(after(FedAvg(), Sequential(), task), found) <= 1e-4


def test_a_later_round_with_other_clients_uses_what_was_recorded_or_records_more() -> None:
    runtime = Cohort("cpu")
    found = after(METHODS["moon"](), runtime, tiny(8), fraction=0.5, rounds=5)
    reference = after(METHODS["moon"](), Sequential(), tiny(8), fraction=0.5, rounds=5)
    assert difference(reference, found) == 0


def warmed_up(lanes: Any, lane: int, step: Any, is_new: bool) -> Any:
    """As on a GPU: a step that is new to the device is taken once before it is recorded, with whatever is there."""
    step = torch.no_grad()(step)
    if is_new:
        step()
    return step


@every_executor
@pytest.mark.parametrize("name", ["fedavg", "fedpc"])
def test_what_is_recorded_late_finds_batches_to_warm_up_with(
    name: str, executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU that is asked for a batch after the last ends the process. Other clients, of other sizes, need widths that
    no round before needed; and groups of models are judged one after another."""
    monkeypatch.setattr(executors._Lanes, "recorded", warmed_up)
    results = []
    for runtime in (Sequential(), Cohort("cpu", executor=executor)):
        settings = Training(rounds=5, epochs=1, batch_size=4, fraction=0.5)
        federation = Federation(METHODS[name](), tiny(9), settings, runtime)
        state = federation.start()
        for _ in range(5):
            state = federation.advance(state)
        results.append((state, evaluate(federation, state)))
    assert difference(results[0][0], results[1][0]) <= 1e-5
    assert results[0][1] == results[1][1]
    assert "given up" not in caplog.text


@dataclass(frozen=True)
class ByRow(FedAvg):
    """Weighs each example by what its context holds for the example's row in the store."""

    async def train(self, local: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        weights = torch.linspace(0, 2, len(local.data.y))
        params = await local.fit(Objective(self.row_loss), params=message.params, context=(weights,))
        return Reply(WeightUpload(params, local.num_examples), memory)

    def row_loss(self, model: Any, batch: Any, weights: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(model.logits(batch.x), batch.y, reduction="none")
        return batch.mean(each * weights[batch.index])


@every_executor
@pytest.mark.parametrize("fits", [True, False])
def test_contexts_may_be_indexed_by_the_rows_of_a_batch(
    fits: bool, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.runtimes.device.Residence._fits", lambda self, num_bytes: fits)
    draws = torch.Generator().manual_seed(3)
    whole = Data.of(torch.randn(40, 12, generator=draws), torch.randint(0, 5, (40,), generator=draws))
    order = torch.randperm(40, generator=draws)
    task = Task({"a": whole.rows(order[:25]), "b": whole.rows(order[25:])}, {}, 5, plain)
    assert (
        difference(after(ByRow(), Sequential(), task), after(ByRow(), Cohort("cpu", executor=executor), task)) <= 1e-6
    )


def test_requests_that_see_their_examples_differently_are_not_alike() -> None:
    federation = Federation(FedAvg(), tiny(), Training(), Sequential())
    local, message = federation.client_context("c00", 0), federation.start().server
    request = FedAvg().train(local, message, None).send(None)
    keys = {
        Lowering("float32").of(replace(request, **change)).key for change in ({}, {}, {"transform": Transform(pad=1)})
    }
    assert len(keys) == 2


@dataclass(frozen=True)
class Tethered(Sgd):
    """Is pulled back to where it began."""

    def init(self, params: Params) -> tuple[Tensor, ...]:
        return tuple(leaf.clone() for leaf in params.values())

    def step(self, gradient: Any, params: Params, state: tuple[Tensor, ...]) -> tuple[Params, tuple[Tensor, ...]]:
        slopes = gradient(params)
        pulled = zip(params.items(), state, strict=True)
        return {name: leaf - self.lr * (slopes[name] + leaf - begin) for (name, leaf), begin in pulled}, state


@on_every_device
@every_executor
def test_an_optimiser_may_begin_with_the_weights(executor: Any, device: str) -> None:
    """In every round anew, though states before the first step are kept where they are always the same."""
    runs = [
        after(FedAvg(), runtime, optimizer=Tethered(lr=0.1))
        for runtime in (Sequential(), Cohort(device, executor=executor))
    ]
    assert difference(*runs) <= 1e-5


@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.1, momentum=0.9), Sam(Sgd(lr=0.1)), Tethered(lr=0.1)], ids=lambda o: type(o).__name__
)
def test_a_step_in_place_is_the_same_step(optimizer: Optimizer) -> None:
    """As on a GPU: statistics of BatchNorm change where they are, once for each step, wherever the optimiser asks."""
    federation = Federation(FedAvg(), tiny(), Training(optimizer=optimizer, batch_size=4), Sequential())
    request = FedAvg().train(federation.client_context("c00", 0), federation.start().server, None).send(None)
    loop = Lowering("float32").of(request)
    buffers = Buffers([loop], None, torch.device("cpu"), interleaved=False, common=False)
    buffers.load([loop])
    batch = tree.map(lambda leaf: leaf[0], buffers.batch(slice(0, 1), buffers.counter))
    given = tree.map(torch.clone, loop.carry)
    with torch.no_grad():
        apart, _ = loop.body(loop.carry, loop.inputs, batch, by_autograd)
        there, _ = loop.body(given, loop.inputs, batch, by_autograd, in_place=True)
    for name, leaf in apart[0].items():
        torch.testing.assert_close(there[0][name], leaf, rtol=1e-6, atol=1e-7)
        if "running" in name:
            assert there[0][name] is given[0][name]
            assert not torch.equal(leaf, loop.carry[0][name])
