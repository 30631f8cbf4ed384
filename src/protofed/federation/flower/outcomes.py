"""What Flower's ends give, and the ways in which they fail. Nothing of Flower is imported here."""

from typing import NamedTuple

from protofed.federation.signing import Signed


class Unreachable(Exception):
    """The SuperLink is not there now. It may come back."""


class Turned(Exception):
    """The SuperLink is there, and does not let this process in."""


class OtherServer(Turned):
    """What is there is not the server: no certificate of the federation's authority says so."""


class RunOver(Exception):
    """The run of a message has ended: nobody waits for what belongs to it."""


class BadParcel(ValueError):
    """What came is none of our messages."""


class Delivery(NamedTuple):
    """An order as it came to a site, before anything of it is believed."""

    run: int
    id: str
    message: Signed
    end: float
    """Until when the SuperLink keeps it, in seconds since 1970. It takes no answer that is to be kept for longer."""


class SiteNode(NamedTuple):
    """A site as the SuperLink sees it."""

    id: int
    is_online: bool
    since: str
    """When it came the last time."""
