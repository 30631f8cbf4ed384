"""Problems as messages: one line each, with the place, the key and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from protofed.errors import BadInput
from protofed.runs.config.schema import Problem, UnknownKey, nearest, written
from protofed.runs.config.toml import Place

MAX_PROBLEMS = 100
"""Problems that one message lists."""

KeysOfSections = Mapping[str, tuple[str, ...]]


def listed(problems: Sequence[Problem], keys: KeysOfSections, place: Place) -> str:
    """One line for each problem. The hint for an unknown key is looked up only for the problems that are listed."""
    lines = [f"{place(p.key)}: {written(p.key)}: {_explained(p, keys)}" for p in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(lines)
    return "\n".join([*lines, *([f"and {left} more"] if left else [])])


def without_place(problem: Problem) -> str:
    """The line for a problem with settings that come from no file."""
    return f"{written(problem.key)}: {_explained(problem, {})}"


def refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise BadInput("\n".join(map(without_place, problems)))


@contextmanager
def collected(messages: list[str]) -> Iterator[None]:
    """Adds a BadInput to the messages instead of raising it, so that all can be reported at once."""
    try:
        yield
    except BadInput as error:
        messages.append(str(error))


def _explained(problem: Problem, keys: KeysOfSections) -> str:
    if not isinstance(problem, UnknownKey):
        return problem.what
    word = problem.key[-1]
    sections = [f"[{section}]" for section, names in keys.items() if word in names]
    if sections:
        return f"{problem.what}; it is a key of {' and '.join(sections)}"
    return problem.what + nearest(word, problem.known)
