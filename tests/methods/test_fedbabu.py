"""FedBABU: the body trains and is averaged, the head stays as it was drawn, and clients fine-tune for themselves."""

import torch

from methods.conformance import TASK, TRAINING, after, assert_close, assert_same, federation, reply_of, usual
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.fedbabu import FedBABU
from protofed.nn.networks import matching
from references import fedbabu
from references.plain import SGD, SIZE, counted_batches, largest_difference, network

METHOD = FedBABU(fine_tuning_epochs=2)


def test_three_rounds_are_those_of_the_reference() -> None:
    """The largest difference of a weight is 3.0e-8."""
    expected, own = fedbabu.rounds(network(), SIZE, counted_batches, 3, SGD)
    found = usual(METHOD, 3)
    assert largest_difference(found.server.params, expected) < 5e-6
    assert max(largest_difference(found.memories[client].params, own[client]) for client in own) < 5e-6
    assert largest_difference(found.server.params, network().state_dict()) > 0.01


def test_the_head_is_never_trained_averaged_or_sent_up() -> None:
    drawn = matching(usual(METHOD, 0).server.params, CLASSIFIER)
    state = usual(METHOD, 3)
    assert_same(matching(state.server.params, CLASSIFIER), drawn, "the head after three rounds")
    upload = reply_of(federation(METHOD), state, "ann").upload
    assert not matching(upload.params, CLASSIFIER)
    assert {*upload.params, *drawn} == set(state.server.params)


def test_a_client_is_judged_by_the_model_that_it_fine_tuned() -> None:
    state = usual(METHOD, 1)
    message, own = METHOD.message_for(state.server, "ann"), state.memories["ann"]
    assert METHOD.local_weights(message, own) is own.params
    assert not torch.equal(own.params["classifier.weight"], message.params["classifier.weight"])


def test_only_the_chosen_layers_are_fine_tuned() -> None:
    for part, stays in (("classifier", "features.1.weight"), ("body", "classifier.weight")):
        own = usual(FedBABU(fine_tuning_epochs=1, fine_tuned=part), 1).memories["ann"].params
        start = usual(METHOD, 0).server.params
        assert [name for name in ("features.1.weight", "classifier.weight") if torch.equal(own[name], start[name])] == [
            stays
        ]


def test_after_the_last_round_all_clients_fine_tune_the_final_model() -> None:
    of = federation(FedBABU(fine_tuning_epochs=TRAINING.epochs))
    before = after(2, of)
    ended = of.finish(before)
    assert_same(ended.server, before.server, "the public model")
    for client in TASK.clients:
        assert not torch.equal(
            ended.memories[client].params["classifier.weight"], before.memories[client].params["classifier.weight"]
        )


def test_fine_tuning_does_not_change_what_is_sent() -> None:
    assert_close(
        usual(FedBABU(fine_tuning_epochs=1), 2).server, usual(METHOD, 2).server, "the public model", within=0.0
    )
