"""The committed reports, recomputed by plain arithmetic: from results.json and, where runs are kept, from rounds.jsonl.

Nothing here uses protofed's own code for tables, so that an error in it does not repeat itself.
"""

import json
import re
import tarfile
import tomllib
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
RECOMPUTED = sorted(path.parent.relative_to(REPORTS).as_posix() for path in REPORTS.rglob("results.json"))
PUBLISHED = {"fpl_office_caltech": "fpl/table2.toml"}
T_975 = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}  # 97.5 % quantiles of Student's t by degrees of freedom
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
METRICS = {
    "GM": ("public.accuracy", "global"),
    "GM I_local": ("public.local_index",),
    "GM mean heads": ("public.mean_heads",),
    "GM prototypes": ("public.nearest_prototype",),
    "GM initial head": ("public.initial_head",),
    "PM(V)": ("personal.owned", "owned"),
    "PM(L)": ("personal.proportional", "proportional"),
    "Acc": ("personal.accuracy", "accuracy"),
    "MF1": ("personal.macro_f1", "macro_f1"),
    "I_local": ("personal.local_index", "local_index"),
    "HM": ("harmonic_mean",),
}
Cells = dict[str, str]


def tables(report: Path) -> Iterator[tuple[str, str, list[Cells]]]:
    """Every table of a report: the headings above it, and its rows by column."""
    task = title = ""
    rows: list[list[str]] = []
    for line in [*report.read_text().splitlines(), ""]:
        if line.startswith("## "):
            task = line[3:]
        elif line.startswith("### "):
            title = line[4:]
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            header, _, *body = rows
            yield task, title, [dict(zip(header, row, strict=True)) for row in body]
            rows = []


def by_column(seed: dict[str, Any], title: str) -> dict[str, float]:
    """A seed's numbers under the names of the columns of a table."""
    old = "metrics" not in seed  # reports of 0.1 have one flat dictionary for each seed
    flat = seed if old else seed["metrics"]
    if title.startswith("Costs"):
        costs = seed if old else seed["costs"]
        named = {"kB down": costs["down"] / 1000, "kB up": costs["up"] / 1000, "s per round": costs["seconds"]}
        return named | {"replies left out": costs["left_out"]}
    if title.startswith("Global and personal"):
        present = {name: [key for key in keys if key in flat] for name, keys in METRICS.items()}
        return {name: 100 * flat[keys[0]] for name, keys in present.items() if keys}
    for word, mean in ("Accuracy that clients see", "own_domain"), ("Area under the ROC", "auc"):
        if title.startswith(word):
            kind = "accuracy at " if mean == "own_domain" else "auc at "
            found = {key.removeprefix(kind): 100 * value for key, value in flat.items() if key.startswith(kind)}
            return found | ({"mean": 100 * flat[mean]} if mean in flat else {})
    own = flat.get("own", flat.get("own_domain"))
    named = {"AVG": 100 * flat["average"]} | ({} if own is None else {"own": 100 * own})
    if old:
        return named | {key: 100 * value for key, value in flat.items() if isinstance(value, float)}
    domains = seed["own_domains" if title.startswith("What clients see at home") else "domains"]
    return named | {name: 100 * scores["accuracy"] for name, scores in domains.items()}


def assert_printed(printed: str, value: float, where: str) -> None:
    """A printed number is the value, rounded to the digits that it has."""
    digits = len(printed.partition(".")[2])
    assert abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9, (
        f"{where}: printed {printed}, recomputed {value:.4f}"
    )


def assert_cell(cell: str, values: list[float], where: str) -> None:
    """A cell is `mean` or `mean ± sample standard deviation`, or `–` where there is nothing."""
    if cell in ("–", ""):
        assert not values, f"{where}: empty, but there are {values}"
        return
    assert values, f"{where}: printed {cell}, but there is nothing to compute it from"
    mean, _, spread = cell.partition(" ± ")
    assert_printed(mean, fmean(values), where)
    if spread:
        assert_printed(spread, stdev(values), where)
    elif "Costs" not in where:
        assert len(values) == 1, f"{where}: {len(values)} seeds and no spread"


def assert_gain(cell: str, differences: list[float], where: str) -> None:
    """A gain is the mean of the seeds' differences, perhaps with its 95 % interval."""
    mean, *interval = NUMBER.findall(cell)
    assert_printed(mean, fmean(differences), where)
    if interval:
        half = T_975[len(differences) - 1] * stdev(differences) / sqrt(len(differences))
        for printed, value in zip(interval, (fmean(differences) - half, fmean(differences) + half), strict=True):
            assert_printed(printed, value, where)


def paired(seeds: list[dict[str, Any]], baseline: list[dict[str, Any]], title: str, column: str) -> list[float]:
    """What a method has above FedAvg with each seed that both have."""
    number = {seed.get("seed", k): by_column(seed, title)[column] for k, seed in enumerate(baseline)}
    pairs = [(by_column(seed, title)[column], seed.get("seed", k)) for k, seed in enumerate(seeds)]
    return [value - number[k] for value, k in pairs if k in number]


@pytest.mark.parametrize("name", RECOMPUTED)
def test_every_table_follows_from_the_seeds_in_results_json(name: str) -> None:
    results = json.loads((REPORTS / name / "results.json").read_text())["results"]
    checked = 0
    for task, title, rows in tables(REPORTS / name / "report.md"):
        for row in rows:
            label = row["method"].removesuffix("*")
            if label.endswith("published"):
                continue
            seeds = results[task][label]
            for column, cell in row.items():
                where = f"{name}, {task}, {title}, {label}, {column}"
                if column == "method" or column.startswith("rounds to"):
                    continue
                if column == "Δ":
                    if cell != "–":
                        of = "own" if title.startswith("What clients see at home") else "AVG"
                        assert_gain(cell, paired(seeds, results[task]["FedAvg"], title, of), where)
                else:
                    numbers = [by_column(seed, title) for seed in seeds]
                    assert_cell(cell, [number[column] for number in numbers if column in number], where)
                checked += 1
        if title.startswith(("Accuracy on each domain", "What clients see at home")):
            labels = {row["method"].strip("*").removesuffix(", published") for row in rows}
            assert labels == set(results[task]), f"{name}, {title}: the rows are not the methods of results.json"
    assert checked > 10


@pytest.mark.parametrize(("name", "file"), PUBLISHED.items())
def test_published_rows_are_those_of_the_experiment(name: str, file: str) -> None:
    published = tomllib.loads((ROOT / "experiments" / file).read_text())["published"]
    checked = 0
    for task, title, rows in tables(REPORTS / name / "report.md"):
        for row in rows:
            if row["method"].endswith("published*"):
                label = row["method"].strip("*").removesuffix(", published")
                columns = ["AVG" if column == "average" else column for column in published[task]["columns"]]
                for column, value in zip(columns, published[task][label], strict=True):
                    assert_printed(row[column], value, f"{name}, {title}, {label} published, {column}")
                    checked += 1
    assert checked


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Settings, environment and rounds of the runs that lie beside a report."""
    kept = {}
    for archive in sorted(REPORTS.rglob("runs.tar.xz")):
        folder = tmp_path_factory.mktemp("runs")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        kept[archive.parent.relative_to(REPORTS).as_posix()] = [
            {
                "config": tomllib.loads((run.parent / "config.toml").read_text()),
                "environment": json.loads((run.parent / "environment.json").read_text()),
                "rounds": [json.loads(line) for line in run.read_text().splitlines()],
            }
            for run in sorted(folder.rglob("rounds.jsonl"))
        ]
    return kept


def is_run_of(run: dict[str, Any], section: dict[str, Any]) -> bool:
    """Whether a run has the name and the own settings of a method's section."""
    method = run["config"]["method"]
    return all(value == method.get(key) for key, value in section["method"].items() if not isinstance(value, dict))


def test_results_of_one_protocol_on_cifar10_follow_from_its_runs(kept_runs: dict[str, list[dict[str, Any]]]) -> None:
    name = "one_protocol_cifar10"
    methods = tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())["methods"]
    [results] = json.loads((REPORTS / name / "results.json").read_text())["results"].values()
    again = "--method FedAvg"  # FedAvg's runs for control in two later sittings, which the table leaves out
    left = sorted(kept_runs[name], key=lambda run: run["config"]["training"]["seed"])
    assert set(results) <= set(methods)
    for label, section in methods.items():
        if label not in results:
            continue  # a method that is newer than the report
        mine = [run for run in left if is_run_of(run, section)]
        if label == "FedAvg":
            mine = [run for run in mine if again not in run["environment"]["command"]]
        left = [run for run in left if run not in mine]  # FedCSPC, with its setting, comes before pFedCSPC without one
        assert [seed["seed"] for seed in results[label]] == [run["config"]["training"]["seed"] for run in mine], label
        for seed, run in zip(results[label], mine, strict=True):
            rounds = [each for each in run["rounds"] if each["round"] > 0]  # round 0 is what comes before training
            last = rounds[-1]
            assert last["round"] == len(rounds) == 25
            home = list(last["at_home"].values())
            expected = {
                "average": fmean(domain["accuracy"] for domain in last["domains"].values()),
                "own": fmean(client["accuracy"] for client in home),
                # The harmonic mean of accuracy and macro-F1 of each client, then the mean over clients.
                "own_local_index": fmean(harmonic(client["accuracy"], client["macro_f1"]) for client in home),
            }
            for key, value in expected.items():
                assert seed["metrics"][key] == pytest.approx(value, abs=1e-9), (label, seed["seed"], key)
            traffic = [client for each in rounds for client in each["traffic"].values()]
            costs = {
                "down": fmean(client["down"] for client in traffic),
                "up": fmean(client["up"] for client in traffic),
                "seconds": fmean(sum(each["seconds"].values()) for each in rounds),
                "left_out": sum(len(each["failures"]) for each in rounds),
            }
            for key, value in costs.items():
                assert seed["costs"][key] == pytest.approx(value, rel=1e-9), (label, seed["seed"], key)
    # What the report says of the control, at home with seeds 0 to 2.
    controls: dict[str, list[str]] = {}
    for run in left:
        home = fmean(client["accuracy"] for client in run["rounds"][-1]["at_home"].values())
        controls.setdefault(run["environment"]["commit"][:7], []).append(f"{100 * home:.1f}")
    assert sorted(controls.values()) == [["47.4", "45.4", "48.9"], ["47.5", "45.4", "48.6"]]


def harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


def test_table_2_of_pfedcspc_follows_from_its_runs(kept_runs: dict[str, list[dict[str, Any]]]) -> None:
    name = "pfedcspc/table2"
    experiment = tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())
    [rows] = [
        rows for _, title, rows in tables(REPORTS / name / "report.md") if title.startswith("Global and personal")
    ]
    ours = {row["method"].removesuffix("*"): row for row in rows if "published" not in row["method"]}
    assert set(ours) == set(experiment["methods"])
    for label, row in ours.items():
        [run] = [run for run in kept_runs[name] if is_run_of(run, experiment["methods"][label])]
        last = run["rounds"][-1]
        assert last["round"] == 100
        clients = last["clients"].values()
        gm = 100 * last["public"]["accuracy"]
        local = 100 * fmean(harmonic(client["accuracy"], client["macro_f1"]) for client in clients)
        for column, value in ("GM", gm), ("I_local", local), ("HM", harmonic(gm, local)):
            assert_cell(row[column], [value], f"{name}, {label}, {column}")


@pytest.mark.parametrize(("name", "length"), [("fedseproto/table1", 100), ("precision", 25)])
def test_a_table_of_domains_follows_from_its_runs(
    name: str, length: int, kept_runs: dict[str, list[dict[str, Any]]]
) -> None:
    """A row is a method, or a method and a precision. Δ is against FedAvg, or against the same method in float32."""
    experiment = tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())["methods"]
    [(_, _, rows)] = tables(REPORTS / name / "report.md")
    scores: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        label = ", ".join(row[column] for column in ("method", "precision") if column in row)
        section = experiment[label]
        precision = section.get("runtime", {}).get("precision", "float32")
        mine = [run for run in kept_runs[name] if is_run_of(run, section)]
        for run in [run for run in mine if run["config"]["runtime"]["precision"] == precision]:
            last = run["rounds"][-1]
            assert last["round"] == length
            domains = {domain: 100 * each["accuracy"] for domain, each in last["domains"].items()}
            average = {"AVG": fmean(domains.values())}
            scores.setdefault(label, {})[run["config"]["training"]["seed"]] = domains | average
    assert sum(map(len, scores.values())) == len(kept_runs[name]), "a run is in no row"
    for row, seeds in zip(rows, scores.values(), strict=True):
        baseline = scores[f"{row['method']}, float32" if "precision" in row else "FedAvg"]
        assert row.get("seeds", "3") == str(len(seeds))
        for column in (column for column in row if column in [*next(iter(seeds.values()))]):
            assert_cell(row[column], [seed[column] for seed in seeds.values()], f"{name}, {row['method']}, {column}")
        if row["Δ"] != "–":
            gains = [each["AVG"] - baseline[seed]["AVG"] for seed, each in seeds.items()]
            assert_gain(row["Δ"], gains, f"{name}, {row['method']}, Δ")
