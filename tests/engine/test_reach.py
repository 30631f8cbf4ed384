"""What the gate refuses beside the rest of a round, and of classes that a client must not tell of."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import Faulty, Tampering, bits, memories, tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.engine.upload_validation import Limits, UploadValidator, out_of_reach, out_of_reach_of_groups
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.methods.families import Weights, WeightUpload
from protofed.prototypes.class_means import Prototypes
from protofed.runtimes.jobs import Failure, Reason
from protofed.testing.federations import Elsewhere
from protofed.transforms.chain import Reach, UploadSettings
from protofed.transforms.stage import Exchange
from protofed.tree import named_leaves, with_leaves

TRAINING = Training(rounds=2, epochs=1, batch_size=4)
COMPARED = UploadSettings(max_prototype_ratio=10).pipeline()


def prototypes(*rows: list[float]) -> Prototypes:
    mean = torch.tensor(rows)
    return Prototypes(mean, mean.any(-1).float())


def refused(reach: Reach, **uploads: Any) -> dict[str, tuple[Reason, str]]:
    message = Weights({"w": torch.tensor([1.0, 0.0])})
    failures = out_of_reach([*uploads.items()], lambda client: message, reach)
    return {client: (failure.reason, failure.detail) for client, failure in failures.items()}


# ---- prototypes


def test_lengths_are_compared_for_a_user_s_own_data_unless_that_is_set() -> None:
    assert UploadSettings().pipeline().reach == Reach()
    assert UploadSettings().pipeline(is_own_data=True).reach == Reach(prototypes=10)
    assert UploadSettings(max_prototype_ratio=0).pipeline(is_own_data=True).reach == Reach()


def test_a_prototype_may_be_ten_times_as_long_as_the_median_and_no_longer() -> None:
    """T17: Lengths 5, 5 and 50, which is ten times 5, or 51, which is more. Absent classes do not count."""
    a, b = prototypes([3, 4], [0, 0]), prototypes([0, 0], [-5, 0])
    assert refused(Reach(prototypes=10), a=a, b=b, c=prototypes([30, 40], [0, 1])) == {}
    detail = "mean: holds a prototype 10.2 times as long as the median of the round: above uploads.max_prototype_ratio"
    assert refused(Reach(prototypes=10), a=a, b=b, c=prototypes([0, 51], [0, 1])) == {
        "c": (Reason.PROTO_TOO_LARGE, detail)
    }
    assert refused(Reach(prototypes=11), a=a, b=b, c=prototypes([0, 51], [0, 1])) == {}
    assert refused(Reach(prototypes=0), a=a, b=b, c=prototypes([0, 1e9], [0, 1])) == {}


def test_every_client_weighs_the_same_however_many_prototypes_it_sends() -> None:
    """One client sends four of length 1000, three send one of length 1 each: the median is 1."""
    many = prototypes(*[[0, 1000]] * 4)
    few = prototypes([1, 0], *[[0, 0]] * 3)
    assert [*refused(Reach(prototypes=10), a=few, b=few, c=few, d=many)] == ["d"]


def test_short_prototypes_of_half_of_the_clients_do_not_make_the_others_long() -> None:
    short, good = prototypes([1e-6, 0]), prototypes([5, 0])
    assert refused(Reach(prototypes=10), a=short, b=short, c=good, d=good) == {}


def test_prototypes_are_compared_within_clusters_of_clients() -> None:
    """Features of another model may be of another size: a to c have lengths near 1, d to f near 50, but for f's 900."""
    uploads = [(name, prototypes([size, 0])) for name, size in zip("abcdef", (1, 1, 1, 50, 60, 900), strict=True)]
    apart = Exchange(lambda client: {}, num_classes=1, group=lambda client, upload: client > "c")
    assert [*out_of_reach_of_groups(uploads, apart, Reach(prototypes=10))] == ["f"]
    together = Exchange(lambda client: {}, num_classes=1)
    assert [*out_of_reach_of_groups(uploads, together, Reach(prototypes=10))] == ["f"]
    assert [*out_of_reach_of_groups(uploads[:-1], together, Reach(prototypes=20))] == ["d", "e"]
    assert [*out_of_reach_of_groups(uploads[:-1], apart, Reach(prototypes=20))] == []


def test_nobody_is_out_of_reach_of_one_other_client() -> None:
    assert refused(Reach(updates=2), a=prototypes([1, 0]), b=prototypes([1e6, 0])) == {}
    assert refused(Reach(prototypes=10), a=prototypes([1, 0]), b=prototypes([1e6, 0]), c=prototypes([0, 0])) == {}


def times(factor: float) -> Any:
    """The change of what a client sends: its prototypes become so many times as long."""

    def changed(sent: Any) -> Any:
        leaves = {p: leaf * factor if p.endswith("mean") else leaf for p, leaf in named_leaves(sent).items()}
        return with_leaves(sent, list(leaves.values()))

    return changed


@pytest.mark.parametrize("name", ["fpl", "fedproto", "fednh", "fedgh"])
def test_long_prototypes_cost_their_client_alone(name: str) -> None:
    """The round is the one in which that client was not there, bit for bit, and it keeps the state that it had."""
    ends = []
    for runtime in (Tampering("c01", times(100)), Faulty({"c01"})):
        of = Federation(METHODS[name](), tiny(), TRAINING, runtime, uploads=COMPARED)
        clean = replace(of, runtime=Tampering("c01", times(1)))
        ends.append(replace(of, runtime=runtime).advance(clean.start()))
    [failure] = ends[0].failures
    assert (failure.client, failure.reason) == ("c01", Reason.PROTO_TOO_LARGE)
    assert ends[0].strikes == {"c01": 1}
    assert ends[0].refused == {"PROTO_TOO_LARGE": 1}
    assert bits(ends[0].server) == bits(ends[1].server)
    assert bits(memories(ends[0])) == bits(memories(ends[1]))
    assert ends[0].traffic["c01"].up == 0
    assert ends[0].loss == ends[1].loss


def test_uploads_that_come_as_bytes_are_compared_too() -> None:
    class Far(Elsewhere):
        def __init__(self) -> None:
            super().__init__()
            self._site = Tampering("c02", times(100))

    uploads = UploadSettings(precision="bfloat16", max_prototype_ratio=10).pipeline()
    of = Federation(METHODS["fpl"](), tiny(), TRAINING, Far(), uploads=uploads)
    assert [f.reason for f in of.advance(of.start()).failures] == [Reason.PROTO_TOO_LARGE]


def test_without_prototypes_uploads_are_read_one_by_one() -> None:
    """Only methods whose uploads hold prototypes wait for all of a round."""
    fpl, fedavg = (
        Federation(METHODS[name](), tiny(), TRAINING).method.upload_spec(
            Federation(METHODS[name](), tiny(), TRAINING).initial_server,
            Federation(METHODS[name](), tiny(), TRAINING).server_context(0, "load"),
        )
        for name in ("fpl", "fedavg")
    )
    assert Reach(prototypes=10).compares(fpl)
    assert not Reach(prototypes=10).compares(fedavg)
    assert not Reach(prototypes=0).compares(fpl)
    assert Reach(updates=3).compares(fedavg)


# ---- weights


def test_weights_may_go_as_far_as_the_setting_says() -> None:
    """From (1, 0): distances 1, 2 and 7; the median is 2."""

    def sent(*weights: float) -> WeightUpload:
        return WeightUpload({"w": torch.tensor(weights, dtype=torch.float32)}, torch.tensor(3))

    uploads = {"a": sent(2, 0), "b": sent(1, -2), "c": sent(8, 0)}
    detail = "its weights are 3.5 times as far from those it received as the median of the round: above uploads."
    assert refused(Reach(updates=3), **uploads) == {"c": (Reason.UPDATE_TOO_LARGE, f"{detail}max_update_ratio")}
    assert refused(Reach(updates=3.6), **uploads) == {}
    assert refused(Reach(prototypes=10), **uploads) == {}


def test_weights_that_go_too_far_cost_their_client_alone() -> None:
    def pushed(sent: Any) -> Any:
        return WeightUpload({name: leaf * 100 for name, leaf in sent.params.items()}, sent.num_examples)

    uploads, ends = UploadSettings(max_update_ratio=5).pipeline(), []
    for runtime in (Tampering("c01", pushed), Faulty({"c01"})):
        of = Federation(METHODS["fedavg"](), tiny(), TRAINING, runtime, uploads=uploads)
        ends.append(of.advance(of.start()))
    assert [failure.reason for failure in ends[0].failures] == [Reason.UPDATE_TOO_LARGE]
    assert bits(ends[0].server) == bits(ends[1].server)
    plain = Federation(METHODS["fedavg"](), tiny(), TRAINING, Tampering("c01", pushed))
    assert not plain.advance(plain.start()).failures


@pytest.mark.parametrize("name", ["fedproto", "ifca", "fedfomo"])
def test_a_reach_of_weights_is_refused_where_nothing_can_be_compared(name: str) -> None:
    of = Federation(METHODS[name](), tiny(), TRAINING, uploads=UploadSettings(max_update_ratio=5).pipeline())
    with pytest.raises(BadInput, match=r"uploads\.max_update_ratio = 5 is for methods that send weights"):
        of.start()


# ---- classes of too few examples


def test_an_upload_that_tells_of_a_class_of_too_few_examples_is_refused() -> None:
    """T17."""
    dropped = torch.tensor([False, True, False])
    limits = Limits(3, enrolled={"c": 10}, withheld=lambda client: dropped if client == "c" else None)
    like = prototypes([0, 0], [0, 0], [0, 0])
    validator = UploadValidator(like, limits)
    told, silent = prototypes([1, 1], [2, 2], [0, 0]), prototypes([1, 1], [0, 0], [2, 1])
    detail = "count: tells of a class of which the client has too few examples"
    assert validator.validated("c", told) == Failure("c", Reason.BELOW_MIN_COUNT, detail)
    assert isinstance(validator.validated("c", silent), Prototypes)
    assert isinstance(validator.validated("d", told), Prototypes)
    count_alone = Prototypes(silent.mean, torch.tensor([1.0, 1.0, 1.0]))
    assert validator.validated("c", count_alone) == Failure("c", Reason.BELOW_MIN_COUNT, detail)


def test_a_site_that_does_not_withhold_is_refused() -> None:
    """c00 has four examples of class 1 among its seven, and one of each other class that it has: with a minimum of two,
    it may tell of class 1 alone."""
    uploads = UploadSettings(min_class_count=2).pipeline()
    of = Federation(METHODS["fedproto"](), tiny(), TRAINING, uploads=uploads)
    good = of.advance(of.start())
    assert not good.failures
    telling = Tampering("c00", lambda sent: Prototypes(torch.ones_like(sent.mean), torch.ones_like(sent.count)))
    state = replace(of, runtime=telling).advance(of.start())
    assert [(failure.client, failure.reason) for failure in state.failures] == [("c00", Reason.BELOW_MIN_COUNT)]
