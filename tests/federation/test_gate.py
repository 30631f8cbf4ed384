"""The gate before a SuperLink of ours: sites reach the Fleet API, and nobody else anything."""

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the SuperLink's folder has keys")

from protofed.federation.flower.superlink import Gate, command_line

TOKEN = "f" * 64


def asked(path: str, headers: dict[str, str], kind: str = "http") -> int:
    """The status that a request gets; 200 if it is let through, 0 if there is no answer at all."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    found = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Gate(app, TOKEN, 1000)({"type": kind, "path": path, "headers": found}, receive, send))
    return statuses[0] if statuses else 0


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/", "/docs", "/health"),
        *("/openapi.json", "/v1/fleet", "/V1/FLEET/x", "//v1/fleet/x", "/v1/control/v1/fleet/", ""),
    ],
)
def test_what_is_not_for_sites_needs_the_token(path: str) -> None:
    size = {"content-length": "10"}
    assert asked(path, size) == 404
    assert asked(path, {**size, "protofed-token": "e" * 64}) == 404
    assert asked(path, {**size, "protofed-token": ""}) == 404
    assert asked(path, {**size, "protofed-token": TOKEN}) == 200


def test_sites_reach_what_is_theirs() -> None:
    assert asked("/v1/fleet/pull-messages", {"content-length": "10"}) == 200


@pytest.mark.parametrize("size", ["1001", "-1", "", "1e3", "٣", "9" * 30])
def test_requests_are_bounded_before_they_are_read(size: str) -> None:
    assert asked("/v1/fleet/push-object", {"content-length": size}) == 413


def test_a_request_that_does_not_say_its_size_is_refused() -> None:
    assert asked("/v1/fleet/push-object", {"transfer-encoding": "chunked"}) == 413
    assert asked("/v1/fleet/push-object", {}) == 413


def test_a_request_that_says_two_sizes_is_refused() -> None:
    """h11 reads such a body to the end of its last piece, whatever size was said."""
    assert asked("/v1/fleet/push-object", {"content-length": "10", "transfer-encoding": "chunked"}) == 413


def test_who_is_refused_is_written_down_at_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("/v1/control/start\n-run", {"content-length": "10"}) == 404
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert re.search(r"refused: .*/v1/control/start.*: 404$", text.strip())
    asked("/v1/fleet/pull-messages", {"content-length": "10"})
    assert capsys.readouterr().err == ""


def test_other_protocols_are_not_spoken() -> None:
    assert asked("/v1/fleet/x", {"content-length": "1"}, kind="websocket") == 0


def test_the_superlink_is_started_closed(tmp_path: Any) -> None:
    words = command_line(tmp_path, "127.0.0.1", 8000)
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= {*words}
    assert words[words.index("--isolation") + 1] == "process"
    assert "--insecure" not in words
