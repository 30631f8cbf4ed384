"""FedPC by sums: its clusters, and that all else is FedPC."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CLASSES,
    FEATURES,
    TASK,
    assert_close,
    assert_same,
    federation,
    memories,
    reply_of,
    usual,
)
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.methods._shared.mixing import entry
from protofed.methods.fedpc import FedPC
from protofed.methods.fedpc_sums import ClusterModels, FedPCSums, Member
from protofed.prototypes.class_means import Prototypes, no_prototypes
from protofed.prototypes.kmeans import within
from protofed.prototypes.kmeans_sums import ClusterSums, projection

PAIR: dict[str, Any] = {"num_clusters": 2, "least_clients": 1}


def assignment(method: FedPCSums, state: State) -> dict[str, int]:
    kept = memories(state)
    return {client: method.cluster(state.server.public, kept[client].initial) for client in sorted(kept)}


def points(state: State) -> Tensor:
    """What clients are clustered by, over the seed and size that the method takes."""
    flat = torch.stack([memories(state)[c].initial.mean.flatten().double() for c in sorted(TASK.clients)])
    return (projection(0, CLASSES * FEATURES, 32) @ flat.T).T


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("mode", ["recomputed", "running"])
def test_with_one_cluster_it_is_fedpc(weighting: Any, mode: Any) -> None:
    settings: dict[str, Any] = {"num_clusters": 1, "weighting": weighting, "prototype_mode": mode}
    found, expected = usual(FedPCSums(**settings), 3), usual(FedPC(**settings), 3)
    assert_close(found.server.public.params, expected.server.params, "the extractor", within=1e-6)
    assert_close(found.server.sent.mean, expected.server.sent.mean, "its prototypes", within=1e-6)
    assert_same(
        {c: m.params for c, m in memories(found).items()},
        {c: m.params for c, m in memories(expected).items()},
        "the heads",
    )


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_with_the_same_clusters_a_round_is_one_of_fedpc(weighting: Any) -> None:
    """FedPC is told the clusters that clients have found by sums."""
    method, other = FedPCSums(**PAIR, weighting=weighting), FedPC(num_clusters=2, weighting=weighting)
    state, start = usual(method, 0), federation(other).start()
    clusters = assignment(method, state)
    assert set(clusters.values()) == {0, 1}
    told = {client: torch.tensor(j) for client, j in clusters.items()}
    server = replace(
        start.server,
        assignment=told,
        params=state.server.public.params,
        prototypes=state.server.public.prototypes,
        sent=state.server.sent,
        partition=replace(start.server.partition, centres=torch.zeros(2, 1, dtype=torch.float64)),
    )
    expected = replace(start, server=server)
    for _ in range(2):
        state, expected = federation(method).advance(state), federation(other).advance(expected)
    assert_close(state.server.public.params, expected.server.params, "extractors", within=1e-6)
    assert_close(state.server.public.prototypes.mean, expected.server.prototypes.mean, "prototypes", within=1e-6)
    assert_close(state.server.sent.mean, expected.server.sent.mean, "what clusters have sent", within=1e-6)


def test_clients_find_the_tightest_halves_of_their_projected_prototypes() -> None:
    """Of all ways to split five clients into two, by a loop."""
    method = FedPCSums(**PAIR)
    state = usual(method, 0)
    own, names = points(state), sorted(TASK.clients)
    splits = [set(part) for size in (1, 2) for part in combinations(range(5), size)]
    best = min(splits, key=lambda part: within(own, torch.tensor([int(k in part) for k in range(5)])))
    clusters = assignment(method, state)
    halves = {frozenset(c for c in names if clusters[c] == j) for j in (0, 1)}
    assert frozenset(names[k] for k in best) in halves
    for j in (0, 1):
        members = [k for k, name in enumerate(names) if clusters[name] == j]
        assert_close(state.server.public.centres[j].double(), own[members].mean(0), f"centre {j}", within=1e-5)
        assert state.server.public.sizes[j] == len(members)


def test_clusters_of_few_clients_are_dissolved() -> None:
    """Three centres on a line have 1, 3 and 4 clients; the one at the left end joins the middle."""
    where = torch.tensor([0.0, 4.0, 5.0, 6.0, 10.0, 11.0, 12.0, 13.0])
    asked: list[list[float]] = []

    def exchange(centres: Tensor) -> ClusterSums:
        asked.append(centres[0, :, 0, 0].tolist())
        member = torch.nn.functional.one_hot((where[:, None] - centres[0, :, 0, 0]).abs().argmin(-1), centres.shape[1])
        return ClusterSums(torch.zeros(1, centres.shape[1], 1, 1), member.sum(0).float()[None, :, None])

    centres = torch.tensor([[0.0], [5.0], [11.5]])
    kept, sizes = FedPCSums().large_ones(centres, exchange)
    assert (kept.flatten().tolist(), sizes.tolist()) == ([5.0, 11.5], [4.0, 4.0])
    assert asked == [[0.0, 5.0, 11.5], [5.0, 11.5]]
    kept, sizes = FedPCSums(least_clients=9).large_ones(centres, exchange)
    assert (kept.flatten().tolist(), sizes.tolist()) == ([11.5], [8.0])
    far = torch.tensor([[5.0], [11.5]])  # four clients each, too few in both: everybody joins the first
    kept, sizes = FedPCSums(least_clients=5).large_ones(far, exchange)
    assert (kept.flatten().tolist(), sizes.tolist()) == ([5.0], [8.0])
    assert len(FedPCSums(least_clients=1).large_ones(centres, exchange)[0]) == 3


def test_in_a_run_no_cluster_has_fewer_than_three_clients() -> None:
    assert min(usual(FedPCSums(), 0).server.public.sizes.tolist()) >= 3


def test_who_was_not_there_for_the_clustering_joins_the_nearest() -> None:
    method = FedPCSums(**PAIR)
    of: Federation = federation(method)
    state = usual(method, 0)
    late = replace(state, receipts={c: r for c, r in state.receipts.items() if c != "bob"})
    joined = memories(of.advance(late))["bob"].initial
    assert_same(joined, memories(state)["bob"].initial, "what bob is clustered by")
    assert assignment(method, of.advance(late)) == assignment(method, state)
    message = state.server.public
    params = {name: torch.stack([leaf[0], leaf[0] + 5]) for name, leaf in message.params.items()}
    sizes = torch.tensor([1.0, 4.0])
    stranger = Member({}, no_prototypes(CLASSES, FEATURES))
    found = method.local_weights(replace(message, params=params, sizes=sizes), stranger)
    # One client of five has the first extractor, four have it plus 5: on average it is plus 4.
    assert_close(found, {n: leaf[0] + 4 for n, leaf in params.items()}, "its extractor", within=1e-5)


def test_a_cluster_that_nobody_replies_for_enters_the_mixing_with_what_it_had() -> None:
    method = FedPCSums(**PAIR, rho="uniform")
    state = usual(method, 1)
    clusters = assignment(method, state)
    alone = [client for client, j in clusters.items() if j == 0]
    of = federation(method)
    uploads = [(c, reply_of(of, state, c).upload) for c in alone]
    after = method.aggregate(state.server, uploads, of.server_context(1, "round"))
    assert_same(entry(after.sent, 1), entry(state.server.sent, 1), "what cluster 1 sent")
    for name, leaf in state.server.public.params.items():
        own = sum(len(TASK.clients[c]) * u.params[name].double() for c, u in uploads)
        own = own / sum(len(TASK.clients[c]) for c in alone)
        expected = (own + leaf[1].double()) / 2
        assert_close(after.public.params[name][0].double(), expected, name, within=1e-6)


def test_before_clusters_are_found_there_is_one_of_the_initial_weights() -> None:
    method = FedPCSums()
    server = method.init_server(federation(method).server_context(0, "setup"))
    assert isinstance(server.public, ClusterModels)
    stranger = Member({}, Prototypes(torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)))
    assert_same(method.local_weights(server.public, stranger), entry(server.public.params, 0), "the initial extractor")
