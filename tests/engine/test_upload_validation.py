"""The gate: every fault of an upload has its reason and its path."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from protofed.api.roles import Count, Label, Prototype, Weights
from protofed.engine.upload_validation import Limits, UploadValidator
from protofed.runtimes.jobs import NOT_THE_CLIENTS_FAULT, Failure, Reason
from protofed.tree import Nothing, Params, Tree, named_leaves, record, with_leaves


@record
class Prototypes:
    mean: Annotated[Tensor, Prototype()]
    count: Annotated[Tensor, Count()]


@record
class Upload:
    params: Annotated[Params, Weights()]
    prototypes: Prototypes
    num_examples: Annotated[Tensor, Count()]
    label: Annotated[Tensor, Label()]


def admitted(client: str, upload: Tree, like: Tree, num_classes: int) -> Any:
    return UploadValidator(like, Limits(num_classes, max_norm=1e6, enrolled={"c": 10})).validated(client, upload)


def good() -> Upload:
    params = {"net.weight": torch.ones(2, 3), "count": torch.tensor([-1.5]), "label": torch.tensor([99])}
    return Upload(
        params,
        Prototypes(torch.tensor([[1.0, 1], [0, 0], [1, 1]]), torch.tensor([2.0, 0.0, 1.0])),
        torch.tensor(7),
        torch.tensor([0, 2]),
    )


def with_leaf(path: str, leaf: Any) -> Upload:
    leaves = named_leaves(good())
    assert path in leaves
    return with_leaves(good(), list({**leaves, path: leaf}.values()))


def with_params(change: Callable[[Params], Params]) -> Upload:
    whole = good()
    return Upload(change(whole.params), whole.prototypes, whole.num_examples, whole.label)


def refused(upload: Tree) -> Failure | None:
    """Why the gate refuses an upload; None if it passes, in the structure that was asked for."""
    passed = admitted("c", upload, good(), 3)
    if isinstance(passed, Failure):
        return passed
    assert isinstance(passed, Upload)
    assert isinstance(passed.prototypes, Prototypes)
    return None


def test_a_good_upload_passes() -> None:
    assert refused(good()) is None
    assert admitted("c", Nothing(), Nothing(), 3) == Nothing()
    assert torch.equal(admitted("c", torch.ones(2), torch.zeros(2), 3), torch.ones(2))


def test_what_passes_has_the_structure_and_order_that_was_asked_for() -> None:
    """A dict for a record, and names in another order, say the same: methods see them as they expect."""
    whole = good()
    params = dict(reversed(whole.params.items()))
    strange = {"label": whole.label, "params": params, "prototypes": whole.prototypes, "num_examples": torch.tensor(7)}
    passed = admitted("c", strange, good(), 3)
    assert isinstance(passed, Upload)
    assert list(passed.params) == list(whole.params)
    assert all(torch.equal(passed.params[name], whole.params[name]) for name in params)


def test_names_in_a_dict_belong_to_the_networks() -> None:
    """`good` has entries called count and label in its params, which hold what neither may hold."""
    assert good().params["count"] < 0
    assert refused(good()) is None


NAN, INF = float("nan"), float("inf")

FAULTS: dict[str, tuple[Tree, Reason, str]] = {
    "missing": (
        with_params(lambda p: {n: w for n, w in p.items() if n != "net.weight"}),
        Reason.KEY_MISSING,
        "params/net.weight is missing",
    ),
    "unexpected": (
        with_params(lambda p: {**p, "net.more": torch.ones(1)}),
        Reason.KEY_UNEXPECTED,
        "params/net.more was not asked for",
    ),
    "shape": (
        with_leaf("params/net.weight", torch.ones(3, 2)),
        Reason.SHAPE_MISMATCH,
        "params/net.weight: has shape (3, 2), not (2, 3)",
    ),
    "one too many dimensions": (
        with_leaf("num_examples", torch.tensor([7])),
        Reason.SHAPE_MISMATCH,
        "num_examples: has shape (1,), not ()",
    ),
    "dtype": (
        with_leaf("prototypes/mean", torch.ones(3, 2, dtype=torch.float64)),
        Reason.DTYPE_MISMATCH,
        "prototypes/mean: is torch.float64, not torch.float32",
    ),
    "no tensor": (with_leaf("num_examples", 7), Reason.DTYPE_MISMATCH, "num_examples: is int, not a tensor"),
    "sparse": (
        with_leaf("params/net.weight", torch.ones(2, 3).to_sparse()),
        Reason.DTYPE_MISMATCH,
        "params/net.weight: is not a dense tensor",
    ),
    "without data": (
        with_leaf("params/net.weight", torch.ones(2, 3, device="meta")),
        Reason.DTYPE_MISMATCH,
        "params/net.weight: is not a dense tensor",
    ),
    "none": (with_leaf("num_examples", None), Reason.KEY_MISSING, "num_examples is missing"),
    "nan": (
        with_leaf("params/net.weight", torch.tensor([[1, NAN, 1], [INF, -INF, 1]])),
        Reason.NON_FINITE,
        "params/net.weight: holds 3 values that are not finite",
    ),
    "infinite count": (
        with_leaf("prototypes/count", torch.tensor([INF, 0, 0])),
        Reason.NON_FINITE,
        "prototypes/count: holds 1 values that are not finite",
    ),
    "negative count": (
        with_leaf("prototypes/count", torch.tensor([1.0, -2.0, 0.0])),
        Reason.NEGATIVE_COUNT,
        "prototypes/count: holds -2",
    ),
    "negative examples": (with_leaf("num_examples", torch.tensor(-1)), Reason.NEGATIVE_COUNT, "num_examples: holds -1"),
    "half an example": (
        with_leaf("prototypes/count", torch.tensor([1.0, 0.5, 0.0])),
        Reason.NON_INTEGER_COUNT,
        "prototypes/count: holds a count that is not a whole number",
    ),
    "more examples than the client has": (
        with_leaf("num_examples", torch.tensor(11)),
        Reason.COUNT_TOO_LARGE,
        "num_examples: holds 11, and the client has 10 examples",
    ),
    "a prototype of an absent class": (
        with_leaf("prototypes/mean", torch.ones(3, 2)),
        Reason.PROTO_WITHOUT_COUNT,
        "prototypes/mean: holds a prototype of a class that prototypes/count says is absent",
    ),
    "too large": (
        with_leaf("params/net.weight", torch.full((2, 3), 1e6)),
        Reason.NORM_TOO_LARGE,
        "has norm 2.44949e+06, above training.max_norm = 1e+06",  # √6 · 10⁶
    ),
    "too large for a norm in float32": (
        with_leaf("params/net.weight", torch.full((2, 3), 3e38)),
        Reason.NORM_TOO_LARGE,
        "has norm 7.34847e+38, above training.max_norm = 1e+06",
    ),
    "class too high": (
        with_leaf("label", torch.tensor([0, 3])),
        Reason.UNKNOWN_CLASS,
        "label: holds a class outside 0..2",
    ),
    "class below 0": (
        with_leaf("label", torch.tensor([-1, 0])),
        Reason.UNKNOWN_CLASS,
        "label: holds a class outside 0..2",
    ),
}


@pytest.mark.parametrize(("upload", "reason", "detail"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_refused_by_its_reason_and_path(upload: Tree, reason: Reason, detail: str) -> None:
    assert refused(upload) == Failure("c", reason, detail)


def test_every_reason_that_the_gate_can_give_is_tested() -> None:
    of_messages = {Reason.UNDECODABLE, Reason.TOO_LARGE, Reason.DUPLICATE}  # see test_envelope.py
    of_messages |= {Reason.WRONG_RUN, Reason.STALE_ROUND, Reason.WRONG_MODEL}
    of_deeds = {Reason.CHANGED_SHARED}  # see test_hostile_clients.py
    of_deeds |= {Reason.NEGATIVE_VARIANCE}  # has a test of its own, below
    of_deeds |= {Reason.BELOW_MIN_COUNT, Reason.PROTO_TOO_LARGE, Reason.UPDATE_TOO_LARGE}  # see test_reach.py
    assert {reason for _, reason, _ in FAULTS.values()} == set(Reason) - NOT_THE_CLIENTS_FAULT - of_messages - of_deeds


@record
class Impostor:
    params: Params
    prototypes: Params
    num_examples: Tensor
    label: Tensor


WHOLE = good()

STRANGE: dict[str, Tree] = {
    "a slash in a name": with_params(lambda p: {**p, "a/b": torch.ones(1)}),
    "two keys of one name": with_params(lambda p: {**p, 1: torch.ones(1), "1": torch.ones(1)}),  # type: ignore[dict-item]
    "a dict for a record": {
        "params": WHOLE.params,
        "prototypes": WHOLE.prototypes,
        "num_examples": torch.tensor(-1),
        "label": WHOLE.label,
    },
    "another record": Impostor(
        WHOLE.params,
        {"mean": torch.ones(3, 2), "count": -torch.ones(3)},
        WHOLE.num_examples,
        WHOLE.label,
    ),
    "nothing at all": None,
}


@pytest.mark.parametrize("upload", STRANGE.values(), ids=STRANGE)
def test_an_upload_of_another_structure_is_refused_rather_than_raised_or_passed(upload: Tree) -> None:
    """A client must not be able to end the run, nor to get past the checks of counts."""
    assert isinstance(refused(upload), Failure)


def test_a_negative_variance_is_refused_and_other_weights_may_be_negative() -> None:
    """T17: A layer of normalisation divides by the root of it. The weight `count` of every upload here is −1.5."""

    def sent(*variance: float) -> Upload:
        return with_params(lambda params: {**params, "net.running_var": torch.tensor(variance)})

    assert isinstance(admitted("c", sent(0.0, 4.0), sent(1.0, 1.0), 3), Upload)
    failure = admitted("c", sent(4.0, -0.5), sent(1.0, 1.0), 3)
    assert (failure.reason, failure.detail) == (
        Reason.NEGATIVE_VARIANCE,
        "params/net.running_var: holds the variance -0.5",
    )
