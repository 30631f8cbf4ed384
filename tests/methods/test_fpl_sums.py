"""FPL for secure sums: its clusters beside all partitions, and the cases that FPL does not have."""

from itertools import product

import pytest
import torch

import protofed
from methods.conformance import CLASSES, TASK, assert_close, assert_same, federation, reply_of, usual
from protofed.engine.state import State
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.methods._shared.targets import Targets
from protofed.methods.fpl import FPL
from protofed.methods.fpl_sums import FPLSums
from protofed.optim.optimizers import Sgd
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.kmeans import within
from protofed.prototypes.kmeans_sums import Clustered

GLOBAL = FPL(contrast_with="global", consistent_with="global")


def prototypes(*rows: list[float]) -> Prototypes:
    return Prototypes(torch.tensor(rows), torch.full((len(rows),), 5.0))


BY_SUMS = FPLSums(num_clusters=2, starts=6, lloyd_steps=5)


def sent_by_all(state: State, method: FPLSums) -> list[Prototypes]:
    return [reply_of(federation(method), state, client).upload.prototypes for client in TASK.clients]


def test_clusters_are_means_of_the_tightest_halves() -> None:
    """Of all ways to split a class's owners into two, by a loop; Eq. (5) and (6) over these clusters."""
    before, after = usual(BY_SUMS, 1), usual(BY_SUMS, 2)
    sent, targets = sent_by_all(before, BY_SUMS), after.server.prototypes
    for c in range(CLASSES):
        own = torch.stack([p.mean[c].double() for p in sent if p.count[c] > 0])
        splits = [torch.tensor(labels) for labels in product((0, 1), repeat=len(own)) if 0 < sum(labels) < len(own)]
        best = min(splits, key=lambda labels: within(own, labels))
        means = torch.stack([own[best == j].mean(0) for j in (0, 1)])
        found = targets.clusters[targets.label == c].double()
        assert len(found) == 2
        order = [0, 1] if (found[0] - means[0]).norm() < (found[0] - means[1]).norm() else [1, 0]
        assert_close(found, means[order], f"clusters of class {c}", within=1e-6)
        assert_close(targets.consistent.mean[c].double(), means.mean(0), f"class {c}, Eq. (6)", within=1e-6)


def test_one_cluster_is_the_global_prototype() -> None:
    one = usual(FPLSums(num_clusters=1, starts=1, lloyd_steps=1), 2).server
    assert_close(one.prototypes.clusters, usual(GLOBAL, 2).server.prototypes.clusters, "clusters", within=1e-6)
    assert_close(one.params, usual(GLOBAL, 2).server.params, "weights", within=1e-6)


def test_a_class_that_nobody_sends_keeps_its_clusters() -> None:
    method, draws = FPLSums(), torch.Generator().manual_seed(3)
    before = Targets(torch.rand(3, 2, generator=draws), torch.tensor([0, 0, 1]), prototypes([1.0, 2.0], [3.0, 4.0]))
    centres = torch.rand(3, 2, 2, generator=draws).double()
    found = Clustered(centres, torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 0.0]]))
    plain = prototypes([9.0, 9.0], [7.0, 7.0])
    kept = method.of_class(found, plain, before, 0)
    assert_same(kept, (before.clusters[:2], before.consistent.mean[0]), "class 0")
    clusters, unbiased = method.of_class(found, plain, before, 1)
    assert_close(clusters.double(), centres[:2, 1], "the two centres that have points", within=1e-6)
    assert_close(unbiased.double(), centres[:2, 1].mean(0), "Eq. (6)", within=1e-6)


def test_nothing_goes_around_it() -> None:
    for wrapper in ("averaging", "ga"):
        [(_, why)] = METHODS[wrapper](base=BY_SUMS).validate(Sgd(lr=0.1), 8, None)
        assert "asks again" in why
        assert not list(METHODS[wrapper](base=GLOBAL).validate(Sgd(lr=0.1), 8, None))


def test_half_of_the_targets_may_be_global() -> None:
    found = Clustered(torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]]).double(), torch.tensor([[1.0], [2.0]]))
    before = Targets(torch.zeros(1, 2), torch.tensor([-1]), prototypes([0.0, 0.0]))
    of = [
        method.of_class(found, prototypes([7.0, 8.0]), before, 0)
        for method in (FPLSums(), FPLSums(contrast_with="global"), FPLSums(consistent_with="global"))
    ]
    clusters, unbiased, plain = [[1.0, 2.0], [3.0, 6.0]], [2.0, 4.0], [7.0, 8.0]
    assert [(a.tolist(), b.tolist()) for a, b in of] == [(clusters, unbiased), ([plain], unbiased), (clusters, plain)]


def test_a_run_in_which_nothing_reads_the_clusters_is_refused() -> None:
    with pytest.raises(BadInput, match=r"method.contrast_with: .*consistent_with.*take fpl"):
        federation(FPLSums(contrast_with="global", consistent_with="global"))


def test_differential_privacy_of_records_is_refused() -> None:
    """Its clients say more of their records than what they train."""
    with pytest.raises(BadInput, match=r"privacy.level: FPLSums \(method.name\) has no private step"):
        protofed.run("fpl_sums", TASK, rounds=1, privacy=protofed.PrivacySettings("record", epsilon=8.0))
