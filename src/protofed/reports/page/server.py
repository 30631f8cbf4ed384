"""The page of runs that go on, served to this machine alone.

Only the loopback address is listened on. A request must name it as its host, so that no foreign name that points here
can be used to read the answers. There are two addresses, the page and its facts, and nothing can be changed.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from protofed.errors import BadInput
from protofed.reports.page.document import document, to_json
from protofed.reports.page.facts import Facts, arranged, facts
from protofed.reports.page.make import title_of
from protofed.reports.page.models import add_models
from protofed.runs.listing import Listing, listing, run_folders

LOOPBACK = "127.0.0.1"
FILES = ("config.toml", "rounds.jsonl", "done", "lock")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watched:
    """The facts of runs as they are now. They are read again when a file has changed."""

    def __init__(self, paths: Sequence[Path], command: str, with_models: bool = True) -> None:
        self._paths = paths
        self._command = command
        self._with_models = with_models
        self._lock = threading.Lock()
        self._seen: object = None
        self._facts: Facts = {}
        self._json = ""
        self._models: threading.Thread | None = None

    def facts(self) -> Facts:
        with self._lock:
            self._refresh()
            return self._facts

    def json(self) -> str:
        with self._lock:
            self._refresh()
            return self._json

    def _refresh(self) -> None:
        seen = _signature(self._paths)
        if seen == self._seen:
            return
        found = listing(self._paths)
        self._set(facts(found, title_of(found), self._command, is_live=True))
        self._seen = seen
        has_ended = bool(found.runs) and all(run.progress == "done" for run in found.runs)
        if self._with_models and has_ended and not (self._models and self._models.is_alive()):
            # While a run goes on, its cores are its own.
            self._models = threading.Thread(target=self._add_models, args=(found, seen), daemon=True)
            self._models.start()

    def _add_models(self, found: Listing, seen: object) -> None:
        page = facts(found, title_of(found), self._command, is_live=True)
        add_models(page, arranged(found.runs))
        with self._lock:
            if seen == self._seen:
                self._set(page)

    def _set(self, page: Facts) -> None:
        self._facts, self._json = page, to_json(page)


def _signature(paths: Sequence[Path]) -> object:
    """What changes when a run does."""
    return [[str(path), *(_stat(path / name) for name in FILES)] for path in run_folders(paths)]


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "protofed", ""
    timeout = 20
    watched: Watched
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_port
        names = [f"{LOOPBACK}:{port}", f"localhost:{port}"]
        origin = self.headers.get("Origin")
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in names:  # guard: watch-checks-host
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for its own address\n", with_body)
        elif origin is not None and origin not in [f"http://{name}" for name in names]:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for itself\n", with_body)
        elif self.path not in ("/", "/facts.json"):  # guard: watch-has-two-addresses
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there are / and /facts.json\n", with_body)
        else:
            self._send_page(with_body)

    def _send_page(self, with_body: bool) -> None:
        try:
            if self.path == "/":
                data = document(self.watched.facts()).encode()
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", data, with_body)
                return
            data = self.watched.json().encode()
        except BadInput as error:  # the folder is gone
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{error}\n".encode(), with_body)
            return
        tag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, "application/json", b"", with_body=False, tag=tag)
        else:
            self._send(HTTPStatus.OK, "application/json", data, with_body, tag)

    def _send(self, status: HTTPStatus, kind: str, data: bytes, with_body: bool, tag: str = "") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""


def server(watched: Watched, port: int = 0) -> ThreadingHTTPServer:
    """Listens on the loopback address; a port that is free if none is named."""
    handler = type("Handler", (_Handler,), {"watched": watched})
    try:
        made = ThreadingHTTPServer((LOOPBACK, port), handler)  # guard: watch-is-for-this-machine
    except (OSError, OverflowError) as error:
        raise BadInput(f"--port {port} cannot be used: {error}; choose another, or 0 for a free one") from error
    made.daemon_threads = True
    return made


def serve(watched: Watched, port: int, ready: Callable[[str], None]) -> None:
    """Serves until Ctrl-C; `ready` is told the address."""
    with server(watched, port) as listening:
        ready(f"http://{LOOPBACK}:{listening.server_port}/")
        try:
            listening.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
