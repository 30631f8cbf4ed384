"""The training loss of a round: the mean over the clients that counted, weighted by their examples, of the mean loss
over the steps of their main training."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubles import Faulty, Tampering, tiny, tiny_parts
from faults.wires import Wired
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Method
from protofed.data.batches import batch_at, training_plan
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.message import Reason, Refused, sealed
from protofed.engine.training import Training
from protofed.evaluation.evaluate import evaluate
from protofed.methods.fedasam import FedASAM
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.methods.fedrep import FedRep
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.fpl import FPL
from protofed.methods.local import LocalOnly
from protofed.optim.optimizers import Sgd
from protofed.runs.results import Round, parsed
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.jobs import Ticket
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.seeds import derive_seed

TRAINING = Training(rounds=2, epochs=2, batch_size=4, seed=3, optimizer=Sgd(lr=0.05, momentum=0.9))
RUNTIMES = {
    "workers": lambda: Workers(2),
    "streams": lambda: Cohort("cpu", executor="streams"),
    "stacked": lambda: Cohort("cpu", executor="stacked"),
    "a wire": Wired,
}
if torch.cuda.is_available():
    del RUNTIMES["workers"]  # a process that has used CUDA cannot be forked


def federation(method: Method[Any, Any, Any, Any], runtime: Any = None, training: Training = TRAINING) -> Federation:
    return Federation(method, tiny(), training, runtime or Sequential())


def by_hand(of: Federation, client: str, round: int, params: dict[str, torch.Tensor]) -> float:
    """The mean over the batches of a plain torch loop."""
    module = nn.ModuleDict(tiny_parts()).train()
    module.load_state_dict(params, strict=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    seed = derive_seed(of.client_context(client, round).step_seed, "request", 0)
    data, losses = of.task.clients[client], []
    plan = training_plan(data, 4, 2, Transform(), torch.Generator().manual_seed(seed))
    for step in range(len(plan.index)):
        batch = batch_at(data, plan, step, Transform())
        kept = batch.weight > 0
        optimizer.zero_grad()
        loss = F.cross_entropy(module["classifier"](module["features"](batch.x))[kept], batch.y[kept])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return sum(losses) / len(losses)


def expected(of: Federation, clients: list[str], round: int, params: dict[str, torch.Tensor]) -> float:
    sizes = {client: len(of.task.clients[client]) for client in clients}
    assert len(set(sizes.values())) > 1, "otherwise the weights do not show"
    return sum(sizes[c] * by_hand(of, c, round, params) for c in clients) / sum(sizes.values())


def test_it_is_the_mean_of_plain_loops_weighted_by_examples() -> None:
    of = federation(FedAvg())
    state = of.start()
    assert state.loss is None
    for number in range(2):
        before, state = state, of.advance(state)
        assert state.loss == pytest.approx(expected(of, list(of.ids), number, before.server.params), rel=1e-5)


@pytest.mark.parametrize(
    "runtime", [Faulty({"c01"}), Tampering("c01", lambda upload: {"nonsense": torch.zeros(1)})], ids=["fails", "lies"]
)
def test_a_client_that_is_left_out_does_not_count(runtime: Sequential) -> None:
    of = federation(FedAvg(), runtime)
    start = of.start()
    found = of.advance(start).loss
    assert found == pytest.approx(expected(of, ["c00", "c02", "c03"], 0, start.server.params), rel=1e-5)
    assert found != pytest.approx(expected(of, list(of.ids), 0, start.server.params), rel=1e-3)


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
@pytest.mark.parametrize("method", [FedAvg(), FPL(), FedSeProto(), FedRep(), FedASAM()], ids=lambda m: type(m).__name__)
def test_every_runtime_has_that_of_the_reference(method: Any, runtime: Any) -> None:
    losses = []
    for one in (Sequential(), runtime()):
        of, found = federation(method, one), []
        state = of.start()
        for _ in range(2):
            state = of.advance(state, evaluates=True)
            found.append(state.loss)
        one.close()
        losses.append(found)
    assert None not in losses[0]
    if isinstance(one, Cohort):
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    else:
        assert losses[1] == losses[0]


def test_it_is_that_of_the_first_training_with_the_configured_optimiser() -> None:
    """FedRep's head has an optimiser of its own and trains before the body; Twice trains twice as configured."""

    class Twice(LocalOnly):
        async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
            first = await super().train(client, message, memory)
            return await super().train(client, message, first.memory)

    once, twice = (federation(method).advance(federation(method).start()).loss for method in (LocalOnly(), Twice()))
    assert once == twice


def test_nothing_but_the_rounds_training_counts() -> None:
    """Neither fine-tuning before a test nor what happens at the end."""
    of = federation(FedProto())
    state = of.advance(of.advance(of.start()))
    assert of.finish(state).loss == state.loss
    tuned = Federation(FedAvg(), tiny(), TRAINING, fine_tune=1)
    after = tuned.advance(tuned.start())
    plain = federation(FedAvg())
    evaluate(tuned, after, {})
    assert after.loss == plain.advance(plain.start()).loss


def test_it_is_in_the_line_of_the_round_and_comes_back_with_all_its_bits() -> None:
    of = federation(FedAvg())
    state = of.advance(of.start())
    [line] = parsed(Round.of(state, 4).line())
    assert line.loss == state.loss


def test_a_line_of_an_older_version_has_none() -> None:
    [line] = parsed('{"round": 1, "participants": 4, "failures": {}}\n')
    assert line.loss is None


TICKET = Ticket("run", 0, "round", 1, "model", 1)


@pytest.mark.parametrize(
    ("said", "reason"),
    [("nan", Reason.NON_FINITE), ("inf", Reason.NON_FINITE), ("-1e999", Reason.NON_FINITE), ("x", Reason.UNDECODABLE)],
)
def test_what_a_message_says_of_its_loss_is_checked(said: str, reason: Reason) -> None:
    class Said(float):
        def __repr__(self) -> str:
            return said

    with pytest.raises(Refused) as found:
        _ = sealed(TICKET, {}, loss=Said(0.5)).loss
    assert found.value.reason == reason
    assert sealed(TICKET, {}, loss=0.1).loss == 0.1
    assert sealed(TICKET, {}).loss is None


class Boastful(Wired):
    """One client's message says that its loss is not finite."""

    def posted(self, job: Any, upload: Any, receipt: Any, loss: float | None = None) -> Any:
        return super().posted(job, upload, receipt, float("nan") if job.client == "c01" else loss)


def test_a_client_with_a_loss_that_is_not_finite_is_left_out() -> None:
    of, good = federation(FedAvg(), Boastful()), federation(FedAvg(), Faulty({"c01"}))
    state, without = of.advance(of.start()), good.advance(good.start())
    assert [(f.client, f.reason) for f in state.failures] == [("c01", Reason.NON_FINITE)]
    assert state.loss == without.loss
    assert all(torch.equal(state.server.params[n], without.server.params[n]) for n in without.server.params)
