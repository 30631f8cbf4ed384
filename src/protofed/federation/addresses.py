"""Addresses: HOST:PORT."""

import ipaddress

from protofed.errors import BadInput

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104, they are looked for here
"""What a program listens at that takes connections from all networks."""


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts. An IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit():
        raise BadInput(f"{address!r} is no address: write it as HOST:PORT")
    if not 0 < int(port) < 65536 or any(letter.isspace() or letter in "/@" for letter in bare):
        raise BadInput(f"{address!r} is no address: write it as HOST:PORT")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
