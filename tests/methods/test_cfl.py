"""CFL: rounds against a plain reference that tries every cut, bipartitions on numbers, FedAvg before the first cut."""

from collections.abc import Callable
from math import cos, radians, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.conformance import (
    CHECKS,
    TASK,
    after,
    assert_same,
    federation,
    scripted,
    small_network,
    usual,
)
from protofed import tree
from protofed.api.method import Method
from protofed.methods.cfl import CFL, Clusters, bipartition, clusters_of, cosines
from protofed.methods.families import WeightUpload
from protofed.methods.fedavg import FedAvg
from references import cfl
from references.plain import largest_difference

CUTTING = CFL(stationary_norm=100.0, progress_norm=0.0, first_round=1, linkage="single")
"""Cuts every cluster of three or more from the second round on."""
OF_AUTHORS = {"stationary_norm": 0.4, "progress_norm": 1.6, "first_round": 20}
EVERYONE = tuple(sorted(TASK.clients))


@pytest.mark.parametrize("method", [CUTTING, CFL(stationary_norm=100.0, progress_norm=0.0, first_round=0)], ids=repr)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: Callable[[Method], None], method: CFL) -> None:
    check(method)


def test_three_rounds_are_those_of_a_plain_reference() -> None:
    """The largest difference of a weight was 1.2e-7. Five clients part in the second round and in the third."""
    of = federation(CUTTING)
    state = after(3, of)
    clusters, models = cfl.rounds(small_network(), of.start().server.undivided, 3, 1, 100.0, 0.0)
    assert sorted(map(tuple, clusters_of(state.server))) == clusters
    assert len(clusters) > 2
    for client, expected in models.items():
        found = CUTTING.message_for(state.server, client).params
        assert largest_difference(found, expected) < 5e-6


# ---- the cut


def plane(*degrees: float) -> Tensor:
    """Updates of length 1 in these directions."""
    return torch.stack([torch.stack([angle.cos(), angle.sin()]) for angle in torch.tensor(degrees).double().deg2rad()])


def test_similarities_are_cosines() -> None:
    found = cosines(plane(0, 60, 180) * torch.tensor([[1.0], [5.0], [0.1]]))
    expected = torch.tensor([[1.0, 0.5, -1.0], [0.5, 1.0, -0.5], [-1.0, -0.5, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert cosines(torch.zeros(2, 3)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("linkage", "second"),
    # Directions 0, 40, 80, 125 degrees. Single: the widest step between neighbours is from 80 to 125. Complete: 0 and
    # 40 join, then 80 and 125, whose least similar pair is 45 degrees apart; 0, 40, 80 would have one of 80 degrees.
    [("single", [False, False, False, True]), ("complete", [False, False, True, True])],
)
def test_cuts_on_numbers(linkage: Any, second: list[bool]) -> None:
    assert bipartition(cosines(plane(0, 40, 80, 125)), linkage).tolist() == second


def test_clients_that_are_all_alike_part_into_two_all_the_same() -> None:
    for linkage in ("single", "complete"):
        assert 0 < bipartition(torch.ones(4, 4, dtype=torch.float64), linkage).sum() < 4


def aggregated(method: CFL, round: int, ways: dict[str, float], absent: tuple[str, ...] = ()) -> Clusters:
    """After uploads of clients that went so far from 0 along one weight."""
    of = federation(method, rounds=30)
    central = of.server_context(round, "round")
    state = method.init_server(central)
    start = tree.map(torch.zeros_like, state.undivided)
    state = Clusters(tree.map(torch.zeros_like, state.params), state.cluster, start)
    uploads = []
    for client, way in ways.items():
        params = {name: leaf.clone() for name, leaf in start.items()}
        params["classifier.bias"][0] = way
        uploads.append((client, WeightUpload(params, torch.tensor(2))))
    return method.aggregate(state, [(c, u) for c, u in uploads if c not in absent], central)


OPPOSED = {"ann": 2.0, "bob": 2.0, "cyd": -2.0, "dan": -2.0, "eve": 0.5}


@pytest.mark.parametrize(
    ("settings", "round", "is_cut"),
    # The mean of the five ways is 0.1, the longest is 2.
    [
        ({}, 20, True),
        ({}, 19, False),
        ({"stationary_norm": 0.11}, 20, True),
        ({"stationary_norm": 0.09}, 20, False),
        ({"progress_norm": 1.9}, 20, True),
        ({"progress_norm": 2.1}, 20, False),
        ({"smallest": 5}, 20, True),
        ({"smallest": 6}, 20, False),
        ({"gap": 0.99}, 20, True),  # across the cut similarities are −1: √((1 + 1)/2) = 1
        ({"gap": 1.01}, 20, False),
    ],
)
def test_when_a_cluster_is_cut(settings: dict[str, Any], round: int, is_cut: bool) -> None:
    found = clusters_of(aggregated(CFL(**{**OF_AUTHORS, **settings}), round, OPPOSED))
    assert found == ([["ann", "bob", "eve"], ["cyd", "dan"]] if is_cut else [list(EVERYONE)])


def test_each_part_has_its_own_mean_from_the_round_of_the_cut_on() -> None:
    state = aggregated(CFL(), 20, OPPOSED)
    biases = {c: CFL().message_for(state, c).params["classifier.bias"][0].item() for c in (*EVERYONE, "a newcomer")}
    assert biases["ann"] == biases["bob"] == biases["eve"] == pytest.approx(1.5)
    assert biases["cyd"] == biases["dan"] == -2.0
    assert biases["a newcomer"] == 0.0  # the model before the cut


def test_a_cluster_of_which_somebody_is_absent_is_not_cut() -> None:
    assert len(clusters_of(aggregated(CFL(), 20, OPPOSED, absent=("eve",)))) == 1


def test_the_gap_is_half_of_the_angle() -> None:
    # √((1 − cos a)/2) = sin(a/2): for two directions 60 degrees apart it is ½.
    assert sqrt((1 - cos(radians(60))) / 2) == pytest.approx(0.5)
    assert bipartition(cosines(plane(0, 60)), "single").tolist() == [False, True]


def test_until_the_first_cut_it_is_fedavg() -> None:
    found, plain = usual(CFL(), 3).server, after(3, federation(FedAvg())).server
    assert_same(CFL().message_for(found, "ann").params, plain.params, "three rounds")
    assert_same(found.undivided, plain.params, "what a newcomer is given")


def test_a_cluster_of_which_nobody_takes_part_keeps_its_model() -> None:
    of = scripted(CUTTING, lambda t: EVERYONE if t < 2 else ("ann",))
    before = after(2, of)
    state = of.advance(before)
    [others] = [c for c in clusters_of(before.server) if "ann" not in c]
    for client in others:
        own = CUTTING.message_for(state.server, client)
        assert_same(own, CUTTING.message_for(before.server, client), f"the model of {client}")
    assert clusters_of(state.server) == clusters_of(before.server)
