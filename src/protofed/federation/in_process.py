"""Sites in the same process as the server: a link without a network. Everything still passes as bytes."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from protofed.federation.interface import Handler


class InProcess:
    """A link to sites that work when their answers are asked for."""

    def __init__(self, sites: Mapping[str, Handler]) -> None:
        self._sites = dict(sites)
        self._last: dict[str, bytes] = {}
        """What each site was sent last: of each, one order at most is waited for."""
        self._waiting: deque[tuple[str, bytes]] = deque()

    def sites(self) -> Sequence[str]:
        return sorted(self._sites)

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        self._last[site] = data
        self._waiting.append((site, data))
        return site

    def resend(self, sent: str) -> None:
        self._waiting.append((sent, self._last[sent]))

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        while self._waiting:
            site, data = self._waiting.popleft()
            answer = self._sites[site].handle(data)
            if answer is not None:
                yield site, answer
