"""What a method reads in the place of uploads of which some may be anything."""

import logging
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import protofed
from doubles import Faulty, Tampering, bits, tiny
from protofed.api.method import Method
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.methods.families import PrototypeUpload, WeightUpload
from protofed.methods.ifca import ClusterUpload
from protofed.prototypes.class_means import Prototypes
from protofed.runs.config.config import parse
from protofed.runtimes.jobs import Answer, Job
from protofed.runtimes.sequential import Sequential
from protofed.transforms.chain import UploadSettings
from protofed.transforms.robust_stage import RobustPrototypes, RobustSettings, RobustWeights, far_ones, shortened
from protofed.transforms.stage import Exchange
from protofed.tree import named_leaves

ONE = RobustSettings(faulty=1)
TRAINING = Training(rounds=1, epochs=1, batch_size=4, minimum_replies=3, weighting="uniform")


def federation(
    name: str, robust: RobustSettings = ONE, clients: int = 5, runtime: Any = None, **more: Any
) -> Federation:
    method = METHODS[name](**more)
    given = {} if runtime is None else {"runtime": runtime}
    return Federation(method, tiny(clients), TRAINING, uploads=UploadSettings().pipeline(robust), **given)


def exchange(**more: Any) -> Exchange:
    return Exchange(lambda client: {}, num_classes=3, **more)


def weights(value: float, count: int = 7) -> WeightUpload:
    return WeightUpload({"w": torch.tensor([1.0, 2.0]) * value, "steps": torch.tensor(int(value))}, torch.tensor(count))


def protos(*rows: float) -> PrototypeUpload:
    """Prototypes of one number for each class; 0 for an absent one."""
    mean = torch.tensor(rows)[:, None]
    return PrototypeUpload({"w": torch.tensor([1.0])}, Prototypes(mean, (mean[:, 0] != 0).float()), torch.tensor(9))


# ---- weights


def test_every_client_hands_on_the_centre_of_its_group_as_one_example() -> None:
    """Without one at each end of 1, 2, 6 and 100, the mean is 4. Whole numbers are rounded: of 1, 2, 6, 100 it is 4."""
    sent: Any = [(c, weights(v, n)) for c, v, n in (("a", 1, 3), ("b", 100, 1000), ("c", 2, 1), ("d", 6, 5))]
    passed = dict(RobustWeights("trimmed", 1).cleaned(iter(sent), exchange()))
    assert [*passed] == ["a", "b", "c", "d"]
    for upload in passed.values():
        assert upload.params["w"].tolist() == [4.0, 8.0]
        assert upload.params["w"].dtype == torch.float32
        assert upload.params["steps"].item() == 4
        assert upload.params["steps"].dtype == torch.int64
        assert upload.num_examples.item() == 1


def test_clusters_of_clients_stay_apart_and_small_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    values = (1, 50, 2, 51, 3, 52, 500, 600)
    sent: Any = [(name, weights(value)) for name, value in zip("abcdefgh", values, strict=True)]

    def group(client: str, upload: Any) -> str:
        return "small" if client in "gh" else "low" if upload.params["w"][0] < 10 else "high"

    with caplog.at_level(logging.WARNING):
        passed = dict(RobustWeights("trimmed", 1).cleaned(iter(sent), exchange(group=group, where="round 2")))
    assert {client: upload.params["w"][0].item() for client, upload in passed.items()} == {
        **dict.fromkeys("ace", 2.0),
        **dict.fromkeys("bdf", 51.0),
    }
    assert "round 2: GROUP_UNDERPROTECTED: g, h " in caplog.text


def test_exchanges_without_weights_pass() -> None:
    sent: Any = [("a", {"loss": torch.tensor(1.0)}), ("b", {"loss": torch.tensor(9.0)})]
    assert list(RobustWeights("trimmed", 1).cleaned(iter(sent), exchange())) == sent


@pytest.mark.parametrize("rule", ["trimmed", "median", "geometric", "nnm_trimmed"])
def test_one_client_cannot_drag_the_model_away(rule: Any) -> None:
    """Its weights are a million times as large, and it claims all the examples that it may."""

    def pushed(sent: Any) -> Any:
        return WeightUpload({name: leaf * 1e6 for name, leaf in sent.params.items()}, sent.num_examples)

    def largest(robust: RobustSettings) -> float:
        of = federation("fedavg", robust, runtime=Tampering("c01", pushed))
        state = of.advance(of.start())
        assert not state.failures
        return max(leaf.abs().max().item() for leaf in state.server.params.values())

    assert largest(RobustSettings()) > 1e4
    assert largest(replace(ONE, weights=rule)) < 10


class Alike(Sequential):
    """All clients send what the first one has sent."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[str, Any]]:
        first: Any = None
        for client, outcome in super().run(jobs):
            assert isinstance(outcome, Answer)
            first = first or outcome.upload
            yield client, replace(outcome, upload=first)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedopt", "fednova", "scaffold", "feddyn", "feddc", "ccvr", "fedper", "fpl"]
)
def test_where_all_clients_send_the_same_a_robust_mean_is_the_mean(name: str) -> None:
    """Then counts, shares and what goes with the weights are all that could differ."""
    states = []
    for robust in (RobustSettings(), ONE):
        of = federation(name, robust, runtime=Alike())
        data = of.task.clients["c00"]
        task = replace(tiny(5), clients=dict.fromkeys(of.task.clients, data), domain_of={}, tests={})
        of = replace(of, task=task, training=replace(TRAINING, rounds=2))
        states.append(of.finish(of.advance(of.advance(of.start()))))
    ends = [named_leaves(state.server) for state in states]
    assert not states[1].failures
    for path, leaf in ends[0].items():
        assert torch.allclose(leaf, ends[1][path], rtol=1e-5, atol=1e-6), path


def test_ifca_and_fedpc_name_the_cluster_of_an_upload() -> None:
    method: Method[Any, Any, Any, Any] = METHODS["ifca"]()
    assert method.group(None, "a", ClusterUpload({}, torch.tensor([0, 7, 0, 0]))) == (1,)
    of = federation("fedpc", RobustSettings())
    state = of.start().server
    of_server = {client: of.method.group(state, client, None) for client in of.ids}
    assert of_server == {client: int(j) for client, j in state.assignment.items()}


@pytest.mark.parametrize(("name", "more"), [("ifca", {"num_clusters": 2}), ("fedpc", {"num_clusters": 1})])
def test_methods_with_clusters_advance(name: str, more: dict[str, int]) -> None:
    of = federation(name, clients=7, **more)
    state = of.advance(of.start())
    assert not state.failures
    assert bits(state.server) != bits(of.start().server)


# ---- prototypes


def means(passed: dict[str, Any]) -> dict[str, list[float]]:
    return {client: upload.prototypes.mean.flatten().tolist() for client, upload in passed.items()}


def cleaned(rule: Any, sent: dict[str, Any], faulty: int = 1, **more: Any) -> dict[str, Any]:
    return dict(RobustPrototypes(rule, faulty).cleaned(iter(sent.items()), exchange(**more)))


def test_prototypes_far_from_those_of_others_are_left_out_by_class() -> None:
    """Class 0: 10, 11, 12 and 100, of which 100 goes; class 1 has no far one, and d keeps it."""
    sent = {"a": protos(10, 5, 0), "b": protos(11, 6, 0), "c": protos(12, 7, 0), "d": protos(100, 8, 0)}
    passed = cleaned("filter", sent)
    assert means(passed) == {"a": [10, 5, 0], "b": [11, 6, 0], "c": [12, 7, 0], "d": [0, 8, 0]}
    assert passed["d"].prototypes.count.tolist() == [0, 1, 0]


def test_a_class_of_too_few_clients_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With one bad client, two owners of class 1 say nothing; three of class 0 do."""
    sent = {"a": protos(10, 5, 0), "b": protos(11, 6, 0), "c": protos(12, 0, 0)}
    for rule in ("filter", "clip", "median"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            passed = cleaned(rule, sent, where="round 3")
        assert all(upload.prototypes.count.tolist() == [1, 0, 0] for upload in passed.values())
        assert all(row[1] == 0 for row in means(passed).values())
        assert "round 3: CLASS_UNDERPROTECTED" in caplog.text
        assert "classes 1 (2)" in caplog.text


def test_a_class_of_too_few_clients_keeps_its_prototype() -> None:
    """All of class 0 but two clients lose it after the first round."""
    of = federation("fedproto")
    state = of.advance(of.start())
    lost = replace(of, runtime=Tampering("c01", without_class_1), _networks={}, _tests={})
    held = state.server.mean[1].clone()
    for robust in (RobustSettings(), replace(ONE, faulty=2)):
        changed = replace(
            lost, uploads=UploadSettings().pipeline(robust), training=replace(TRAINING, minimum_replies=5)
        )
        after = changed.advance(state).server
        assert torch.equal(after.mean[1], held) == robust.is_on


def without_class_1(sent: Any) -> Any:
    keep = torch.arange(len(sent.count)) != 1
    return Prototypes(sent.mean * keep[:, None], sent.count * keep)


def test_prototypes_that_are_too_long_are_shortened_to_the_median() -> None:
    """Lengths 3, 4 and 50: the third becomes 4 long."""
    assert shortened(torch.tensor([[3.0, 0.0], [0.0, -4.0], [30.0, 40.0]])).tolist() == [
        [3, 0],
        [0, -4],
        pytest.approx([2.4, 3.2]),
    ]
    assert means(cleaned("clip", {"a": protos(10, 0, 0), "b": protos(11, 0, 0), "c": protos(100, 0, 0)})) == {
        "a": [10, 0, 0],
        "b": [11, 0, 0],
        "c": [11, 0, 0],
    }


def test_prototypes_become_the_median_of_their_owners() -> None:
    sent = {"a": protos(10, 0, 0), "b": protos(12, 0, 0), "c": protos(100, 0, 0), "d": protos(0, 5, 0)}
    assert means(cleaned("median", sent)) == {"a": [12, 0, 0], "b": [12, 0, 0], "c": [12, 0, 0], "d": [0, 0, 0]}


def test_prototypes_of_other_clusters_are_not_compared() -> None:
    sent = {name: protos(v, 0, 0) for name, v in zip("abcdef", (10, 11, 12, 100, 101, 102), strict=True)}
    grouped = cleaned("filter", sent, group=lambda client, upload: client > "c")
    assert means(grouped) == means(sent)


def test_few_bits_of_difference_are_not_far() -> None:
    same = torch.ones(5, 3) * 7
    same[4] += 1e-6
    assert not far_ones(same).any()
    same[4] += 1
    assert far_ones(same).tolist() == [False] * 4 + [True]


def test_one_client_cannot_spoil_the_prototypes() -> None:
    """Its prototypes point the other way, at a length that the gate lets pass."""

    def turned(sent: Any) -> Any:
        return Prototypes(sent.mean * -5, sent.count)

    def error(rule: Any, runtime: Any) -> float:
        robust = RobustSettings(int(rule != "mean"), prototypes=rule)
        of, clean = federation("fedproto", robust, 9, runtime), federation("fedproto", RobustSettings(), 9)
        found, wanted = (one.advance(one.start()).server.mean for one in (of, clean))
        return ((found - wanted).norm() / wanted.norm()).item()

    attacked = {rule: error(rule, Tampering("c04", turned)) for rule in ("mean", "clip", "median", "filter")}
    assert attacked["mean"] > 0.5
    assert attacked["filter"] < 0.2
    assert attacked["median"] < 0.35
    assert attacked["clip"] < attacked["mean"] / 2


# ---- what cannot be


def problems(robust: str, method: str = 'name = "fedavg"', training: str = "") -> str:
    text = f'[task]\nname = "minidigits"\n[method]\n{method}\n[training]\n{training}\n[robust]\n{robust}\n'
    with pytest.raises(BadInput) as caught:
        parse(tomllib.loads(text), "file.toml")
    return str(caught.value)


GOOD = 'minimum_replies = 3\nweighting = "uniform"'


def test_settings_that_cannot_go_together_are_refused_with_both_keys() -> None:
    said = problems("faulty = 2", training='weighting = "uniform"')
    assert "robust.faulty" in said
    assert "training.minimum_replies must be at least 5" in said
    said = problems("faulty = 1", training="minimum_replies = 3")
    assert "robust.weights" in said
    assert "training.weighting" in said
    for name, base in (
        ("ga", ""),
        ("grace", ""),
        ("fedfomo", ""),
        ("pfedcspc", ""),
        ("ccvr", '[method.base]\nname = "grace"'),
    ):
        said = problems("faulty = 1", f'name = "{name}"\n{base}', GOOD)
        assert "robust.weights" in said
        assert "not for" in said
    said = problems('faulty = 1\nweights = "krum"', training=GOOD)
    assert "robust.weights" in said


def test_what_would_protect_nothing_is_refused() -> None:
    for name, robust in (
        ("fedavg", replace(ONE, weights="mean")),
        ("fedproto", replace(ONE, prototypes="mean")),
        ("fedmd", ONE),
    ):
        of = federation(name, robust)
        with pytest.raises(BadInput, match=r"robust\.faulty = 1.*nothing that the method sends is protected"):
            of.start()


def test_several_prototypes_of_a_class_cannot_be_compared() -> None:
    of = federation("pfedcspc", personalised=False)
    with pytest.raises(BadInput, match=r"robust\.prototypes"):
        of.start()
    of = federation("pfedcspc", personalised=False, prototypes="class_means", calibration_epochs=1)
    assert not of.advance(of.start()).failures


def test_a_round_of_too_few_replies_is_abandoned_and_not_averaged() -> None:
    of = federation("fedavg", clients=4, runtime=Faulty({"c00", "c01"}))
    with pytest.raises(protofed.RunFailed, match="2 of 4 clients replied well, and the run needs 3"):
        of.advance(of.start())


def test_no_rule_is_applied_by_default() -> None:
    assert UploadSettings().pipeline(RobustSettings(weights="median")).stages == ()


def test_a_run_takes_the_settings_and_they_are_part_of_its_hash() -> None:
    given: Any = {"rounds": 1, "minimum_replies": 3, "weighting": "uniform"}
    robust = protofed.run("fpl", tiny(5), **given, robust=ONE)
    plain = protofed.run("fpl", tiny(5), **given)
    assert robust.federation.name != plain.federation.name
    assert bits(robust.server) != bits(plain.server)
