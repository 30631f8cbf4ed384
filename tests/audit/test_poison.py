"""Attacks on what clients send, and what robust rules are worth under them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from protofed import METHODS, BadInput
from protofed.api.task import Task
from protofed.audit import attacks, poison
from protofed.audit.attacks import ATTACKS, TRIGGER, Own
from protofed.audit.poison import Cell, Poisoned, Wanted, campaign, measured
from protofed.audit.poison_report import markdown, of, write
from protofed.audit.replay import Tap
from protofed.methods.families import PrototypeUpload, Weights, WeightUpload
from protofed.prototypes.class_means import Prototypes
from protofed.runs.config.config import Config, parse
from protofed.runs.loading import SavedRun, open_run
from protofed.testing.federations import TASK, federation
from protofed.transforms.stage import Exchange
from protofed.tree import Tree


def own(client: str, weight: float, received: float = 1.0) -> Own:
    upload = PrototypeUpload(
        {"w": torch.tensor([weight]), "norm.running_var": torch.tensor([weight])},
        Prototypes(torch.tensor([[weight, 0.0]]), torch.tensor([1.0])),
        torch.tensor(3),
    )
    return Own(client, Weights({"w": torch.tensor([received]), "norm.running_var": torch.tensor([0.0])}), upload)


def test_an_update_turned_around() -> None:
    lie = ATTACKS["-10 x update"].lie(own("a", 3.0), [])
    assert lie.params["w"].item() == 1 - 10 * (3 - 1)
    assert lie.params["norm.running_var"].item() == 3, "a negative variance is refused by itself"
    assert lie.num_examples.item() == 3
    assert torch.equal(lie.prototypes.mean, torch.tensor([[3.0, 0.0]]))


def test_a_little_is_the_mean_less_the_deviation() -> None:
    lie = ATTACKS["ALIE"].lie(own("a", 9.0), [own("a", 9.0), own("b", 1.0), own("c", 2.0)])
    # mean 4, deviation √((25 + 9 + 4) / 2)
    assert lie.params["w"].item() == pytest.approx(4 - 19**0.5)


def test_prototypes_are_found_by_their_role() -> None:
    lie = ATTACKS["prototypes x -5"].lie(own("a", 2.0), [])
    assert lie.prototypes.mean.tolist() == [[-10, 0]]
    assert lie.params["w"].item() == 2
    assert ATTACKS["prototypes x 100"].lie(Own("a", {}, WeightUpload({}, torch.tensor(1))), []).params == {}


def test_a_back_door_marks_half_of_the_images_and_is_tested_on_other_classes() -> None:
    task = attacks.back_door(TASK, ["ann"])
    before, after = TASK.clients["ann"], task.clients["ann"]
    marked = (after.inputs(after.index) != before.inputs(before.index)).flatten(1).any(1)
    assert marked[::2].all()
    assert not marked[1::2].any()
    assert (after.labels[::2] == attacks.TARGET).all()
    assert torch.equal(after.labels[1::2], before.labels[1::2])
    tests = task.tests[TRIGGER]
    assert len(tests) == sum(int((data.labels != attacks.TARGET).sum()) for data in TASK.tests.values())
    assert (tests.inputs(tests.index)[..., -4:-1, -4:-1] == 255).all()
    assert task.clients["bob"] is TASK.clients["bob"]


def test_bad_clients_lie_and_others_do_not() -> None:
    sent = {}
    for bad in ((), ("ann",)):
        tap = Tap()
        of = federation(METHODS["fedavg"](), runtime=Poisoned(bad, ATTACKS["-10 x update"]))
        of = replace(of, uploads=replace(of.uploads, stages=(tap,)))
        of.advance(of.start())
        sent[bad] = {one.client: one for one in tap.sent}
    for client, one in sent["ann",].items():
        honest, weight = sent[()][client], "classifier.weight"
        way = one.upload.params[weight] - one.message.params[weight]
        factor = -10 if client == "ann" else 1
        assert torch.allclose(way, factor * (honest.upload.params[weight] - one.message.params[weight]), atol=1e-6)


def test_attackers_are_of_different_domains() -> None:
    task = Task(
        dict.fromkeys("abcd", TASK.clients["ann"]), dict(TASK.tests), 4, TASK.model, name="t",
        domain_of={"a": "domain 0", "b": "domain 0", "c": "domain 1"},
    )  # fmt: skip
    assert poison.attackers_of(task, 4) == ("a", "c", "d", "b")


# ---- campaigns


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    folder = tmp_path_factory.mktemp("poison") / "run"
    protofed.run("fpl", TASK, rounds=1, epochs=1, batch_size=8, folder=folder, runtime="sequential")
    return open_run(folder, task=TASK)


def test_a_campaign_measures_what_is_asked_for_and_nothing_twice(done: SavedRun, tmp_path: Path) -> None:
    said: list[str] = []
    wanted = Wanted(["none", "-10 x update", "back-door"], ["mean", "trimmed"], [1, 2], [5])
    cells = campaign(done, wanted, said.append)
    of_cells = [(c.attack, c.rule, c.attackers) for c in cells if c.seed == 5]
    assert sorted(of_cells) == sorted([
        ("none", "mean", 0), ("none", "trimmed", 1), ("none", "trimmed", 2),
        *((a, r, n) for a in ("-10 x update", "back-door") for r in ("mean", "trimmed") for n in (1, 2)),
    ])  # fmt: skip
    assert len(cells) == len(of_cells) == len(said)
    assert all((c.success is None) == (c.attack != "back-door") for c in cells)
    paths = write(done, cells, 1, tmp_path)
    assert {path.name for path in paths} == {"poison.md", "poison.json", "poison_weights.png"}
    assert len(json.loads((tmp_path / "poison.json").read_text())) == len(cells)


def test_a_campaign_of_prototypes_has_their_rules(done: SavedRun) -> None:
    cells = campaign(done, Wanted(["prototypes x 100"], (), [1]))
    assert [c.rule for c in cells] == [*poison.PROTOTYPE_RULES]
    assert {c.what for c in cells} == {"prototypes"}


def test_the_table_has_means_and_the_worst_seed() -> None:
    cells = [
        Cell("none", "weights", "mean", 0, 0, 0.9),
        Cell("none", "weights", "mean", 0, 1, 0.8),
        Cell("a", "weights", "mean", 2, 0, 0.5),
        Cell("a", "weights", "mean", 2, 1, None),
        Cell("a", "weights", "trimmed", 2, 0, None),
    ]
    assert len(of(cells, "none", "mean", 4)) == 2, "the mean asks for no number"
    table = poison_table(cells)
    assert "| none | 0 | 85 (80) |  |" in table
    assert "| a | 2 | 50 (50), 1 failed | fails |" in table


def poison_table(cells: list[Cell]) -> str:
    from protofed.audit.poison_report import _table

    return _table(cells, "accuracy")


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (Wanted(["nonsense"]), "--attack 'nonsense' is unknown"),
        (Wanted(rules=["krum"]), "--rule 'krum' is none of"),
        (Wanted(attackers=[3]), "1 to 2 can be bad"),
    ],
)
def test_what_cannot_be_is_refused(done: SavedRun, wanted: Wanted, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        campaign(done, wanted)


def test_a_method_without_weights_is_not_attacked_through_them(tmp_path: Path) -> None:
    protofed.run("fedproto", TASK, rounds=1, epochs=1, folder=tmp_path / "run", runtime="sequential")
    saved = open_run(tmp_path / "run", task=TASK)
    with pytest.raises(BadInput, match="spoils weights, which the run's method does not send"):
        campaign(saved, Wanted(["ALIE"]))
    with pytest.raises(BadInput, match="the back-door needs images"):
        attacks.back_door(vectors(), [])


def vectors() -> Task:
    from audit.replays import task_of

    return task_of({"a": [0, 1, 2]})


def test_the_report_names_seeds(done: SavedRun) -> None:
    assert "seeds 3, 5" in markdown(done, [Cell("a", "weights", "mean", 1, s, 0.5) for s in (5, 3)], 2)[1]


# ---- on minidigits


class Krum:
    """The upload whose nearest neighbours are nearest, under every name: a control, which protofed does not offer."""

    def __init__(self, faulty: int) -> None:
        self.faulty = faulty

    def refusal(self, like: Tree, message: Tree, num_classes: int) -> str | None:
        return None

    def cleaned(self, uploads: Iterable[tuple[str, Tree]], exchange: Exchange) -> Iterator[tuple[str, Tree]]:
        accepted = list(uploads)
        rows = torch.stack([torch.cat([w.flatten() for w in upload.params.values()]) for _, upload in accepted])
        near = torch.cdist(rows.double(), rows.double()).square().sort(1).values[:, 1 : len(rows) - self.faulty - 1]
        chosen = accepted[int(near.sum(1).argmin())][1]
        yield from ((client, chosen) for client, _ in accepted)


def config(method: str, lr: float) -> Config:
    training = {"rounds": 8, "epochs": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9}}
    return parse({"task": {"name": "minidigits"}, "method": {"name": method}, "training": training}, "here")


def accuracy(method: str, attack: str, rule: str, attackers: int = 1, what: str = "weights", **more: Any) -> float:
    """Per cent; 0 if the run failed."""
    given = config(method, {"fedavg": 0.03, "fpl": 0.01}[method])
    assert not isinstance(given.task, Task)
    cell = measured(given, given.task.build(), attack, what, rule, attackers, 0, **more)
    return 100 * (cell.accuracy or 0.0)


@pytest.mark.slow
def test_robust_means_bear_attacks_that_the_mean_does_not() -> None:
    """T15. The controls: the mean under the strongest attack, and Krum without any, which is why there is no Krum."""
    clean = accuracy("fedavg", "none", "trimmed")
    assert clean > 75
    for attack, attackers, rule in (
        ("-10 x update", 1, "trimmed"),
        ("-10 x update", 2, "nnm_trimmed"),
        ("labels + 1", 2, "trimmed"),
    ):
        assert accuracy("fedavg", attack, rule, attackers) >= clean - 10, (attack, attackers)
    assert accuracy("fedavg", "-10 x update", "mean") <= 30
    assert accuracy("fedavg", "none", "mean", stages=(Krum(1),)) <= 60


@pytest.mark.slow
def test_the_gate_and_the_rules_bear_prototypes_that_are_too_long() -> None:
    """T16. The control is FPL without either."""
    clean = accuracy("fpl", "none", "none", what="prototypes")
    for rule, price in (("clip", 5), ("filter", 5), ("gate", 15)):  # the gate refuses the client's weights too
        assert accuracy("fpl", "prototypes x 100", rule, what="prototypes") >= clean - price, rule
    assert accuracy("fpl", "prototypes x 100", "none", what="prototypes") <= 30
