"""A loss or a weight that is not finite is found in the fit where it happens, and the message says where it began."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import Faulty, Watching, bits, job_of, tiny
from protofed import BadInput, RunFailed
from protofed.api.contexts import Reply
from protofed.api.requests import Fit, Fitted, Objective
from protofed.engine.federation import Federation
from protofed.engine.message import bounds
from protofed.engine.round import RoundClients
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.methods.ditto import Ditto
from protofed.methods.families import WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedavg_ft import FedAvgFT
from protofed.methods.fedrep import FedRep
from protofed.optim.optimizers import Sgd
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.divergence import Diverged, are_finite, explained
from protofed.runtimes.jobs import NO_TICKET, Failure, Reason
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
            case "descended":
                return z.exp().sum() / (1.0 - due * 1.0)
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
    return [job_of(federation, c, federation.method.message_for(server, c)) for c in federation.ids]


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


def test_what_is_only_recorded_beside_the_loss_is_not_blamed() -> None:
    @dataclass(frozen=True)
    class Recording(Bad):
        def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
            torch.log(1.0 - batch.is_last_epoch * 2.0)  # not a number, and of no consequence
            return super().loss(model, batch, message, memory)

    found = failures(Recording(kind="descended"), Sequential())
    assert "step 3 of 4: the loss was inf: it began with `div` in Bad.term" in found[0].detail.replace(
        "__", ""
    ).replace("truediv", "div")


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
    central = federation.server_context(0, "round")
    loss = Objective(lambda model, batch: model.logits(batch.x).sum() / 0)
    with pytest.raises(Diverged, match="step 1 of 1: the loss was"):
        central.fit(loss, params=central.initial_params(), data=federation.task.clients["c00"])


# ---- what a run then does


@dataclass(frozen=True)
class Fragile(FedAvg):
    """Diverges at client c01 (the only one with nine examples) while the learning rate is above a limit."""

    limit: float = 0.02

    async def train(self, local: Any, message: Any, memory: Any) -> Any:
        term = Objective(partial(self.breaking, local.id == "c01" and local.optimizer.lr > self.limit))
        params = await local.fit(term, params=message.params)
        return Reply(WeightUpload(params, local.num_examples), memory)

    def breaking(self, is_due: bool, model: Any, batch: Any) -> Tensor:
        loss = batch.cross_entropy(model.logits(batch.x))
        return loss / 0 if is_due else loss


def federation(policy: Any, lr: float = 0.1, **settings: Any) -> Federation:
    training = Training(rounds=1, epochs=1, batch_size=4, on_divergence=policy, optimizer=Sgd(lr=lr), **settings)
    return Federation(Fragile(), tiny(), training)


def test_by_default_the_run_stops_and_says_who_and_where() -> None:
    of = federation("stop")
    with pytest.raises(RunFailed) as caught:
        of.advance(of.start())
    message = str(caught.value)
    assert message.startswith("round 1: client c01 diverged with Fragile: step 1 of 3: the loss was inf")
    assert "`return loss / 0 if is_due else loss`" in message
    assert 'set training.on_divergence to "retry_half_lr" or "skip"' in message


def test_a_client_may_be_skipped() -> None:
    of = federation("skip")
    state = of.advance(of.start())
    assert [(f.client, f.reason) for f in state.failures] == [("c01", Reason.DIVERGED)]
    without = Federation(Fragile(), tiny(), of.training, Faulty({"c01"}))
    assert bits(state.server) == bits(without.advance(without.start()).server)
    assert state.strikes == {}, "to diverge is no offence"


def test_a_client_may_repeat_its_round_at_half_the_rate_until_it_stays_finite() -> None:
    """0.1 is halved to 0.05, 0.025 and 0.0125, which is below the limit of 0.02."""
    of = federation("retry_half_lr")
    state = of.advance(of.start())
    assert state.repeats == {"c01": 3}
    assert state.failures == ()
    seen: dict[str, Any] = {}
    watched = replace(of, runtime=Watching(lambda client, _, upload: seen.update({client: upload.params})))
    watched.advance(watched.start())
    alone = federation("stop", lr=0.0125)
    found: dict[str, Any] = {}
    alone = replace(alone, runtime=Watching(lambda client, _, upload: found.update({client: upload.params})))
    alone.advance(alone.start())
    assert bits(seen["c01"]) == bits(found["c01"]), "the round is the one with the lower rate"
    assert bits(seen["c00"]) != bits(found["c00"]), "others keep theirs"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Ditto(personal_lr=0.08), [0.025, 0.02]),
        (Ditto(), [0.025, 0.025]),
        (FedRep(head_lr=0.08), [0.02, 0.025]),
        (FedAvgFT(fine_tuning_lr=0.08, fine_tuning_optimizer="sgd"), [0.025, 0.02]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rate_that_the_method_sets_is_halved_too(method: Any, expected: list[float]) -> None:
    """The second repetition: a quarter of 0.08, and of the configured 0.1."""
    of = Federation(method, tiny(), federation("retry_half_lr").training)
    clients = RoundClients(of, State(0, of.initial_server, {}), of.ids, "round")
    call = SimpleNamespace(ticket=NO_TICKET, tests="none", sent={"c01": method.message_for(of.initial_server, "c01")})
    call.validator = SimpleNamespace(bounds=bounds({}))
    call.step, call.evaluates = method.train, False
    job = clients._job("c01", call, halvings=2)
    rates: list[float] = []

    def noted(request: Any) -> Any:
        rates.append(request.optimizer.lr)
        return Fitted(request.params, (), (), None)

    of.runtime.answer = noted
    of.runtime.reply(job, job.memory(of.runtime.store))
    assert rates == expected


@dataclass(frozen=True)
class FragileOwn(Fragile):
    """Diverges at client c01 while a rate of the method's own, halved, is above the limit."""

    async def train(self, local: Any, message: Any, memory: Any) -> Any:
        term = Objective(partial(self.breaking, local.id == "c01" and 0.08 / 2**local.halvings > self.limit))
        return Reply(WeightUpload(await local.fit(term, params=message.params), local.num_examples), memory)


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_a_client_is_told_how_often_its_rate_was_halved(runtime: Any) -> None:
    with_runtime = runtime()
    of = Federation(FragileOwn(), tiny(), federation("retry_half_lr").training, with_runtime)
    state = of.advance(of.start())
    with_runtime.close()
    assert state.repeats == {"c01": 2}
    assert state.failures == ()


def test_a_client_that_diverges_at_any_rate_is_left_out() -> None:
    of = replace(federation("retry_half_lr"), method=Fragile(limit=1e-6))
    state = of.advance(of.start())
    assert [(f.client, f.reason) for f in state.failures] == [("c01", Reason.DIVERGED)]
    assert state.repeats == {"c01": 5}


def test_an_optimiser_without_a_rate_cannot_be_halved() -> None:
    class Odd:
        for_round = init = step = None

    with pytest.raises(BadInput, match="has no learning rate to be halved"):
        Federation(FedAvg(), tiny(), Training(optimizer=Odd(), on_divergence="retry_half_lr"))  # type: ignore[arg-type]


def test_a_server_whose_state_is_not_finite_ends_the_run_before_it_is_saved() -> None:
    @dataclass(frozen=True)
    class Exploding(FedAvg):
        def aggregate(self, server: Any, uploads: Any, central: Any) -> Any:
            server = super().aggregate(server, uploads, central)
            return replace(server, params={name: leaf / 0 for name, leaf in server.params.items()})

    of = Federation(Exploding(), tiny(), Training(rounds=1, epochs=1))
    with pytest.raises(RunFailed, match=r"round 1: the server's params/.* is not finite; what was saved is intact"):
        of.advance(of.start())


def test_a_server_that_diverges_while_it_trains_ends_the_run() -> None:
    @dataclass(frozen=True)
    class Retraining(FedAvg):
        def aggregate(self, server: Any, uploads: Any, central: Any) -> Any:
            server = super().aggregate(server, uploads, central)
            loss = Objective(lambda model, batch: model.logits(batch.x).sum() / 0)
            return replace(server, params=central.fit(loss, params=server.params, data=tiny().clients["c00"]))

    of = Federation(Retraining(), tiny(), Training(rounds=1, epochs=1))
    with pytest.raises(RunFailed, match="the server's own training diverged: step 1 of 1: the loss was"):
        of.advance(of.start())
