"""What stands between the check of uploads and the method."""

from typing import Any

import pytest
import torch

from doubles import Tampering, bits, tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.methods.families import Weights, WeightUpload
from protofed.transforms.chain import UploadSettings
from protofed.transforms.stage import ClipToMedian, Exchange

MEDIAN = UploadSettings(clip="median").pipeline()


def upload(*weights: float) -> WeightUpload:
    return WeightUpload({"w": torch.tensor(weights)}, torch.tensor(3))


def test_ways_that_are_longer_than_the_median_are_scaled_down_to_it() -> None:
    """From (1, 0): lengths 1, 2 and 10, so that the last becomes 2 long in its own direction."""
    uploads: Any = [("a", upload(2.0, 0.0)), ("b", upload(1.0, 2.0)), ("c", upload(1.0, -10.0))]
    exchange = Exchange(lambda client: Weights({"w": torch.tensor([1.0, 0.0])}), num_classes=5)
    cleaned = list(ClipToMedian().cleaned(uploads, exchange))
    assert [client for client, _ in cleaned] == ["a", "b", "c"]
    assert cleaned[0][1] is uploads[0][1]
    assert cleaned[1][1] is uploads[1][1]
    assert cleaned[2][1].params["w"].tolist() == pytest.approx([1, -2])
    assert cleaned[2][1].num_examples == 3


def test_one_client_cannot_drag_the_mean_away() -> None:
    def pushed(sent: Any) -> Any:
        return WeightUpload({name: leaf * 1e6 for name, leaf in sent.params.items()}, sent.num_examples)

    def largest(**more: Any) -> float:
        of = Federation(METHODS["fedavg"](), tiny(), Training(rounds=1, epochs=1), Tampering("c01", pushed), **more)
        state = of.advance(of.start())
        assert not state.failures
        return max(leaf.abs().max().item() for leaf in state.server.params.values())

    assert largest() > 1e4
    assert largest(uploads=MEDIAN) < 10


@pytest.mark.parametrize("name", ["fpl", "scaffold", "ga", "averaging", "fedrep"])
def test_methods_that_send_weights_can_be_clipped(name: str) -> None:
    of = Federation(METHODS[name](), tiny(), Training(rounds=1, epochs=1), uploads=MEDIAN)
    plain = Federation(METHODS[name](), tiny(), Training(rounds=1, epochs=1))
    assert bits(of.advance(of.start()).server) != bits(plain.advance(plain.start()).server)


@pytest.mark.parametrize("name", ["fedproto", "ifca", "fedfomo"])
def test_methods_whose_weights_cannot_be_compared_are_refused_by_the_settings_name(name: str) -> None:
    of = Federation(METHODS[name](), tiny(), Training(rounds=1, epochs=1), uploads=MEDIAN)
    with pytest.raises(BadInput, match=r"uploads\.clip"):
        of.advance(of.start())
