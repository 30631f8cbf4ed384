"""Training with clipped and noised gradients, against loops over single records."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.private_runs import plain_parts, private, private_methods, task_of
from protofed import METHODS, Sam, Sgd
from protofed.api.requests import Fit, Mechanism, Objective, PrivateFit, Request
from protofed.data.batches import Batch, Data, batch_at, training_plan
from protofed.data.transforms import Transform
from protofed.nn.networks import Model, Networks, Parts
from protofed.runtimes import private_fit as dp_sgd
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.private_fit import private_fit
from protofed.runtimes.sequential import Sequential, fit
from protofed.runtimes.workers import Workers
from protofed.tree import Params, squared_distance

NETWORKS = Networks(plain_parts)


@dataclass
class Plain:
    """Clipping without noise, in floating point; it remembers the sums."""

    most: float = 1e12
    sums: list[Tensor] | None = None

    def clipped(self, rows: Tensor) -> Tensor:
        rows = rows.double()
        return rows * (self.most / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    def released(self, total: Tensor) -> Tensor:
        self.sums = [*(self.sums or []), total]
        return total


def cross_entropy(model: Model, batch: Batch, *context: Any) -> Tensor:
    return batch.cross_entropy(model.logits(batch.x))


def data_of(count: int) -> Data:
    draws = torch.Generator().manual_seed(2)
    return Data.of(torch.randn(count, 6, generator=draws), torch.arange(count) % 3)


def request_of(count: int = 19, mechanism: Mechanism | None = None, **changes: Any) -> PrivateFit:
    request = PrivateFit(
        networks=NETWORKS,
        params=NETWORKS.init(3),
        context=(),
        data=data_of(count),
        transform=Transform(),
        seed=11,
        objectives=(Objective(cross_entropy),),
        optimizer=Sgd(lr=0.2),
        epochs=1,
        batch_size=8,
        mechanisms=(mechanism or Plain(),),
    )
    return replace(request, **changes)


def record_of(batch: Batch, k: int) -> Batch:
    """A batch of the k-th record alone."""
    only = slice(k, k + 1)
    number = batch.number + batch.index[k]
    return Batch(batch.x[only], batch.y[only], torch.ones(1), batch.index[only], batch.is_last_epoch, number)


def gradient_of(request: Fit, objective: Objective, batch: Batch, params: Params) -> Tensor:
    names = list(request.trained()[request.objectives.index(objective)])
    leaves = {name: params[name].detach().requires_grad_() for name in names}
    loss = objective.loss(request.networks.model({**params, **leaves}, training=True), batch, *request.context)
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def test_sums_are_those_of_single_records_clipped_one_by_one_and_rows_that_fill_a_batch_have_none() -> None:
    """T5."""
    mechanism = Plain(most=0.3)
    request = request_of(mechanism=mechanism, optimizer=Sgd(lr=1e-20))
    private_fit(request)
    plan = training_plan(request.data, 8, 1, request.transform, torch.Generator().manual_seed(11))
    assert mechanism.sums is not None
    assert (plan.weight.sum(1) == torch.tensor([8, 8, 3])).all()
    for step, found in enumerate(mechanism.sums):
        batch = batch_at(request.data, plan, step, request.transform)
        rows = [
            gradient_of(request, request.objectives[0], record_of(batch, k), request.params).double()
            for k in range(8)
            if batch.weight[k]
        ]
        expected = sum(row * min(1, 0.3 / row.norm().item()) for row in rows)
        assert torch.allclose(found, expected, atol=1e-6)


def test_without_clipping_and_noise_full_batches_train_as_ever() -> None:
    for optimizer in (Sgd(lr=0.2, momentum=0.9, weight_decay=0.01), Sam(Sgd(lr=0.2))):
        private = request_of(count=16, epochs=3, optimizer=optimizer)
        plain = Fit(**{name: getattr(private, name) for name in Fit.__dataclass_fields__})
        found, expected = private_fit(private), fit(plain)
        for name, leaf in expected.params.items():
            assert torch.allclose(found.params[name], leaf, atol=1e-5), name
        assert found.loss is None


def test_a_batch_that_is_not_full_is_divided_by_the_size_of_a_full_one() -> None:
    """A client of 3 records with batches of 8 divides by 3, as everybody knows that it has 3."""
    for count, size in ((19, 8), (3, 3)):
        mechanism = Plain()
        request = request_of(count=count, mechanism=mechanism, optimizer=Sgd(lr=1.0))
        start, params = request.params, private_fit(request).params
        assert mechanism.sums is not None
        moved = torch.cat([(start[name] - leaf).flatten() for name, leaf in params.items()]).double()
        assert torch.allclose(moved, sum(mechanism.sums) / size, atol=1e-5)


def test_a_penalty_is_added_behind_clipping_and_noise() -> None:
    anchor = NETWORKS.init(4)

    def penalty(model: Model, *context: Any) -> Tensor:
        return 50 * squared_distance(model.trainable, context[0])

    mechanism = Plain(most=1e-9)
    request = request_of(count=8, mechanism=mechanism, context=(anchor,), penalty=penalty, optimizer=Sgd(lr=0.01))
    found = private_fit(request).params
    for name, leaf in found.items():
        assert torch.allclose(leaf, anchor[name], atol=1e-6), "the penalty's gradient is 100 (w − anchor)"


def test_parts_that_fit_in_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = private_fit(request_of(mechanism=Plain(0.3))).params
    monkeypatch.setattr(dp_sgd, "CHUNK_BYTES", 1)
    for name, leaf in private_fit(request_of(mechanism=Plain(0.3))).params.items():
        assert torch.allclose(leaf, whole[name], atol=1e-6)


def test_each_objective_trains_its_own_weights_with_its_own_mechanism() -> None:
    first, second = Plain(), Plain()
    objectives = (Objective(cross_entropy, ("features.*",)), Objective(cross_entropy, ("classifier.*",)))
    private_fit(request_of(objectives=objectives, mechanisms=(first, second)))
    assert first.sums is not None
    assert second.sums is not None
    assert {len(one) for one in first.sums} == {6 * 8 + 3 * 8}
    assert {len(one) for one in second.sums} == {8 * 3 + 3}


def test_dropout_is_drawn_for_each_record() -> None:
    def with_dropout(client: str = "any") -> Parts:
        return {"features": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), "classifier": nn.Linear(8, 3)}

    mechanism = Plain()
    networks = Networks(with_dropout)
    same = data_of(1).rows(torch.zeros(8, dtype=torch.int64))
    request = request_of(mechanism=mechanism, networks=networks, params=networks.init(0), data=same)
    seen: list[Tensor] = []
    mechanism.clipped = lambda rows: seen.append(rows) or rows.double()  # type: ignore[method-assign, func-returns-value]
    Sequential().answer(request)
    assert len(torch.unique(seen[0], dim=0)) > 4


def test_weights_that_leave_all_bounds_say_nothing_of_examples() -> None:
    with pytest.raises(Diverged, match="lower the learning rate"):
        private_fit(request_of(optimizer=Sgd(lr=1e38), epochs=3))


class Watching(Sequential):
    """Compares the loss of a batch with the mean over those of its records."""

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, PrivateFit):
            rows = range(6)
            data, params = request.data, request.params
            x = request.transform.clean(data.inputs(data.index[:6]))
            number = torch.tensor(7)
            batch = Batch(x, data.labels[:6], torch.ones(6), data.index[:6], torch.tensor(True), number)
            for objective in request.objectives:
                whole = gradient_of(request, objective, batch, params)
                singles = [gradient_of(request, objective, record_of(batch, k), params) for k in rows]
                assert torch.allclose(whole, torch.stack(singles).mean(0), atol=1e-4, rtol=1e-3)
                self.compared += 1
        return super().answer(request)


@pytest.mark.parametrize("name", [name for name in private_methods() if name != "fedsr"])
def test_losses_are_means_over_records(name: str) -> None:
    """Only then clipping record by record descends what the method means. FedSR draws noise for each record."""
    runtime = Watching()
    of = private(name, runtime, rounds=3, epochs=1)
    state = of.start()
    for _ in range(2):
        state = of.advance(state)
    assert runtime.compared == 6


@pytest.mark.parametrize("name", ["fedavg", "moon", "fpl", "fednh"])
def test_runtimes_agree(name: str) -> None:
    ends = []
    for runtime in (Sequential(), Workers(2), Cohort("cpu")):
        of = private(name, runtime, rounds=2, epochs=1)
        state = of.start()
        for _ in range(2):
            state = of.advance(state)
        assert of.private is not None
        ends.append((state.server.params, sorted(of.private.ledger.entries, key=repr)))
        runtime.close()
    for params, entries in ends[1:]:
        assert entries == ends[0][1]
        assert all(torch.equal(leaf, ends[0][0][name]) for name, leaf in params.items())


def test_methods_without_a_private_step_are_known() -> None:
    assert {"fedavg", "fedprox", "fpl", "fedproc", "fednh", "fedproto_avg", "fedopt", "feddyn"} <= {*private_methods()}
    assert not {"grace", "fedetf", "gpfl", "fedper_plus", "feddecorr", "pfedcspc", "fedpc"} & {*private_methods()}
    assert METHODS["fedavg"]().not_by_record == ""
    assert task_of().num_classes == 3
