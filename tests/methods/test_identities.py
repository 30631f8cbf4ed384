"""Methods that become other methods when a term is off, bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from methods.conformance import (
    CLASSES,
    FEATURES,
    TASK,
    after,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    small_task,
)
from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.state import State
from protofed.methods.fedadmm import FedADMM
from protofed.methods.fedavg import FedAvg
from protofed.methods.feddistill import FedDistill
from protofed.methods.fedproto import FedProto
from protofed.methods.fedproto_avg import FedProtoAvg
from protofed.methods.fedprox import FedProx
from protofed.methods.fedrep import FedRep
from protofed.methods.fpl import FPL
from protofed.methods.knn_per import KnnPer
from protofed.methods.local import LocalOnly
from protofed.methods.moon import Moon
from protofed.prototypes import contrast

TWO_CLIENTS = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3], "bob": [3, 2, 2, 1, 0]})


def end(method: Method, task: Task = TASK) -> State:
    return after(3, federation(method, task))


def params_of(state: State) -> dict[str, Any]:
    """The weights of the server, or of every client where the server has none."""
    if hasattr(state.server, "params"):
        return {"server": state.server.params}
    return {client: memory.params for client, memory in state.memories.items()}


IDENTITIES = [
    pytest.param(FedADMM(penalty_weight=0.0), FedAvg(), id="FedADMM without a penalty is FedAvg"),
    pytest.param(
        FedDistill(distillation_weight=0.0), LocalOnly(), id="FedDistill without distillation is local training"
    ),
    pytest.param(KnnPer(), FedAvg(), id="kNN-Per trains the weights of FedAvg"),
    pytest.param(FedProx(proximal_weight=0.0), FedAvg(), id="FedProx without its penalty is FedAvg"),
    pytest.param(Moon(contrast_weight=0.0), FedAvg(), id="MOON without its contrast is FedAvg"),
    pytest.param(FPL(contrast=False, consistency=False), FedAvg(), id="FPL without both terms is FedAvg"),
    pytest.param(
        FPL(contrast=False, consistency=False, prototype_mode="recomputed"),
        FedAvg(),
        id="FPL without both terms is FedAvg, however it makes prototypes",
    ),
    pytest.param(FedProtoAvg(pull_weight=0.0), FedAvg(), id="FedProtoAvg without its pull is FedAvg"),
    pytest.param(FedProto(pull_weight=0.0), LocalOnly(), id="FedProto without its pull is local training"),
    pytest.param(
        FPL(contrast=False, consistent_with="global"),
        FedProtoAvg(pull_weight=1.0),
        id="FPL consistent with global prototypes only is FedProtoAvg",
    ),
]

DIFFERENCES = [
    pytest.param(FedADMM(), FedAvg(), id="the penalty of FedADMM"),
    pytest.param(FedDistill(), LocalOnly(), id="FedDistill"),
    pytest.param(FedProx(), FedAvg(), id="FedProx"),
    pytest.param(Moon(), FedAvg(), id="MOON"),
    pytest.param(FPL(consistency=False), FedAvg(), id="the contrast of FPL"),
    pytest.param(FPL(contrast=False), FedAvg(), id="the consistency of FPL"),
    pytest.param(FPL(), FPL(consistency=False), id="the consistency of FPL beside its contrast"),
    pytest.param(FPL(), FPL(contrast_with="global"), id="cluster prototypes"),
    pytest.param(FPL(contrast=False), FedProtoAvg(), id="unbiased prototypes"),
    pytest.param(
        FPL(contrast=False), FPL(contrast=False, consistency_reduction="sum"), id="the sum in place of the mean"
    ),
    pytest.param(FPL(), FPL(temperature=0.5), id="the temperature"),
    pytest.param(FedProtoAvg(), FedAvg(), id="FedProtoAvg"),
    pytest.param(FedProtoAvg(), FedProtoAvg(prototype_mode="recomputed"), id="how prototypes are made"),
    pytest.param(FedProto(), LocalOnly(), id="FedProto"),
]


@pytest.mark.parametrize(("method", "simpler"), IDENTITIES)
def test_a_method_without_its_term_is_the_simpler_one(method: Method, simpler: Method) -> None:
    assert_same(params_of(end(method)), params_of(end(simpler)), "weights after three rounds")


@pytest.mark.parametrize(("method", "other"), DIFFERENCES)
def test_a_term_that_is_on_changes_the_result(method: Method, other: Method) -> None:
    """Without this, the identities above would hold for terms that do nothing."""
    assert fingerprint(params_of(end(method))) != fingerprint(params_of(end(other)))


@pytest.mark.parametrize("method", [FedAvg(), FedProtoAvg(pull_weight=0.0), Moon(contrast_weight=0.0)], ids=repr)
def test_averaging_one_client_is_local_training(method: Method) -> None:
    alone = small_task({"ann": [0, 1, 2, 3, 0, 1, 2, 3, 3]})
    local = end(LocalOnly(), alone).memories["ann"]
    assert_same(end(method, alone).server.params, local.params, "the only client's weights")


def test_with_one_cluster_per_class_the_contrast_is_a_softmax_over_class_prototypes() -> None:
    known = end(FPL(), TWO_CLIENTS).server.prototypes
    assert known.label.tolist() == list(range(CLASSES))  # two prototypes are each other's first neighbour
    z = torch.rand(6, FEATURES, generator=torch.Generator().manual_seed(0))
    batch = batch_of(z, [0, 1, 2, 3, 3, 0])
    cosines = F.cosine_similarity(z[:, None], known.clusters[None], dim=-1)
    softmax = F.cross_entropy(cosines / 0.02, batch.y, reduction="none")
    found = FPL(consistency=False).prototype_loss(z, batch, known)
    torch.testing.assert_close(found, softmax, rtol=1e-4, atol=1e-5)


def test_with_one_cluster_per_class_the_consistency_is_the_pull_of_fedproto() -> None:
    known = end(FPL(), TWO_CLIENTS).server.prototypes
    plain = end(FPL(consistent_with="global"), TWO_CLIENTS).server.prototypes
    assert_same(known.consistent, plain.consistent, "unbiased and global prototypes")
    z = torch.rand(4, FEATURES, generator=torch.Generator().manual_seed(0))
    batch = batch_of(z, [0, 1, 2, 3])
    pull = contrast.pull(z, batch.y, known.consistent.mean, known.consistent.is_known)
    assert torch.equal(FPL(contrast=False).prototype_loss(z, batch, known), pull)
    fpl, fedproto = end(FPL(contrast=False), TWO_CLIENTS), end(FedProtoAvg(), TWO_CLIENTS)
    assert_same(fpl.server.params, fedproto.server.params, "weights after three rounds")
    assert fingerprint(end(FPL(contrast=False)).server.params) != fingerprint(end(FedProtoAvg()).server.params)


def test_fedrep_is_not_fedavg_even_on_the_body() -> None:
    fedavg, fedrep = end(FedAvg()).server.params, end(FedRep(head_epochs=1)).server.params
    assert not torch.equal(fedrep["features.0.weight"], fedavg["features.0.weight"])
