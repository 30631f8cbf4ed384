"""Secure sums in a federation: the same state bit for bit, whoever drops out where, and what is refused."""

import dataclasses
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

import protofed
from methods.conformance import assert_close, assert_same, federation, memories, small_task
from protofed import BadInput, RunFailed, SecureSettings
from protofed.api.method import Method
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.methods import METHODS
from protofed.privacy.exchanges import MaskedUpload, Request, UnmaskingUpload
from protofed.runs.config import config
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.jobs import Answer, Failure, Job, Outcome, Reason
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers
from protofed.transforms.chain import UploadSettings

TASK = small_task({f"c{k:02d}": [k % 4, 1, 2, 3, 0, 1, k % 3][: 4 + k % 4] for k in range(10)})
GLOBAL = {"contrast_with": "global", "consistent_with": "global"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fpl, global": GLOBAL,
    "fpl_sums": {"lloyd_steps": 2},
    "fedmd": {"alignment_size": 8, "first_epochs": 1},
    "ccvr": {"samples": 5, "epochs": 1},
    "fedavg_ft": {"fine_tuning_epochs": 1},
    "fedavg, uniform": {"weighting": "uniform"},
    "ifca, uniform": {"weighting": "uniform"},
}


def method_of(case: str) -> Method[Any, Any, Any, Any]:
    return METHODS[case.partition(",")[0]](**SETTINGS.get(case, {}))


CASES = sorted(case for case in {*METHODS, *SETTINGS} if method_of(case).sums)
STEPS = {1: "Advertise", 2: "ShareOut", 3: "AddMasked", 4: "Agree", 5: "Unmask"}
GONE = ("c01", "c04", "c07")


class Dropping(Sequential):
    """A runtime in which some clients do not answer in one kind of exchange, after so many calls of a phase."""

    def __init__(self, gone: tuple[str, ...] = (), kind: str = "", after: int = 0) -> None:
        super().__init__()
        self.gone, self.kind, self.after = gone, kind, after

    def run(self, jobs: Any) -> Iterator[Outcome]:
        for job in jobs:
            is_told = type(job.step).__name__ == self.kind and job.ticket.call > self.after
            if job.client in self.gone and is_told:
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to")
            else:
                yield from super().run([self.told(job)])

    def told(self, job: Job) -> Job:
        return job


def secure(method: Method[Any, Any, Any, Any], runtime: Any = None, masks: bool = True, **training: Any) -> Federation:
    of = federation(method, TASK, runtime, **{"epochs": 1, "rounds": 1, "quarantine": 0, **training})
    return dataclasses.replace(of, secure=SecureSettings(sums=True, masks=masks).made())


def end_of(of: Federation) -> State:
    return of.finish(of.advance(of.start()))


def whole(state: State) -> dict[str, Any]:
    return {"server": state.server, "memories": memories(state)}


def check(case: str, exchange: int, count: int) -> None:
    """Those that drop out before adding are not in the sum, and those that drop out after it are, but in no other one
    of the same phase."""
    gone = GONE[:count]
    masked = end_of(secure(method_of(case), Dropping(gone, STEPS[exchange])))
    plain = end_of(secure(method_of(case), Dropping(gone, "Add", after=int(exchange > 3)), masks=False))
    assert_same(whole(masked), whole(plain), f"{case} with {count} gone in exchange {exchange}")


OF_EACH_KIND = {
    "fedavg",
    "fednova",
    "fpl, global",
    "fpl_sums",
    "fedpc_sums",
    "fednh",
    "ifca",
    "ccvr",
    "scaffold",
    "local",
}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=case, marks=() if case in OF_EACH_KIND else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_masked_sums_end_in_the_same_state_as_sums_without_masks(number: int) -> None:
    """Each method with all clients, and with three gone in one of the exchanges."""
    check(CASES[number], 1, 0)
    check(CASES[number], 1 + number % 5, 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("exchange", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_masked_sums_end_in_the_same_state_whoever_drops_out(case: str, exchange: int, count: int) -> None:
    check(case, exchange, count)


@pytest.mark.parametrize("case", ["fedavg", "fedproto", "ifca", "scaffold", "fedproc"])
def test_sums_in_fixed_point_are_those_in_floating_point_but_for_rounding(case: str) -> None:
    summed = end_of(secure(method_of(case), masks=False))
    usual = end_of(federation(method_of(case), TASK, epochs=1, rounds=1))
    assert_close(whole(summed), whole(usual), case, within=1e-6)


@pytest.mark.parametrize("runtime", [Workers, Cohort], ids=["workers", "cohort"])
def test_in_every_runtime_the_sums_are_the_same(runtime: Any) -> None:
    of = secure(method_of("fedprox"), runtime(2) if runtime is Workers else runtime())
    try:
        other = end_of(of)
    finally:
        of.runtime.close()
    plain = end_of(federation(method_of("fedprox"), TASK, Workers(2) if runtime is Workers else Cohort(), epochs=1))
    assert_close(other.server, plain.server, "the server's state", within=1e-6)


def test_what_arrives_in_the_clear_is_no_upload_and_no_loss() -> None:
    """The server is handed keys, sealed shares, whole numbers, signatures and shares, none of these twice the same."""
    seen: list[tuple[str, dict[str, Tensor]]] = []

    class Tap(Dropping):
        def run(self, jobs: Any) -> Iterator[Outcome]:
            for client, outcome in super().run(jobs):
                assert isinstance(outcome, Answer)
                assert outcome.loss is None
                seen.append((client, dict(protofed.tree.named_leaves(outcome.upload))))
                yield client, outcome

    state = secure(method_of("fedavg"), Tap())
    ended = end_of(state)
    assert ended.loss is None
    assert len(seen) == 50
    kinds = {(path, leaf.dtype) for _, leaves in seen for path, leaf in leaves.items()}
    assert {path for path, _ in kinds} == {"sealing", "masking", "signature", "sealed", "numbers", "shares"}
    assert not any(dtype.is_floating_point for _, dtype in kinds)
    numbers = [leaves["numbers"] for _, leaves in seen if "numbers" in leaves]
    assert len({tuple(x.tolist()) for x in numbers}) == 10
    assert all((x.abs() > 2**56).double().mean() > 0.9 for x in numbers), "masked numbers fill all 64 bits"


def test_one_that_lies_about_the_message_to_a_client_learns_nothing_of_it() -> None:
    """The client notes that the model is not the one that all were announced, and gives nothing."""

    class Crafted(Dropping):
        def told(self, job: Job) -> Job:
            if job.client == "c03" and isinstance(job.message, Request):
                base = protofed.tree.map(lambda leaf: leaf + 1, job.message.base)
                return dataclasses.replace(job, message=dataclasses.replace(job.message, base=base))
            return job

    state = secure(method_of("fedavg"), Crafted()).advance(secure(method_of("fedavg")).start())
    [failure] = state.failures
    assert failure.client == "c03"
    assert "not the one that was announced" in failure.detail


def test_a_sum_in_which_masks_were_left_is_refused() -> None:
    """T12: A client that adds noise of all 64 bits: what is left cannot be a sum of numbers."""

    class Noisy(Dropping):
        def run(self, jobs: Any) -> Iterator[Outcome]:
            for client, outcome in super().run(jobs):
                if client == "c02" and isinstance(outcome, Answer) and isinstance(outcome.upload, MaskedUpload):
                    noise = torch.randint(-(2**63), 2**63 - 1, outcome.upload.numbers.shape)
                    outcome = dataclasses.replace(outcome, upload=MaskedUpload(noise))
                yield client, outcome

    of = secure(method_of("fedavg"), Noisy(), attempts=1)
    with pytest.raises(RunFailed, match="masks were left"):
        of.advance(of.start())


def test_a_weight_that_is_not_the_public_one_is_refused_at_the_client_and_in_the_sum() -> None:
    class Heavy(METHODS["fedavg"]):  # type: ignore[misc]
        def summand(self, upload: Any, message: Any) -> Any:
            return {"upload": (upload.params, 1000.0)}

    of = secure(Heavy(), attempts=1)
    with pytest.raises(RunFailed, match="must be public"):
        of.advance(of.start())

    class Liar(Dropping):
        """One whose own code was changed: it adds 17 to the sum of the weights, which comes first."""

        def run(self, jobs: Any) -> Iterator[Outcome]:
            for client, outcome in super().run(jobs):
                if client == "c02" and isinstance(outcome, Answer) and isinstance(outcome.upload, MaskedUpload):
                    numbers = outcome.upload.numbers.clone()
                    numbers[0] += 17 * 2**34
                    outcome = dataclasses.replace(outcome, upload=MaskedUpload(numbers))
                yield client, outcome

    of = secure(method_of("fedavg"), Liar(), attempts=1)
    with pytest.raises(RunFailed, match="counts 70 in the sum, and clients together 53"):
        of.advance(of.start())


def test_a_round_is_unmasked_once() -> None:
    """Six have given their shares when the round is abandoned: they do not help to unmask it again."""

    class Late(Dropping):
        def run(self, jobs: Any) -> Iterator[Outcome]:
            for client, outcome in super().run(jobs):
                unmasks = isinstance(outcome, Answer) and isinstance(outcome.upload, UnmaskingUpload)
                lost = unmasks and client in ("c00", *GONE)
                yield client, Failure(client, Reason.LATE, "told to") if lost else outcome

    of = secure(method_of("fedavg"), Late(), attempts=2)
    with pytest.raises(RunFailed, match="Given up after 2 attempts"):
        of.advance(of.start())
    of = secure(method_of("fedavg"), Dropping(("c00", *GONE), "AddMasked"), attempts=2)
    with pytest.raises(RunFailed, match="6 clients have added something, and the sum needs 7"):
        of.advance(of.start())


def test_clients_keep_what_they_learnt_if_they_are_in_the_sum() -> None:
    """SCAFFOLD's control variates: of a client that dropped out before adding, that of the round before."""
    start = secure(method_of("scaffold")).start()
    for exchange, kept in ((3, False), (4, True)):
        state = secure(method_of("scaffold"), Dropping(("c04",), STEPS[exchange])).advance(start)
        control = memories(state)["c04"].control if "c04" in state.receipts else {}
        assert any(bool(leaf.any()) for leaf in control.values()) == kept


# ---- what is refused


NOT_SUMS = sorted(name for name in METHODS if not METHODS[name]().sums)


@pytest.mark.parametrize("name", NOT_SUMS)
def test_methods_that_read_single_uploads_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"secure\.sums and method\.name"):
        secure(METHODS[name]())


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"clip": "median"}, "uploads.clip"),
        ({"precision": "bfloat16"}, "uploads.precision"),
        ({"min_owners": 2}, "uploads.min_owners"),
        ({"max_prototype_ratio": 10}, "uploads.max_prototype_ratio"),
        ({"max_update_ratio": 10}, "uploads.max_update_ratio"),
    ],
)
def test_what_changes_single_uploads_is_refused(settings: dict[str, Any], key: str) -> None:
    of = federation(method_of("fedavg"), TASK)
    pipeline = UploadSettings(**settings).pipeline()
    with pytest.raises(BadInput, match=f"secure.sums and {key}"):
        dataclasses.replace(of, uploads=pipeline, secure=SecureSettings(sums=True).made())


def test_nothing_of_a_rare_class_is_added() -> None:
    """Every client has one example of class 3, and more of other classes: nobody adds to its prototype."""
    task = small_task({f"c{k}": [0, 0, 1, 1, 3] for k in range(4)})
    ends = []
    for minimum in (0, 2):
        of = federation(METHODS["fednh"](), task, epochs=1, rounds=1, quarantine=0)
        pipeline = UploadSettings(min_class_count=minimum).pipeline()
        of = dataclasses.replace(of, uploads=pipeline, secure=SecureSettings(sums=True, masks=False).made())
        before = of.start()
        ends.append(of.advance(before).server.params["classifier.prototypes"])
    first = before.server.params["classifier.prototypes"]
    assert not torch.equal(ends[0][3], first[3])
    assert torch.equal(ends[1][3], first[3])
    assert not torch.equal(ends[1][0], first[0])


def test_too_few_clients_and_their_evaluations_are_refused() -> None:
    with pytest.raises(BadInput, match=r"training\.fraction: 2 clients"):
        secure(method_of("fedavg"), fraction=0.2)
    of = secure(method_of("fedavg"))
    with pytest.raises(BadInput, match=r"secure\.sums and evaluation\.clients"):
        of.advance(of.start(), evaluates=True)


def test_a_method_that_tells_clients_different_things_is_refused() -> None:
    of = secure(METHODS["feddc"](weighting="uniform"))
    with pytest.raises(RunFailed, match="different messages"):
        of.advance(of.start())


def test_ifca_cannot_ask_for_losses_one_by_one() -> None:
    with pytest.raises(RunFailed, match="one by one"):
        secure(METHODS["ifca"](restarts=2)).start()


PLAIN = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}


def test_the_section_of_a_file() -> None:
    text = "[task]\nname='minidigits'\n[method]\nname='fedavg'\n[secure]\nsums=true\nthreshold=0.8\n"
    found = config.parse(tomllib.loads(text), "a test")
    assert found.secure == SecureSettings(sums=True, threshold=0.8, masks=True)
    assert config.parse(PLAIN, "a test").secure == SecureSettings()
    unmasked = config.parse({**PLAIN, "secure": {"sums": True, "masks": False}}, "a test")
    assert found.identity == unmasked.identity, "masks change no number"
    assert found.identity != config.parse(PLAIN, "a test").identity


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"method": {"name": "fpl"}}, ("secure", "sums", "method.name")),
        ({"evaluation": {"clients": 1}}, ("evaluation", "clients", "secure.sums")),
        ({"secure": {"sums": True, "threshold": 0.5}}, ("secure", "threshold", "0.67")),
    ],
)
def test_contradictions_in_a_file_name_both_keys(changes: dict[str, Any], keys: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        config.parse({**PLAIN, "secure": {"sums": True}, **changes}, "a test")
    assert all(key in str(caught.value) for key in keys)


def test_fpl_with_global_targets_is_let_in() -> None:
    config.parse({**PLAIN, "method": {"name": "fpl", **GLOBAL}, "secure": {"sums": True}}, "a test")
