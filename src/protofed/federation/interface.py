"""What the parts of a federation ask of each other. A transport knows none of the messages: it carries bytes."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class Link(Protocol):
    """What the server needs of a transport."""

    def sites(self) -> Sequence[str]:
        """The names of the sites that are enrolled by their keys, whether or not they are there now."""

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        """Sends a site bytes, which it answers with at most `most_bytes`: a transport takes in no more. An id for
        `resend`. A site that is not there is no error: it may come back."""

    def resend(self, sent: str) -> None:
        """Sends the same bytes again. A site that has answered them already answers the same."""

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        """What sites answered, each with the name of the site whose key signed it; ends after so many seconds, or
        earlier when something came."""


class Handler(Protocol):
    """What a transport needs at a site. `protofed.federation.site.Site` is one."""

    def handle(self, data: bytes) -> bytes | None:
        """The answer to bytes from the server; None for bytes that are no message, which nobody answers. The same bytes
        are answered with the same bytes. It never raises because of what the bytes are."""
