"""A page in a browser on this machine cannot use our servers: not by its own name, a form, a script or a socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.servers.environment import server_environ
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from infra.servers.prefect.callers import Callers
from infra.servers.settings import Settings
from infra.servers.specs import server_spec
from tests.support.programs.processes import wait_until
from tests.support.services.raw_http import Response, address_of, ask

PORT = 4200
SOCKET = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
          "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
JSON = {"Content-Type": "application/json"}
EVIL = "http://evil.example"


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEMMA_NAMES", raising=False)


def post(url: str, path: str, body: Any, **headers: str) -> Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(url, "POST", path, {**JSON, **given}, json.dumps(body).encode())


def flows_named(api: str, name: str) -> list[Any]:
    asked = post(api, "/flows/filter", {"flows": {"name": {"any_": [name]}}})
    assert asked.status == 200
    found: list[Any] = json.loads(asked.body)
    return found


FOREIGN = [
    # What was shown: the page's name was made to point to 127.0.0.1, and its requests are "same-origin".
    pytest.param({"Host": f"evil.example:{PORT}", "Origin": f"{EVIL}:{PORT}", **JSON}, 421, id="rebound"),
    pytest.param({"Host": "evil.example", **JSON}, 421, id="rebound without an origin"),
    pytest.param({"Origin": EVIL, **JSON}, 403, id="a script of another site"),
    pytest.param({"Origin": "null", "Content-Type": "text/plain"}, 403, id="a sandboxed form"),
    pytest.param({"Origin": "http://127.0.0.1:8888", **JSON}, 403, id="another server of this machine"),
    pytest.param({"Sec-Fetch-Site": "cross-site", **JSON}, 403, id="a browser that hides the origin"),
    pytest.param({"Sec-Fetch-Site": "same-site", **JSON}, 403, id="the same site, another server"),
    pytest.param({"Content-Type": "text/plain"}, 415, id="JSON in a form's clothes"),
    pytest.param({}, 415, id="no content type"),
]


@pytest.mark.cluster
@pytest.mark.parametrize(("headers", "status"), FOREIGN)
def test_prefect_makes_nothing_for_a_foreign_page(prefect_url: str, headers: dict[str, str], status: int) -> None:
    name = "made-by-a-page"
    refused = ask(prefect_url, "POST", "/flows/", headers, json.dumps({"name": name}).encode())
    assert refused.status == status, refused
    assert refused.headers["content-type"].startswith("text/plain")
    assert "access-control-allow-origin" not in refused.headers
    assert flows_named(prefect_url, name) == []


@pytest.mark.cluster
def test_a_foreign_page_deletes_no_deployment_and_ours_still_can(prefect_url: str) -> None:
    flow = json.loads(post(prefect_url, "/flows/", {"name": "kept"}).body)["id"]
    made = json.loads(post(prefect_url, "/deployments/", {"name": "kept", "flow_id": flow}).body)["id"]
    which = {"deployments": {"id": {"any_": [made]}}}
    for path in ("/deployments/bulk_delete", f"/deployments/{made}/create_flow_run"):
        assert post(prefect_url, path, which, Origin=EVIL).status == 403
        assert post(prefect_url, path, which, Host="evil.example", Origin="http://evil.example").status == 421
        assert ask(prefect_url, "POST", path, {"Content-Type": "text/plain"}, json.dumps(which).encode()).status == 415
    for method in ("DELETE", "PATCH", "PUT"):
        assert ask(prefect_url, method, f"/deployments/{made}", {"Origin": EVIL}).status == 403
    assert ask(prefect_url, "GET", f"/deployments/{made}").status == 200
    host = address_of(prefect_url)
    # As Prefect's own page sends it, and a program.
    assert post(prefect_url, "/deployments/bulk_delete", which, Origin=f"http://{host}").status == 200
    assert ask(prefect_url, "GET", f"/deployments/{made}").status == 404
    assert ask(prefect_url, "DELETE", f"/flows/{flow}").status == 204


@pytest.mark.cluster
def test_what_a_foreign_page_reads_of_prefect(prefect_url: str) -> None:
    assert ask(prefect_url, "GET", "/health", {"Host": "evil.example"}).status == 421
    assert ask(prefect_url, "GET", "/health", {"Origin": EVIL}).status == 403
    preflight = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in ask(prefect_url, "OPTIONS", "/flows/", preflight).headers
    # A link on another site to our page.
    assert ask(prefect_url, "GET", "/health", {"Sec-Fetch-Site": "cross-site"}).status == 200


@pytest.mark.cluster
@pytest.mark.parametrize("path", ["/events/in", "/events/out", "/logs/out"])
def test_prefects_sockets_open_for_no_foreign_page(prefect_url: str, path: str) -> None:
    prefect = SOCKET | {"Sec-WebSocket-Protocol": "prefect"}
    assert ask(prefect_url, "GET", path, prefect | {"Origin": EVIL}).status == 403
    assert ask(prefect_url, "GET", path, prefect | {"Host": "evil.example"}).status == 421
    assert ask(prefect_url, "GET", path, prefect).status == 101
    assert ask(prefect_url, "GET", path, prefect | {"Origin": f"http://{address_of(prefect_url)}"}).status == 101


def half_sent(url: str) -> socket.socket:
    """A connection with a request whose body does not come."""
    client = socket.create_connection(("127.0.0.1", int(url.split("/")[2].rpartition(":")[2])), timeout=60)
    client.sendall(b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    return client


@pytest.mark.cluster
def test_the_metrics_and_mlflow_refuse_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_url: str) -> None:
    monkeypatch.setenv("STEMMA_NAMES", "stemma.lab")
    specs = [server_spec(name, tmp_path, any_free_port(), Settings()) for name in ("metrics", "mlflow")]
    urls = {spec.name: spec.url.removesuffix("/metrics") for spec in specs}
    servers = [subprocess.Popen(spec.command, env=server_environ(spec.variables)) for spec in specs]
    try:
        for url in urls.values():
            wait_until(lambda health=f"{url}/health": answers(health), timeout_s=120)
        # Nothing is waited for without end. Some are answered without their body, which then has to come.
        halves = [half_sent(url) for url in (*urls.values(), prefect_url)]
        for url in urls.values():
            for path in ("/metrics", "/health"):
                assert ask(url, "GET", path).status == 200
                assert ask(url, "GET", path, {"Host": "evil.example"}).status == 421
                assert ask(url, "GET", path, {"Host": "stemma.lab", "Origin": "https://stemma.lab"}).status == 200
                assert ask(url, "POST", path, {"Origin": EVIL}).status == 403
        mlflow = urls["mlflow"]
        create, made = "/api/2.0/mlflow/experiments/create", {"name": "made-by-a-page"}
        # Its own rules leave out what does not begin with /api/ or /ajax-api/, and take every port of this machine.
        for path in (create, "/graphql"):
            assert post(mlflow, path, made, Origin=EVIL).status == 403
            assert post(mlflow, path, made, Origin="http://localhost:8888").status == 403
            assert post(mlflow, path, made, Host="evil.example").status == 421
        # Files are written there, whose bodies are no JSON.
        place = "/api/2.0/mlflow-artifacts/artifacts/note.txt"
        assert ask(mlflow, "PUT", place, {"Content-Type": "text/plain"}, b"a note").status == 200
        assert post(mlflow, create, made).status == 200
        bomb = {**JSON, "Content-Length": "700000000"}
        for url, path in ((mlflow, create), (prefect_url, "/flows/"), (urls["metrics"], "/metrics")):
            assert ask(url, "POST", path, bomb).status == 413
        for client in halves:
            while client.recv(65_536):
                pass
            client.close()
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.mark.cluster
def test_a_worker_that_calls_the_server_by_an_unknown_name_says_so_and_does_not_wait(
    prefect_url: str, tmp_path: Path
) -> None:
    # Linux takes this address for loopback, too, and the server does not.
    env = server_environ({"PREFECT_API_URL": prefect_url.replace("127.0.0.1", "0.0.0.0"), "NO_PROXY": "*"})
    command = [sys.executable, "-m", "infra.servers.prefect.worker", "stemma", str(tmp_path)]
    worker = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert worker.returncode == 1
    assert "not known as 0.0.0.0" in worker.stderr
    assert "STEMMA_NAMES=0.0.0.0" in worker.stderr


def rules(host: str = "127.0.0.1") -> Callers:
    return Settings(host).callers(PORT)


def status(callers: Callers, **headers: str) -> int:
    found = callers.refusal("POST", {name.replace("_", "-"): value for name, value in headers.items()})
    return int(found.status) if found else 200


@pytest.mark.parametrize(
    "host",
    ["localhost:4200", "LOCALHOST", "127.0.0.1:4200", "[::1]:4200", "localhost:14200"],
)
def test_loopback_by_any_name_and_through_a_tunnel_is_ours(host: str) -> None:
    assert status(rules(), host=host) == 200
    assert status(rules(), host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "localhost:4200,evil.example", "127.0.0.1.nip.example:4200",
     "evil@localhost", "localhost:x", "::1", "[::1", "localhost:4200:4200", "0.0.0.0:4200", "localhost."],
)  # fmt: skip
def test_what_only_looks_like_loopback_is_not(host: str) -> None:
    assert status(rules(), host=host) == 421


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://", "http://localhost", "http://localhost:4200.evil.example", "http://localhost:4201",
     "file://localhost:4200", "http://localhost:4200/", "http://[", "http://localhost:4200, http://evil.example"],
)  # fmt: skip
def test_an_origin_that_only_looks_like_ours_is_not(origin: str) -> None:
    assert status(rules(), host="localhost:4200", origin=origin) == 403


def test_a_refusal_says_what_an_operator_sets_and_then_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"host": "stemma.lab:8443", "origin": "https://stemma.lab:8443"}
    # A proxy that calls us by our own address, as nginx does unless told otherwise.
    changed = {"host": "127.0.0.1:4200", "origin": "https://stemma.lab:8443"}
    for headers, name in ((kept, "stemma.lab"), (changed, "stemma.lab:8443")):
        found = rules().refusal("POST", headers)
        assert found is not None
        assert f"STEMMA_NAMES={name}" in found.message
        monkeypatch.setenv("STEMMA_NAMES", f"mlflow,{name}")
        assert status(rules("0.0.0.0"), **headers) == 200
        monkeypatch.delenv("STEMMA_NAMES")
    monkeypatch.setenv("STEMMA_NAMES", "stemma.lab")
    assert status(rules(), host="127.0.0.1:4200", origin="https://stemma.lab") == 200
    assert status(rules(), host="127.0.0.1:4200", origin="https://stemma.lab:9999") == 403
    assert Settings("0.0.0.0").page == "stemma.lab"


def test_a_server_for_other_machines_is_called_by_this_machines_names() -> None:
    names = rules("0.0.0.0").names
    assert {"localhost", "127.0.0.1", socket.gethostname().lower()} <= names
    assert socket.gethostname().lower() not in rules().names - {"localhost"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("application/json", 200), ("application/json; charset=utf-8", 200), ("application/merge-patch+json", 200),
     ("text/plain", 415), ("text/plain; application/json", 415), ("application/x-www-form-urlencoded", 415),
     ("multipart/form-data", 415), ("application/json, text/plain", 415), ("", 415)],
)  # fmt: skip
def test_a_body_says_that_it_is_json(kind: str, expected: int) -> None:
    for length in ({"content_length": "2"}, {"transfer_encoding": "chunked"}):
        assert status(rules(), host="localhost", content_type=kind, **length) == expected
    assert status(rules(), host="localhost", content_length="0") == 200
