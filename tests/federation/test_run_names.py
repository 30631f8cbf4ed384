"""The name under which sites know a run."""

from pathlib import Path

import pytest

from protofed.errors import BadInput

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.federation.serve import run_name
from protofed.federation.site_store import RUN
from protofed.runs.store.folder import RunFolder


def test_a_run_keeps_its_name_and_another_gets_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "results" / "0a1b+2c")
    first = run_name(folder, resume=False)
    assert RUN.fullmatch(first)
    assert run_name(folder, resume=False) != first  # nothing of it is there yet
    first = run_name(folder, resume=True)
    folder.path.mkdir()
    assert run_name(folder, resume=True) == first
    assert run_name(folder, resume=False) == first  # such a command is refused later, and must not change it


@pytest.mark.parametrize("text", ["", "../x", "a\nb", "ä"])
def test_a_run_without_its_name_is_not_resumed(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        run_name(folder, resume=True)
    (tmp_path / "run.name").write_text(text)
    with pytest.raises(BadInput):
        run_name(folder, resume=True)
