"""Frozen parameters are constants: in memory once, never copied for a fit, never sent, never saved."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import CLASSES, FEATURES, INPUTS, Tampering, bits, tiny, tiny_parts
from protofed import BadInput, tree
from protofed.api.task import ClientId
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedbn import FedBN
from protofed.nn.networks import Networks, Parts
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential

WIDE = 1024
ENCODER_BYTES = 4 * (INPUTS * WIDE + 12 * WIDE * WIDE)  # above 50 MB


class Encoder(nn.Module):
    """Looks pretrained: large, and frozen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(INPUTS, width) / INPUTS**0.5)
        self.rest = nn.Parameter(torch.eye(width).repeat(12, 1, 1))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first)
        return torch.tanh(x @ self.rest[0])


def with_encoder(client: ClientId = "any", width: int = 16, head: int = FEATURES) -> Parts:
    features = nn.Sequential(Encoder(width), nn.Linear(width, head), nn.LayerNorm(head))
    return {"features": features, "classifier": nn.Linear(head, CLASSES)}


LAYERS = ("features.1", "features.2", "classifier")
HEAD = [f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias")]
CONSTANTS = ["features.0.first", "features.0.rest"]


def large_storages(num_bytes: int) -> set[int]:
    """Addresses of all storages of at least this size that Python objects of the process hold."""
    gc.collect()
    tensors = [leaf for leaf in gc.get_objects() if issubclass(type(leaf), Tensor)]
    tensors = [leaf for leaf in tensors if leaf.layout == torch.strided and not leaf.is_meta]
    return {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes() >= num_bytes}


def test_frozen_parameters_are_no_part_of_the_weights() -> None:
    networks = Networks(with_encoder)
    assert list(networks.init(0)) == HEAD
    assert list(networks.trainable) == HEAD
    assert list(networks.shapes) == HEAD
    assert list(networks.constants) == CONSTANTS
    assert networks.normalisation == ("features.2.weight", "features.2.bias")
    assert Networks(tiny_parts).constants == {}


def test_constants_do_not_depend_on_the_seed_but_weights_do() -> None:
    networks, x = Networks(with_encoder), torch.ones(3, INPUTS)
    assert bits(networks.constants) == bits(Networks(with_encoder).constants)
    assert bits(networks.init(1)) == bits(Networks(with_encoder).init(1))
    assert bits(networks.init(1)) != bits(networks.init(2))
    first = networks.init(1)
    first["classifier.bias"].add_(1)
    assert bits(networks.init(1)) != bits(first), "fresh weights are not shared between calls"
    for training in (False, True):
        encoder = networks._modes[training]["features"][0]  # type: ignore[index]
        assert torch.equal(encoder(x), Encoder.forward(encoder, x))


def test_the_hash_says_which_constants() -> None:
    def frozen(value: float) -> Parts:
        parts = tiny_parts()
        parts["features"][0].requires_grad_(False).weight.fill_(value)  # type: ignore[index]
        return parts

    one, same, other = (Networks(lambda v=v: frozen(v)) for v in (1.0, 1.0, 2.0))
    assert one.constants_hash == same.constants_hash
    assert one.constants_hash != other.constants_hash
    assert one.signature != other.signature
    assert one.signature != Networks(tiny_parts).signature
    assert len(one.constants_hash) == 64


def test_networks_that_differ_elsewhere_share_their_constants() -> None:
    one, other = Networks(with_encoder), Networks(lambda: with_encoder(head=FEATURES + 1))
    assert one.signature != other.signature
    assert one.constants_hash == other.constants_hash
    for name in CONSTANTS:
        assert one.constants[name].data_ptr() == other.constants[name].data_ptr()


def test_a_constant_that_a_network_changes_is_noticed() -> None:
    class Changing(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            self.first.add_(1)
            return x

    networks = Networks(lambda: {"features": Changing()})
    networks.check_unchanged()
    networks.model(networks.init(0)).features(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"changed features\.first, which is not saved: it is frozen"):
        networks.check_unchanged()


def test_modules_that_trained_elsewhere_are_not_taken_for_frozen_ones() -> None:
    features = nn.Linear(INPUTS, FEATURES)
    networks = Networks(lambda: {"features": features})
    networks.model(networks.init(0), training=True).features(torch.ones(1, INPUTS))
    with pytest.raises(BadInput, match=r"features\.weight is in use by other networks"):
        Networks(lambda: {"features": features})


def test_frozen_layers_of_normalisation_are_not_kept_by_clients() -> None:
    def parts(client: ClientId) -> Parts:
        built = tiny_parts()
        built["features"].requires_grad_(False)
        built["projection"] = nn.LayerNorm(FEATURES)
        return built

    networks = Networks(lambda: parts("any"))
    statistics = ("features.1.running_mean", "features.1.running_var")
    assert networks.normalisation == (*statistics, "projection.weight", "projection.bias")
    federation = Federation(FedBN(), replace(tiny(), model=parts), Training(rounds=1, epochs=1))
    state = federation.advance(federation.start())
    assert state.failures == ()


@pytest.mark.parametrize("runtime", [Sequential, lambda: Cohort("cpu")], ids=["sequential", "cohort"])
def test_twenty_clients_hold_a_large_encoder_once_and_send_the_head_alone(runtime: Any) -> None:
    before = large_storages(ENCODER_BYTES // 2)
    assert ENCODER_BYTES > 50_000_000
    sent: list[list[str]] = []

    def note(upload: Any) -> Any:
        sent.append(list(upload.params))
        return upload

    task = replace(tiny(20), model=lambda client: with_encoder(client, WIDE))
    training = Training(rounds=1, epochs=1, batch_size=8)
    federation = Federation(FedAvg(), task, training, Tampering("c00", note) if runtime is Sequential else runtime())
    state = federation.start()
    start = {name: leaf.clone() for name, leaf in state.server.params.items()}
    networks = {id(federation.networks_of(client)) for client in task.clients}
    assert len(networks) == 1
    assert len(large_storages(ENCODER_BYTES // 2) - before) == 1
    state = federation.advance(state)
    assert state.failures == ()
    assert len(large_storages(ENCODER_BYTES // 2) - before) == 1
    assert list(state.server.params) == HEAD
    assert all(not torch.equal(start[name], leaf) for name, leaf in state.server.params.items())
    assert sent == ([HEAD] if runtime is Sequential else [])
    state_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves((state.server, state.memories)))
    assert state_bytes < 100_000
