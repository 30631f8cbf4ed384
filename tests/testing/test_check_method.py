"""The conformance suite as a user has it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import protofed
from protofed.methods.families import GlobalModel
from protofed.testing import check_method
from protofed.testing.reach import reachable
from protofed.tree import Nothing


@dataclass(frozen=True)
class Good(GlobalModel[Nothing]):
    """A method of a user's own."""

    tags = ("global",)
    smoothing: float = 0.1

    def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Tensor:
        return (1 - self.smoothing) * batch.cross_entropy(model.logits(batch.x))


@dataclass(frozen=True)
class Hoarding(Good):
    """Puts the first client's examples where the server can reach them."""

    hoard: list[Tensor] = field(default_factory=list, compare=False)

    def networks(self, spec: Any, client: str) -> Any:
        return super().networks(spec, client)

    async def train(self, client: Any, message: Any, memory: Any) -> Any:
        reply = await super().train(client, message, memory)
        object.__setattr__(client.networks, "seen", client.data)
        return reply


@pytest.mark.slow
def test_a_good_method_passes() -> None:
    check_method(Good())


@pytest.mark.slow
def test_a_method_through_which_the_server_reaches_examples_is_named() -> None:
    with pytest.raises(AssertionError, match="Hoarding: the server reaches no example: training examples"):
        check_method(Hoarding())


def test_every_way_to_a_tensor_is_found() -> None:
    secret = torch.ones(3)

    class Holder:
        def __init__(self) -> None:
            self.inside = [{"a": (lambda: secret)}]

        def method(self) -> None: ...

    ways = [path for path, leaf in reachable(Holder().method) if leaf is secret]
    assert ways == [".__self__.inside[0]['a'].secret"]
    assert [leaf is secret for _, leaf in reachable({1: secret[1:]}) if leaf.shape == (3,)] == [True]
    assert not list(reachable(protofed))
