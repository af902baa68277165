"""Servers with credentials: every route of Prefect and MLflow asks for them, ours have them, and nobody writes them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets

from infra.servers.ports import any_free_port
from tests.support.pipelines import data_config
from tests.support.programs.command import environment, finish, start, start_new, stemma, write_config
from tests.support.programs.processes import wait_until
from tests.support.programs.reboot import after_a_reboot
from tests.support.services.postgres import PASSWORD, postgres
from tests.support.services.receivers import webhook

pytestmark = pytest.mark.cluster

USER, SECRET = "ada", "correct-horse-battery"
PLANTED = {
    "STEMMA_AUTH": f"{USER}:{SECRET}",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED01",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret+key",
    "AWS_SESSION_TOKEN": "planted-session-token",
    "AWS_ENDPOINT_URL": "http://reader:planted-endpoint-password@127.0.0.1:9",
    "HF_TOKEN": "hf_plantedplantedplantedplantedplanted",
    "WANDB_API_KEY": "planted-wandb-key",
    "SLACK_WEBHOOK": "https://hooks.example/services/T0/B0/planted-hook",
    "HTTPS_PROXY": "http://clerk:planted-proxy-password@127.0.0.1:9",
    "STEMMA_NOTICE_EMAIL": "mailto://clerk:planted-mail-password@127.0.0.1:9/?from=a@lab.example&to=b@lab.example",
}
NEVER_WRITTEN = (
    SECRET,
    PASSWORD,
    base64.b64encode(f"{USER}:{SECRET}".encode()).decode(),
    "AKIAPLANTEDPLANTED01",
    "planted/aws+secret+key",
    "planted-session-token",
    "planted-endpoint-password",
    "hf_plantedplanted",
    "planted-wandb-key",
    "planted-hook",
    "planted-proxy-password",
    "planted-notice-hook",
    "planted-mail-password",
)
WRONG = ("ada:wrong-horse-battery", f"bob:{SECRET}", f"{USER}:", ":", f"{USER}:{SECRET} ")
HEALTH = {"/api/health", "/api/ready"}


@dataclass
class Guarded:
    """A store whose servers run behind credentials, on PostgreSQL, and what their commands printed."""

    folder: Path
    env: dict[str, str]
    database: str
    services: dict[str, dict[str, Any]]
    hooks: list[Any]
    said: list[str] = field(default_factory=list)

    @property
    def prefect(self) -> str:
        return str(self.services["prefect"]["url"])

    @property
    def mlflow(self) -> str:
        return str(self.services["mlflow"]["url"])

    @property
    def root(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    with postgres() as url, webhook(status=404) as (address, hooks):
        hook = f"{address}/services/planted-notice-hook"
        env = environment(STEMMA_RELAY="on", STEMMA_DATABASE_URL=url, STEMMA_NOTICE_SLACK=hook, **PLANTED)
        ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
        try:
            answer = stemma("up", "--root", folder / "store", "--host", "0.0.0.0", *ports, env=env)
            assert answer.code == 0, answer.document["errors"]
            services = {service["name"]: service for service in answer.document["services"]}
            yield Guarded(folder, env, url, services, hooks, [str(answer)])
        finally:
            stemma("down", "--root", folder / "store", env=env)


def headers(auth: str | None) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}


def statuses(base: str, routes: list[tuple[str, str]], auth: str | None) -> dict[tuple[str, str], int]:
    """What each (method, path) answers."""
    with httpx.Client(base_url=base, headers=headers(auth), timeout=60, trust_env=False) as client:
        # An empty body of JSON: nothing that would do anything, were it let in.
        def ask(route: tuple[str, str]) -> int:
            return client.request(route[0], route[1], json={} if route[0] != "GET" else None).status_code

        with ThreadPoolExecutor(4) as pool:
            return dict(zip(routes, pool.map(ask, routes), strict=True))


def filled(path: str) -> str:
    """A route's template with something in the place of its parameters."""
    pieces = ["x" if piece.startswith(("{", "<")) else piece for piece in path.split("/")]
    return "/".join(pieces)


@pytest.fixture(scope="module")
def prefect_routes(guarded: Guarded) -> list[tuple[str, str]]:
    schema = httpx.get(f"{guarded.prefect}/openapi.json", trust_env=False, timeout=60).json()
    routes = [
        (method.upper(), f"/api{filled(path)}") for path, methods in schema["paths"].items() for method in methods
    ]
    assert len(routes) > 150
    return routes + [("GET", f"/api{path}") for path in ("/docs", "/openapi.json", "/redoc", "/nothing", "/")]


@pytest.mark.parametrize("auth", [None, *WRONG])
def test_every_route_of_prefects_api_asks(
    guarded: Guarded, prefect_routes: list[tuple[str, str]], auth: str | None
) -> None:
    answers = statuses(guarded.prefect, prefect_routes if auth is None else prefect_routes[::10], auth)
    assert {route for route, status in answers.items() if status != 401} <= {("GET", path) for path in HEALTH}


def test_prefects_page_without_data_and_its_health_are_all_that_is_open(guarded: Guarded) -> None:
    open_routes = [("GET", path) for path in ("/", "/dashboard", "/ui-settings", *sorted(HEALTH))]
    assert set(statuses(guarded.prefect, open_routes, None).values()) == {200}
    settings = httpx.get(f"{guarded.prefect}/ui-settings", trust_env=False, timeout=60).text
    assert json.loads(settings)["auth"] == "BASIC"
    assert SECRET not in settings


@pytest.mark.parametrize("path", ["/api/events/in", "/api/events/out", "/api/logs/out"])
@pytest.mark.parametrize("token", [None, "ada:wrong-horse-battery"])
def test_prefects_sockets_ask_too(guarded: Guarded, path: str, token: str | None) -> None:
    async def ask() -> str:
        address = guarded.prefect.replace("http", "ws", 1) + path
        async with websockets.connect(address, subprotocols=[websockets.Subprotocol("prefect")]) as socket:
            await socket.send(json.dumps({"type": "auth", "token": token}))
            return str(await socket.recv())

    with pytest.raises(websockets.ConnectionClosed):
        asyncio.run(ask())


@pytest.fixture(scope="module")
def mlflow_routes() -> list[tuple[str, str]]:
    """All of MLflow's routes, those of its Flask app and those that its FastAPI app serves itself."""
    code = (
        "import json, mlflow.server.fastapi_app as fast; from mlflow.server import app;"
        "routes = [(m, str(r)) for r in app.url_map.iter_rules() for m in r.methods];"
        "routes += [(m, r.path) for r in fast.app.routes for m in getattr(r, 'methods', None) or ()];"
        "print(json.dumps(routes))"
    )
    env = environment(_MLFLOW_SGI_NAME="uvicorn")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found = [(method, filled(path)) for method, path in json.loads(done.stdout.splitlines()[-1])]
    return sorted({(method, path) for method, path in found if method not in ("OPTIONS", "HEAD")})


OPEN_IN_MLFLOW = ("/health", "/static-files/", "/api/3.0/mlflow/server-info", "/ajax-api/3.0/mlflow/server-info")
"""Is it alive, the page's own scripts, and its version: nothing of what is stored."""


@pytest.mark.parametrize("auth", [None, *WRONG[:2]])
def test_every_route_of_mlflow_asks(guarded: Guarded, mlflow_routes: list[tuple[str, str]], auth: str | None) -> None:
    routes = mlflow_routes
    paths = {path for _, path in routes}
    assert len(routes) > 200
    for kind in ("/", "/graphql", "/get-artifact", "/api/2.0/mlflow/", "/ajax-api/2.0/mlflow/", "mlflow-artifacts"):
        assert any(kind in path for path in paths), kind
    routes = routes if auth is None else routes[::12]
    answers = statuses(guarded.mlflow, routes, auth)
    let_in = {route for route, status in answers.items() if status not in (401, 403)}
    assert {path for _, path in let_in if not path.startswith(OPEN_IN_MLFLOW)} == set()


def test_the_right_credentials_open_both(guarded: Guarded) -> None:
    right = PLANTED["STEMMA_AUTH"]
    assert set(statuses(guarded.prefect, [("POST", "/api/flows/filter")], right).values()) == {200}
    search = ("GET", "/api/2.0/mlflow/experiments/search?max_results=1")
    assert set(statuses(guarded.mlflow, [("GET", "/"), search], right).values()) == {200}


def test_our_commands_are_refused_without_credentials_and_say_what_to_set(guarded: Guarded) -> None:
    stranger = environment(STEMMA_DATABASE_URL=guarded.database)
    config = write_config(guarded.folder / "refused.yaml", data_config(guarded.folder))
    for command in (["up"], ["deploy", config], ["run", config]):
        answer = stemma(*command, "--root", guarded.root, env=stranger)
        assert answer.code == 2, (command, answer.document)
        assert answer.document["errors"][0]["code"] == "no_credentials"
        assert "STEMMA_AUTH" in json.dumps(answer.document["errors"])


class Arguments:
    """Gathers the command lines of all processes while the block runs."""

    def __enter__(self) -> Arguments:
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.seen |= {" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}


def failed_notices(guarded: Guarded) -> list[Any]:
    asked = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}
    auth = headers(PLANTED["STEMMA_AUTH"])
    answer = httpx.post(f"{guarded.prefect}/api/events/filter", json=asked, headers=auth, trust_env=False, timeout=60)
    found: list[Any] = answer.json()["events"]
    return found


@pytest.fixture(scope="module")
def command_lines(guarded: Guarded) -> str:
    """Those of all processes while a pipeline is deployed, runs well, and one runs that fails."""
    config = write_config(guarded.folder / "good.yaml", data_config(guarded.folder))
    bad = data_config(guarded.folder)
    bad["name"] = "failing"
    bad["ingest"] = {"read": [{"kind": "files", "paths": [str(guarded.folder / "gone.txt")]}]}
    failing = write_config(guarded.folder / "bad.yaml", bad)
    with Arguments() as arguments:
        for begin, command, code in (
            (start, ["deploy", config, "--cron", "0 2 * * *"], 0),
            # With the command line and the environment that a person gives it, in a new process.
            (start_new, ["run", config], 0),
            (start, ["run", failing], 1),
            (start, ["status", config], 0),
            (start, ["lineage", "tokenizer"], 0),
        ):
            answer = finish(begin(*command, "--root", guarded.root, env=guarded.env))  # type: ignore[operator]
            assert answer.code == code, answer.document["errors"]
            guarded.said.append(str(answer))
    return "\n".join(arguments.seen)


def test_no_planted_secret_is_written_anywhere(guarded: Guarded, command_lines: str) -> None:
    """Everything that anybody wrote is searched."""
    # Where the notices go one is refused and nobody listens to the other, so what Prefect says of that is searched too.
    wait_until(lambda: guarded.hooks and failed_notices(guarded))
    outbox = guarded.root / "lineage" / "outbox"
    wait_until(lambda: not any(outbox.iterdir()))
    written = {str(path): path.read_bytes() for path in guarded.root.rglob("*") if path.is_file()}
    place = guarded.database.replace(f":{PASSWORD}@", "@")
    env = os.environ | {"PGPASSWORD": PASSWORD}
    dump = subprocess.run(["pg_dump", place], env=env, capture_output=True, check=True).stdout
    assert b"tokenizer" in dump
    written |= {
        "PostgreSQL": dump,
        "command lines": command_lines.encode(),
        "what commands printed": "\n".join(guarded.said).encode(),
    }
    assert any("mlflow" in name for name in written)
    assert "infra.servers.prefect.worker" in command_lines
    found = {(name, secret) for name, text in written.items() for secret in NEVER_WRITTEN if secret.encode() in text}
    assert not found


def test_state_is_for_its_owner_only(guarded: Guarded) -> None:
    servers = guarded.root / "servers"
    assert servers.stat().st_mode & 0o077 == 0
    for name in ("services.json", "settings.json", "mlflow-auth.ini"):
        assert (servers / name).stat().st_mode & 0o077 == 0, name
    for service in psutil.process_iter(["cmdline", "pid"]):
        if "infra.servers.prefect.worker" in (service.info["cmdline"] or []):
            assert os.stat(f"/proc/{service.info['pid']}/environ").st_mode & 0o077 == 0


@pytest.mark.long
def test_after_a_reboot_up_continues_and_nothing_is_lost(
    guarded: Guarded, command_lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The risk: servers killed with their machine do not find their database, or ask for other credentials."""
    monkeypatch.setenv("STEMMA_AUTH", PLANTED["STEMMA_AUTH"])  # also for our own questions
    # The recorded password-less database is enough to find it; its password comes from libpq's own place.
    after_a_reboot(guarded.root, guarded.services, environment(STEMMA_RELAY="on", PGPASSWORD=PASSWORD))
    settings = json.loads((guarded.root / "servers" / "settings.json").read_text())
    assert settings["guarded"]
