"""What methods show of themselves for figures: who learns from whom, prototypes, and forms of the public model."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from methods.conformance import CLASSES, SIZES, TASK, federation, usual
from protofed import METHODS
from protofed.api.method import Method
from protofed.engine.state import State
from protofed.methods.ccvr import CCVR
from protofed.methods.fedala import FedALA, Mixing
from protofed.methods.fedfomo import FedFomo, Models
from protofed.methods.fedpc import FedPC
from protofed.methods.fedproto import FedProto
from protofed.methods.fpl import FPL
from protofed.methods.pfedcspc import PFedCSPC
from protofed.nn.networks import matching
from protofed.prototypes.class_means import Prototypes, points
from protofed.reports.analysis.views import Observer
from protofed.runs.results import Result


@dataclass(frozen=True)
class Seen:
    """What a test says that an observer sees."""

    memories: dict[str, Any]

    @property
    def ids(self) -> list[str]:
        return sorted(self.memories)

    def memory(self, client: str) -> Any:
        return self.memories[client]


def observed(of: Any, state: State) -> Observer:
    return Observer(Result(of, state, ()))


# ---- every method


@pytest.mark.parametrize("name", list(METHODS))
def test_what_a_method_shows_fits_its_federation(name: str) -> None:
    method = METHODS[name]()
    of, state = federation(method), usual(method, 1)
    for kind, shown in method.prototype_sets(state.server).items():
        assert shown.values.dim() == 2, kind
        assert shown.label.shape == shown.values.shape[:1]
        assert 0 <= int(shown.label.min()) <= int(shown.label.max()) < CLASSES
    for title, relation in method.relations(state.server, observed(of, state)).items():
        assert relation.values.shape == (len(relation.rows), len(relation.columns)), title
        assert relation.values.isfinite().all()
        assert len(relation.groups) in (0, len(relation.rows))
    message = method.message_for(state.server, "ann")
    networks = of.networks_of("ann")
    networks.check(method.starting_weights(message, of.client_state(state, "ann", message)))
    x = TASK.transform.clean(TASK.tests["domain 0"].x)
    for params, seen in method.public_variants(state.server).values():
        assert method.predict(networks.model(params), x, seen, None).shape == (len(x), CLASSES)


# ---- by hand


def test_known_prototypes_are_points_with_their_classes() -> None:
    mean = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0], [0.0, 0.0]]])
    found = points(Prototypes(mean, torch.tensor([[2, 0, 1], [1, 1, 0]])))
    assert found.values.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found.label.tolist() == [0, 2, 0, 1]


def test_fpls_padding_is_no_prototype() -> None:
    server = usual(FPL(), 1).server
    shown = FPL().prototype_sets(server)
    assert set(shown["cluster prototypes"].label.tolist()) <= set(range(CLASSES))
    assert torch.equal(shown["unbiased prototypes"].values, server.prototypes.consistent.mean)
    nothing = FPL().prototype_sets(usual(FPL(), 0).server)
    assert [len(one.label) for one in nothing.values()] == [0, 0]


def test_fedproto_shows_its_global_prototypes() -> None:
    server = usual(FedProto(), 1).server
    assert torch.equal(FedProto().prototype_sets(server)["global prototypes"].values, server.mean)


def test_pfedcspcs_weights_are_those_of_the_clients_that_were_there() -> None:
    server = usual(PFedCSPC(calibration_epochs=1), 1).server
    weights = {"ann": [0.5, 0.5], "bob": [0.0, 0.0], "cyd": [0.25, 0.75]}
    mixing = {client: torch.tensor(own, dtype=torch.float64) for client, own in weights.items()}
    shown = PFedCSPC().relations(replace(server, mixing=mixing), Seen({}))
    [relation] = shown.values()
    assert list(relation.rows) == list(relation.columns) == ["ann", "cyd"]
    assert relation.values.tolist() == [[0.5, 0.5], [0.25, 0.75]]
    assert PFedCSPC().relations(replace(server, mixing={}), Seen({})) == {}


def test_fedfomos_rows_are_what_models_were_worth() -> None:
    worth = {"ann": torch.tensor([0.0, 2.0]), "bob": torch.tensor([-1.0, 0.0])}
    [relation] = FedFomo().relations(Models({}, worth), Seen({})).values()
    assert (list(relation.rows), relation.values.tolist()) == (["ann", "bob"], [[0, 2], [-1, 0]])


def test_fedalas_shares_are_means_over_each_tensor() -> None:
    shares = {"classifier.weight": torch.tensor([[0.0, 1.0], [0.5, 0.5]]), "classifier.bias": torch.tensor([1.0, 0.5])}
    memories = {"ann": Mixing({}, shares, torch.tensor(2))}
    [relation] = FedALA().relations(usual(FedALA(), 0).server, Seen(memories)).values()
    assert relation.values.tolist() == [[0.5, 0.75]]
    assert list(relation.columns) == ["classifier.weight", "classifier.bias"]


def test_fedpcs_clients_are_compared_by_what_they_were_clustered_by() -> None:
    """An independent reference: class means of plain forward passes at the initial weights."""
    method = FedPC(num_clusters=2)
    of, state = federation(method), usual(method, 1)
    clients, clusters = method.relations(state.server, observed(of, state)).values()
    model = of.networks_of("ann").model(of.server_context(0, "look").initial_params())
    sent = []
    for client in SIZES:
        data = TASK.clients[client]
        z = model.features(TASK.transform.clean(data.x))
        means = [z[data.y == c].mean(0) if (data.y == c).any() else torch.zeros(8) for c in range(CLASSES)]
        sent.append(torch.cat(means).detach().double())
    expected = [[float(a @ b / (a.norm() * b.norm())) for b in sent] for a in sent]
    torch.testing.assert_close(clients.values, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert list(clients.groups) == [int(state.server.assignment[client]) for client in SIZES]
    assert clients.layout is not None
    assert clients.layout.shape == (5, 2)
    torch.testing.assert_close(clusters.values.sum(1), torch.ones(2, dtype=torch.float64))


# ---- around another method


def test_a_calibration_shows_the_classifier_of_the_base_and_its_own() -> None:
    of = federation(CCVR(), rounds=1)
    state = of.finish(of.advance(of.start()))
    before, after = CCVR().public_variants(state.server).values()
    assert before[0] == state.server.base.params
    assert all(torch.equal(after[0][n], state.server.classifier[n]) for n in matching(after[0], ("classifier.*",)))
    assert not torch.equal(before[0]["classifier.weight"], after[0]["classifier.weight"])


def test_a_wrapper_shows_the_prototypes_of_its_base() -> None:
    method = CCVR(FPL())
    state = usual(method, 1)
    found = method.prototype_sets(state.server)
    assert found.keys() == FPL().prototype_sets(state.server.base).keys()


def test_settings_of_the_training_hide_nothing() -> None:
    of = federation(FedALA(), optimizer_state="kept")
    state = of.advance(of.advance(of.start()))
    [relation] = of.method.relations(state.server, observed(of, state)).values()
    assert list(relation.rows) == sorted(SIZES)
    message = of.method.message_for(state.server, "ann")
    of.networks_of("ann").check(of.method.starting_weights(message, of.client_state(state, "ann", message)))
    local = federation(CCVR(), norm_statistics="local")
    assert local.method.public_variants(local.start().server) == {}, "nobody has statistics for the server's weights"


def test_a_method_shows_nothing_by_default() -> None:
    method: Method[Any, Any, Any, Any] = METHODS["fedavg"]()
    state = usual(method, 1)
    assert method.relations(state.server, Seen({})) == method.prototype_sets(state.server) == {}
