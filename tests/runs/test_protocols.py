"""The papers' protocols as files of comparisons: what they ask for, against the papers, and that their small forms run.

The tables below are written by hand from the papers and their public code, not from the files.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from protofed import BadInput
from protofed.datasets import DATASETS
from protofed.datasets.cache import load
from protofed.metrics.registry import METRICS
from protofed.reports import comparison as reporting
from protofed.runs import compare
from protofed.runs.compare import Comparison
from protofed.runs.config.config import Config
from protofed.runs.config.toml import document
from protofed.runs.sweep import sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TABLES = {
    "fpl": ("table1", "table2", "table3"),
    "fedseproto": ("table1", "table2", "table3"),
    "fedpc": ("table4",),
    "pfedcspc": (
        *("table2", "table3", "table4", "table5", "table6"),
        *("table7_cifar10", "table7_cifar10_skewed", "table7_tiny_imagenet", "table7_tiny_imagenet_skewed"),
    ),
}
READINGS = {"fedpc": ("readings",)}
"""Of what a paper leaves open: one seed, to see which learn."""
FIGURES = {"fpl": ("figure4", "figure5"), "fedseproto": ("figure3", "figure4"), "pfedcspc": ("figure6",)}
FILES = [f"{paper}/{name}" for group in (TABLES, READINGS, FIGURES) for paper, names in group.items() for name in names]
PUBLISHED = [f"{paper}/{name}" for paper, names in TABLES.items() for name in names]

SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "nesterov": False}
CONSTANT = {**SGD, "clip_norm": 0.0, "lr_decay": 1.0}
FALLING = {**SGD, "clip_norm": 10.0, "lr_decay": 0.99}
ADAM = {"name": "adam", "lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0} | {
    "clip_norm": 0.0,
    "lr_decay": 1.0,
}
ALLOCATIONS = {
    ("fpl", "digits"): {"mnist": 3, "usps": 7, "svhn": 6, "syn": 4},
    ("fpl", "office_caltech10"): {"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4},
    ("fedseproto", "digits"): {"mnist": 1, "usps": 2, "svhn": 3, "syn": 4},
    ("fedseproto", "office_caltech10"): {"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4},
    ("fedseproto", "pacs"): {"photo": 2, "art_painting": 3, "cartoon": 4, "sketch": 1},
    ("fedseproto", "vlcs"): {"caltech": 2, "labelme": 3, "pascal": 4, "sun": 1},
}
SHARES = {"digits": 0.01, "office_caltech10": 0.2, "pacs": 0.2, "vlcs": 0.2}
DOMAIN_MODELS = {"fpl": "resnet10", "fedseproto": "cnn3"}
PROJECTED = {
    "cifar10": "lenet_projected",
    "cifar100": "resnet18_projected",
    "tiny_imagenet": "resnet18_projected",
    "vireofood172": "resnet18_projected",
}
SUMMARIES = {"fpl": "last_five", "fedseproto": "last", "fedpc": "last", "pfedcspc": "last"}
TARGETS = {
    "pfedcspc/table7_cifar10_skewed": 0.61,
    "pfedcspc/table7_cifar10": 0.66,
    "pfedcspc/table7_tiny_imagenet_skewed": 0.42,
    "pfedcspc/table7_tiny_imagenet": 0.45,
}
MISPRINTS = {("Tiny ImageNet", "FedSoup"), ("VireoFood-172", "FedSoup"), ("CIFAR-100", "GRACE")}
"""Whose HM does not follow from the numbers beside it."""
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("fpl/table2", "FedProx", {"name": "fedprox", "proximal_weight": 1e-4}),
    ("fpl/table2", "MOON", {"name": "moon", "contrast_weight": 5.0, "temperature": 0.5}),
    ("fpl/table2", "FedDyn", {"name": "feddyn", "penalty_weight": 0.0, "weighting": "examples"}),
    (
        *("fpl/table2", "FedOPT"),
        {"server_optimizer": "momentum", "server_lr": 0.5, "momentum": 0.9, "weighting": "uniform"},
    ),
    ("fpl/table2", "FedProc", {"prototype_weighting": "uniform", "schedule": "closed"}),
    ("fpl/table2", "FedProto", {"name": "fedproto_avg", "pull_weight": 1.0}),
    ("fpl/table2", "FPL", {"temperature": 0.02, "contrast": True, "consistency": True}),
    ("fpl/table3", "G", {"contrast": False, "consistency": True, "consistent_with": "global"}),
    ("fpl/figure5", "Global prototypes", {"contrast": True, "consistency": False, "contrast_with": "global"}),
    ("fedseproto/table1", "FedSR", {"length_weight": 0.01, "information_weight": 0.001, "weighting": "examples"}),
    ("fedseproto/table3", "FedSeProto", {"shares": "prototypes"}),
    ("fedseproto/figure3", "Without KD", {"distillation": False, "information": True, "alignment": True}),
    ("fedseproto/figure3", "Without MI", {"distillation": True, "information": False, "alignment": True}),
    ("fedseproto/figure3", "Without Proto", {"distillation": True, "information": True, "alignment": False}),
    ("fedpc/table4", "FedProto", {"pull_weight": 0.1, "inference": "nearest_prototype"}),
    ("fedpc/table4", "FedNH", {"smoothing": 0.9, "initial_scale": 1.0}),
    ("fedpc/table4", "FedRep", {"head_epochs": 10}),
    ("fedpc/table4", "Ditto", {"proximal_weight": 0.75, "reference": "trained"}),
    ("fedpc/readings", "Norm", {"distance": "norm", "pull_weight": 0.5, "num_clusters": 5}),
    ("fedpc/readings", "γ 5", {"distance": "mean_square_examples", "pull_weight": 5.0}),
    ("fedpc/readings", "Softmax ρ", {"rho": "softmax", "prototype_mode": "recomputed"}),
    ("fedpc/table4", "FedPC", {"num_clusters": 5, "cross_entropy_weight": 0.5, "pull_weight": 0.5}),
    ("pfedcspc/table3", "Ditto", {"proximal_weight": 1.0, "reference": "received"}),
    ("pfedcspc/table4", "TPG+CA", {"prototypes": "class_means", "augmentation": False, "knowledge_weight": 0.0}),
    ("pfedcspc/table4", "CPM+PA+CA", {"prototypes": "clustered", "augmentation": True, "alignment_weight": 0.0}),
    ("pfedcspc/table4", "PTA+CPM+CA+KP", {"augmentation": False, "alignment_weight": 0.1, "knowledge_weight": 0.5}),
    ("pfedcspc/table5", "FedAvg +PMI+FT", {"calibration": False, "alignment_weight": 0.0, "personalised": True}),
    ("pfedcspc/table5", "FedCSPC", {"calibration": True, "personalised": False}),
]


@cache
def loaded(file: str, is_small: bool = False) -> Comparison:
    return compare.load(EXPERIMENTS / f"{file}.toml", is_small=is_small)


def runs(found: Comparison) -> Iterator[tuple[str, str, Config]]:
    """By labels of task and method: the configuration of the first seed, from which others differ in the seed alone."""
    for task, methods in found.runs.items():
        for method, (one, *_) in methods.items():
            yield task, method, one


def test_every_table_and_figure_has_its_file_and_no_other_is_there() -> None:
    assert sorted(str(p.relative_to(EXPERIMENTS).with_suffix("")) for p in EXPERIMENTS.glob("*/*.toml")) == sorted(
        FILES
    )


def test_the_readme_has_a_link_to_every_file() -> None:
    text = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(([a-z0-9_/]+)\.toml\)", text)) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_how_it_is_run_and_no_line_is_too_long(file: str) -> None:
    text = (EXPERIMENTS / f"{file}.toml").read_text(encoding="utf-8")
    assert f"\n# protofed compare experiments/{file}.toml --report reports/{file}\n" in text
    lines = [line for line in text.splitlines() if not line.startswith(("source = ", "# protofed compare"))]
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("file", FILES)
def test_a_file_loads_in_both_forms(file: str) -> None:
    full, small = loaded(file), loaded(file, is_small=True)
    assert {task: list(methods) for task, methods in small.runs.items()} == {
        task: list(methods) for task, methods in full.runs.items()
    }
    assert {(c.training.rounds, c.training.epochs) for c in small.configs} == {(2, 1)}
    assert all(method.resolved()["method"] == small.runs[t][m][0].resolved()["method"] for t, m, method in runs(full))


@pytest.mark.parametrize("file", FILES)
def test_seeds_are_summed_up_as_the_paper_does(file: str) -> None:
    found = loaded(file)
    expected = (0,) if file.endswith("readings") else (0, 1, 2)
    assert found.seeds == expected
    assert tuple(one.training.seed for one in next(iter(found.runs[next(iter(found.runs))].values()))) == expected
    assert found.summary == SUMMARIES[file.partition("/")[0]]
    assert found.target == TARGETS.get(file)


@pytest.mark.parametrize("file", FILES)
def test_training_is_as_in_the_protocol(file: str) -> None:
    paper = file.partition("/")[0]
    for task, method, one in runs(loaded(file)):
        settings = one.resolved()
        name, training = settings["task"]["name"], settings["training"]
        found = [training[key] for key in ("rounds", "epochs", "batch_size", "fraction")]
        is_short = name in ("tiny_imagenet", "vireofood172") and not file.startswith("pfedcspc/table7")
        match paper:
            case "fpl" | "fedseproto":
                expected, optimizer = [100, 10, 64, 1.0], CONSTANT
            case "fedpc" if task.endswith("as FedNH"):
                expected, optimizer = [200, 5, 64, 0.1], FALLING
            case "fedpc":
                expected, optimizer = [200, 5, 10, 1.0], ADAM
            case _:
                expected, optimizer = [50 if is_short else 100, 10, 64, 0.5 if "C 0.5" in task else 1.0], CONSTANT
        assert (found, training["optimizer"]) == (expected, optimizer), (task, method)


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("f") and not f.startswith("fedpc")])
def test_domains_are_divided_among_clients_as_in_the_paper(file: str) -> None:
    paper = file.partition("/")[0]
    for _, _, one in runs(loaded(file)):
        task = one.resolved()["task"]
        assert task["clients"] == ALLOCATIONS[paper, task["name"]]
        assert list(task["clients"]) == list(ALLOCATIONS[paper, task["name"]])
        assert (task["fraction"], task["model"]) == (SHARES[task["name"]], DOMAIN_MODELS[paper])
        assert task["other_model"] == ("cnn2" if file == "fedseproto/table3" else "")
        assert (task["pixels"], task["every_class"], task["test_limit"]) == (32, True, 0)


@pytest.mark.parametrize("file", [f for f in FILES if "fedpc" in f or "pfedcspc" in f])
def test_labels_are_divided_among_clients_as_in_the_paper(file: str) -> None:
    for label, _, one in runs(loaded(file)):
        task = one.resolved()["task"]
        assert (task["partition"], task["limit"]) == ("dirichlet", 0)
        found = (task["num_clients"], task["concentration"], task["local_tests"], task["preprocessing"], task["model"])
        if file.startswith("fedpc"):
            stated = label.removesuffix(", as FedNH")
            kept = "drawn" if label.endswith("as FedNH") else "kept"
            assert found == (100, float(stated[-3:]), kept, "fedpc", "conv2")
            assert task["test_share"] == 0.25
        else:
            beta = 0.1 if file.endswith("skewed") else 0.5
            assert found == (10, beta, "proportional", "pfedcspc", PROJECTED[task["name"]])


@pytest.mark.parametrize(("file", "method", "settings"), VARIANTS, ids=[f"{f} {m}" for f, m, _ in VARIANTS])
def test_a_method_has_the_settings_that_the_published_number_rests_on(
    file: str, method: str, settings: dict[str, Any]
) -> None:
    for methods in loaded(file).runs.values():
        found = methods[method][0].resolved()["method"]
        assert found == found | settings


def test_what_differs_between_sets_is_said_for_each() -> None:
    found = {
        task: {m: c[0].resolved()["method"] for m, c in own.items()}
        for task, own in loaded("pfedcspc/table2").runs.items()
    }
    assert [own["MOON"]["contrast_weight"] for own in found.values()] == [5.0, 1.0, 1.0, 1.0]
    assert [own["CCVR"]["samples"] for own in found.values()] == [100, 500, 500, 500]
    assert [own["FedDecorr"]["decorrelation_weight"] for own in found.values()] == [0.1, 0.05, 0.1, 0.1]
    assert [own["FedETF"]["initial_scale"] for own in found.values()] == [10.0, 1.0, 1.0, 1.0]
    plugged = loaded("pfedcspc/table6").runs["Tiny ImageNet"]["MOON+pFedCSPC"][0].resolved()["method"]
    assert (plugged["base"]["name"], plugged["base"]["contrast_weight"]) == ("moon", 1.0)


@pytest.mark.parametrize("file", PUBLISHED)
def test_every_run_of_a_table_has_published_numbers_and_every_number_a_run(file: str) -> None:
    """But for FedPC under FedNH's protocol, of which there is none."""
    found = loaded(file)
    assert {task: list(rows) for task, rows in found.published.items()} == {
        task: [m for m in methods if not (m == "FedPC" and task.endswith("as FedNH"))]
        for task, methods in found.runs.items()
    }


@pytest.mark.parametrize("file", FILES)
def test_published_columns_are_names_that_a_report_knows(file: str) -> None:
    found = loaded(file)
    for task, rows in found.published.items():
        domains = next(iter(found.runs[task].values()))[0].resolved()["task"].get("clients", {})
        for cells in rows.values():
            assert cells
            assert set(cells) <= {*domains, "average", "reached", *(metric.id for metric in METRICS)}


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("f") and not f.startswith("fedpc")])
def test_published_averages_follow_from_the_domains(file: str) -> None:
    for task, rows in loaded(file).published.items():
        for method, cells in rows.items():
            domains = [value for column, value in cells.items() if column != "average"]
            assert len(domains) == 4
            # Some papers cut digits off where others round.
            assert cells["average"] == pytest.approx(fmean(domains), abs=0.011), (task, method)


def test_published_harmonic_means_follow_but_for_three_misprints() -> None:
    wrong = set()
    for task, rows in loaded("pfedcspc/table2").published.items():
        for method, cells in rows.items():
            both = cells["public.accuracy"], cells["personal.local_index"]
            if cells["harmonic_mean"] != pytest.approx(2 * both[0] * both[1] / sum(both), abs=0.02):
                wrong.add((task, method))
    assert wrong == MISPRINTS


def test_numbers_that_papers_print_twice_are_the_same_in_both_files() -> None:
    fpl = {name: loaded(f"fpl/{name}").published for name in ("table1", "table2", "table3", "figure4")}
    for task in ("Digits", "Office Caltech"):
        assert fpl["table1"][task]["Neither"] == fpl["table2"][task]["FedAvg"] == fpl["figure4"][task]["Base"]
        assert fpl["table1"][task]["CPCL and UPCR"] == fpl["table2"][task]["FPL"] == fpl["figure4"][task]["τ 0.02"]
        assert fpl["table3"][task] == {"G": fpl["table2"][task]["FedProto"], "U": fpl["table1"][task]["UPCR"]}
    two, three = loaded("pfedcspc/table2").published, loaded("pfedcspc/table3").published
    index = "personal.local_index"
    assert all(two[task]["FedAvg"][index] == three[task]["FedAvg-FT"][index] for task in two)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_small_form_runs_where_the_data_are(file: str, tmp_path: Path) -> None:
    small = at_hand(file)
    outcomes = sweep(small.configs, tmp_path / "results")
    assert [outcome.failure for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.is_done for outcome in outcomes)
    report = reporting.write(small, outcomes, tmp_path / "report").read_text(encoding="utf-8")
    assert all(f"## {task}\n" in report for task in small.runs)


def at_hand(file: str) -> Comparison:
    """The small form, with rendered digits for SYN, of the tasks whose images are there."""
    table = document(EXPERIMENTS / f"{file}.toml")[0]
    digits = table["tasks"].get("Digits", {}).get("task", {}).get("clients", {})
    if digits:
        digits["syn_rendered"] = digits.pop("syn")
    small = compare.parse(table, file, is_small=True)
    there = {task: methods for task, methods in small.runs.items() if _is_there(next(iter(methods.values()))[0])}
    if not there:
        pytest.skip(f"no images of {', '.join(small.runs)} below $PROTOFED_DATA")
    return replace(small, runs=there)


def _is_there(one: Config) -> bool:
    task = one.resolved()["task"]
    try:
        for name in task["clients"] if task["name"] == "digits" else [task["name"]]:
            load(DATASETS[name], pixels=task["pixels"])
    except BadInput:
        return False
    return True


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_a_note_for_its_report(file: str) -> None:
    assert len(loaded(file).note) > 100


def test_rows_of_global_models_without_fine_tuning_are_that() -> None:
    for file, labels in (("pfedcspc/table3", ["FedAvg"]), ("pfedcspc/table5", ["FedAvg", "FedCSPC"])):
        for rows in loaded(file).published.values():
            assert [label for label, cells in rows.items() if "public.local_index" in cells] == labels
    five = loaded("pfedcspc/table5").runs["CIFAR-10"]
    plain, tuned = five["FedCSPC"][0], five["FedCSPC +FT"][0]
    assert plain.method == tuned.method
    assert (plain.evaluation.fine_tune, tuned.evaluation.fine_tune) == (0, 10)
    assert plain.identity != tuned.identity


def test_rounds_to_a_target_are_of_the_global_model() -> None:
    assert {loaded(file).metric for file in TARGETS} == {"public.accuracy"}
    assert {loaded(file).metric for file in set(FILES) - TARGETS.keys()} == {""}


def test_what_a_published_global_model_is_of() -> None:
    """FedRep's and FedPer's in FedNH's code have the initial head; the same numbers stand in both blocks."""
    found = loaded("fedpc/table4").published
    for task in [one for one in found if not one.endswith("as FedNH")]:
        for block in (found[task], found[f"{task}, as FedNH"]):
            for method in ("FedRep", "FedPer"):
                assert "public.initial_head" in block[method]
                assert not block[method].keys() & {"public.accuracy", "public.mean_heads"}
        assert "public.mean_heads" in found[task]["FedPC"]
        assert all(found[f"{task}, as FedNH"][m] == row for m, row in found[task].items() if m != "FedPC")
