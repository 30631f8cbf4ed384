"""The reference runtime does what a plain training loop does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, INPUTS, bits, tiny_parts
from protofed.api.contexts import ClientContext, Reply
from protofed.api.requests import Fit, Fitted, Map, Objective, Request, Total
from protofed.api.task import Task
from protofed.data.batches import Batch, Data, batch_at, evaluation_plan, training_plan
from protofed.data.transforms import Transform
from protofed.nn.networks import Model, Networks, Parts, Patterns
from protofed.optim.optimizers import Optimizer, Sam, Sgd
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.jobs import Answer, Failure, Job, Reason
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed
from protofed.tree import Nothing, Params, record

SIZE, EPOCHS, SEED = 4, 3, 11
OPTIMIZER = Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3)
STATISTICS = {"features.1.running_mean", "features.1.running_var"}
TOLERANCE = {"atol": 1e-6, "rtol": 0.0}


@pytest.fixture
def data(tiny_task: Task) -> Data:
    data = tiny_task.clients["c02"]
    assert len(data) % SIZE  # so that the last batch of an epoch is a partial one
    return data


@pytest.fixture
def networks() -> Networks:
    return Networks(tiny_parts)


def cross_entropy(model: Model, batch: Batch) -> Tensor:
    return batch.cross_entropy(model.logits(batch.x))


def feature_size(model: Model, batch: Batch) -> Tensor:
    return batch.mean(model.features(batch.x).square().sum(-1))


def fitted(networks: Networks, data: Data, *objectives: Objective, **changes: Any) -> Fitted:
    request = Fit(
        networks=networks,
        params=changes.pop("params", networks.init(1)),
        context=(),
        data=data,
        transform=Transform(),
        objectives=objectives,
        optimizer=OPTIMIZER,
        epochs=EPOCHS,
        batch_size=SIZE,
        seed=SEED,
    )
    return Sequential().answer(replace(request, **changes))


def fit(networks: Networks, data: Data, *objectives: Objective, **changes: Any) -> Params:
    """The weights after it."""
    return fitted(networks, data, *objectives, **changes).params


Loss = Callable[[nn.ModuleDict, Batch], Tensor]


def plain_loop(params: Params, data: Data, *turns: tuple[Loss, tuple[str, ...]]) -> Params:
    """What everyone writes: modules, a torch optimiser for each loss and its parts, loss.backward, step."""
    return plain_training(params, data, *turns)[0]


def plain_training(
    params: Params, data: Data, *turns: tuple[Loss, tuple[str, ...]], short: bool = False
) -> tuple[Params, list[float]]:
    """The weights, and the sum of the losses of each batch. With `short`, batches are those of a DataLoader: the last
    one of an epoch has the rows that are left, and no others."""
    losses = []
    module = nn.ModuleDict(tiny_parts()).train()
    module.load_state_dict(params, strict=False)
    optimizers = [
        torch.optim.SGD([w for p in parts for w in module[p].parameters()], lr=0.1, momentum=0.9, weight_decay=1e-3)
        for _, parts in turns
    ]
    plan = training_plan(data, SIZE, EPOCHS, Transform(), torch.Generator().manual_seed(SEED))
    for step in range(len(plan.index)):
        batch = batch_at(data, plan, step, Transform())
        if short:
            counts = batch.weight > 0
            batch = replace(batch, x=batch.x[counts], y=batch.y[counts], weight=batch.weight[counts])
        for optimizer, (loss, _) in zip(optimizers, turns, strict=True):
            module.zero_grad()
            value = loss(module, batch)
            value.backward()
            losses.append(value.item())
            optimizer.step()
    per_batch = [sum(losses[k : k + len(turns)]) for k in range(0, len(losses), len(turns))]
    return {name: leaf.detach() for name, leaf in module.state_dict().items() if "num_batches" not in name}, per_batch


def plain_cross_entropy(module: nn.ModuleDict, batch: Batch) -> Tensor:
    counted = batch.weight > 0
    return F.cross_entropy(module["classifier"](module["features"](batch.x))[counted], batch.y[counted])


def plain_feature_size(module: nn.ModuleDict, batch: Batch) -> Tensor:
    return module["features"](batch.x)[batch.weight > 0].square().sum(-1).mean()


def test_a_fit_is_a_plain_training_loop(networks: Networks, data: Data) -> None:
    found = fit(networks, data, Objective(cross_entropy))
    expected = plain_loop(networks.init(1), data, (plain_cross_entropy, ("features", "classifier")))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert all(not torch.equal(found[name], networks.init(1)[name]) for name in found)


def test_a_fit_is_a_loop_over_a_dataloader_where_the_rows_that_are_left_divide_a_batch(
    networks: Networks, data: Data
) -> None:
    """Weights and running means. The running variance has Bessel's correction of the filled batch."""
    few = data.rows(torch.arange(10))
    assert len(few) % SIZE == 2
    turn = (plain_cross_entropy, ("features", "classifier"))
    expected, losses = plain_training(networks.init(1), few, turn, short=True)
    found = fitted(networks, few, Objective(cross_entropy))
    names = set(expected) - {"features.1.running_var"}
    near = {"atol": 2e-5, "rtol": 0.0}  # two rows may be close, and are divided by what is between them
    torch.testing.assert_close({n: found.params[n] for n in names}, {n: expected[n] for n in names}, **near)
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_batch_size_beyond_all_examples_takes_no_memory(networks: Networks, data: Data) -> None:
    rows: list[int] = []

    def counted(model: Model, batch: Batch) -> Tensor:
        rows.append(len(batch.x))
        return cross_entropy(model, batch)

    fit(networks, data, Objective(counted), batch_size=10**9)
    assert len(rows) == EPOCHS
    assert max(rows) < 2 * len(data)


def test_the_loss_of_a_fit_is_the_mean_over_the_batches_of_a_plain_loop(networks: Networks, data: Data) -> None:
    _, losses = plain_training(networks.init(1), data, (plain_cross_entropy, ("features", "classifier")))
    found = fitted(networks, data, Objective(cross_entropy)).loss
    assert len(losses) == EPOCHS * 4
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found != pytest.approx(losses[-1], rel=1e-2)


def test_the_losses_of_several_objectives_are_added(networks: Networks, data: Data) -> None:
    turns = (plain_cross_entropy, ("features", "classifier")), (plain_feature_size, ("features",))
    _, losses = plain_training(networks.init(1), data, *turns)
    found = fitted(networks, data, Objective(cross_entropy), Objective(feature_size, ("features.*",))).loss
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_loss_is_that_of_the_weights_not_of_other_points_that_an_optimiser_tries(
    networks: Networks, data: Data
) -> None:
    """A first step of SAM and of SGD have one loss, and SAM asks for the gradient twice."""
    once = {"epochs": 1, "batch_size": len(data)}
    sam, sgd = (
        fitted(networks, data, Objective(cross_entropy), optimizer=o, **once).loss
        for o in (Sam(Sgd(lr=0.1)), Sgd(lr=0.1))
    )
    assert sam == sgd


@record
class Seen:
    z: Tensor
    steps: Tensor


def seen(model: Model, batch: Batch) -> Seen:
    return Seen(model.features(batch.x)[batch.weight > 0].sum(0), torch.tensor(1))


@pytest.mark.parametrize("optimizer", [OPTIMIZER, Sam(Sgd(lr=0.1))], ids=["sgd", "sam"])
def test_a_fold_sums_over_the_last_epoch_what_the_first_loss_saw(
    networks: Networks, data: Data, optimizer: Optimizer
) -> None:
    features: list[Tensor] = []

    def noted(model: Model, batch: Batch) -> Tensor:
        features.append(model.features(batch.x)[batch.weight > 0].detach())
        return cross_entropy(model, batch)

    objectives = Objective(noted, trains=("classifier.*",)), Objective(feature_size, ("features.*",))
    answer = fitted(networks, data, *objectives, fold=seen, optimizer=optimizer)
    params, folded = answer.params, answer.folded
    calls = features[:: 2 if isinstance(optimizer, Sam) else 1]  # its second call is at other weights
    per_epoch = len(calls) // EPOCHS
    expected = torch.zeros(FEATURES)
    for z in calls[-per_epoch:]:
        expected = expected + z.sum(0)
    assert bits(folded) == bits(Seen(expected, torch.tensor(per_epoch)))
    assert not folded.z.requires_grad
    assert bits(params) == bits(fit(networks, data, *objectives, optimizer=optimizer))


def test_a_folded_sum_that_is_not_finite_fails_the_fit(networks: Networks, data: Data) -> None:
    with pytest.raises(Diverged, match="folded sums were not finite"):
        fit(networks, data, Objective(cross_entropy), fold=lambda model, batch: batch.x.sum() / 0)


def test_two_objectives_take_turns_on_every_batch(networks: Networks, data: Data) -> None:
    found = fit(
        networks, data, Objective(cross_entropy, trains=("classifier.*",)), Objective(feature_size, ("features.*",))
    )
    turns = (plain_cross_entropy, ("classifier",)), (plain_feature_size, ("features",))
    torch.testing.assert_close(found, plain_loop(networks.init(1), data, *turns), **TOLERANCE)


def test_two_objectives_on_the_same_weights_have_a_momentum_each(networks: Networks, data: Data) -> None:
    found = fit(networks, data, Objective(cross_entropy), Objective(feature_size))
    parts = ("features", "classifier")

    # torch skips what has no gradient, weight decay included; here the gradient is zero
    def size(module: nn.ModuleDict, batch: Batch) -> Tensor:
        return plain_feature_size(module, batch) + 0 * sum(w.sum() for w in module["classifier"].parameters())

    expected = plain_loop(networks.init(1), data, (plain_cross_entropy, parts), (size, parts))
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("trains", "freezes", "moving"),
    [
        (("classifier.*",), (), {"classifier.weight", "classifier.bias"}),
        (("*",), ("features.*", "*.bias"), {"classifier.weight"}),
        (("features.0.*",), ("features.*.bias",), {"features.0.weight"}),
    ],
)
def test_frozen_parameters_keep_every_bit_while_buffers_move(
    networks: Networks, data: Data, trains: Patterns, freezes: Patterns, moving: set[str]
) -> None:
    before, after = bits(networks.init(1)), bits(fit(networks, data, Objective(cross_entropy, trains, freezes)))
    assert {name for name in before if before[name] != after[name]} == moving | STATISTICS


def test_what_a_request_holds_is_not_modified(networks: Networks, data: Data) -> None:
    params = networks.init(1)
    before = bits((params, data))
    fit(networks, data, Objective(cross_entropy), params=params)
    assert bits((params, data)) == before
    assert not any(leaf.requires_grad for leaf in params.values())


def test_a_fit_leaves_no_graph_behind(networks: Networks, data: Data) -> None:
    assert not any(leaf.requires_grad for leaf in fit(networks, data, Objective(cross_entropy)).values())


def test_the_seed_alone_decides_what_a_fit_draws(data: Data) -> None:
    def with_dropout() -> Parts:
        parts = tiny_parts()
        return {**parts, "features": nn.Sequential(parts["features"], nn.Dropout(0.5))}

    networks = Networks(with_dropout)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = fit(networks, data, Objective(cross_entropy))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert bits(fit(networks, data, Objective(cross_entropy))) == bits(first)
    assert bits(fit(networks, data, Objective(cross_entropy), seed=SEED + 1)) != bits(first)
    # one batch with all rows: only dropout can tell the seeds apart
    whole = [fit(networks, data, Objective(feature_size), batch_size=len(data), epochs=1, seed=s) for s in (1, 2)]
    assert (whole[0]["features.0.0.weight"] - whole[1]["features.0.0.weight"]).abs().max() > 1e-4


class CallCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("optimizer", [OPTIMIZER, Sam(OPTIMIZER)], ids=["sgd", "sam"])
def test_buffers_move_once_per_step_wherever_gradients_are_taken(data: Data, optimizer: Optimizer) -> None:
    networks = Networks(lambda: {**tiny_parts(), "counter": CallCounter()})

    def loss(model: Model, batch: Batch) -> Tensor:
        return cross_entropy(model, replace(batch, x=model.counter(batch.x)))

    params = fit(networks, data, Objective(loss), optimizer=optimizer)
    assert params["counter.calls"] == EPOCHS * -(-len(data) // SIZE)


def test_statistics_of_sam_are_those_of_the_weights_themselves(networks: Networks, data: Data) -> None:
    """After one step they cannot depend on the place that SAM tried."""
    found = [
        fit(networks, data, Objective(cross_entropy), optimizer=o, epochs=1, batch_size=len(data))
        for o in (OPTIMIZER, Sam(OPTIMIZER, rho=1.0))
    ]
    for name in STATISTICS:
        assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0]["features.0.weight"], found[1]["features.0.weight"])


@record
class Counts:
    wrong: Tensor
    seen: Tensor


def rows(count: int) -> Data:
    draws = torch.Generator().manual_seed(3)
    x, y = torch.randn(2 * count, INPUTS, generator=draws), torch.randint(0, CLASSES, (2 * count,), generator=draws)
    return Data(x, y, torch.randperm(2 * count, generator=draws)[:count])


@pytest.mark.parametrize("count", [1, 256, 300])
def test_a_total_is_over_every_example_once(networks: Networks, count: int) -> None:
    data, params = rows(count), networks.init(1)

    def statistic(model: Model, batch: Batch, factor: Tensor) -> Counts:
        wrong = (model.logits(batch.x).argmax(-1) != batch.y) * batch.weight
        return Counts(factor * wrong.sum(), (batch.weight > 0).sum())

    found = Sequential().answer(Total(networks, params, (torch.tensor(2.0),), data, Transform(), SEED, statistic))
    logits = networks.model(params).logits(data.x[data.index])
    assert isinstance(found, Counts)
    assert found.wrong == 2 * (logits.argmax(-1) != data.labels).sum()
    assert found.wrong.dtype == torch.float32
    assert found.seen == count
    assert found.seen.dtype == torch.int64


def test_totals_are_accumulated_in_double(networks: Networks) -> None:
    """256 ones and then 2^24: in float32, the ones would be lost to the sum that comes with a later batch."""
    data = rows(2 * 256)

    def statistic(model: Model, batch: Batch) -> Tensor:
        is_first = torch.equal(batch.x, data.x[data.index[:256]])
        return torch.tensor(2.0**24 if is_first else 1.0)

    three = replace(data, index=torch.cat([data.index[:256], data.index[256:], data.index[256:]]))
    assert (
        Sequential().answer(Total(networks, networks.init(1), (), three, Transform(), SEED, statistic)) == 2.0**24 + 2
    )


@pytest.mark.parametrize("count", [1, 256, 300])
def test_a_map_gives_every_example_once_in_order(networks: Networks, count: int) -> None:
    data, params = rows(count), networks.init(1)

    def function(model: Model, batch: Batch, shift: Tensor) -> dict[str, Tensor]:
        return {"z": model.features(batch.x) + shift, "y": batch.y}

    found = Sequential().answer(Map(networks, params, (torch.tensor(1.0),), data, Transform(), SEED, function))
    assert found["y"].tolist() == data.labels.tolist()
    assert found["z"].shape == (count, FEATURES)
    torch.testing.assert_close(found["z"], networks.model(params).features(data.x[data.index]) + 1)
    assert not found["z"].requires_grad


def test_evaluation_changes_no_statistics_and_varies_nothing(networks: Networks) -> None:
    params = networks.init(1)
    before = bits(params)
    images = Data.of(torch.rand(3, 3, 2, 2), torch.zeros(3, dtype=torch.int64))
    varied = Transform(pad=2, flip=True, rotation=30, mean=(0.5,) * 3, std=(0.5,) * 3)
    found = Sequential().answer(Map(networks, params, (), images, varied, SEED, lambda model, batch: batch.x))
    torch.testing.assert_close(found, 2 * images.x - 1)
    Sequential().answer(
        Map(networks, params, (), rows(5), Transform(), SEED, lambda model, batch: model.logits(batch.x))
    )
    assert bits(params) == before
    assert len(evaluation_plan(images).index) == 1


# ---- steps of a client

STEP_SEED = 77


@pytest.fixture
def local(networks: Networks, data: Data) -> ClientContext:
    return ClientContext("c02", 2, 9, CLASSES, networks, data, Transform(), OPTIMIZER, EPOCHS, SIZE, SEED, STEP_SEED)


class NoMemory:
    """All that a job needs of a method."""

    def init_memory(self, local: ClientContext, message: None) -> Nothing:
        return Nothing()


def fit_seed(count: int) -> int:
    return derive_seed(STEP_SEED, "request", count)


def outcome(local: ClientContext, step: Callable[..., Any]) -> Any:
    async def replying(*arguments: Any) -> Reply[Any, Nothing]:
        return Reply(await step(*arguments), Nothing())

    ((client, found),) = Sequential().run([Job(local.id, replying, local, None, None, NoMemory())])
    assert client == local.id
    return found.upload if isinstance(found, Answer) else found


def test_a_fit_of_a_client_is_seeded_by_its_step_and_count(
    local: ClientContext, networks: Networks, data: Data
) -> None:
    async def twice(local: ClientContext, message: None, memory: None) -> list[Params]:
        return [await local.fit(Objective(cross_entropy), params=networks.init(1)) for _ in range(2)]

    found = outcome(local, twice)
    for count in range(2):
        seed = fit_seed(count)
        assert bits(found[count]) == bits(fit(networks, data, Objective(cross_entropy), seed=seed))
    assert bits(found[0]) != bits(found[1])


def test_what_a_fit_names_comes_before_what_is_configured(local: ClientContext, networks: Networks, data: Data) -> None:
    other, fewer = Sgd(lr=0.5, lr_decay=0.5), data.rows(torch.arange(5))

    async def step(local: ClientContext, message: None, memory: None) -> Params:
        params = networks.init(1)
        return await local.fit(Objective(cross_entropy), params=params, epochs=1, optimizer=other, data=fewer)

    seed = fit_seed(0)
    expected = fit(networks, fewer, Objective(cross_entropy), epochs=1, optimizer=Sgd(lr=0.125), seed=seed)
    assert bits(outcome(local, step)) == bits(expected)


def near(model: Model, batch: Batch, anchor: Tensor) -> Tensor:
    return 0.1 * (model.trainable["classifier.bias"] - anchor).square().sum()


def scaled(model: Model, batch: Batch, factor: Tensor, shift: Tensor) -> Tensor:
    return factor * batch.mean((model.features(batch.x) - shift).square().sum(-1))


def test_added_terms_are_descended_too_each_with_its_own_context(
    local: ClientContext, networks: Networks, data: Data
) -> None:
    anchor, factor, shift, own = torch.arange(5.0), torch.tensor(0.3), torch.tensor(0.7), torch.tensor(2.0)

    def base(model: Model, batch: Batch, weight: Tensor) -> Tensor:
        return weight * cross_entropy(model, batch)

    def whole(model: Model, batch: Batch) -> Tensor:
        return base(model, batch, own) + near(model, batch, anchor) + scaled(model, batch, factor, shift)

    async def step(local: ClientContext, message: None, memory: None) -> Params:
        more = local.with_loss_term(near, anchor).with_loss_term(scaled, factor, shift)
        return await more.fit(Objective(base), params=networks.init(1), context=(own,))

    found = outcome(local, step)
    seed = fit_seed(0)
    assert bits(found) == bits(fit(networks, data, Objective(whole), seed=seed))
    assert bits(found) != bits(fit(networks, data, Objective(cross_entropy), seed=seed))


def test_a_local_that_adds_shares_its_count_of_fits_with_the_one_it_came_from(
    local: ClientContext, networks: Networks
) -> None:
    async def step(local: ClientContext, message: None, memory: None) -> list[Params]:
        more = local.with_loss_term(lambda model, batch: torch.tensor(0.0))
        return [await each.fit(Objective(cross_entropy), params=networks.init(1)) for each in (local, more)]

    first, second = outcome(local, step)
    assert bits(first) != bits(second)


def test_totals_and_maps_of_a_client_read_its_own_data_unless_told(local: ClientContext, networks: Networks) -> None:
    async def step(local: ClientContext, message: None, memory: None) -> list[Tensor]:
        def seen(model: Model, batch: Batch) -> Tensor:
            return batch.weight.sum()

        params, few = networks.init(1), local.data.rows(torch.tensor([3]))
        labels = await local.map(lambda model, batch: batch.y, params)
        return [await local.total(seen, params), await local.total(seen, params, data=few), labels]

    own, few, labels = outcome(local, step)
    assert (own, few) == (len(local.data), 1)
    assert torch.equal(labels, local.data.labels)


def test_an_error_at_a_client_is_a_failure_that_says_where_and_the_next_client_works(local: ClientContext) -> None:
    async def broken(local: ClientContext, message: None, memory: None) -> None:
        raise KeyError("lost")

    async def misled(local: ClientContext, message: None, memory: None) -> None:
        await local.fit(Objective(lambda model, batch: model.nonsense(batch.x)), params=local.initial_params())

    async def forgetful(local: ClientContext, message: None, memory: None) -> None:
        return None

    async def good(local: ClientContext, message: None, memory: None) -> Reply[Nothing, Nothing]:
        return Reply(Nothing(), Nothing())

    steps = {"a": broken, "b": misled, "c": forgetful, "d": good}
    jobs = [Job(client, step, local, None, None, NoMemory()) for client, step in steps.items()]
    a, b, c, d = Sequential().run(jobs)
    assert isinstance(a[1], Failure)
    assert a[1].reason is Reason.CLIENT_ERROR
    assert "KeyError: 'lost' (test_sequential.py, line" in a[1].detail
    assert "no part 'nonsense'" in b[1].detail
    assert "a step ends with a Reply, not with NoneType" in c[1].detail
    assert d[0] == "d"
    assert isinstance(d[1], Answer)


@dataclass(frozen=True)
class Unheard(Request[None]):
    pass


def test_an_unknown_request_is_an_error(networks: Networks, data: Data) -> None:
    with pytest.raises(TypeError, match="unknown request"):
        Sequential().answer(Unheard(networks, {}, (), data, Transform(), SEED))
