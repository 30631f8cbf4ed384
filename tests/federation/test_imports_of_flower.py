"""Only one package imports Flower, so that all else works without it."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src" / "protofed"
ONLY = SOURCE / "federation" / "flower"


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def names_used() -> set[str]:
    """All that is imported from Flower, by full name."""
    return {name for path in ONLY.glob("*.py") for name in imports_of(path) if name.split(".")[0] == "flwr"}


def test_one_package_imports_flower() -> None:
    assert names_used()
    others = [path for path in SOURCE.rglob("*.py") if ONLY not in path.parents]
    assert [
        p for p in others if any(name.split(".")[0] in ("flwr", "uvicorn", "httpx") for name in imports_of(p))
    ] == []
