"""Uploads on their way: rounded at the client, checked as sent, whole again at the server."""

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import protofed
from doubles import bits, tiny
from protofed.api.roles import Count, Label, Prototype, Weights, roles
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.runtimes.workers import Workers
from protofed.transforms.chain import Bfloat16, UploadPipeline, UploadSettings
from protofed.tree import Params, record

TRAINING = Training(rounds=2, epochs=1, batch_size=4)


@record
class Sent:
    params: Annotated[Params, Weights()]
    count: Annotated[Tensor, Count()]
    label: Annotated[Tensor, Label()]
    mean: Annotated[Tensor, Prototype()]
    plain: Tensor


def sent() -> Sent:
    return Sent(
        {"w": torch.tensor([1 / 3])}, torch.tensor([257.0]), torch.tensor([1]), torch.ones(1, 2), torch.zeros(1)
    )


def test_roles_are_those_of_fields_and_hold_below_them() -> None:
    found = roles({"a": sent()})
    assert found["a/params/w"] == Weights()
    assert found["a/count"] == Count()
    assert found["a/label"] == Label()
    assert found["a/mean"] == Prototype("count")
    assert "a/plain" not in found


def test_numbers_are_rounded_and_counts_are_not() -> None:
    there = Bfloat16().encode(sent())
    assert there.params["w"].dtype == there.mean.dtype == torch.bfloat16
    assert there.count.item() == 257.0  # bfloat16 has 8 bits: it would be 256
    assert there.label.dtype == torch.int64
    back = Bfloat16().decode(there, sent())
    assert back.params["w"].dtype == torch.float32
    assert back.params["w"].item() == pytest.approx(1 / 3, rel=2**-8)
    assert back.params["w"].item() != pytest.approx(1 / 3, rel=1e-6)


def test_a_chain_is_undone_in_reverse() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def spec(self, like: Any) -> Any:
            return self.encode(like)

        def encode(self, upload: Any) -> Any:
            return {self.name: upload}

        def decode(self, sent: Any, like: Any) -> Any:
            assert {self.name: like}.keys() == sent.keys()
            return sent[self.name]

    chain = UploadPipeline((Named("a"), Named("b")))
    one = {"x": torch.ones(1)}
    assert chain.spec(one) == chain.encoded(one, torch.tensor([0]), 1) == {"b": {"a": one}}
    assert chain.decoded({"b": {"a": one}}, one) == one


@pytest.mark.parametrize("name", ["fedavg", "fpl", "fedproto", "fedpc", "scaffold", "ga"])
def test_uploads_in_bfloat16_are_half_as_large_and_end_near(name: str) -> None:
    plain = Federation(METHODS[name](), tiny(), TRAINING)
    half = Federation(METHODS[name](), tiny(), TRAINING, uploads=UploadSettings(precision="bfloat16").pipeline())
    states = [of.advance(of.start()) for of in (plain, half)]
    assert not states[1].failures
    up = [sum(traffic.up for traffic in state.traffic.values()) for state in states]
    assert 0.45 < up[1] / up[0] < 0.75
    assert bits(states[0].server) != bits(states[1].server)
    assert bits(states[0].server).keys() == bits(states[1].server).keys()


def test_workers_encode_as_one_process_does() -> None:
    settings = UploadSettings(precision="bfloat16")
    servers = []
    for runtime in (None, Workers(2)):
        more = {} if runtime is None else {"runtime": runtime}
        of = Federation(METHODS["fpl"](), tiny(), TRAINING, uploads=settings.pipeline(), **more)
        servers.append(of.advance(of.start()).server)
        of.runtime.close()
    assert bits(servers[0]) == bits(servers[1])


def test_a_run_takes_the_settings_and_they_are_part_of_its_hash() -> None:
    result = protofed.run("fedavg", tiny(), rounds=1, uploads=UploadSettings(precision="bfloat16", clip="median"))
    plain = protofed.run("fedavg", tiny(), rounds=1)
    assert result.federation.name != plain.federation.name
    assert bits(result.server) != bits(plain.server)
