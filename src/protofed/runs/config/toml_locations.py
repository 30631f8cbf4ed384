"""What tomllib does not tell about a TOML text: the line of each key, and the depth of nesting.

Reads statement by statement, with just enough grammar to tell keys from values. A key in an inline table has the line
on which the table begins. A key in an array of tables has no line.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Key = tuple[str, ...]

# Quantifiers are possessive and strings may lack their end: no text, valid or not, causes backtracking.
_LONG = r'"""(?:[^"\\]++|\\.|"(?!""))*+"{0,5}' + r"|'''(?:[^']++|'(?!''))*+'{0,5}"
_SHORT = r'"(?:[^"\\\n]++|\\.)*+"?' + r"|'[^'\n]*+'?"
_COMMENT = r"#[^\n]*+"
_WORD = rf"(?:[A-Za-z0-9_-]++|{_SHORT})"
_KEY = rf"{_WORD}(?:[ \t]*+\.[ \t]*+{_WORD})*+"

_OPAQUE = re.compile(rf"(?P<text>{_LONG}|{_SHORT})|{_COMMENT}", re.DOTALL)
_CHAIN = re.compile(_KEY)
_BLANK = re.compile(rf"(?:\s++|{_COMMENT})*+")
_HEADER = re.compile(rf"\[{{1,2}}[ \t]*+(?P<key>{_KEY})[ \t]*+\]{{1,2}}", re.DOTALL)
_ASSIGNMENT = re.compile(rf"(?P<key>{_KEY})[ \t]*+=", re.DOTALL)
_PIECE = re.compile(rf"{_LONG}|{_SHORT}|{_COMMENT}|[\[{{]|[\]}}]|\n|[^\"'#\[\]{{}}\n]++", re.DOTALL)


class Lines:
    """The lines of the keys in a valid text. Reads only as far as the last key that was asked for."""

    def __init__(self, text: str, table: Mapping[str, Any]) -> None:
        self._table = table  # the text as tomllib reads it
        self._unread = _lines(text)
        self._first: dict[Key, int] = {}

    def of(self, key: Key) -> int | None:
        """The first line, from 1, that names the key; None if there is none or it is unclear."""
        if not _has(self._table, key):
            return None
        while key not in self._first and (entry := next(self._unread, None)):
            self._first.setdefault(*entry)
        return next((self._first[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self._first), None)


def nesting(text: str) -> int:
    """A lower bound on the depth of nesting, without recursion: open brackets, or the dots of a key."""
    plain = _OPAQUE.sub(lambda match: "s" if match["text"] else "", text)
    depth = deepest = 0
    for bracket in re.sub(r"[^\[\]{}]++", "", plain):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return max(deepest, *(chain.group().count(".") for chain in _CHAIN.finditer(plain)), 0)


def _has(table: Any, key: Key) -> bool:
    for word in key:
        if not isinstance(table, Mapping) or word not in table:
            return False
        table = table[word]
    return True


def _lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key outside inline tables with its line, every time that it is named."""
    line, counted = 1, 0
    for key, start in _named(text):
        line, counted = line + text.count("\n", counted, start), start
        yield from ((key[:n], line) for n in range(1, len(key) + 1))


def _named(text: str) -> Iterator[tuple[Key, int]]:
    """The full key of every header and assignment, and its offset in the text."""
    table: Key = ()
    at = _after(_BLANK, text, 0)
    while at < len(text):
        if header := _HEADER.match(text, at):
            table = _words(header["key"])
            yield table, at
            at = header.end()
        elif assignment := _ASSIGNMENT.match(text, at):
            yield (*table, *_words(assignment["key"])), at
            at = _after_value(text, assignment.end())
        else:
            return  # unknown grammar: the keys after this have no line
        at = _after(_BLANK, text, at)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _after_value(text: str, at: int) -> int:
    """The end of the line on which a value ends: the first line end outside brackets, strings and comments."""
    depth = 0
    for piece in _PIECE.finditer(text, at):
        if piece.group() == "\n" and depth == 0:
            return piece.start()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece.group(), 0)
    return len(text)


def _words(key: str) -> Key:
    """The words of a dotted key. tomllib reads quoted ones."""
    if '"' not in key and "'" not in key:
        return tuple(word.strip() for word in key.split("."))
    words: list[str] = []
    table: Any = tomllib.loads(f"{key} = 0")
    while isinstance(table, dict):
        (word,) = table
        words.append(word)
        table = table[word]
    return tuple(words)
