"""Every guard, taken away in turn: for each of them a test must fail.

    python tests/faults/mutants.py            all of them, with a table
    python tests/faults/mutants.py lock sort  those whose names hold one of these words

The source is copied, one text in it is replaced, and the tests that are named for it are run on the copy. A guard that
no test misses is an error, and so is a text that is no longer in the source, or a word that names no test.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from faults.guards import GUARDS, Guard  # noqa: E402

SECONDS = 120
"""What takes longer hangs without its guard."""


def text_of(guard: Guard, source: Path = ROOT / "src") -> str:
    return (source / "protofed" / guard.file).read_text(encoding="utf-8")


def is_missed(guard: Guard) -> bool:
    """Whether a test fails on a copy of the source without this guard."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        text = text_of(guard, copy)
        assert text.count(guard.old) == 1, f"{guard.name}: its text is {text.count(guard.old)} times in {guard.file}"
        (copy / "protofed" / guard.file).write_text(text.replace(guard.old, guard.new), encoding="utf-8")
        return _fails(copy, shlex.split(guard.tests))


def _fails(source: Path, tests: list[str]) -> bool:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    paths = ["-o", f"pythonpath={source} {ROOT / 'tests'}"]
    try:
        ended = subprocess.run([*words, *paths, *tests], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 1


def main() -> int:
    wanted = sys.argv[1:]
    chosen = [guard for guard in GUARDS if not wanted or any(word in guard.name for word in wanted)]
    survived = 0
    print("| guard | where | tests that miss it | |\n| --- | --- | --- | --- |")
    for guard in chosen:
        begin = time.perf_counter()
        is_good = is_missed(guard)
        survived += not is_good
        verdict = "missed" if is_good else "**NOT MISSED**"
        seconds = time.perf_counter() - begin
        print(f"| {guard.name} | {guard.file} | `{guard.tests}` | {verdict}, {seconds:.0f} s |", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} guards are missed when they are gone")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
