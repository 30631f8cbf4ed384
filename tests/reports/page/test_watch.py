"""The live page: what it answers, to whom, and that it follows the run."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import PATIENCE, wait_for
from page_doubles import a_round, written
from protofed.errors import BadInput
from protofed.reports.page.server import Watched, server


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run of which one round is done, and the port that its page is on."""
    folder = written(tmp_path / "runs" / "a", [a_round(1)], {"training": {"rounds": 2}}, is_done=False)
    with server(Watched([tmp_path / "runs"], "protofed watch", with_models=False)) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield folder, listening.server_port
        listening.shutdown()
        thread.join()


def asked(
    port: int, path: str = "/facts.json", method: str = "GET", host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_it_follows_a_run(watched: tuple[Path, int]) -> None:
    folder, port = watched
    status, headers, data = asked(port)
    run = json.loads(data)["tasks"][0]["groups"][0]["runs"][0]
    assert (status, run["done"], run["progress"]) == (200, 1, "stopped")
    assert asked(port, If_None_Match=headers["ETag"])[0] == 304
    (folder / "rounds.jsonl").write_text("".join(json.dumps(a_round(k)) + "\n" for k in (1, 2)))
    (folder / "done").write_text("")
    status, _, data = asked(port, If_None_Match=headers["ETag"])
    run = json.loads(data)["tasks"][0]["groups"][0]["runs"][0]
    assert (status, run["done"], run["progress"]) == (200, 2, "done")
    written(folder.parent / "b", [a_round(1)], {"method": {"name": "fpl"}})
    assert len(json.loads(asked(port)[2])["tasks"][0]["groups"]) == 2
    status, headers, page = asked(port, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "", "localhost"])
def test_another_name_for_this_machine_is_refused(watched: tuple[Path, int], host: str) -> None:
    status, _, data = asked(watched[1], host=host)
    assert status == 403
    assert b"rounds" not in data


def test_its_own_names_are_not(watched: tuple[Path, int]) -> None:
    port = watched[1]
    assert asked(port, host=f"localhost:{port}")[0] == 200
    assert asked(port, Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert asked(port, Origin="http://evil.example")[0] == 403
    assert asked(port, Origin="null")[0] == 403


@pytest.mark.parametrize(
    "path", ["/config.toml", "/../a/config.toml", "/a/rounds.jsonl", "/%2e%2e/", "/facts.json/", "/?x=/etc/passwd"]
)
def test_there_is_no_other_address(watched: tuple[Path, int], path: str) -> None:
    assert asked(watched[1], path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_nothing_can_be_changed(watched: tuple[Path, int], method: str) -> None:
    assert asked(watched[1], "/", method)[0] == 501
    status, headers, data = asked(watched[1], "/", "HEAD")
    assert (status, data) == (200, b"")
    assert int(headers["Content-Length"]) > 100_000


def test_it_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    with server(Watched([tmp_path], "")) as listening:
        assert listening.socket.getsockname()[0] == "127.0.0.1"
        with pytest.raises(BadInput, match="choose another"):
            server(Watched([tmp_path], ""), listening.server_port)
    assert listening.socket.fileno() == -1


def test_what_is_made_from_states_comes_when_the_runs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def add(page: dict[str, object], tasks: object) -> None:
        made.append("models")
        page["marked"] = True

    monkeypatch.setattr("protofed.reports.page.server.add_models", add)
    folder = written(tmp_path / "a", [a_round(1)], is_done=False)
    watched = Watched([tmp_path], "")
    assert "marked" not in watched.facts()
    (folder / "done").write_text("")
    wait_for(lambda: "marked" in watched.facts())
    assert made == ["models"]
    assert "marked" in json.loads(watched.json())
