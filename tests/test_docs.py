"""The documentation says what the code does: pages, settings, snippets, links."""

import io
import json
import re
import runpy
import shutil
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import protofed
from methods.conformance import CHECKS
from protofed.api.describe import settings_of
from protofed.api.method import Method
from protofed.inspection import inspect
from protofed.methods import METHODS
from protofed.runs.config import config

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "methods"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HEADINGS = [
    "What it does",
    "Use",
    "Settings",
    "What is sent and kept",
    "Departures",
    "When to use it",
]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MACHINE_PATH = re.compile(r"/(?:work|tmp|root)/")
NUMBERED = re.compile(r"^(\d+)\. ", re.MULTILINE)

every_method = pytest.mark.parametrize("name", METHODS)


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def prose(text: str) -> str:
    """What is left without code blocks."""
    return FENCE.sub("", text)


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    _, *pieces = re.split(r"^## ", text, flags=re.MULTILINE)
    return {heading: body for heading, _, body in (piece.partition("\n") for piece in pieces)}


def rows(section: str) -> list[list[str]]:
    """The cells of a table, without its header."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


# ---- the pages of the methods


def test_there_is_one_page_per_method_and_no_other() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*METHODS, "README"}


@every_method
def test_a_page_has_the_fixed_headings_in_order(name: str) -> None:
    headings = re.findall(r"^(#+) (.*)$", prose(page(name)), re.MULTILINE)
    assert [marks for marks, _ in headings] == ["#"] + ["##"] * len(HEADINGS)
    assert [title for _, title in headings[1:]] == HEADINGS


@every_method
def test_a_page_has_one_figure_and_it_shows_both_ways_and_the_memory(name: str) -> None:
    [figure] = blocks(page(name), "mermaid")
    assert figure in sections(page(name))["What it does"]
    assert figure.startswith("flowchart LR\n")
    edges = set(re.findall(r"(\w+)(?:\[[^\]]*\])? --> (\w+)", figure))
    assert edges == {("server", "message"), ("message", "step"), ("step", "upload"), ("upload", "server")}
    inside = figure[figure.index('subgraph client["Client"]') : figure.rindex("\n    end\n")]
    assert re.search(r'memory\[\("memory: [\w ]+"\)\]', inside)


@every_method
def test_a_page_lists_every_setting_with_its_default(name: str) -> None:
    section = sections(page(name))["Settings"]
    expected = [(f"`{s.name}`", f"`{json.dumps(s.default)}`") for s in settings_of(METHODS[name])]
    assert [(row[0], row[2]) for row in rows(section)] == expected
    assert all(len(row) == 4 and all(row) for row in rows(section))
    assert expected or section.strip() == "None."


@every_method
def test_a_page_says_what_goes_down_what_goes_up_and_what_is_kept(name: str) -> None:
    assert [row[0] for row in rows(sections(page(name))["What is sent and kept"])] == ["down", "up", "kept"]


@every_method
def test_a_page_has_the_departures_of_the_module(name: str) -> None:
    docstring = sys.modules[METHODS[name].__module__].__doc__ or ""
    _, found, departures = docstring.partition("Departures:")
    assert found, "the module says nothing of departures"
    section = sections(page(name))["Departures"]
    numbers = NUMBERED.findall(section)
    assert numbers == NUMBERED.findall(departures)
    assert numbers == [str(k + 1) for k in range(len(numbers))]
    assert numbers or (section.strip(), departures.strip()) == ("None.", "none.")


@every_method
def test_the_table_of_methods_has_the_page_and_says_who_is_judged(name: str) -> None:
    table = {row[0]: row for row in rows((PAGES / "README.md").read_text(encoding="utf-8"))}
    assert table.keys() == {f"[{known}]({known}.md)" for known in METHODS}
    has_own = METHODS[name].public is Method.public
    assert table[f"[{name}]({name}.md)"][-1] == ("clients' own models" if has_own else "public model")


# ---- snippets


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`protofed.run` stops after one round of one epoch; the methods that it was called with."""
    methods: list[Any] = []
    whole_run = protofed.run

    def short_run(method: Any, *args: Any, **settings: Any) -> protofed.Result:
        result = whole_run(method, *args, **{**settings, "rounds": 1, "epochs": 1})
        methods.append(result.federation.method)
        return result

    monkeypatch.setattr(protofed, "run", short_run)
    return methods


def executed(snippets: list[str], folder: Path) -> dict[str, Any]:
    """What is defined after running the snippets one after another, as one file."""
    path = folder / "snippet.py"
    path.write_text("\n".join(snippets), encoding="utf-8")
    with redirect_stdout(io.StringIO()):
        return runpy.run_path(str(path))


@every_method
def test_the_snippets_of_a_page_run_and_are_the_same_experiment(name: str, ran: list[Any], tmp_path: Path) -> None:
    use = sections(page(name))["Use"]
    [toml], [python] = blocks(use, "toml"), blocks(use, "python")
    assert len([line for line in python.splitlines() if line]) == 2
    parsed = config.parse(tomllib.loads(toml), f"{name}.md")
    assert type(parsed.method) is METHODS[name]
    defined = executed([python], tmp_path)
    assert ran == [parsed.method]
    assert defined["result"].is_complete


def test_all_snippets_of_the_pages_are_tested() -> None:
    for path in PAGES.glob("*.md"):
        kinds = sorted(kind for kind, _ in FENCE.findall(path.read_text(encoding="utf-8")))
        assert kinds == ([] if path.stem == "README" else ["mermaid", "python", "toml"]), path.name


@pytest.fixture
def example(ran: list[Any], tmp_path: Path) -> dict[str, Any]:
    """What the snippets of CONTRIBUTING.md define."""
    return executed(blocks(CONTRIBUTING.read_text(encoding="utf-8"), "python"), tmp_path)


def test_the_worked_example_is_short_runs_and_passes_its_own_test(example: dict[str, Any], ran: list[Any]) -> None:
    method, *_ = blocks(CONTRIBUTING.read_text(encoding="utf-8"), "python")
    assert len([line for line in method.splitlines() if line]) < 25
    assert ran == [example["ShortFeatures"](length_weight=0.1)]
    tests: list[Callable[[], None]] = [value for key, value in example.items() if key.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_the_worked_example_conforms(example: dict[str, Any]) -> None:
    for check in CHECKS:
        check(example["ShortFeatures"]())


# ---- the page on users' own data


def made_scans(root: Path) -> None:
    """The images of the page: grey ones at Leeds and Porto, coloured ones at Oslo, one of them cut short."""
    noise = np.random.default_rng(0)

    def draw(name: str, width: int, height: int, mode: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path)

    for folder, count in (("leeds/benign", 40), ("leeds/malignant", 22), ("porto/benign", 18), ("porto/malignant", 25)):
        for k in range(count):
            draw(f"{folder}/{k:03}.png", 120, 100, "L")
    for k in range(31):
        draw(f"oslo/benign/{k:03}.png", *((640, 480) if k == 30 else (96, 96)), "RGB")
    draw("porto/unclear/000.png", 120, 100, "L")
    shutil.copy(root / "leeds/benign/007.png", root / "porto/benign/transfer.png")
    damaged = root / "oslo/benign/012.png"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    (root / "oslo/benign/case12.dcm").write_bytes(b"DICM")


def made_patients(root: Path) -> None:
    """The tables of the page."""
    root.mkdir()
    for site, count, unlabelled in (("leeds", 120, 5), ("oslo", 45, 1), ("porto", 80, 3)):
        lines = ["record,age,sex,smoker,cholesterol,ward,scanner,outcome"]
        for k in range(count):
            cholesterol = "" if site == "oslo" else f"{140 + 37 * k % 113 + k % 10 / 10}"
            ward = "ICU" if site == "porto" and k % 3 == 0 else str(k % 3 + 1)
            outcome = "" if k < unlabelled else "ill" if 7 * k % 20 < 9 else "well"
            measured = f"{30 + 17 * k % 60},{'fm'[k % 2]},{('no', 'yes', '')[k % 3]},{cholesterol}"
            lines.append(f"{site[0].upper()}{k + 1:04},{measured},{ward},MR,{outcome}")
        (root / f"{site}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_answers_on_the_page_of_own_data_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made_scans(tmp_path / "scans")
    made_patients(tmp_path / "patients")
    text = (ROOT / "docs" / "your-data.md").read_text(encoding="utf-8")
    shown = [block for block in blocks(text, "") if not block.startswith(("protofed ", "scans/", "patients/"))]
    scans, patients = Path("scans"), Path("patients")
    images, candidates, tables = shown
    assert images == inspect(scans).text + "\n"
    assert f" {candidates}" in inspect(patients).text
    assert tables == inspect(patients, label="outcome", write=Path("patients.toml")).text + "\n"
    [file] = blocks(text, "toml")
    assert file == Path("patients.toml").read_text(encoding="utf-8")
    assert inspect(scans, skip_damaged=True, write=Path("scans.toml")).written is not None


# ---- all documents


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(path: Path) -> None:
    targets = [link for link in LINK.findall(prose(path.read_text(encoding="utf-8"))) if "://" not in link]
    files = [target.partition("#")[0] for target in targets if not target.startswith(("#", "mailto:"))]
    assert [file for file in files if not (path.parent / file).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_mentions_a_path_of_some_machine(path: Path) -> None:
    assert MACHINE_PATH.findall(path.read_text(encoding="utf-8")) == []
