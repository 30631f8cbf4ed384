"""Tasks of tokens: inputs are integers, and a language model's output layer may be its embedding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofed import METHODS, BadInput, Data, Task, tree
from protofed.api.task import ClientId
from protofed.data.transforms import Transform
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.nn.networks import Parts
from protofed.optim.optimizers import Sgd
from protofed.runtimes.cohort.cohort import Cohort
from protofed.runtimes.sequential import Sequential

TOKENS, LENGTH, DIM = 9, 5, 6


class MeanOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, DIM)
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(x).mean(1)))


def classifier(client: ClientId) -> Parts:
    return {"features": MeanOfTokens(), "classifier": nn.Linear(DIM, 2)}


def tied(client: ClientId) -> Parts:
    features, output = MeanOfTokens(), nn.Linear(DIM, TOKENS, bias=False)
    output.weight = features.embedding.weight
    return {"features": features, "classifier": output}


def texts(num_clients: int, dtype: torch.dtype, num_classes: int) -> Task:
    """The class says which half of the tokens is frequent; the next token is the one that stands first."""
    draws = torch.Generator().manual_seed(3)

    def examples(count: int) -> Data:
        y = torch.randint(0, 2, (count,), generator=draws)
        x = torch.randint(0, 6, (count, LENGTH), generator=draws) + 3 * y[:, None]
        return Data.of(x.to(dtype), y if num_classes == 2 else x[:, 0])

    clients = {f"c{k}": examples(20 + 3 * k) for k in range(num_clients)}
    model = classifier if num_classes == 2 else tied
    return Task(clients, {"all": examples(200)}, num_classes, model, name="texts")


def trained(method: str, runtime: Any, task: Task, rounds: int) -> tuple[State, float]:
    """The state, and the share of test examples that the public model gets right."""
    training = Training(rounds=rounds, epochs=2, batch_size=8, optimizer=Sgd(lr=0.5))
    federation = Federation(METHODS[method](), task, training, runtime)
    state = federation.start()
    for _ in range(rounds):
        state = federation.advance(state)
    assert state.failures == ()
    test, model = task.tests["all"], federation.networks_of("c0").model(state.server.params)
    return state, (model.logits(test.x).argmax(-1) == test.y).float().mean().item()


def difference(a: State, b: State) -> float:
    pairs = zip(tree.leaves(a.server), tree.leaves(b.server), strict=True)
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs if one.numel())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("method", ["fedavg", "fpl"])
def test_a_classifier_of_tokens_learns(method: str, dtype: torch.dtype) -> None:
    task = texts(3, dtype, num_classes=2)
    assert task.spec.input.kind == "tokens"
    assert trained(method, Sequential(), task, rounds=10)[1] > 0.85


@pytest.mark.parametrize("executor", ["streams", "stacked"])
@pytest.mark.parametrize("num_classes", [2, TOKENS], ids=["classifier", "tied"])
@pytest.mark.parametrize("method", ["fedavg", "fpl"])
def test_clients_of_tokens_may_be_trained_together(
    method: str, num_classes: int, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task = texts(3, torch.int64, num_classes)
    reference, _ = trained(method, Sequential(), task, rounds=2)
    found, _ = trained(method, Cohort("cpu", executor=executor), task, rounds=2)
    assert difference(reference, found) <= 1e-5
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_tied_language_model_learns() -> None:
    task = texts(3, torch.int64, num_classes=TOKENS)
    before = trained("fedavg", Sequential(), task, rounds=0)[1]
    state, after = trained("fedavg", Sequential(), task, rounds=25)
    assert after > before + 0.15
    assert "classifier.weight" not in state.server.params


def test_tokens_are_not_varied_and_other_integers_are_no_inputs() -> None:
    x, y = torch.ones(4, 1, 3, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(BadInput, match="not for tokens"):
        Task({"a": Data.of(x, y)}, {}, 2, classifier, transform=Transform(flip=True))
    with pytest.raises(BadInput, match=r"inputs of type torch\.int16: make them .* or torch\.int64 for tokens"):
        Task({"a": Data.of(x.to(torch.int16), y)}, {}, 2, classifier)
