"""Every guard, taken away in turn: for each of them a test must fail.

    python tests/faults/mutants.py              all of them, with a table
    python tests/faults/mutants.py lock sort    those whose ids hold one of these words
    python tests/faults/mutants.py --show lock  what is changed, as a diff; no test runs

The source is copied, the lines marked `# guard: id` are changed as guards.py says, and the tests that are named for the
guard run on the copy. They must pass on the source as it is: a test that fails anyway misses nothing. A guard that no
test misses is an error. So are a guard without a mark, a mark without a guard, and a word that names no test.
"""

import argparse
import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from faults.guards import GUARDS, Guard  # noqa: E402

HANGS = 120.0
"""Without a guard its tests may hang: they are ended after so many seconds and ten times what they take with it."""

MARK = re.compile(r"# guard: (?P<ids>[a-z0-9-]+(?:, [a-z0-9-]+)*)$")


@dataclass(frozen=True)
class Marked:
    """The lines of a file that have one guard's mark."""

    path: Path
    lines: tuple[int, ...]


def marks(source: Path = ROOT / "src") -> dict[str, Marked]:
    """The marked lines of every guard. A mark on a line of its own is the next line's."""
    found: dict[str, Marked] = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(text):
            for name in _ids(line):
                place = _guarded(text, number)
                before = found.get(name, Marked(path, ()))
                assert before.path == path, f"{name} is marked in {before.path} and in {path}"
                found[name] = Marked(path, (*before.lines, place))
    return found


def _ids(line: str) -> list[str]:
    mark = MARK.search(line)
    return mark["ids"].split(", ") if mark else []


def _guarded(text: list[str], number: int) -> int:
    """The line that a mark is about."""
    while text[number].lstrip().startswith("#"):
        number += 1
    return number


def changed(guard: Guard, text: list[str], lines: tuple[int, ...]) -> list[str]:
    """The text without the guard."""
    first, last = lines[0], lines[-1]
    marked = text[first : last + 1]
    indent = marked[0][: len(marked[0]) - len(marked[0].lstrip())]

    def written(new: str) -> list[str]:
        return [indent + line for line in new.split("\n")] if new else []

    if guard.swap:
        old, new = guard.swap
        code = MARK.sub("", marked[0]).rstrip()
        assert len(lines) == 1, f"{guard.id}: a swap is for one line"
        assert code.count(old) == 1, f"{guard.id}: {old!r} is {code.count(old)} times in the marked line"
        marked = [code.replace(old, new)]
    elif guard.before or guard.after:
        marked = [*written(guard.before), *marked, *written(guard.after)]
    else:
        marked = written(guard.new)
    return [*text[:first], *marked, *text[last + 1 :]]


def shown(guard: Guard) -> str:
    """What taking the guard away changes, as a diff."""
    place = marks()[guard.id]
    text, name = place.path.read_text(encoding="utf-8").split("\n"), str(place.path.relative_to(ROOT))
    diff = difflib.unified_diff(
        text, changed(guard, text, place.lines), name, f"{name} without {guard.id}", lineterm=""
    )
    return "\n".join([f"# {guard.id}: {guard.what}", f"# pytest {guard.tests}", *diff, ""])


def is_missed(guard: Guard) -> bool:
    """Whether a test that passes fails on a copy of the source without this guard."""
    usual = seconds_with_guards(guard.tests)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        place = marks(copy)[guard.id]
        text = changed(guard, place.path.read_text(encoding="utf-8").split("\n"), place.lines)
        place.path.write_text("\n".join(text), encoding="utf-8")
        try:
            return _tested(copy, guard.tests, timeout=HANGS + 10 * usual) is not None
        except subprocess.TimeoutExpired:
            return True


@cache
def seconds_with_guards(tests: str) -> float:
    """How long the tests take on the source as it is, where they must pass."""
    begin = time.monotonic()
    failure = _tested(ROOT / "src", tests)
    assert failure is None, f"pytest {tests} fails although no guard is gone:\n{failure}"
    return time.monotonic() - begin


def _tested(source: Path, tests: str, timeout: float | None = None) -> str | None:
    """What pytest says of tests that fail on this source; nothing if they pass."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    paths = ["-o", f"pythonpath={source} {ROOT / 'tests'}"]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT / 'tests'}"}
    ended = subprocess.run(
        [*words, *paths, *shlex.split(tests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    if ended.returncode > 1:  # less than 0: a signal, such as for memory that is not there
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout[-2000:] if ended.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes guards away in turn: for each of them a test must fail.")
    parser.add_argument("words", nargs="*", help="only guards whose ids hold one of these; all by default")
    parser.add_argument("--show", action="store_true", help="print what is changed, and run nothing")
    wanted = parser.parse_args()
    chosen = [guard for guard in GUARDS if not wanted.words or any(word in guard.id for word in wanted.words)]
    if not chosen:
        parser.error(f"no guard's id holds {' or '.join(wanted.words)}")
    if wanted.show:
        print("\n".join(map(shown, chosen)))
        return 0
    survived = 0
    print("| guard | what | tests that miss it | |\n| --- | --- | --- | --- |")
    for guard in chosen:
        begin = time.monotonic()
        is_good = is_missed(guard)
        survived += not is_good
        verdict = "missed" if is_good else "**NOT MISSED**"
        seconds = time.monotonic() - begin
        print(f"| {guard.id} | {guard.what} | `{guard.tests}` | {verdict}, {seconds:.0f} s |", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} guards are missed when they are gone")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
