"""The server's `Link` over Flower. It signs orders, verifies answers, and keeps at it: a site that comes back is asked
again, and when the SuperLink ends the run, another one begins there with what is still to be answered."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protofed.federation.flower.outcomes import RunOver, SiteNode, Turned, Unreachable
from protofed.federation.keys import PrivateKey, PublicKey
from protofed.federation.signing import BadSignature, Signed, new_nonce, signed, verified
from protofed.printable import one_line

log = logging.getLogger(__name__)

POLLS = 0.1
"""Seconds between two questions for answers."""
LOOKS = 1.0
"""Seconds between two looks at which sites are there, while all that are asked are at work."""
LOOKS_FOR_MISSING = 0.2
"""The same while one that is asked is missing."""
TRIES = 2.0
"""Seconds until a SuperLink that is not there is tried again."""
MOST_REFUSED = 3
"""Answers to one message that are refused before its site is left alone."""
MOST_WAITING = 4
"""Messages to one site that may still be answered. What is older is given up: nobody waits for it."""


class Session(Protocol):
    """A run at the SuperLink. `control.Session` is one."""

    run: int

    @property
    def is_over(self) -> bool: ...
    def nodes(self) -> dict[str, SiteNode]: ...
    def send(self, node: int, message: Signed) -> str: ...
    def answers(self, sent: Mapping[str, int]) -> Iterator[tuple[str, Signed | str]]: ...
    def close(self) -> None: ...


@dataclass
class _Sent:
    site: str
    data: bytes
    most_bytes: int
    posts: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By Flower's name of the message: its run and its nonce."""
    since: str | None = None
    """When the site had come to which it was posted last; None: it is to be posted."""
    num_refused: int = 0


class FlowerLink:
    """Not for several threads."""

    def __init__(
        self,
        begin: Callable[[], Session],
        federation: str,
        key: PrivateKey,
        sites: Mapping[str, PublicKey],
        keep_alive: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self._begin, self._federation, self._key, self._sites = begin, federation, key, dict(sites)
        self._keep_alive, self._tell = keep_alive, tell
        self._session: Session | None = None
        self._waiting: dict[str, _Sent] = {}
        self._nodes: dict[str, SiteNode] = {}
        self._looked = -LOOKS
        self._told = ""

    def sites(self) -> list[str]:
        return sorted(self._sites)

    def online(self) -> list[str]:
        """The sites that are there now."""
        self._guarded(lambda session: self._look(session, 0.0))
        return sorted(site for site, node in self._nodes.items() if node.is_online)

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        if site not in self._sites:
            raise ValueError(f"{site} is none of the sites that are enrolled")
        name = new_nonce()
        older = [one for one, sent in self._waiting.items() if sent.site == site]
        for one in older[: max(0, len(older) + 1 - MOST_WAITING)]:
            del self._waiting[one]
        self._waiting[name] = _Sent(site, data, most_bytes)
        self._guarded(self._post)
        return name

    def resend(self, sent: str) -> None:
        if sent in self._waiting:
            self._waiting[sent].since = None
            self._guarded(self._post)

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        end = time.monotonic() + timeout
        while True:
            came = False
            for site, data in self._answers():
                came = True
                yield site, data
            if came or time.monotonic() >= end:
                return
            time.sleep(max(0.0, min(POLLS, end - time.monotonic())))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _answers(self) -> Iterator[tuple[str, bytes]]:
        self._guarded(self._post)
        session = self._session
        if session is None:
            time.sleep(TRIES)
            return
        mine = {
            post: (name, sent, nonce)
            for name, sent in self._waiting.items()
            for post, (run, nonce) in sent.posts.items()
            if run == session.run
        }
        try:
            for post, found in session.answers({post: sent.most_bytes for post, (_, sent, _) in mine.items()}):
                name, sent, nonce = mine[post]
                # guard: federation-one-answer-to-a-message
                if name not in self._waiting or sent.posts.pop(post, None) is None:
                    continue
                if isinstance(found, str):
                    self._tell(f"{sent.site}: an answer did not come: {one_line(found)}")
                elif self._is_from(sent.site, found, session.run, nonce):
                    del self._waiting[name]
                    yield sent.site, found.body
                    continue
                sent.num_refused += 1
                if not sent.posts and sent.num_refused < MOST_REFUSED:
                    sent.since = None
        except (Unreachable, Turned, RunOver) as error:
            self._lost(error)

    def _is_from(self, site: str, message: Signed, run: int, nonce: str) -> bool:
        try:
            header = verified(message, self._sites[site], "answer", self._federation, run, site)
            if header.nonce != nonce:
                raise BadSignature("it answers something else")  # guard: federation-answers-its-order
        except BadSignature as error:
            self._tell(f"{site}: an answer is refused: {error}")
            return False
        return True

    def _post(self, session: Session) -> None:
        """Sends what has not been sent, and again what a site has lost because it was started anew."""
        if not self._waiting:
            return
        is_missing = any(sent.since is None for sent in self._waiting.values())
        self._look(session, LOOKS_FOR_MISSING if is_missing else LOOKS)
        for sent in list(self._waiting.values()):
            node = self._nodes.get(sent.site)
            if node is None or not node.is_online or node.since == sent.since:
                continue
            if sent.since is not None and sent.posts:
                self._tell(f"{sent.site} was away: what it was asked is sent again")
            nonce = new_nonce()
            message = signed(
                self._key, "order", self._federation, session.run, sent.site, nonce, sent.data, time.time()
            )
            sent.posts[session.send(node.id, message)] = session.run, nonce
            sent.since = node.since

    def _look(self, session: Session, every: float) -> None:
        if time.monotonic() - self._looked >= every:
            self._looked = time.monotonic()
            self._nodes = session.nodes()

    def _guarded(self, action: Callable[[Session], None]) -> None:
        """Does something at the SuperLink. If that is not there, it is done later."""
        try:
            if self._session is not None and self._session.is_over:
                self._tell("the SuperLink has ended the run: another one begins there, with what is still open")
                self._forget_session()
            if self._session is None:
                self._session = self._begin()
            action(self._session)
            self._told = ""
        except (Unreachable, Turned, RunOver) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """A SuperLink that is away for a moment still knows the run; one that refuses has ended it."""
        self._nodes = {}
        if not isinstance(error, Unreachable):
            self._forget_session()
        if str(error) != self._told:
            self._told = str(error)
            self._tell(f"the SuperLink is out of reach: {one_line(self._told)}; trying again")
        self._keep_alive()

    def _forget_session(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        for sent in self._waiting.values():
            sent.since = None
            sent.posts.clear()
