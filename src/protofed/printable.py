"""Names from data and files, fit for terminals, reports and JSON.

A name can hold commands for a terminal, a turn of the direction of writing, or bytes that are not UTF-8, which Python
keeps as half characters. All of them are shown as escapes, such as \\x1b.
"""

import json
from typing import Any


def printable(text: str) -> str:
    """The text with everything escaped that cannot be seen, except spaces and line breaks."""
    if text.isprintable():
        return text
    # guard: names-are-printable
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(name: str) -> str:
    """The same for a name, whose line breaks are escaped too: it could look like lines of ours."""
    return printable(name).replace("\n", "\\n")  # guard: names-are-one-line


def printable_json(value: Any, indent: int) -> str:
    """JSON that can be printed and written as UTF-8. Readers get the values as they are."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # guard: json-is-printable
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1].replace("\x7f", "\\u007f") for c in text)
