"""The pieces that several methods are made of."""

import pytest
import torch

from protofed.errors import RoundAbandoned
from protofed.methods._shared.mixing import entry, stacked, weighted_mean
from protofed.methods.families import Weights


def test_a_mean_of_models_by_hand() -> None:
    models = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 10.0])}]
    # 3/4 · (1, 2) + 1/4 · (5, 10) = (2, 4)
    assert weighted_mean(zip(models, [0.75, 0.25], strict=True))["w"].tolist() == [2.0, 4.0]
    with pytest.raises(RoundAbandoned):
        weighted_mean((model, 0.0) for model in models)


def test_an_entry_of_stacked_records_is_the_record() -> None:
    records = [Weights({"w": torch.tensor([k, 2.0 * k])}) for k in range(3)]
    stack = stacked(records)
    assert stack.params["w"].shape == (3, 2)
    assert [entry(stack, k).params["w"].tolist() for k in range(3)] == [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]
