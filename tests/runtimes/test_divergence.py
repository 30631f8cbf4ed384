"""A loss or a weight that is not finite is found in the fit where it happens, and the message says where it began."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import tiny
from protofed.method import Fit, Objective
from protofed.methods.ditto import Ditto
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedrep import FedRep
from protofed.optim import Sgd
from protofed.runtimes.cohort import Cohort
from protofed.runtimes.divergence import Diverged, are_finite, explained
from protofed.runtimes.federation import Federation, Training
from protofed.runtimes.jobs import Failure, Job, Reason
from protofed.runtimes.sequential import Sequential, fit
from protofed.runtimes.workers import Workers

RUNTIMES = {
    "sequential": Sequential,
    "streams": lambda: Cohort("cpu", executor="streams"),
    "stacked": lambda: Cohort("cpu", executor="stacked"),
    "workers": lambda: Workers(1),
}
if torch.cuda.is_available():
    del RUNTIMES["workers"]  # a process that has used CUDA cannot be forked


@dataclass(frozen=True)
class Bad(FedAvg):
    """Goes wrong in the last epoch, in one of several ways. A mask of infinities is harmless."""

    kind: str = "term"

    def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
        z = model.features(batch.x)
        masked = torch.where(batch.y[:, None] == 1, z, -torch.inf).logsumexp(1).exp().mean()
        return super().loss(model, batch, message, memory) + 0.0 * masked + self.term(z, batch.is_last_epoch)

    def term(self, z: Tensor, due: Tensor) -> Tensor:
        match self.kind:
            case "term":
                return torch.log(1.0 - due * 2.0)
            case "gradient":  # the root of a sum that has become 0: its slope is infinite
                return ((1.0 - due * 1.0) * z.square().sum()).sqrt()
            case "constant":  # has no gradient: the weights stay finite
                return torch.log(1.0 - due * 1.0).detach()
        return z.sum() * 0


def failures(method: Any, runtime: Any, **training: Any) -> list[Failure]:
    """What the runtime gives for one step at every client."""
    federation = Federation(method, tiny(), Training(rounds=1, epochs=2, batch_size=4, **training), runtime)
    with runtime.open(federation):
        server = federation.start().server
        jobs = _jobs(federation, server)
        found = dict(runtime.run(jobs))
    runtime.close()
    return [outcome for outcome in found.values() if isinstance(outcome, Failure)]


def _jobs(federation: Federation, server: Any) -> list[Any]:
    method = federation.method
    return [
        Job(c, method.train, federation.local(c, 0), method.message_for(server, c), None, method.init_memory)
        for c in federation.ids
    ]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_step_the_operation_and_the_term_are_named(runtime: str) -> None:
    found = failures(Bad(kind="term"), RUNTIMES[runtime]())
    assert [f.client for f in found] == ["c00", "c01", "c02", "c03"]
    assert {f.reason for f in found} == {Reason.DIVERGED}
    # c00 has 5 examples: two batches of at most 4 in each of two epochs, so the third step is the first of the last.
    assert found[0].detail.startswith("step 3 of 4: the loss was nan: it began with `log` in Bad.term (")
    assert "`return torch.log(1.0 - due * 2.0)`" in found[0].detail
    assert "for Bad.loss (" in found[0].detail, "the line of the loss that holds the term"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_loss_that_leaves_the_weights_finite_is_found_too(runtime: str) -> None:
    found = failures(Bad(kind="constant"), RUNTIMES[runtime]())
    assert len(found) == 4
    assert "step 3 of 4: the loss was -inf: it began with `log` in Bad.term" in found[0].detail


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_gradient_that_is_not_finite_is_told_from_the_loss(runtime: str) -> None:
    found = failures(Bad(kind="gradient"), RUNTIMES[runtime]())
    assert "step 3 of 4: the loss was finite, but the gradient of features.0.weight, " in found[0].detail
    assert "Backward0' returned nan values" in found[0].detail


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_masks_of_infinities_are_harmless(runtime: str) -> None:
    assert failures(Bad(kind="none"), RUNTIMES[runtime]()) == []


def test_a_step_that_is_too_long_is_the_optimisers() -> None:
    found = failures(FedAvg(), Sequential(), optimizer=Sgd(lr=1e38, weight_decay=1e30))
    assert "the optimiser's step took " in found[0].detail
    assert "out of bounds, from a finite gradient" in found[0].detail


def test_of_several_objectives_the_one_at_fault_is_named() -> None:
    @dataclass(frozen=True)
    class Second(FedRep):
        def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
            return super().loss(model, batch, message, memory) / (1 - batch.is_last_epoch * 1.0)

    assert "the loss was inf" in failures(Second(), Sequential())[0].detail
    requests: list[Fit] = []

    class Asked(Sequential):
        def answer(self, request: Any) -> Any:
            requests.append(request)
            return super().answer(request)

    failures(Ditto(), Asked())
    request = next(r for r in requests if isinstance(r, Fit))
    broken = Objective(lambda model, batch, *context: model.logits(batch.x).sum() / 0)
    both = replace(request, objectives=(*request.objectives, broken))
    assert str(explained(both, fit)).startswith("step 1 of 4, objective 2 of 2: the loss was ")


def test_what_does_not_happen_again_is_said_to_be_so() -> None:
    requests: list[Fit] = []

    class Asked(Sequential):
        def answer(self, request: Any) -> Any:
            requests.append(request)
            return super().answer(request)

    assert failures(FedAvg(), Asked()) == []
    assert "done again by itself, the same training stays finite" in str(explained(requests[0], fit))


def test_finite_by_hand() -> None:
    good = {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor([3]), "none": torch.empty(0)}
    huge = {"w": torch.tensor([3e38, -3e38])}
    losses = [torch.tensor(1.0), torch.tensor(3e38)]
    cases = [
        (good, losses),
        (huge, losses),  # sums in float64 do not overflow
        ({"w": torch.tensor([1.0, torch.nan])}, losses),
        (good, [torch.tensor(torch.inf)]),
        ({"w": torch.tensor([1.0, -torch.inf])}, []),
    ]
    assert are_finite(cases) == [True, True, False, False, False]


def test_the_server_that_trains_is_told_too() -> None:
    federation = Federation(FedAvg(), tiny(), Training(rounds=1), Sequential())
    central = federation.central(0, "round")
    loss = Objective(lambda model, batch: model.logits(batch.x).sum() / 0)
    with pytest.raises(Diverged, match="step 1 of 1: the loss was"):
        central.fit(loss, params=central.initial_params(), data=federation.task.clients["c00"])
