"""pFedMe: one step by hand, and three rounds against a plain torch loop."""

import pytest
import torch

from methods.conformance import TASK, TRAINING, after, assert_close, federation, usual
from protofed.errors import BadInput
from protofed.methods.fedavg import FedAvg
from protofed.methods.pfedme import MoreauDescent, PFedMe
from protofed.optim.optimizers import Sgd
from protofed.tree import Params
from references import pfedme
from references.plain import SGD, SIZE, counted_batches, largest_difference, network

METHOD = PFedMe(attraction=4.0, inner_steps=3, copy_lr=0.1)


@pytest.mark.parametrize("method", [METHOD, PFedMe(server_lr=1.5, personal_lr=0.02)], ids=repr)
def test_three_rounds_are_those_of_the_reference(method: PFedMe) -> None:
    """The largest difference of a weight is 2.4e-7."""
    expected, own = pfedme.rounds(
        network(),
        SIZE,
        counted_batches,
        3,
        method.personal_lr or SGD["lr"],
        method.attraction,
        method.inner_steps,
        method.copy_lr,
        method.server_lr,
    )
    found = usual(method, 3)
    assert largest_difference(found.server.params, expected) < 5e-6
    for client, personal in own.items():
        assert largest_difference(found.memories[client].params, personal) < 5e-6
    assert largest_difference(found.server.params, network().state_dict()) > 0.01


def test_a_step_by_hand() -> None:
    # f(θ) = θ²/2 from θ = w = 8, λ = 2, rate 0.25: θ is 8 − ¼·8 = 6, then 6 − ¼(6 + 2·(6 − 8)) = 5.5.
    # w goes η λ = 0.1 · 2 of the way: 8 − 0.2 · 2.5 = 7.5.
    asked = []

    def gradient(params: Params) -> Params:
        asked.append(params["w"].item())
        return {"w": params["w"], "twin.w": torch.zeros(())}

    start = {"w": torch.tensor(8.0), "twin.w": torch.tensor(8.0)}
    params, _ = MoreauDescent(Sgd(lr=0.25), 2.0, 2, 0.1).step(gradient, start, ())
    assert asked == [8.0, 6.0]
    assert {name: leaf.item() for name, leaf in params.items()} == pytest.approx({"w": 5.5, "twin.w": 7.5})


def test_with_one_inner_step_and_a_copy_that_follows_it_is_fedavg_with_plain_sgd() -> None:
    method = PFedMe(attraction=4.0, inner_steps=1, copy_lr=0.25)
    plain = after(3, federation(FedAvg(), optimizer=Sgd(lr=TRAINING.optimizer.lr)))
    assert_close(usual(method, 3).server, plain.server, "the weights after three rounds", within=1e-5)


def test_the_server_goes_part_of_the_way_but_takes_the_statistics_as_they_are() -> None:
    start, whole = usual(METHOD, 0).server.params, usual(METHOD, 1).server.params
    half = usual(PFedMe(attraction=4.0, inner_steps=3, copy_lr=0.1, server_lr=0.5), 1).server.params
    torch.testing.assert_close(half["classifier.weight"], (start["classifier.weight"] + whole["classifier.weight"]) / 2)
    assert torch.equal(half["features.1.running_mean"], whole["features.1.running_mean"])


def test_a_client_is_its_own_model_and_sends_its_copy() -> None:
    state = usual(METHOD, 1)
    message = METHOD.message_for(state.server, "ann")
    used = METHOD.local_weights(message, state.memories["ann"])
    assert used["classifier.weight"] is state.memories["ann"].params["classifier.weight"]
    assert set(message.params) == set(usual(FedAvg(), 0).server.params)
    assert len(TASK.clients) == len(state.memories)


def test_a_copy_that_would_go_past_the_own_model_is_refused() -> None:
    with pytest.raises(BadInput, match="copy_lr"):
        federation(PFedMe(attraction=15.0, copy_lr=0.1)).start()
