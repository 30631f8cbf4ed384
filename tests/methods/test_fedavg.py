"""FedAvg: the weighted mean, and plain training in between."""

import pytest
import torch

from methods.conformance import (
    SIZES,
    TASK,
    assert_close,
    assert_same,
    federation,
    fingerprint,
    mean_cross_entropy,
    reply_of,
    trained_by_hand,
    usual,
)
from protofed.methods.families import Weights, WeightUpload
from protofed.methods.fedavg import FedAvg


def test_weights_and_batchnorm_statistics_are_averaged_by_numbers_of_examples() -> None:
    one = {"features.weight": torch.tensor([1.0, -2.0]), "features.running_var": torch.tensor([4.0])}
    three = {"features.weight": torch.tensor([5.0, 2.0]), "features.running_var": torch.tensor([8.0])}
    uploads = [("a", WeightUpload(one, torch.tensor(1))), ("b", WeightUpload(three, torch.tensor(3)))]
    server = FedAvg().aggregate(Weights(one), iter(uploads), None)
    # With 1 and 3 examples: a quarter of the first and three quarters of the second.
    # weight: 0.25 · 1 + 0.75 · 5 = 4 and 0.25 · (−2) + 0.75 · 2 = 1; variance: 0.25 · 4 + 0.75 · 8 = 7.
    assert server.params["features.weight"].tolist() == [4.0, 1.0]
    assert server.params["features.running_var"].tolist() == [7.0]


def test_a_round_ends_with_the_mean_of_the_replies() -> None:
    of, state = federation(FedAvg()), usual(FedAvg(), 0)
    replies = {client: reply_of(of, state, client).upload for client in TASK.clients}
    assert {client: int(reply.num_examples) for client, reply in replies.items()} == SIZES
    total = sum(SIZES.values())
    expected = {
        name: sum(SIZES[c] / total * replies[c].params[name].double() for c in SIZES).float()
        for name in state.server.params
    }
    server = usual(FedAvg(), 1).server
    assert_close(server.params, expected, "the server against the mean in float64", within=1e-6)
    statistics = ["features.1.running_mean", "features.1.running_var"]
    assert all(not torch.equal(server.params[name], state.server.params[name]) for name in statistics)


@pytest.mark.parametrize("client", ["ann", "dan"])
def test_a_client_trains_as_plain_torch_does(client: str) -> None:
    start = usual(FedAvg(), 1).server.params
    expected, _ = trained_by_hand(start, client, mean_cross_entropy, round=1)
    reply = reply_of(federation(FedAvg()), usual(FedAvg(), 1), client)
    assert_close(reply.upload.params, expected, "weights and statistics after local training", within=1e-5)


def test_everyone_starts_from_the_same_weights_and_keeps_nothing() -> None:
    state = usual(FedAvg(), 0)
    messages = [FedAvg().message_for(state.server, client) for client in TASK.clients]
    for message in messages:
        assert_same(message, messages[0], "the message of the first round")
    assert not fingerprint(usual(FedAvg(), 1).memories)
