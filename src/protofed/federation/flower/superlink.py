"""A SuperLink that the server starts itself, in a process of its own, closed to all but sites.

Flower's SuperLink has one port for everything, and no password for those who start runs and register nodes. So a gate
stands in front of it: sites reach the Fleet API, where each request is signed with their key. For the rest one must
know a token that lies in the server's folder.
"""

import argparse
import hmac
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import RunFailed
from protofed.federation.keys import read_private
from protofed.federation.processes import end_with_parent
from protofed.printable import one_line

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET = "/v1/fleet/"
STARTS = 60.0
"""Seconds that a SuperLink may take to start."""
MOST_NOTED = 10_000
"""Requests that are written into the log because they were refused."""
MOST_STARTS = 20
"""That a SuperLink is started anew in an hour."""


class Gate:
    """Lets sites through to what is theirs, and nobody else to anything."""

    def __init__(self, app: App, token: str, max_request: int) -> None:
        self._app, self._token, self._max = app, token.encode(), max_request
        self._num_refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        send = self._noting(scope, send)
        is_ours = hmac.compare_digest(headers.get(b"protofed-token", b""), self._token)
        if not is_ours and not scope["path"].startswith(FLEET):  # guard: federation-control-closed
            await _refused(send, 404)
            return
        size = headers.get(b"content-length", b"")
        if not size.isdigit() or len(size) > 12 or int(size) > self._max:  # guard: federation-requests-bounded
            await _refused(send, 413)
            return
        if b"transfer-encoding" in headers:  # guard: federation-requests-have-the-size-they-say
            await _refused(send, 413)  # it would be read instead of the size
            return
        await self._app(scope, receive, send)

    def _noting(self, scope: Scope, send: Send) -> Send:
        """Whoever is refused is written down, here or by Flower: the other end alone would know of it."""

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._num_refused += 1
                if self._num_refused <= MOST_NOTED:  # guard: refused-requests-noted
                    who = (scope.get("client") or ("somebody",))[0]
                    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    what = f"{scope.get('method', '')} {one_line(scope['path'][:80])}"
                    print(f"{stamp} refused: {who}: {what}: {message['status']}", file=sys.stderr, flush=True)
            await send(message)

        return noting


async def _refused(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class SuperLinkProcess:
    """The SuperLink of a server. It ends with the server's process, and is started anew when it ends before."""

    def __init__(self, folder: Path, listen: str, tell: Callable[[str], None]) -> None:
        self._folder, self._listen, self._tell = folder, listen, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: list[float] = []

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def keep_alive(self) -> None:
        """Starts it if it is not there."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._tell(f"the SuperLink has ended ({self._process.returncode}): it is started anew")
        now = time.monotonic()
        self._starts = [*(start for start in self._starts if now - start < 3600), now]
        if len(self._starts) > MOST_STARTS:
            raise RunFailed(f"the SuperLink ends again and again: {self.log} says why")
        command = [sys.executable, "-m", __name__, "--folder", str(self._folder), "--listen", self._listen]
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603, the command is ours
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the server, which ends the round first
            )

    @property
    def log(self) -> Path:
        return self._folder / "superlink.log"

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def command_line(folder: Path, host: str, port: int) -> list[str]:
    """The words of `flower-superlink`."""
    return [
        *("flower-superlink", "--host", host, "--port", str(port), "--isolation", "process"),
        *("--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key"), "--database", str(folder / "superlink.db")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    for name in ("folder", "listen", "parent"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(words)
    end_with_parent(int(options.parent))
    folder = Path(options.folder)
    os.umask(0o077)  # what travels lies in the database
    os.environ["FLWR_HOME"] = str(folder / "flower")
    token = read_private(folder / "control.token").decode("ascii").strip()
    host, _, port = options.listen.rpartition(":")

    import uvicorn
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    from protofed.federation.flower.records import MAX_REQUEST

    sys.argv = command_line(folder, host.strip("[]"), int(port))
    config = _parse_superlink_lifespan_config()
    uvicorn.run(
        Gate(create_app(config, SuperLinkLifespan), token, MAX_REQUEST),
        host=config.host,
        port=config.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        access_log=False,
        workers=1,
        timeout_graceful_shutdown=2,
        limit_concurrency=256,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
