"""Figures from finished runs: the numbers behind them, the files, and what is said when a run lacks what one needs."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import sklearn.manifold
import torch
from sklearn.metrics import silhouette_score
from torch import nn

import protofed
from protofed import CCVR, FPL, BadInput, Data, FedAvg, FedFomo, FedProto, LocalOnly, Task
from protofed.nn.networks import Parts
from protofed.reports.analysis import gallery
from protofed.reports.analysis.curves import calibration, curves, initial, smoothed
from protofed.reports.analysis.drawing import CannotDraw, Drawing, Options, grouped
from protofed.reports.analysis.gradcam import cam, centre, gradcam
from protofed.reports.analysis.relations import relations
from protofed.reports.analysis.sensitivity import ablation, sensitivity, series
from protofed.reports.analysis.tsne import tsne, unit
from protofed.reports.analysis.views import chosen_rounds, client_view, sampled, views
from protofed.runs.loading import SavedRun, open_run
from protofed.testing.federations import CLASSES, TASK

KEPT = (1, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three rounds."""
    out = tmp_path_factory.mktemp("runs")
    run(out / "fedavg", FedAvg())
    run(out / "fedavg 1", FedAvg(), seed=1)
    run(out / "ccvr", CCVR())
    run(out / "fpl", FPL())
    run(out / "fomo", FedFomo(num_models=2))
    for temperature in (0.05, 0.5):
        run(out / f"fpl {temperature}", FPL(temperature=temperature))
    run(out / "fpl without", FPL(contrast=False))
    return out


def run(folder: Path, method: Any, seed: int = 0, task: Task = TASK, **changes: Any) -> None:
    settings = {"rounds": 3, "epochs": 1, "batch_size": 8, "keep": KEPT, "runtime": "sequential", **changes}
    protofed.run(method, task, seed=seed, folder=folder, **settings)


def opened(made: Path, *names: str) -> list[SavedRun]:
    return [open_run(made / name, task=TASK) for name in names]


def lines(made: Path, name: str) -> list[dict[str, Any]]:
    """The rounds as the file says, read without the package."""
    return [json.loads(line) for line in (made / name / "rounds.jsonl").read_text().splitlines()]


def rows(drawing: Drawing, suffix: str = "") -> list[dict[str, str]]:
    return list(csv.DictReader(drawing.tables[suffix].csv().splitlines()))


# ---- how runs are told apart


def test_runs_that_differ_in_the_seed_are_one_group_and_a_run_counts_once(made: Path) -> None:
    groups = grouped(opened(made, "fedavg", "fpl", "fedavg 1", "fpl", "fpl 0.5"))
    assert [group.label for group in groups] == ["fedavg", "fpl, temperature 0.02", "fpl, temperature 0.5"]
    assert [len(group.runs) for group in groups] == [2, 1, 1]


# ---- curves


def test_curves_are_the_numbers_of_every_round(made: Path) -> None:
    found = rows(curves(opened(made, "fedavg", "fedavg 1", "fpl"), Options()))
    for name, label, number in (("fedavg", "fedavg", 0), ("fedavg 1", "fedavg", 1), ("fpl", "fpl", 0)):
        for line in lines(made, name):
            own = [row for row in found if (row["run"], int(row["round"])) == (label, line["round"])]
            losses = [float(row["value"]) for row in own if row["what"] == "training loss"]
            scores = [float(row["value"]) for row in own if row["what"] == "average"]
            assert losses[number] == line["loss"]
            assert scores[number] == 100 * line["summary"]["average"]


def test_many_runs_have_a_panel_each(made: Path) -> None:
    names = [path.name for path in made.iterdir()]
    drawing = curves(opened(made, *names), Options(metric="average"))
    assert drawing.figures.keys() == {"average", "loss"}
    count = len(grouped(opened(made, *names)))
    assert sum(axis.axison for axis in drawing.figures["loss"].axes) == count


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    assert smoothed([1.0, 2.0, 9.0, 4.0], 1) == [1.5, 4.0, 5.0, 6.5]
    assert smoothed([1.0, 2.0, 9.0], 0) == [1.0, 2.0, 9.0]


def test_a_metric_that_is_unknown_or_was_not_measured_is_said(made: Path) -> None:
    with pytest.raises(BadInput, match="did you mean 'average'"):
        curves(opened(made, "fedavg"), Options(metric="avrage"))
    with pytest.raises(CannotDraw, match=r"no round of fedavg has the metric personal.owned"):
        curves(opened(made, "fedavg"), Options(metric="personal.owned"))


# ---- sensitivity and ablation


def test_results_over_a_number_are_means_of_the_last_rounds(made: Path) -> None:
    found = rows(sensitivity(opened(made, "fedavg", "fpl", "fpl 0.05", "fpl 0.5"), Options()))
    assert [(row["setting"], row["value"]) for row in found] == [
        ("method.temperature", value) for value in ("0.02", "0.05", "0.5")
    ]
    for row, name in zip(found, ("fpl", "fpl 0.05", "fpl 0.5"), strict=True):
        expected = fmean(line["summary"]["average"] for line in lines(made, name)[-5:])
        assert float(row["result"]) == pytest.approx(expected, abs=1e-12)


@dataclass(frozen=True)
class Fake:
    settings: dict[str, Any]
    method: str = "m"
    label: str = "m"


def fakes(*points: tuple[float, int, bool]) -> list[Any]:
    return [Fake({"method.name": "m", "method.a": a, "method.b": b, "method.on": on}) for a, b, on in points]


def test_settings_that_are_changed_one_at_a_time_have_a_line_each_through_the_common_point() -> None:
    found = series(fakes((1.0, 5, True), (2.0, 5, True), (3.0, 5, True), (1.0, 7, True)))
    assert [(s.key, sorted(s.points)) for s in found] == [("method.a", [1, 2, 3]), ("method.b", [5, 7])]


def test_a_grid_has_a_line_for_each_value_of_the_other_setting() -> None:
    found = series(fakes(*((a, b, True) for a in (1.0, 2.0) for b in (5, 7))))
    assert [(s.key, s.others) for s in found] == [
        ("method.a", "b 5"),
        ("method.a", "b 7"),
        ("method.b", "a 1.0"),
        ("method.b", "a 2.0"),
    ]


def test_a_switch_is_no_number() -> None:
    assert series(fakes((1.0, 5, True), (1.0, 5, False))) == []


def test_bars_of_an_ablation_have_equal_numbers(made: Path) -> None:
    names = ("fedavg", "fpl", "fpl without", "fpl 0.5")
    found = rows(ablation(opened(made, *names), Options()))
    labels = [row["run"] for row in found]
    assert len(labels) == 3, "the other temperature says nothing of the switched part"
    assert labels[0] == "fedavg"
    assert "contrast off" in labels[2]


def test_runs_that_do_not_differ_in_that_are_refused(made: Path) -> None:
    with pytest.raises(CannotDraw, match="differ in one number only"):
        sensitivity(opened(made, "fedavg", "fedavg 1", "fpl"), Options())
    with pytest.raises(CannotDraw, match="switched on or off"):
        ablation(opened(made, "fpl", "fpl 0.5"), Options())


# ---- models of kept rounds


def test_what_clients_use_is_tested_as_in_the_run(made: Path) -> None:
    """FedAvg starts from what it uses; FedFomo's own models are judged in the run."""
    for name in ("fedavg", "fomo"):
        found = rows(initial(opened(made, name), Options()))
        for row in found:
            line = next(r for r in lines(made, name) if r["round"] == int(row["round"]))
            assert float(row["model in use"]) == pytest.approx(line["at_home"][row["client"]]["accuracy"], abs=1e-9)
        assert {int(row["round"]) for row in found} == {1, 2, 3}
        assert name != "fedavg" or all(row["initial model"] == row["model in use"] for row in found)


def test_a_calibration_is_judged_before_and_after(made: Path) -> None:
    """Without it CCVR is FedAvg; after it, at the end, it is what the run reports."""
    found = rows(calibration(opened(made, "ccvr"), Options()))

    def score(model: str, number: int) -> float:
        own = [r for r in found if r["model"] == model and int(r["round"]) == number]
        assert len(own) == 2
        return fmean(float(r["accuracy"]) for r in own)

    for number in (1, 2, 3):
        plain = lines(made, "fedavg")[number - 1]["summary"]["average"]
        assert score("before calibration", number) == pytest.approx(plain, abs=1e-9)
    at_end = lines(made, "ccvr")[-1]["summary"]["average"]
    assert score("after calibration", 3) == pytest.approx(at_end, abs=1e-9)
    assert score("after calibration", 3) != pytest.approx(score("before calibration", 3), abs=1e-9)


def test_the_next_training_of_a_client_is_that_of_the_run(tmp_path: Path) -> None:
    """A client that trains alone has after round 3 what its training of round 3 leaves."""
    run(tmp_path / "local", LocalOnly(), keep=(2, 3))
    saved = open_run(tmp_path / "local", task=TASK)
    expected = saved.at(3).model_for("bob").params
    found = client_view(saved.at(2), "bob", trained=True).params
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(saved.at(2).model_for("bob").params["classifier.weight"], expected["classifier.weight"])


def test_rounds_are_those_that_are_there(made: Path) -> None:
    [saved] = opened(made, "fedavg")
    assert chosen_rounds(saved, ()) == [1, 2, 3]
    assert chosen_rounds(saved, (2, 1)) == [1, 2]
    assert chosen_rounds(saved, (), most=2) == [1, 3]
    with pytest.raises(CannotDraw, match=r"no state of round 9, but those of 1, 2, 3: .*keep = \[9\]"):
        chosen_rounds(saved, (1, 9))


# ---- relations


def test_heat_maps_are_what_the_server_knows(made: Path) -> None:
    [saved] = opened(made, "fomo")
    found = rows(relations([saved], Options(rounds=(2, 3))))
    for number in (2, 3):
        affinity = saved.at(number).server.affinity
        own = [float(row["value"]) for row in found if int(row["round"]) == number]
        assert own == [value for values in affinity.values() for value in values.tolist()]


def test_methods_without_relations_are_said(made: Path) -> None:
    with pytest.raises(CannotDraw, match=r"no client learns from certain others .* of fedavg"):
        relations(opened(made, "fedavg"), Options())


# ---- t-SNE


def test_all_panels_of_a_run_have_one_embedding(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []

    def flat(self: Any, values: Any) -> Any:
        sizes.append(values.shape)
        return values[:, :2]

    monkeypatch.setattr(sklearn.manifold.TSNE, "fit_transform", flat)
    runs = opened(made, "fedavg", "fpl")
    drawing = tsne(runs, Options(examples=24))
    found = rows(drawing)
    assert len(sizes) == 2
    assert [size[0] for size in sizes] == [sum(r["run"] == name for r in found) for name in ("fedavg", "fpl")]
    result = runs[1].at(2)
    [view] = views(result)
    assert view.name == "public model"
    expected = {}
    for domain, data in TASK.tests.items():
        z = view.model().features(TASK.transform.clean(data.x)).detach().numpy()
        expected |= {(domain, k): z[k] / np.linalg.norm(z[k]) for k in range(len(z))}
    own = [r for r in found if (r["run"], r["round"], r["kind"]) == ("fpl", "2", "test example")]
    assert len(own) == 24
    for row in own:
        place = expected[row["domain"], int(row["row"])]
        assert (float(row["x"]), float(row["y"])) == pytest.approx(tuple(place[:2]), abs=1e-5)
        assert int(row["class"]) == int(TASK.tests[row["domain"]].y[int(row["row"])])
    known = [r for r in found if (r["round"], r["kind"]) == ("2", "unbiased prototypes")]
    mean = result.server.prototypes.consistent.mean
    assert [float(r["x"]) for r in known] == pytest.approx((mean[:, 0] / mean.norm(dim=1)).tolist(), abs=1e-5)
    z = np.stack(list(expected.values()))
    labels = np.concatenate([data.y.numpy() for data in TASK.tests.values()])
    [line] = [r for r in rows(drawing, "separation") if (r["run"], r["round"]) == ("fpl", "2")]
    assert float(line["silhouette by class"]) == pytest.approx(float(silhouette_score(z, labels)), abs=1e-4)


def test_rows_of_length_one_by_hand() -> None:
    assert unit(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[0.6, 0.8], [0.0, 0.0]]


def test_clients_that_are_named_are_looked_at(made: Path) -> None:
    drawing = tsne(opened(made, "fomo"), Options(clients=("ann", "bob"), rounds=(3,), examples=24))
    assert drawing.figures.keys() == {"by class", "by domain", "by client"}
    assert {row["model"] for row in rows(drawing)} == {"ann", "bob"}
    with pytest.raises(BadInput, match="no client 'zoe'; the clients are ann"):
        tsne(opened(made, "fomo"), Options(clients=("zoe",)))


def test_the_sample_is_the_same_every_time_and_even() -> None:
    first, again = dict(sampled(TASK.tests, 16, range(CLASSES))), dict(sampled(TASK.tests, 16, range(CLASSES)))
    for domain, data in first.items():
        assert data.index.tolist() == again[domain].index.tolist()
        assert data.labels.bincount().tolist() == [2] * CLASSES


# ---- Grad-CAM


def seeing(client: str = "") -> Parts:
    """One map, the image itself; class 1 is for bright images, class 0 against."""
    convolution, classifier = nn.Conv2d(1, 1, 1, bias=False), nn.Linear(1, 2)
    nn.init.constant_(convolution.weight, 1.0)
    with torch.no_grad():
        classifier.weight.copy_(torch.tensor([[-3.0], [2.0]]))
        classifier.bias.zero_()
    return {
        "features": nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "classifier": classifier,
    }


def blind(client: str = "") -> Parts:
    return {"features": nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "classifier": nn.Linear(3, 2)}


def images(parts: Any) -> Task:
    x = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(4)) + 0.1
    data = Data.of(x, torch.tensor([1, 0] * 4))
    return Task({"ann": data, "bob": data}, {"all": data}, 2, parts, name="tiny images")


def test_the_map_of_a_network_of_one_map_is_that_map(tmp_path: Path) -> None:
    """The slope of class 1 is 2/16 at every pixel, so the map is the image by its largest pixel; nothing speaks for
    class 0, whose slope is negative."""
    task = images(seeing)
    run(tmp_path / "run", FedAvg(), task=task, rounds=1, optimizer=protofed.Sgd(lr=1e-30), keep=())
    [view] = views(open_run(tmp_path / "run", task=task).at())
    one = task.tests["all"].rows(torch.tensor([2]))
    heat, score, named = cam(view, one)
    x = one.x[2, 0]
    assert named == 1
    assert score == pytest.approx(1 / (1 + np.exp(-5 * float(x.mean()))), abs=1e-5)
    torch.testing.assert_close(heat, x / x.max())
    assert not cam(view, one, target=0)[0].any()
    assert not any(layer._forward_hooks for layer in view.networks.modules("features")), "a hook was left behind"


def test_the_centre_of_a_map_by_hand() -> None:
    heat = torch.zeros(4, 4)
    assert centre(heat) == (0.5, 0.5)
    heat[0, 2] = heat[2, 2] = 1.0
    assert centre(heat) == (0.625, 0.375)


def test_runs_are_put_side_by_side(made: Path) -> None:
    runs = opened(made, "fedavg", "fpl")
    found = rows(gradcam(runs, Options(images=("domain 1:3", "domain 0:7"))))
    assert [(r["run"], r["domain"], r["image"]) for r in found] == [
        (name, domain, image) for domain, image in (("domain 1", "3"), ("domain 0", "7")) for name in ("fedavg", "fpl")
    ]
    for row in found:
        saved = next(one for one in runs if one.folder.path.name == row["run"])
        data = TASK.tests[row["domain"]]
        scores = saved.at().predict("ann", data.x[int(row["image"])][None])
        assert int(row["named"]) == int(scores.argmax())
        assert row["is right"] == str(int(row["named"]) == int(data.y[int(row["image"])]))
    assert len(rows(gradcam(runs, Options()))) == 2 * 6


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("sketch:3", "no domain 'sketch'; write DOMAIN:NUMBER"),
        ("domain 1:12", "test images 0 to 11"),
        ("x", "no domain"),
    ],
)
def test_images_that_are_not_there_are_said(made: Path, image: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        gradcam(opened(made, "fedavg"), Options(images=(image,)))


def test_networks_without_a_convolution_and_tasks_without_images_are_said(tmp_path: Path) -> None:
    from run_doubles import small_task

    task, table = images(blind), small_task()
    run(tmp_path / "blind", FedAvg(), task=task)
    run(tmp_path / "table", FedAvg(), task=table)
    with pytest.raises(CannotDraw, match="no 2-d convolution"):
        gradcam([open_run(tmp_path / "blind", task=task)], Options())
    with pytest.raises(CannotDraw, match="no test images"):
        gradcam([open_run(tmp_path / "table", task=table)], Options())


# ---- files


def test_every_figure_that_the_runs_allow_is_written_and_others_are_named(made: Path, tmp_path: Path) -> None:
    told: list[str] = []
    runs = opened(made, "fedavg", "fpl", "fpl 0.5", "ccvr")
    drawn = gallery.draw(runs, (), tmp_path / "out", Options(examples=40, tell=told.append))
    assert drawn.skipped.keys() == {"ablation", "relations"}
    assert {path.stem.partition("_")[0] for path in drawn.paths} == gallery.FIGURES.keys() - drawn.skipped.keys()
    for path in drawn.paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else data.count(b"\n") > 1, path
    assert told


def test_a_figure_that_is_asked_for_and_cannot_be_drawn_is_an_error(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotDraw, match=r"^relations: no client learns"):
        gallery.draw(opened(made, "fedavg"), ("relations",), tmp_path / "out", Options())
    with pytest.raises(BadInput, match="did you mean 'tsne'"):
        gallery.draw(opened(made, "fedavg"), ("t-sne",), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()


def test_names_that_are_formulas_or_commands_are_drawn_as_text(tmp_path: Path) -> None:
    odd = "a$x_1$\x1b[2J"
    clients = {odd: TASK.clients["ann"], "bob": TASK.clients["bob"], "cyd": TASK.clients["cyd"]}
    task = Task(clients, {odd: TASK.tests["domain 0"]}, CLASSES, TASK.model, name="odd")
    for name, method in (("fomo", FedFomo(num_models=1)), ("proto", FedProto())):
        run(tmp_path / name, method, task=task)
    runs = [open_run(tmp_path / name, task=task) for name in ("fomo", "proto")]
    drawn = gallery.draw(runs, ("tsne", "relations", "gradcam", "curves"), tmp_path / "out", Options(examples=12))
    assert not any(b"\x1b" in path.read_bytes() for path in drawn.paths if path.suffix == ".csv")


def test_prototypes_of_another_space_than_the_features_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "run", FPL())
    monkeypatch.setattr(FPL, "shown_features", lambda self, model, x: model.features(x)[:, :3])
    with pytest.raises(CannotDraw, match="cluster prototypes of fpl have 8 numbers and its features 3"):
        tsne([open_run(tmp_path / "run", task=TASK)], Options(examples=24))
