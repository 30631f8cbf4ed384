"""examples/federation/nginx.conf before a SuperLink that somebody else has started: a run of three sites passes through
it, and nothing but the Fleet API is reached."""

import http.client
import os
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from federation.machines import Machines, free_port
from federation.test_machines import ended_well, left_out

NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NGINX, reason="nginx is not installed")]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "federation" / "nginx.conf"
AROUND = """\
{user}pid {folder}/nginx.pid;
daemon off;
master_process off;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u;
    scgi_temp_path {folder}/s;
    include {folder}/federation.conf;
}}
"""


def address_of(machines: Machines) -> str:
    found = re.search(r'superlink = "127.0.0.1:(\d+)"', (machines.federation / "server/server.toml").read_text())
    assert found
    return found[1]


def start_nginx(machines: Machines, folder: Path) -> int:
    """The example with other paths and ports. The port where sites reach it."""
    folder.mkdir()
    port = free_port()
    text = EXAMPLE.read_text()
    for old, new in {
        "listen 8000 ssl": f"listen 127.0.0.1:{port} ssl",
        "/var/lib/protofed/fed": str(machines.federation),
        "127.0.0.1:8001": f"127.0.0.1:{address_of(machines)}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "federation.conf").write_text(text)
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(AROUND.format(user=user, folder=folder))
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    machines._popen("nginx", command)
    return port


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, int]]:
    machines = Machines(tmp_path_factory.mktemp("proxied"))
    try:
        machines.set_up()
        machines.flower_superlink()
        port = start_nginx(machines, machines.folder / "nginx")
        for path in machines.federation.glob("kits/*/site.toml"):
            path.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", path.read_text()))
        yield machines, port
    finally:
        machines.close()


def test_a_run_of_three_sites_passes_through_the_proxy(proxied: tuple[Machines, int]) -> None:
    machines, port = proxied
    experiment = machines.experiment("scaffold", 3)
    machines.sites()
    machines.serve(experiment)
    ended_well(machines, experiment)
    assert left_out(machines) == {}
    assert all(f"connected to 127.0.0.1:{port}" in machines.text(site) for site in machines.clients)


def status(machines: Machines, port: int | str, path: str, size: int = 0) -> int:
    """What a stranger is answered who has no more than the authority's certificate."""
    context = ssl.create_default_context(cafile=str(machines.federation / "server" / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", int(port), timeout=60, context=context)
    try:
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/protobuf")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


CLOSED = [
    *("/v1/control/start-run", "/v1/control/register-node", "/v1/control/list-nodes", "/v1/runtime/acquire-task"),
    *("/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", "/v1/fleet/..%2fcontrol/list-nodes"),
    *("/v1//control/list-nodes", "/V1/control/list-nodes", "/docs", "/openapi.json", "/health", "/"),
]


def test_nothing_but_the_fleet_api_is_reached_through_the_proxy(proxied: tuple[Machines, int]) -> None:
    machines, port = proxied
    machines.wait_until(lambda: reached(machines, port), "the SuperLink or nginx did not start")
    assert {path: status(machines, port, path) for path in CLOSED} == dict.fromkeys(CLOSED, 404)
    assert status(machines, address_of(machines), "/v1/control/list-nodes") != 404  # the SuperLink itself is open
    assert status(machines, port, "/v1/fleet/activate-node") == 401  # nobody signed it
    assert status(machines, port, "/v1/fleet/push-object", size=7 * 2**20) == 413


def reached(machines: Machines, port: int) -> bool:
    try:
        return status(machines, port, "/v1/fleet/activate-node") < 500
    except OSError:
        return False
