"""Telling sites why a run does not begin, so that the reason can be read at both ends."""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from protofed.engine.message import printable
from protofed.errors import BadInput
from protofed.federation.codec import Undecodable, decoded, encoded
from protofed.federation.interface import Link
from protofed.federation.messages import Notice
from protofed.federation.signing import new_nonce

P = ParamSpec("P")
R = TypeVar("R")

SECONDS = 5.0
"""How long is waited until the sites have heard it: when the server ends, what it sent is gone."""
MOST_BYTES = 2**16
"""Of a notice and of its answer."""


def sites_told(prepare: Callable[Concatenate[Link, P], R]) -> Callable[Concatenate[Link, P], R]:
    """The same function; if a run cannot begin, the sites of its link are told why."""

    @wraps(prepare)
    def telling(link: Link, /, *arguments: P.args, **named: P.kwargs) -> R:
        try:
            return prepare(link, *arguments, **named)
        except BadInput as error:
            tell(link, str(error))  # guard: sites-told-why-a-run-does-not-begin
            raise

    return telling


def tell(link: Link, why: str, seconds: float = SECONDS) -> None:
    """Tells each site what is wrong with it, and what is wrong with no site in particular. `why` has a line for each
    thing, which begins with the site's name."""
    waiting = {new_nonce(): site for site in link.sites()}
    for nonce, site in waiting.items():
        lines = tuple(printable(line)[:1000] for line in _of_site(site, why, [*waiting.values()]))
        link.send(site, encoded(Notice(nonce, lines[:50])), MOST_BYTES)
    end = time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        for site, data in link.receive(min(left, 1.0)):
            try:
                answer = decoded(data, MOST_BYTES)
            except Undecodable:
                continue
            if isinstance(answer, Notice) and waiting.get(answer.nonce) == site:
                del waiting[answer.nonce]


def _of_site(site: str, why: str, sites: Sequence[str]) -> list[str]:
    """The lines that concern a site: what is wrong with others is not its business."""
    named = {one: [line for line in why.splitlines() if line.startswith(f"{one}: ")] for one in sites}
    of_others = {line for one, lines in named.items() if one != site for line in lines}
    found = [line.removeprefix(f"{site}: ") for line in why.splitlines() if line not in of_others]
    return found or ["another site does not take part"]
