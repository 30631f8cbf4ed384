"""The site builds without a warning and loads nothing from elsewhere; the reference leaves nothing out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import protofed
import reference_docs
import site_hooks
from protofed.api.describe import settings_of
from protofed.methods import METHODS
from protofed.runs.config.sections import IN_TRAINING, SECTIONS
from protofed.tasks import TASKS

ROOT = Path(__file__).parent.parent.parent
FETCHED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(?:https?:)?//|<link\b[^>]*rel=\"stylesheet\"[^>]*href=\"(?:https?:)?//"
)


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(tmp_path) for path in pages}
    assert {path.with_name(path.name.replace("README", "index")).with_suffix(".html") for path in written} <= made
    fetching = [path.name for path in pages if FETCHED.search(path.read_text(encoding="utf-8"))]
    assert fetching == []
    assert not [path.name for path in pages if "flowchart LR" in path.read_text(encoding="utf-8")]
    page = (tmp_path / "reference/python.html").read_text(encoding="utf-8")
    assert 'id="protofed.Result.metrics"' in page or 'id="protofed.runs.results.Result.metrics"' in page


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[b](b.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\nplugins: []\n", encoding="utf-8")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "'b.md'" in done.stderr


@pytest.mark.parametrize(
    ("link", "with_repository", "without"),
    [
        ("[a page](training.md#batches)", "[a page](training.md#batches)", "[a page](training.md#batches)"),
        ("[`nn/x.py`](../src/nn/x.py)", "[`nn/x.py`](https://host/r/blob/main/src/nn/x.py)", "`nn/x.py`"),
        (
            "[the rules](../CONTRIBUTING.md#a)",
            "[the rules](https://host/r/blob/main/CONTRIBUTING.md#a)",
            "the rules (`CONTRIBUTING.md`)",
        ),
        ("[out](https://host/a.md)", "[out](https://host/a.md)", "[out](https://host/a.md)"),
        ("```\n[x](../y.md)\n```", "```\n[x](../y.md)\n```", "```\n[x](../y.md)\n```"),
    ],
)
def test_links_out_of_the_documentation_lead_to_the_repository_or_become_text(
    link: str, with_repository: str, without: str
) -> None:
    assert site_hooks.rewritten(link, "page.md", "https://host/r/") == with_repository
    assert site_hooks.rewritten(link, "page.md") == without


def test_a_figure_keeps_its_words_and_another_kind_is_refused() -> None:
    text = (ROOT / "docs/methods/fpl.md").read_text(encoding="utf-8")
    made = site_hooks.rewritten(text, "methods/fpl.md")
    assert "mermaid" not in made
    for words in ("FINCH clusters of prototypes", "cluster and unbiased prototypes", "own prototypes", "nothing"):
        assert words in made[made.index('<div class="round">') : made.index("## Use")]
    with pytest.raises(ValueError, match="must be that of a method's page"):
        site_hooks.rewritten("```mermaid\npie\n```", "x.md")


def test_every_section_is_in_the_reference_and_every_key_has_a_meaning() -> None:
    assert {"task", "method", *reference_docs.FILLED} == SECTIONS.keys()
    classes = [*reference_docs.FILLED.values(), *TASKS.values(), *METHODS.values()]
    classes += [cls for registry in IN_TRAINING.values() for cls in registry.values()]
    assert [f"{cls.__name__}.{one.name}" for cls in classes for one in settings_of(cls) if not one.meaning] == []


def test_the_python_reference_has_every_name_once() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    methods = {cls.__name__ for cls in METHODS.values()}
    listed = re.findall(r"^::: protofed\.(\w+)$", text, re.MULTILINE)
    assert sorted([*listed, "METHODS", "TASKS", "__version__"]) == sorted({*protofed.__all__} - methods)
    assert all(f"`protofed.{name}`" in text for name in ("METHODS", "TASKS", "__version__"))
