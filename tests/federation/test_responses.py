"""What a SuperLink answers is bounded before it is read, and whatever it is, it ends neither a site nor a server."""

from collections.abc import Iterator

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import httpx
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.supernode.fleet_http_client import FleetHttpClient

from protofed.federation.flower.fleet import MAX_RESPONSE, bounded, called
from protofed.federation.flower.outcomes import Unreachable

GOOD = PullMessagesResponse().SerializeToString()


class Body(httpx.SyncByteStream):
    def __init__(self, data: bytes) -> None:
        self.data, self.is_read = data, False

    def __iter__(self) -> Iterator[bytes]:
        self.is_read = True
        yield self.data


def pulled(body: Body, headers: dict[str, str]) -> object:
    """What a site gets where the SuperLink answers with this."""
    client = FleetHttpClient("https://localhost:8000")
    answer = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=body))
    client._client = httpx.Client(transport=answer)
    return called(bounded(client).PullMessages, PullMessagesRequest())


def test_what_is_small_enough_is_read() -> None:
    assert pulled(Body(GOOD), {"content-length": str(len(GOOD))}) == PullMessagesResponse()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-length": str(MAX_RESPONSE + 1)},
        {"content-length": "9" * 30},
        {"content-length": "-1"},
        {"transfer-encoding": "chunked"},
        {"content-length": "10", "transfer-encoding": "chunked"},
        {"content-length": "10", "content-encoding": "gzip"},
        {},
    ],
    ids=str,
)
def test_what_is_too_large_is_not_read(headers: dict[str, str]) -> None:
    body = Body(GOOD)
    with pytest.raises(Unreachable, match="too large"):
        pulled(body, headers)
    assert not body.is_read


def test_what_cannot_be_read_ends_nothing() -> None:
    with pytest.raises(Unreachable, match="cannot be read"):
        pulled(Body(b"<html>"), {"content-length": "6"})
