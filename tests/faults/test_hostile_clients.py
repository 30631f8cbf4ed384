"""A client that misbehaves inside the process: it is left out by name, and nobody else notices (V10, V11).

Every deed is tried under `sequential`, `workers` and `cohort` on the CPU. The round must be the one in which the client
was not asked, bit for bit, and the next round must be too.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import bits, job_of, memories, tiny
from protofed import RunFailed
from protofed.api.contexts import ClientContext, Reply
from protofed.api.task import ClientId, Task
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.methods.families import WeightUpload
from protofed.methods.moon import Moon
from protofed.runtimes import isolation
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.jobs import Reason
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.tree import Params, named_leaves

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|fork|Sparse).*")

BAD = "c01"
RUNTIMES: dict[str, Callable[[], Any]] = {
    "sequential": Sequential,
    "workers": lambda: Workers(2),
    "one worker": lambda: Workers(1),
    "cohort": lambda: Cohort("cpu"),
}
every_runtime = pytest.mark.parametrize(
    "runtime", ["sequential", "workers", pytest.param("one worker", marks=pytest.mark.slow), "cohort"]
)
TRAINING = Training(rounds=3, epochs=1, batch_size=8, seed=3)

Deed = Callable[[ClientContext, Any, Any], Any]
"""Done by the bad client before it trains. What it returns changes the reply."""


@dataclass(frozen=True)
class Hostile(Moon):
    """In the second round, the bad client does something else."""

    deed: Deed = lambda client, message, memory: None
    first_memory: Callable[[Any, Any], Any] | None = None

    def init_memory(self, client: ClientContext, message: Any) -> Any:
        if self.first_memory is not None and client.id == BAD:
            return self.first_memory(client, message)
        return super().init_memory(client, message)

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if (client.id, client.round) != (BAD, 1):
            return await super().train(client, message, memory)
        change = self.deed(client, message, memory)
        reply = await super().train(client, message, memory)
        return change(reply) if callable(change) else reply


class WithoutBad(Federation):
    def sampled(self, *_: Any, **__: Any) -> tuple[ClientId, ...]:
        return tuple(client for client in self.ids if client != BAD)


def federation(runtime: Any, task: Task | None = None, **hostile: Any) -> Federation:
    return Federation(Hostile(**hostile), task or pooled(), TRAINING, runtime)


def pooled() -> Task:
    """All clients' examples are rows of one tensor, as in most tasks."""
    task = tiny(5)
    x, y = torch.cat([data.x for data in task.clients.values()]), torch.cat([d.y for d in task.clients.values()])
    begin, clients = 0, {}
    for name, data in task.clients.items():
        clients[name] = replace(data, x=x, y=y, index=data.index + begin)
        begin += len(data)
    return replace(task, clients=clients)


def everything(state: State) -> dict[str, Any]:
    return bits({"server": state.server, "memories": dict(sorted(memories(state).items()))})


def same_without(kind: str, expects: str, **hostile: Any) -> None:
    """A round with a hostile client must be the one without it, and so must the next one, in which it is good."""
    runtime, calm = RUNTIMES[kind](), RUNTIMES[kind]()
    of, other = federation(runtime, **hostile), WithoutBad(Moon(), pooled(), TRAINING, calm)
    whole = Federation(Moon(), other.task, TRAINING, calm)
    try:
        first = replace(of, method=Moon()).advance(of.start())
        found, expected = of.advance(first), other.advance(first)
        assert [(f.client, str(f.reason)) for f in found.failures] == [(BAD, expects)], found.failures
        assert everything(found) == everything(expected)
        found, expected = of.advance(found), whole.advance(expected)
        assert found.failures == ()
        assert everything(found) == everything(expected)
    finally:
        runtime.close()
        calm.close()


# ---- V10: what is no tensor, or no ordinary one


class Treacherous(Tensor):
    """Runs code of its maker at every question."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise SystemExit("the server has run a client's code")


def resized(leaf: Tensor) -> Tensor:
    new = leaf.clone()
    new.untyped_storage().resize_(0)
    return new


def escaped(leaf: Tensor) -> Tensor:
    kept: list[Tensor] = []
    torch.func.vmap(lambda one: (kept.append(one), one)[1])(torch.stack([leaf, leaf]))
    return kept[0]


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "nested": lambda leaf: torch.nested.nested_tensor([leaf.flatten(), leaf.flatten()[:1]]),
    "jagged": lambda leaf: torch.nested.nested_tensor([leaf.flatten(), leaf.flatten()[:1]], layout=torch.jagged),
    "resized storage": resized,
    "subclass": lambda leaf: leaf.clone().as_subclass(Treacherous),
    "sparse": lambda leaf: leaf.to_sparse(),
    "meta": lambda leaf: leaf.to("meta"),
    "complex NaN": lambda leaf: torch.complex(leaf, torch.full_like(leaf, torch.nan)),
    "negative view": lambda leaf: torch.complex(leaf, leaf).conj().imag,
    "out of vmap": escaped,
    "word": lambda leaf: "three",
    "function": lambda leaf: lambda: None,
    "nothing": lambda leaf: None,
}


def first_changed(params: Params, leaf: Callable[[Tensor], Any]) -> dict[str, Any]:
    name = next(name for name in params if name.endswith("weight"))
    return {**params, name: leaf(params[name].detach())}


def uploaded(leaf: str) -> Deed:
    """The first weights that are sent are something else."""

    def changed(reply: Reply[Any, Any]) -> Reply[Any, Any]:
        return replace(reply, upload=replace(reply.upload, params=first_changed(reply.upload.params, LEAVES[leaf])))

    return lambda *_: changed


@every_runtime
@pytest.mark.parametrize("leaf", LEAVES)
def test_an_upload_of_no_ordinary_tensors_costs_its_client_alone(leaf: str, runtime: str) -> None:
    same_without(runtime, "DTYPE_MISMATCH", deed=uploaded(leaf))


def remembered(change: Callable[[Any], Any]) -> Deed:
    return lambda *_: lambda reply: replace(reply, memory=change(reply.memory))


@every_runtime
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_memory_of_no_ordinary_tensors_costs_its_client_alone(leaf: str, runtime: str) -> None:
    deed = remembered(lambda memory: in_first_dict(memory, lambda params: first_changed(params, LEAVES[leaf])))
    same_without(runtime, "DTYPE_MISMATCH", deed=deed)


def in_first_dict(value: Any, change: Callable[[Params], Any]) -> Any:
    """The record with its first dict changed."""
    name = next(name for name in value.__dataclass_fields__ if isinstance(getattr(value, name), dict))
    return replace(value, **{name: change(getattr(value, name))})


MEMORIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a name less": (lambda m: in_first_dict(m, lambda p: dict(list(p.items())[1:])), "KEY_MISSING"),
    "a name more": (lambda m: in_first_dict(m, lambda p: {**p, "more": torch.zeros(1)}), "KEY_UNEXPECTED"),
    "no record": (lambda m: "three", "DTYPE_MISMATCH"),
    "nothing": (lambda m: None, "DTYPE_MISMATCH"),
    "very deep": (lambda m: in_first_dict(m, lambda p: {**p, "more": nested(100_000)}), "UNDECODABLE"),
    "NaN": (lambda m: in_first_dict(m, lambda p: first_changed(p, lambda t: t * torch.nan)), "NON_FINITE"),
}


@every_runtime
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_could_not_be_loaded_again_costs_its_client_alone(memory: str, runtime: str) -> None:
    change, reason = MEMORIES[memory]
    same_without(runtime, reason, deed=remembered(change))


# ---- V10: ways to leave


class Leaving(BaseException):
    pass


def left(error: BaseException) -> Deed:
    def leave(*_: Any) -> None:
        raise error

    return leave


EXITS: dict[str, BaseException] = {
    "SystemExit": SystemExit(0),
    "GeneratorExit": GeneratorExit(),
    "another": Leaving("now"),
    "Stop": StopIteration(WeightUpload),
    "RunFailed": RunFailed("so says a client"),
}


@every_runtime
@pytest.mark.parametrize("error", EXITS)
def test_a_step_that_leaves_costs_its_client_alone(error: str, runtime: str) -> None:
    same_without(runtime, "CLIENT_ERROR", deed=left(EXITS[error]))


@dataclass(frozen=True)
class LeavesInItsLoss(Hostile):
    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        if (client.id, client.round) == (BAD, 1):
            await client.total(leaving, message.params)
        return await super().train(client, message, memory)


def leaving(*_: Any) -> Any:
    raise SystemExit(3)


@every_runtime
def test_a_loss_that_leaves_costs_its_client_alone(runtime: str) -> None:
    of = Federation(LeavesInItsLoss(), pooled(), TRAINING, RUNTIMES[runtime]())
    try:
        first = replace(of, method=Moon()).advance(of.start())
        found = of.advance(first)
        expected = WithoutBad(Moon(), of.task, TRAINING, of.runtime).advance(first)
    finally:
        of.runtime.close()
    assert [(f.client, f.reason) for f in found.failures] == [(BAD, Reason.CLIENT_ERROR)]
    assert "SystemExit: 3" in found.failures[0].detail
    assert everything(found) == everything(expected)


@pytest.mark.parametrize("runtime", ["sequential", "cohort"])
def test_ctrl_c_and_handlers_of_signals_are_no_clients_failure(runtime: str) -> None:
    """R8. What the user's own handler raises, such as at a time limit, ends the run."""
    of = federation(RUNTIMES[runtime](), deed=lambda *_: signal.raise_signal(signal.SIGUSR1))
    first = replace(of, method=Moon()).advance(of.start())
    before = signal.signal(signal.SIGUSR1, out_of_time)
    try:
        with pytest.raises(TimeoutError, match="no more time"):
            of.advance(first)
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            of.advance(first)
    finally:
        signal.signal(signal.SIGUSR1, before)


@every_runtime
def test_what_a_callback_raises_is_no_clients_failure(runtime: str) -> None:
    """R8. An observer of a run that fails ends the run."""

    def fails(client: ClientId) -> None:
        raise ZeroDivisionError(client)

    of = replace(federation(RUNTIMES[runtime]()), on_client=fails)
    try:
        with pytest.raises(ZeroDivisionError, match="c00"):
            of.advance(of.start())
    finally:
        of.runtime.close()


def out_of_time(number: int, frame: Any) -> None:
    raise TimeoutError("no more time")


# ---- V11: changes in place


def weights_of(value: Any) -> Tensor:
    return next(leaf for name, leaf in named_leaves(value).items() if name.endswith("features.0.weight"))


CHANGES: dict[str, Deed] = {
    "its message": lambda client, message, memory: weights_of(message).zero_(),
    "its message, through a view": lambda client, message, memory: weights_of(message)[1:].view(-1).mul_(5),
    "its message, detached": lambda client, message, memory: weights_of(message).detach().t().add_(1),
    "its message, several at once": lambda client, message, memory: torch._foreach_add_([weights_of(message)], 1.0),
    "its memory": lambda client, message, memory: weights_of(memory).zero_(),
    "examples of all": lambda client, message, memory: client.data.x.zero_(),
    "labels of all": lambda client, message, memory: client.data.y.zero_(),
    "public examples": lambda client, message, memory: client.public.x.zero_(),
    "buffers of the networks": lambda client, message, memory: client.networks.initial_buffers[
        "features.1.running_var"
    ].zero_(),
    "default type": lambda client, message, memory: torch.set_default_dtype(torch.float64),
    "gradients": lambda client, message, memory: torch.set_grad_enabled(False),
    "threads": lambda client, message, memory: lambda reply: (torch.set_num_threads(3), reply)[1],
    "determinism": lambda client, message, memory: torch.use_deterministic_algorithms(True),
    "device": lambda client, message, memory: torch.set_default_device("meta"),
}


@every_runtime
@pytest.mark.parametrize("change", CHANGES)
def test_a_client_that_changes_what_others_share_is_left_out(change: str, runtime: str) -> None:
    same_without(runtime, "CHANGED_SHARED", deed=CHANGES[change])


@pytest.mark.parametrize("deed", ["resized", "other data"])
def test_a_cohort_puts_back_what_has_lost_its_memory(deed: str) -> None:
    """V11. Its clients work on one copy of what was sent to all."""

    def changed(client: ClientContext, message: Any, memory: Any) -> None:
        if deed == "resized":
            weights_of(message).untyped_storage().resize_(0)
        else:
            weights_of(message).data = torch.zeros(8, 12)

    same_without("cohort", "CHANGED_SHARED", deed=changed)


@pytest.mark.parametrize("runtime", ["sequential", "workers", "one worker"])
@pytest.mark.parametrize("alias", ["data", "numpy", "names"])
def test_a_change_that_cannot_be_seen_reaches_nobody(alias: str, runtime: str) -> None:
    """What a client does to its message by another name does no harm to others: it has a copy."""

    def changed(client: ClientContext, message: Any, memory: Any) -> Any:
        def spoil(reply: Reply[Any, Any]) -> Reply[Any, Any]:
            if alias == "data":
                weights_of(message).data.zero_()
            elif alias == "numpy":
                weights_of(message).numpy()[:] = 7
            else:
                message.params.clear()
            return reply

        return spoil

    of = federation(RUNTIMES[runtime](), deed=changed)
    first = replace(of, method=Moon()).advance(of.start())
    try:
        found = of.advance(first)
    finally:
        of.runtime.close()
    expected = Federation(Moon(), of.task, TRAINING).advance(first)
    assert found.failures == ()
    assert everything(found) == everything(expected)


KEPT: list[Tensor] = []


def test_an_upload_cannot_be_changed_after_it_was_checked() -> None:
    """The client keeps a hold of what it sent."""

    def kept(reply: Reply[Any, Any]) -> Reply[Any, Any]:
        KEPT[:] = list(named_leaves(reply.upload).values())
        return reply

    of = federation(Sequential(), deed=lambda *_: kept)
    first = replace(of, method=Moon()).advance(of.start())
    message = of.method.message_for(first.server, BAD)
    [(_, answer)] = of.runtime.run([job_of(of, BAD, message, first.receipts[BAD], round=1)])
    before = bits(answer.upload)
    for leaf in KEPT:
        leaf.zero_()
    assert bits(answer.upload) == before


@pytest.mark.parametrize("runtime", ["sequential", "cohort"])
@pytest.mark.parametrize("has_room", [True, False])
def test_what_cannot_be_put_back_ends_the_run_by_name(
    runtime: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V11. Examples beyond a limit are not kept twice, and memory that was taken from them cannot be given back."""
    deed: Deed = lambda client, *_: client.data.x.zero_()  # noqa: E731
    if has_room:
        deed = lambda client, *_: client.data.x.untyped_storage().resize_(0)  # noqa: E731
    of = federation(RUNTIMES[runtime](), deed=deed)
    if not has_room:
        of.runtime._shared = isolation.SharedTensors(most_bytes=100)
    first = replace(of, method=Moon()).advance(of.start())
    with pytest.raises(RunFailed, match="client c01 changed its examples in place, and that cannot be put back"):
        of.advance(first)


def test_processes_leave_such_a_client_out() -> None:
    """V11. Its process ends, and with it what it has changed."""
    same_without("one worker", "CHANGED_SHARED", deed=lambda client, *_: client.data.x.untyped_storage().resize_(0))


# ---- first memories, which are made before the first step

FIRST: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "leaves": (lambda client, message: leaving(), "CLIENT_ERROR"),
    "a function": (lambda client, message: {"params": lambda: None}, "CLIENT_ERROR"),
    "a subclass": (lambda client, message: first_changed(message.params, LEAVES["subclass"]), "CLIENT_ERROR"),
    "resized": (lambda client, message: first_changed(message.params, resized), "CLIENT_ERROR"),
    "changes its message": (lambda client, message: weights_of(message).zero_(), "CHANGED_SHARED"),
}


@every_runtime
@pytest.mark.parametrize("first", FIRST)
def test_a_first_memory_costs_its_client_alone(first: str, runtime: str) -> None:
    memory, reason = FIRST[first]
    of = federation(RUNTIMES[runtime](), first_memory=memory)
    try:
        found = of.advance(of.start())
        expected = WithoutBad(Moon(), of.task, TRAINING, of.runtime).advance(of.start())
    finally:
        of.runtime.close()
    assert [(f.client, str(f.reason)) for f in found.failures] == [(BAD, reason)], found.failures
    assert everything(found) == everything(expected)
