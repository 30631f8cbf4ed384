"""The documentation says what the code does: pages, settings, snippets, links."""

import io
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

import method_docs
import protofed
import reference_docs
from methods.conformance import CHECKS
from methods.sampling import some_methods
from protofed.api.describe import text_of
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
    assert re.search(r'memory\[\("memory: [^"]+"\)\]', inside)


def test_what_is_generated_is_up_to_date() -> None:
    names = [str(path.relative_to(ROOT)) for path in method_docs.stale(ROOT)]
    assert not names, f"run `{method_docs.COMMAND}`: {', '.join(names)} are not what the code says"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files with generated text, in a folder where they may be changed."""
    for path in [*(path for path, _ in method_docs.blocks_by_file(ROOT)), *reference_docs.pages(ROOT)]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("docs/methods/fpl.md", "`0.02`"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("docs/methods/fpl.md", "\n7. "),
                ("docs/methods/fpl.md", "**Keeps:** nothing"),
                ("docs/methods/fpl.md", "CVPR 2023"),
                ("docs/methods/README.md", "[fpl](fpl.md)"),
            )
        ),
        ("README.md", "(docs/methods/fpl.md)"),
        ("src/protofed/__init__.py", '"FPL",'),
        ("docs/reference/commands.md", "`--hold-out SITE`"),
        ("docs/reference/configuration.md", "number > 0, ≤ 1"),
    ],
)
def test_a_change_of_what_is_generated_is_seen_and_undone(copy: Path, file: str, word: str) -> None:
    path = copy / file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(word, "something else"), encoding="utf-8")
    [(changed, text)] = method_docs.stale(copy).items()
    assert changed == path
    assert word in text


def test_what_is_written_by_hand_is_left_alone(copy: Path) -> None:
    path = copy / "docs/methods/fpl.md"
    path.write_text(path.read_text(encoding="utf-8") + "A remark.\n", encoding="utf-8")
    assert method_docs.stale(copy) == {}


def test_a_page_without_its_marks_is_refused(copy: Path) -> None:
    path = copy / "docs/methods/fpl.md"
    path.write_text(path.read_text(encoding="utf-8").replace("generated: end settings", ""), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"fpl\.md: there must be one pair of marks 'generated: begin settings'"):
        method_docs.stale(copy)


@pytest.mark.parametrize("name", ["fpl", "local", "ga", "fedetf"])
def test_a_method_without_a_page_gets_one_that_passes_the_tests_of_pages(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch, ran: list[Any], tmp_path: Path
) -> None:
    path = copy / f"docs/methods/{name}.md"
    path.unlink()
    [(made, text)] = method_docs.stale(copy).items()
    made.write_text(text, encoding="utf-8")
    assert made == path
    assert method_docs.stale(copy) == {}
    monkeypatch.setattr(sys.modules[__name__], "PAGES", copy / "docs/methods")
    test_a_page_has_the_fixed_headings_in_order(name)
    test_a_page_has_one_figure_and_it_shows_both_ways_and_the_memory(name)
    test_the_snippets_of_a_page_run_and_are_the_same_experiment(name, ran, tmp_path)


@every_method
def test_the_docstring_of_a_module_has_all_parts(name: str) -> None:
    text = text_of(METHODS[name])
    parts = (text.title, text.summary, text.sends, text.keeps, text.server)
    assert all(parts)
    assert text.reference or name == "local"


def test_a_docstring_that_lacks_a_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[METHODS["fpl"].__module__]
    whole = module.__doc__ or ""
    broken = [
        (whole.replace("FPL: ", ""), "begin with"),
        (whole.replace("Keeps: ", ""), "a paragraph"),
        (whole.replace("Departures:", ""), "numbered list"),
        (whole.replace("\n2. ", "\n3. "), "numbered list"),
        (whole.partition("Departures:")[0] + "Departures: some.", "numbered list"),
    ]
    for docstring, reason in broken:
        monkeypatch.setattr(module, "__doc__", docstring)
        with pytest.raises(ValueError, match=rf"protofed\.methods\.fpl: .*{reason}"):
            text_of(METHODS["fpl"])


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
def test_the_experiment_of_a_page_is_of_its_method(name: str) -> None:
    [toml] = blocks(sections(page(name))["Use"], "toml")
    assert type(config.parse(tomllib.loads(toml), f"{name}.md").method) is METHODS[name]


@some_methods
def test_the_snippets_of_a_page_run_and_are_the_same_experiment(name: str, ran: list[Any], tmp_path: Path) -> None:
    use = sections(page(name))["Use"]
    [toml], [python] = blocks(use, "toml"), blocks(use, "python")
    assert len([line for line in python.splitlines() if line]) == 2
    parsed = config.parse(tomllib.loads(toml), f"{name}.md")
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
    (root / "oslo/benign/case12.nii").write_bytes(b"n+1")


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
    answer = inspect(patients, label="outcome", write=Path("patients.toml")).text + "\n"
    assert tables == re.sub("It takes .* on this", "It takes about a minute on this", answer)
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


NAMED_TESTS = re.compile(r"\]\((?P<file>[^)]*/test_\w+\.py)\): (?P<names>`test_\w+`(?:, `test_\w+`)*)")


def test_tests_that_are_named_in_a_table_exist() -> None:
    page = ROOT / "docs" / "reliability.md"
    found = [(page.parent / m["file"], re.findall(r"\w+", m["names"])) for m in NAMED_TESTS.finditer(page.read_text())]
    assert len(found) >= 19
    assert [(f.name, n) for f, names in found for n in names if f"\ndef {n}(" not in f.read_text()] == []
