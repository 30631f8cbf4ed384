"""A trained model as a plain nn.Module: it predicts as in the federation, and so do its graphs."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import protofed
from models.handing import CLASSES, SIZE, run_of, vectors
from protofed import METHODS, BadInput, FedAvg, Result, RunFailed, TrainedModel
from protofed.api.task import InputSpec
from protofed.data.transforms import Transform
from protofed.models import graphs
from protofed.models.module import Context
from protofed.tasks.models import MODELS, Network

X = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "public": ("fedavg", {}),
    "personal": ("fedbn", {}),
    "prototypes": ("fpl", {}),
    "nearest prototype": ("fedproto", {"inference": "nearest_prototype"}),
    "exemplars": ("pfedcspc", {}),
    "sampled features": ("fedsr", {}),
    "parts of the method": ("fedseproto", {}),
    "classifier of the method": ("fednh", {}),
    "constants": ("fedetf", {}),
}


def expected(result: Result, client: str | None) -> Tensor:
    """What the method itself predicts."""
    federation, state = result.federation, result.state
    with torch.no_grad():
        if client is not None:
            return result.predict(client, X)
        public = federation.method.public(state.server)
        assert public is not None
        params, message = public
        return federation.method.predict(federation.networks_of(federation.ids[0]).model(params), X, message, None)


def has_public(result: Result) -> bool:
    return result.federation.method.public(result.state.server) is not None


@pytest.mark.parametrize("name", [*METHODS])
def test_a_module_predicts_as_the_method_does(name: str) -> None:
    result = run_of(name)
    for client in ("c1", *([None] if has_public(result) else [])):
        model = result.module(client)
        with torch.no_grad():
            scores = model(X)
        assert torch.allclose(scores, expected(result, client), atol=1e-6), client
        assert scores.shape == (5, CLASSES)
        total = model.probabilities(X).sum(-1)
        assert torch.allclose(total, torch.ones(5), atol=1e-5)
        for points in model.prototypes.values():
            assert points.values.shape[1] == model.embed(X).shape[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_saved_copied_and_exported(kind: str) -> None:
    name, settings = KINDS[kind]
    result = run_of(name, settings)
    model = result.module(None if has_public(result) else "c1")
    with torch.no_grad():
        scores = model(X)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(X), scores)
        other = copy.deepcopy(model)
        for leaf in other.state_dict().values():
            leaf.zero_()
        assert torch.equal(model(X), scores), "a copy has weights of its own"
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(X), scores)
        assert torch.allclose(torch.jit.trace(model, (X,), check_trace=False)(X), scores, atol=1e-5)
    assert graphs.torch_graph(model), "it was compared with the model"
    pytest.importorskip("onnxruntime")
    assert graphs.onnx_graph(model), "and so was this one"


def shape_of(name: str) -> tuple[int, ...]:
    return (12,) if name.startswith("mlp") else (3, 28, 28) if name == "small_cnn" else (3, 32, 32)


LARGE = {"resnet10", "resnet18", "cnn3", "conv2"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in LARGE else one for one in MODELS])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # a layer asks for the size of images, which is fixed
def test_graphs_of_every_network_give_the_same_answers(name: str) -> None:
    """The exporters refuse a graph that differs by more than 1e-4; TorchScript is compared here."""
    pytest.importorskip("onnxruntime")
    shape = shape_of(name)
    torch.manual_seed(0)
    parts = Network(name, {"inputs" if len(shape) == 1 else "channels": shape[0], "num_classes": 4})()
    spec = {"classes": tuple("abcd"), "input": InputSpec(shape), "transform": Transform()}
    model = TrainedModel(FedAvg(), parts, Context({}, {}), **spec)
    assert graphs.torch_graph(model)
    assert graphs.onnx_graph(model)
    x = graphs.samples(model, 3)
    with torch.no_grad():
        traced = torch.jit.trace(model, (graphs.samples(model, 2, seed=1),), check_trace=False)
        assert torch.allclose(traced(x), model(x), atol=1e-4)


def test_a_graph_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = run_of("fedavg").module()
    program = graphs.program_of(copy.deepcopy(model))
    with torch.no_grad():
        model.get_parameter("classifier.bias").add_(0.01)
    monkeypatch.setattr(graphs, "program_of", lambda model: program)
    with pytest.raises(RunFailed, match=r"differ by 0\.01"):
        graphs.torch_graph(model)


def test_what_a_client_keeps_for_training_is_left_behind() -> None:
    model = run_of("scaffold").module("c1")
    assert {name.partition(".")[0] for name in model.state_dict()} == {"features", "classifier"}
    assert not model.known
    assert [*run_of("pfedcspc").module().known] == ["message/exemplars/mean", "message/exemplars/count"]


def test_sites_without_a_model_are_named() -> None:
    result = run_of("local")
    with pytest.raises(BadInput, match=r"LocalOnly has no global model here: .* one of: c0, c1, c2"):
        result.module()
    with pytest.raises(BadInput, match="no client 'nobody'; the clients are c0, c1, c2"):
        result.module("nobody")


def test_a_site_that_never_took_part_has_no_model_of_its_own() -> None:
    result = protofed.run("local", vectors(), rounds=1, epochs=1, fraction=0.3, runtime="sequential")
    [trained] = result.state.receipts
    assert result.module(trained)
    with pytest.raises(BadInput, match="has not taken part in a round yet"):
        result.module(next(client for client in result.federation.ids if client != trained))


def test_a_prediction_does_not_depend_on_the_batch() -> None:
    for name in ("fedsr", "fedavg", "fpl"):
        model = run_of(name).module()
        with torch.no_grad():
            assert torch.allclose(model(X)[:1], model(X[:1]), atol=1e-6), name
