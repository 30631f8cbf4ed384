"""FedPC: its clustering, its loss (Eq. 3 and 4), its aggregation (Eq. 5 to 8), and who joins when."""

import dataclasses
from collections.abc import Callable, Iterator
from math import exp, log
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    CLASSES,
    FEATURES,
    ODD_TASK,
    SIZES,
    TASK,
    after,
    assert_close,
    assert_finite,
    assert_same,
    batch_of,
    federation,
    fingerprint,
    identity_model,
    loaded,
    mean_cross_entropy,
    reply_of,
    scripted,
    small_task,
    trained_by_hand,
    usual,
    whole,
)
from protofed import tree, wire
from protofed.api.contexts import Reply
from protofed.api.method import Method
from protofed.api.requests import Request
from protofed.data.batches import Batch
from protofed.engine.state import State
from protofed.methods._shared.cluster_models import Distance, global_prototypes, prototype_distance
from protofed.methods._shared.mixing import entry
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, PartSharing, PrototypeUpload
from protofed.methods.fedpc import Clusters, FedPC, mean_extractor
from protofed.nn.networks import Parts, matching, without
from protofed.prototypes.class_means import Prototypes
from protofed.prototypes.clusters import blended_prototypes, members_mean, similarity_shares
from protofed.prototypes.kmeans import no_partition
from protofed.runtimes.jobs import Answer, Failure, Reason
from protofed.runtimes.sequential import Sequential
from protofed.tree import Params

TWO = FedPC(num_clusters=2, weighting="uniform")
SETTINGS = [
    FedPC(),
    TWO,
    FedPC(num_clusters=1),
    FedPC(num_clusters=0),
    FedPC(num_clusters=2, rho="softmax"),
    FedPC(num_clusters=2, rho="uniform", distance="norm"),
    FedPC(num_clusters=2, distance="square"),
    FedPC(num_clusters=2, distance="mean_square"),
    FedPC(num_clusters=2, weighting="examples"),
    FedPC(num_clusters=2, prototype_mode="running"),
]
Rows = list[list[float] | None]


def prototypes(*rows: list[float] | None) -> Prototypes:
    """(C, D), with None for a class that is not there."""
    dim = len(next(row for row in rows if row is not None))
    mean = torch.tensor([[0.0] * dim if row is None else row for row in rows])
    return Prototypes(mean, torch.tensor([float(row is not None) for row in rows]))


def of_clusters(*clusters: Rows, dim: int = 2) -> Prototypes:
    """(J, C, D)."""
    mean = torch.tensor([[[0.0] * dim if row is None else row for row in rows] for rows in clusters])
    return Prototypes(mean, torch.tensor([[float(row is not None) for row in rows] for rows in clusters]))


# Clusters A and B have both classes, C has class 0 only. Flattened, A = (1, 0, 0, 1) and B = (0, 1, 0, 1).
THREE = of_clusters([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]], [[3.0, 0.0], None])
# cos(A, B) = 1 / (√2 √2) = 0.5. On class 0, which C shares with them, cos(A, C) = 1 and cos(B, C) = 0.
COSINES = torch.tensor([[1.0, 0.5, 1.0], [0.5, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)


# ---- what every method must do


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("method", SETTINGS, ids=repr)
def test_it_conforms(method: FedPC, check: Callable[[Method], None]) -> None:
    check(method)


@pytest.mark.parametrize("fraction", [0.5, 0.2])
@pytest.mark.parametrize("method", SETTINGS, ids=repr)
def test_few_clients_at_a_time(method: FedPC, fraction: float) -> None:
    of = federation(method, rounds=4, fraction=fraction)
    state = of.start()
    assert state.memories.keys() == TASK.clients.keys()
    for t in range(4):
        before, state = state, of.advance(state)
        assert not state.failures
        for client in TASK.clients.keys() - set(of.sampled(t)):
            assert_same(state.memories[client], before.memories[client], f"{client}, who did not take part")
    assert_finite(whole(state), f"fraction {fraction}")


# ---- between clusters


def test_the_weights_between_clusters_by_hand() -> None:
    # Rows of cosines divided by their sums, 2.5, 1.5 and 2.
    expected = torch.tensor([[0.4, 0.2, 0.4], [1 / 3, 2 / 3, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(similarity_shares(THREE, "cosine", 0.1), expected)


def test_the_softmax_between_clusters_by_hand() -> None:
    # τ = 0.5: e² for cosine 1, e for 0.5, 1 for 0.
    a, b, c = [exp(2), exp(1), exp(2)], [exp(1), exp(2), 1.0], [exp(2), 1.0, exp(2)]
    expected = torch.tensor([[x / sum(row) for x in row] for row in (a, b, c)], dtype=torch.float64)
    torch.testing.assert_close(similarity_shares(THREE, "softmax", 0.5), expected)


def test_equal_shares_are_equal_whatever_the_clusters_have() -> None:
    torch.testing.assert_close(similarity_shares(THREE, "uniform", 0.1), torch.full((3, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("rho", ["cosine", "softmax"])
def test_clusters_that_share_no_class_take_nothing_from_each_other(rho: Any) -> None:
    apart = of_clusters([[1.0, 0.0], None, None], [None, [1.0, 0.0], None], [None, None, None])
    assert torch.equal(similarity_shares(apart, rho, 1.0), torch.eye(3, dtype=torch.float64))


def test_a_negative_cosine_counts_as_none() -> None:
    opposite = of_clusters([[1.0, 0.0]], [[-1.0, 0.0]])
    assert torch.equal(similarity_shares(opposite, "cosine", 0.1), torch.eye(2, dtype=torch.float64))
    # By softmax it is a cosine of 0 against 1, τ = 1.
    share = exp(1) / (exp(1) + 1)
    expected = torch.tensor([[share, 1 - share], [1 - share, share]], dtype=torch.float64)
    torch.testing.assert_close(similarity_shares(opposite, "softmax", 1.0), expected)


@pytest.mark.parametrize("rho", ["cosine", "softmax"])
def test_weights_are_shares_for_any_prototypes(rho: Any) -> None:
    for seed in range(30):
        draws = torch.Generator().manual_seed(seed)
        count = (torch.rand(5, 6, generator=draws) < 0.5).float()
        mean = torch.randn(5, 6, 4, generator=draws) * count[..., None] * (seed % 3)  # every third: all zero
        shares = similarity_shares(Prototypes(mean, count), rho, 0.1)
        assert (shares >= 0).all()
        torch.testing.assert_close(shares.sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("rho", ["cosine", "softmax"])
def test_equal_clusters_take_equally_from_all(rho: Any) -> None:
    one = [[0.3, 0.7], None, [2.0, 0.1]]
    shares = similarity_shares(of_clusters(one, one, one, one), rho, 0.1)
    torch.testing.assert_close(shares, torch.full((4, 4), 0.25, dtype=torch.float64))


def test_prototypes_between_clusters_by_hand() -> None:
    shares = COSINES / COSINES.sum(-1, keepdim=True)
    found = blended_prototypes(
        dataclasses.replace(THREE, count=torch.tensor([[2.0, 1.0], [3.0, 1.0], [4.0, 0.0]])), shares
    )
    expected = torch.tensor(
        [
            [[0.4 + 0.4 * 3, 0.2], [0.0, 1.0]],  # A: 0.4 A + 0.2 B + 0.4 C; of class 1 (0.4 A + 0.2 B) / 0.6
            [[1 / 3, 2 / 3], [0.0, 1.0]],  # B: A / 3 + 2 B / 3
            [[0.5 + 0.5 * 3, 0.0], [0.0, 1.0]],  # C: (A + C) / 2; it has no class 1, and takes that of A
        ]
    )
    torch.testing.assert_close(found.mean, expected)
    # Of class 0 A takes from all (2 + 3 + 4), B from A and B, C from A and C.
    assert found.count.tolist() == [[9.0, 2.0], [5.0, 2.0], [6.0, 1.0]]


def test_a_class_that_nobody_similar_has_stays_unknown() -> None:
    apart = of_clusters([[1.0, 0.0], None, None], [None, [1.0, 0.0], None])
    found = blended_prototypes(apart, similarity_shares(apart, "cosine", 0.1))
    assert_same(found, apart, "prototypes of clusters that share nothing")


# ---- within clusters


def test_the_mean_within_a_cluster_by_hand() -> None:
    sent = [(prototypes([1.0, 0.0], [4.0, 0.0], None), 1.0), (prototypes([4.0, 0.0], None, None), 3.0)]
    before = Prototypes(torch.full((3, 2), 9.0), torch.tensor([5.0, 5.0, 5.0]))
    found = members_mean(sent, before)
    # Class 0: (1 · 1 + 3 · 4) / 4 = 3.25. Class 1 has one owner. Class 2 has none, and stays as it was.
    assert found.mean.tolist() == [[3.25, 0.0], [4.0, 0.0], [9.0, 9.0]]
    assert found.count.tolist() == [2.0, 1.0, 5.0]
    assert_same(members_mean([], before), before, "a cluster that nobody replied for")


def cosine_by_hand(a: Prototypes, b: Prototypes) -> float:
    both = [c for c in range(len(a.count)) if a.count[c] > 0 and b.count[c] > 0]
    x = torch.cat([a.mean[c].double() for c in both])
    y = torch.cat([b.mean[c].double() for c in both])
    return float(x @ y / (x.norm() * y.norm()))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_round_is_equations_5_to_8_by_a_slow_loop(weighting: Any) -> None:
    """Statistics of BatchNorm are averaged with the weights."""
    method = FedPC(num_clusters=2, weighting=weighting)
    of, state = federation(method), usual(method, 1)
    sent = {client: reply_of(of, state, client).upload for client in TASK.clients}
    weight = {client: SIZES[client] if weighting == "examples" else 1 for client in sent}
    members = [[c for c in sent if state.server.assignment[c] == j] for j in range(2)]
    assert sorted(map(len, members)) != [0, 5]
    extractors, own = [], []
    for group in members:
        total = sum(weight[c] for c in group)
        extractors.append(
            {n: sum(weight[c] * sent[c].params[n].double() for c in group) / total for n in state.server.params}
        )
        mean, count = torch.zeros(CLASSES, FEATURES, dtype=torch.float64), torch.zeros(CLASSES)
        for y in range(CLASSES):
            owners = [c for c in group if sent[c].prototypes.count[y] > 0]
            if owners:
                parts = [weight[c] * sent[c].prototypes.mean[y].double() for c in owners]
                mean[y], count[y] = sum(parts) / sum(weight[c] for c in owners), len(owners)
        own.append(Prototypes(mean, count))
    cosine = cosine_by_hand(*own)
    assert 0 < cosine < 1
    shares = [[1 / (1 + cosine), cosine / (1 + cosine)], [cosine / (1 + cosine), 1 / (1 + cosine)]]
    found = usual(method, 2).server
    for j in range(2):
        mixed = {n: shares[j][0] * extractors[0][n] + shares[j][1] * extractors[1][n] for n in extractors[0]}
        assert_close(entry(found.params, j), mixed, f"the extractor of cluster {j}", within=1e-6)
        assert_close(entry(found.sent, j), own[j], f"what cluster {j} sent", within=1e-6)
        for y in range(CLASSES):
            has = [k for k in range(2) if own[k].count[y] > 0]
            expected = sum(shares[j][k] * own[k].mean[y] for k in has) / sum(shares[j][k] for k in has)
            assert_close(found.prototypes.mean[j, y], expected, f"class {y} of cluster {j}", within=1e-6)
    assert any("running_mean" in name for name in found.params)
    assert "classifier.weight" not in found.params


def test_a_cluster_that_nobody_replies_for_keeps_its_extractor_and_shares_it() -> None:
    state = usual(TWO, 1)
    server = state.server
    present = [c for c in TASK.clients if server.assignment[c] == 0]
    replies = {c: reply_of(federation(TWO), state, c).upload for c in present}
    found = TWO.aggregate(server, iter(replies.items()), federation(TWO).server_context(1, "round"))
    assert_same(entry(found.sent, 1), entry(server.sent, 1), "the prototypes of cluster 1")
    shares = similarity_shares(found.sent, "cosine", 0.1)
    assert 0 < shares[1, 0] < 0.6
    mean = {n: sum(replies[c].params[n].double() for c in present) / len(present) for n in server.params}
    for j in range(2):
        mixed = {n: shares[j, 0] * mean[n] + shares[j, 1] * server.params[n][1].double() for n in mean}
        assert_close(entry(found.params, j), mixed, f"cluster {j}", within=1e-6)


@dataclasses.dataclass(frozen=True)
class SharedBody(PartSharing):
    """FedAvg on everything but the classifier, which stays at the client and trains along."""

    private = CLASSIFIER


@pytest.mark.parametrize("mode", ["recomputed", "running"])
def test_one_cluster_without_the_pull_is_fedavg_with_local_heads(mode: Any) -> None:
    plain: dict[str, Any] = {"cross_entropy_weight": 1.0, "prototype_mode": mode, "weighting": "examples"}
    found, expected = usual(FedPC(1, pull_weight=0.0, **plain), 3), usual(SharedBody(), 3)
    assert_same(entry(found.server.params, 0), expected.server.params, "the extractor after three rounds")
    assert_same(found.memories, expected.memories, "the heads after three rounds")
    pulled = usual(FedPC(1, pull_weight=0.1, **plain), 3)
    assert fingerprint(entry(pulled.server.params, 0)) != fingerprint(expected.server.params)


# ---- the client


# Class 0 has the rows (2, 4) and (4, 4), mean (3, 4): 3² + 4² = 25 from (0, 0); alone they are 4 + 16 = 20 and
# 16 + 16 = 32 from it. Class 1 has (1, 3), 2² = 4 from (1, 1); its row of weight 0 is not there. Class 2 has no
# prototype, class 3 no example.
READINGS: dict[Any, float] = {
    "norm": 5 + 2,
    "square": 25 + 4,
    "mean_square": (25 + 4) / 2,  # two dimensions
    "mean_square_examples": (20 / 2 + 32 / 2 + 4 / 2 + 0) / 4,  # four examples, one without a prototype
}


@pytest.mark.parametrize("distance", READINGS)
def test_the_distance_to_prototypes_by_hand(distance: Any) -> None:
    known = Prototypes(
        torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0], [9.0, 9.0]]), torch.tensor([2.0, 1.0, 0.0, 1.0])
    )
    z = torch.tensor([[2.0, 4.0], [4.0, 4.0], [1.0, 3.0], [7.0, 7.0], [50.0, 50.0]])
    batch = batch_of(z, [0, 0, 1, 2, 1], [1, 1, 1, 1, 0])
    assert prototype_distance(z, batch, known, distance).item() == pytest.approx(READINGS[distance], abs=1e-6)


def test_the_readings_are_those_that_the_setting_offers() -> None:
    assert set(READINGS) == set(get_args(Distance))


@pytest.mark.parametrize(
    ("distance", "pull"), [("norm", 5.0), ("square", 25.0), ("mean_square", 12.5), ("mean_square_examples", 6.25)]
)
def test_the_loss_by_hand(distance: Any, pull: float) -> None:
    known = prototypes([0.0, 0.0], None)
    batch = batch_of([[3.0, 4.0], [0.0, 2.0]], [0, 1])
    # All logits are 0: log 2. Class 0 is 5 away; its example is one of two, and the other has no prototype.
    method = FedPC(cross_entropy_weight=0.25, pull_weight=2.0, distance=distance)
    found = method.loss(identity_model([[0.0, 0.0], [0.0, 0.0]]), batch, known)
    assert found.item() == pytest.approx(0.25 * log(2) + 2 * pull, abs=1e-5)
    assert FedPC().cross_entropy_weight == FedPC().pull_weight == 0.5


def test_at_a_prototype_the_gradient_is_zero_and_not_nan() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 3.0]], requires_grad=True)
    known = prototypes([1.0, 2.0], [3.0, 0.0])
    (gradient,) = torch.autograd.grad(prototype_distance(z, batch_of(z.detach(), [0, 1]), known, "norm"), z)
    # The second is straight above its prototype: a unit vector, as the distance is not squared.
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


@pytest.mark.parametrize("distance", READINGS)
def test_no_gradient_reaches_prototypes(distance: Any) -> None:
    known = prototypes([0.0, 0.0], [1.0, 1.0])
    known.mean.requires_grad_()
    z = torch.rand(2, 2, requires_grad=True)
    loss = prototype_distance(z, batch_of(z.detach(), [0, 1]), known, distance)
    gradient, other = torch.autograd.grad(loss, [z, known.mean], allow_unused=True)
    assert gradient.abs().sum() > 0
    assert other is None


@pytest.mark.parametrize("distance", ["norm", "mean_square_examples"])
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_client_descends_equation_4_on_the_whole_network(rounds: int, distance: Any) -> None:
    method = FedPC(num_clusters=2, weighting="uniform", distance=distance)
    state = usual(method, rounds)
    message, memory = method.message_for(state.server, "ann"), state.memories["ann"]
    known = message.prototypes
    assert known.is_known.any() == (rounds > 0)  # in the first round cross-entropy is alone

    def loss(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        total = 0.5 * mean_cross_entropy(parts, z, batch)
        for y in batch.y[batch.weight > 0].unique().tolist():
            if known.is_known[y]:
                mean = z[(batch.y == y) & (batch.weight > 0)].mean(0)
                total = total + 0.5 * (mean - known.mean[y]).norm()
        return total

    def by_examples(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
        rows = [
            (z[i] - known.mean[y]).square().mean()
            for i, y in enumerate(batch.y.tolist())
            if known.is_known[y] and batch.weight[i] > 0
        ]
        return 0.5 * mean_cross_entropy(parts, z, batch) + 0.5 * sum(rows, torch.tensor(0.0)) / batch.weight.sum()

    descended = loss if distance == "norm" else by_examples
    expected, _ = trained_by_hand({**message.params, **memory.params}, "ann", descended, round=rounds)
    reply = reply_of(federation(method), state, "ann")
    assert_close(reply.upload.params, without(expected, CLASSIFIER), "the extractor", within=2e-5)
    assert_close(reply.memory.params, matching(expected, CLASSIFIER), "the head", within=2e-5)
    assert not torch.equal(reply.memory.params["classifier.weight"], memory.params["classifier.weight"])
    data = TASK.clients["ann"]
    assert_close(
        reply.upload.prototypes, means_by_hand({**reply.upload.params, **memory.params}, data), "P", within=1e-5
    )


def test_running_prototypes_are_the_mean_features_that_the_last_epoch_saw() -> None:
    method = FedPC(num_clusters=2, prototype_mode="running")
    of = federation(method)
    start = of.server_context(0, "round").initial_params()
    start = {name: leaf for name, leaf in start.items() if not name.startswith("recorder")}
    _, seen = trained_by_hand(start, "ann", lambda parts, z, batch: 0.5 * mean_cross_entropy(parts, z, batch))
    last = seen[2:]  # two epochs of two batches: 11 examples, batches of 8
    z = torch.cat([z[batch.weight > 0] for batch, z in last]).double()
    y = torch.cat([batch.y[batch.weight > 0] for batch, _ in last])
    found = reply_of(of, usual(method, 0), "ann").upload.prototypes
    for c in y.unique().tolist():
        assert_close(found.mean[c], z[y == c].mean(0), f"class {c}", within=2e-5)
    assert found.is_known.tolist() == [bool((y == c).any()) for c in range(CLASSES)]


def means_by_hand(params: Params, data: Any) -> Prototypes:
    """Eq. (2) by a loop, in evaluation mode; a class that is not there is zero."""
    with torch.no_grad():
        z = loaded(params, training=False)["features"](TASK.transform.clean(data.x))
    mean, count = torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)
    for y in data.y.unique().tolist():
        mean[y], count[y] = z[data.y == y].double().mean(0).float(), 1.0
    return Prototypes(mean, count)


# ---- the clustering


class Spy(Sequential):
    """A runtime that does everything right, writes down who did what, and can make a step fail at a client."""

    def __init__(self, fails: tuple[str, str] = ("", ""), times: int = 0) -> None:
        super().__init__()
        self.fails, self.times = fails, times
        self.replies: list[tuple[str, str, Any]] = []
        self.requests: list[Request[Any]] = []

    def run(self, jobs: Any) -> Iterator[tuple[str, Any]]:
        for job in jobs:
            step = job.step.__name__
            if (step, job.client) == self.fails and self.times:
                self.times -= 1
                yield job.client, Failure(job.client, Reason.CLIENT_ERROR, "told to")
                continue
            runtime = Sequential()
            runtime.answer = self.answer  # type: ignore[method-assign]
            [(client, outcome)] = runtime.run([job])
            if isinstance(outcome, Answer):
                memory = runtime.store.load(client, outcome.receipt)
                self.replies.append((step, client, Reply(outcome.upload, memory)))
            yield client, outcome

    def answer(self, request: Request[Any]) -> Any:
        self.requests.append(request)
        return Sequential().answer(request)


# Two kinds of clients, by the classes that they have.
KINDS = small_task(
    {"ann": [0, 1, 0, 1, 0], "bob": [2, 3, 3], "cyd": [0, 1, 1], "dan": [3, 2, 2, 3], "eve": [1, 0], "fay": [2, 3]}
)


def groups(server: Clusters) -> set[frozenset[str]]:
    found: dict[int, set[str]] = {}
    for client, cluster in server.assignment.items():
        found.setdefault(int(cluster), set()).add(client)
    return {frozenset(group) for group in found.values()}


def test_clients_with_the_same_classes_are_clustered_together() -> None:
    expected = {frozenset({"ann", "cyd", "eve"}), frozenset({"bob", "dan", "fay"})}
    for method in (TWO, FedPC(num_clusters=0), FedPC(num_clusters=2, pca_dims=1)):
        of = federation(method, KINDS)
        assert groups(of.start().server) == expected
        assert groups(after(2, of).server) == expected


def test_other_names_of_the_clients_give_the_same_clusters() -> None:
    names = {"ann": "zoe", "bob": "abe", "cyd": "kim", "dan": "yan", "eve": "bea", "fay": "max"}
    renamed = dataclasses.replace(KINDS, clients={names[c]: data for c, data in KINDS.clients.items()})
    expected = {frozenset(names[c] for c in group) for group in groups(federation(TWO, KINDS).start().server)}
    assert groups(federation(TWO, renamed).start().server) == expected


def test_clients_are_clustered_by_the_features_of_the_initial_weights() -> None:
    spy = Spy()
    of = federation(TWO, runtime=spy)
    of.start()
    initial = of.server_context(0, "setup").initial_params()
    assert [(step, client) for step, client, _ in spy.replies] == [("describe", c) for c in sorted(TASK.clients)]
    for _, client, reply in spy.replies:
        expected = means_by_hand(initial, TASK.clients[client])
        assert_close(reply.upload, expected, f"what {client} sends", within=1e-5)
    assert any((reply.upload.count == 0).any() for *_, reply in spy.replies)


def test_the_servers_record_has_every_client_from_the_start_and_one_entry_per_cluster_after_setup() -> None:
    of = federation(TWO)
    fresh, state = TWO.init_server(of.server_context(0, "setup")), usual(TWO, 0)
    assert {c: int(j) for c, j in fresh.assignment.items()} == dict.fromkeys(TASK.clients, -1)
    assert tree.named_leaves(fresh).keys() == tree.named_leaves(state.server).keys()
    initial = without(of.server_context(0, "setup").initial_params(), CLASSIFIER)
    for j in range(2):
        assert_same(entry(state.server.params, j), initial, f"the extractor of cluster {j}")
    assert state.server.prototypes.mean.shape == state.server.sent.mean.shape == (2, CLASSES, FEATURES)
    assert not state.server.prototypes.is_known.any()
    assert {int(j) for j in state.server.assignment.values()} == {0, 1}


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (3, 3), (5, 5), (9, 5)])
def test_there_are_no_more_clusters_than_clients(wanted: int, found: int) -> None:
    server = federation(FedPC(num_clusters=wanted)).start().server
    assert len(server.partition.centres) == len(server.params["features.0.weight"]) == found
    assert {int(j) for j in server.assignment.values()} == set(range(found))


def test_a_client_receives_what_its_cluster_has() -> None:
    server = usual(TWO, 2).server
    assert not torch.equal(*server.params["features.0.weight"])
    for client, cluster in server.assignment.items():
        message = TWO.message_for(server, client)
        assert_same(message.params, entry(server.params, int(cluster)), f"the extractor of {client}")
        assert_same(message.prototypes, entry(server.prototypes, int(cluster)), f"the prototypes of {client}")
        assert message.is_assigned


# ---- who joins later


def joins_late(times: int) -> tuple[Spy, State, State]:
    """A run in which eve cannot be described so many times, after setup and after the first round."""
    spy = Spy(("describe", "eve"), times)
    of = federation(TWO, KINDS, runtime=spy)
    start = of.start()
    assert [f.client for f in start.failures] == ["eve"]
    assert start.server.assignment["eve"] == -1
    spy.replies.clear()
    spy.requests.clear()
    return spy, start, of.advance(start)


def test_a_client_that_missed_the_clustering_joins_the_nearest_cluster_when_it_takes_part() -> None:
    spy, start, state = joins_late(times=1)
    assert not state.failures
    assert state.server.assignment["eve"] == state.server.assignment["ann"]
    assert groups(state.server) == groups(federation(TWO, KINDS).start().server)
    others = {c: j for c, j in state.server.assignment.items() if c != "eve"}
    assert_same(others, {c: start.server.assignment[c] for c in others}, "the clusters of the others")
    assert_same(state.server.partition, start.server.partition, "the partition")
    # The others are asked too, but do nothing: one pass over eve's data, and six trainings, each with its prototypes.
    steps = [(step, client) for step, client, _ in spy.replies]
    assert steps == [(step, client) for step in ("describe", "train") for client in sorted(KINDS.clients)]
    assert [type(request).__name__ for request in spy.requests] == ["Total", *["Fit", "Total"] * 6]
    assert spy.requests[0].data is KINDS.clients["eve"]


def test_once_everybody_has_a_cluster_nobody_is_described_again() -> None:
    spy, _, state = joins_late(times=1)
    spy.replies.clear()
    federation(TWO, KINDS, runtime=spy).advance(state)
    assert {step for step, *_ in spy.replies} == {"train"}


def test_a_client_that_joins_late_counts_in_its_cluster() -> None:
    spy, _, state = joins_late(times=1)
    uploads = {client: reply.upload for step, client, reply in spy.replies if step == "train"}
    again = TWO.aggregate(state.server, iter(uploads.items()), federation(TWO, KINDS).server_context(0, "round"))
    assert_same(again.params, state.server.params, "all six")
    del uploads["eve"]
    five = TWO.aggregate(state.server, iter(uploads.items()), federation(TWO, KINDS).server_context(0, "round"))
    assert fingerprint(five.params) != fingerprint(state.server.params)


def test_a_client_that_cannot_be_described_waits_for_the_next_round() -> None:
    spy, start, state = joins_late(times=2)
    assert [f.client for f in state.failures] == ["eve"]
    assert state.server.assignment["eve"] == -1
    uploads = {client: reply.upload for step, client, reply in spy.replies if step == "train"}
    assert "eve" not in uploads, "a client that has failed in a round is not asked again"
    assert "eve" not in state.memories
    expected = TWO.aggregate(start.server, iter(uploads.items()), federation(TWO, KINDS).server_context(0, "round"))
    assert_same(state.server, expected, "the server without eve")
    message = TWO.message_for(state.server, "eve")
    assert_same(message.params, mean_extractor(state.server), "what a client without a cluster receives")
    assert not message.prototypes.is_known.any()
    # In the next round it can, and joins those that it belongs to.
    third = federation(TWO, KINDS, runtime=spy).advance(state)
    assert third.server.assignment["eve"] == third.server.assignment["ann"]


def test_a_round_without_the_client_does_not_wait_for_it() -> None:
    spy = Spy(("describe", "eve"), times=1)
    of = scripted(TWO, lambda t: ("ann", "bob") if t == 0 else ("ann", "eve"), spy)
    state = after(1, of)
    assert state.server.assignment["eve"] == -1
    assert [step for step, *_ in spy.replies[4:]] == ["train", "train"]
    state = of.advance(state)
    assert state.server.assignment["eve"] >= 0
    assert_finite(whole(state), "after eve joined")


# ---- privacy


@pytest.mark.parametrize("method", [TWO, FedPC(num_clusters=2, prototype_mode="running")], ids=repr)
def test_nothing_of_any_classifier_is_in_any_upload(method: FedPC) -> None:
    spy = Spy()
    after(2, federation(method, runtime=spy))
    heads = [leaf for *_, reply in spy.replies for leaf in reply.memory.params.values()]
    assert len(spy.replies) == 3 * 5
    assert len(heads) == 2 * len(spy.replies)
    for step, client, reply in spy.replies:
        sent = wire.encode(reply.upload)
        assert b"classifier" not in sent
        for head in heads:
            assert head.numpy().tobytes() not in sent, f"{step} of {client}"
        own = reply.upload.prototypes if isinstance(reply.upload, PrototypeUpload) else reply.upload
        assert set(own.count.tolist()) <= {0.0, 1.0}  # which classes, not how many examples of each


# ---- a model for everyone


def small_server() -> Clusters:
    """Two clusters of three clients and one, and one client without."""
    params = {"features.weight": torch.tensor([[1.0], [5.0]])}
    own = Prototypes(
        torch.tensor([[[2.0, 0.0], [1.0, 1.0]], [[6.0, 0.0], [0.0, 0.0]]]), torch.tensor([[3.0, 2.0], [1.0, 0.0]])
    )
    assignment = {c: torch.tensor(j) for c, j in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", -1))}
    partition = dataclasses.replace(no_partition(4), centres=torch.zeros(2, 1, dtype=torch.float64))
    return Clusters(params, own, own, assignment, partition)


class Server:
    def initial_params(self) -> Params:
        return {"features.weight": torch.tensor([9.0]), "classifier.weight": torch.tensor([[7.0]])}


def test_the_models_for_everyone_are_the_mean_extractor_under_the_mean_head_and_the_initial_one() -> None:
    heads = {c: OwnWeights({"classifier.weight": torch.tensor([[w]])}) for c, w in (("a", 1.0), ("d", 4.0), ("e", 4.0))}
    found = TWO.global_models(small_server(), heads, Server())  # type: ignore[arg-type]
    # (3 · 1 + 1 · 5) / 4 = 2, and (1 + 4 + 4) / 3 = 3.
    weights = {name: [leaf.item() for leaf in model.params.values()] for name, model in found.items()}
    assert weights == {"nearest_prototype": [2.0, 7.0], "mean_heads": [2.0, 3.0], "initial_head": [2.0, 7.0]}
    assert "mean_heads" not in TWO.global_models(small_server(), {}, Server())  # type: ignore[arg-type]


def test_global_prototypes_are_the_mean_over_all_clients_that_have_the_class() -> None:
    found = global_prototypes(small_server().sent)
    # Class 0: (3 · 2 + 1 · 6) / 4 = 3. Class 1: only the first cluster has it.
    assert found.mean.tolist() == [[3.0, 0.0], [1.0, 1.0]]
    assert found.count.tolist() == [4.0, 2.0]


def test_global_prototypes_of_a_run_are_the_mean_of_what_clients_sent() -> None:
    spy = Spy()
    state = after(1, federation(TWO, runtime=spy))
    sent = [reply.upload.prototypes for step, _, reply in spy.replies if step == "train"]
    owners = torch.stack([p.count for p in sent]).sum(0)
    mean = torch.stack([p.mean.double() for p in sent]).sum(0) / owners[:, None]
    assert_close(global_prototypes(state.server.sent), Prototypes(mean, owners), "the global prototypes", within=1e-6)


def test_nobody_has_a_public_model_but_the_readings_work_on_a_run() -> None:
    of, state = federation(TWO, ODD_TASK), after(2, federation(TWO, ODD_TASK))
    assert TWO.public(state.server) is None
    found = TWO.global_models(state.server, state.memories, of.server_context(2, "evaluate"))
    x = ODD_TASK.transform.clean(ODD_TASK.tests["domain 0"].x)
    batch = batch_of(x, [0] * len(x))
    known = global_prototypes(state.server.sent)
    assert known.is_known.tolist() == [True, True, True, False]
    for name, reading in found.items():
        model = of.networks_of("ann").model(reading.params)
        with torch.no_grad():
            predicted = reading.outcomes(model, batch, *reading.context).predicted
            z = model.features(x)
        nearest = torch.cdist(z, known.mean[:3]).argmin(-1)
        assert torch.equal(predicted, nearest if name == "nearest_prototype" else model.scores(z).argmax(-1))
