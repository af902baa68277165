"""The MLflow server of one store, in one process; behind MLflow's own authentication where STEMMA_AUTH is set.

python -m infra.lineage.server ROOT --port 5000
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from infra.errors import StemmaError
from infra.lineage.migrations import prepare
from infra.lineage.tracking import artifacts_folder, database_uri, exclusive
from infra.servers.asgi_server import BoundedBody, Server
from infra.servers.credentials import Credentials, credentials
from infra.servers.prefect.callers import App, OwnCallersOnly, Receive, Scope, Send
from infra.servers.settings import Settings
from infra.servers.state import make_servers_folder, write_private

FIRST_VISIT = {
    "mlflow.workflowType_v1": "machine_learning",
    "mlflow.home.getting-started.collapsed_v1": True,
    "mlflow.assistant.panelOpen_v1": False,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "mlflow.settings.telemetry.enabled_v1": False,
    "mlflow.telemetry.info.alert.dismissed_v1": True,
    "mlflow.detectIssues.guidanceShown_v1": True,
    "_mlflow_model_registry_promo_modal_dismissed_v1": True,
}
"""Choices that MLflow's page stores in the browser after a visit: training shown instead of chatbots, the assistant
closed, no usage data sent, notices read. The server has no setting for any of them (3.17.2)."""

_REMEMBER = """for (const [key, value] of Object.entries(%s))
  if (localStorage.getItem(key) === null) localStorage.setItem(key, value);"""

_FOLD_MENU = """
if (innerWidth < 700) {
  const menu = '[data-component-id="mlflow_header.toggle_sidebar_button"]';
  const fold = new MutationObserver(() => {
    const button = document.querySelector(menu);
    if (button) { fold.disconnect(); button.click(); }
  });
  fold.observe(document, {childList: true, subtree: true});
}"""
"""The menu takes half of a phone, and the page does not remember that it was folded."""

_NO_ASSISTANT = "<style>[data-assistant-ui] {display: none !important}</style>"
"""Its button floats over the page, and it sends questions about the user's runs to a third party's model."""

MOST_BODY_BYTES = 64_000_000
"""Largest request that stores no file; MLflow's own limit of a batch of metrics is 1 MB."""

CHECKED_ANEW_EVERY_S = 60
"""A password's check costs tens of milliseconds: a right one is remembered for so long."""


def serve(root: Path, host: str, port: int) -> None:
    """Serve MLflow like `mlflow server`, without its second process, which would import MLflow once more (5 s)."""
    prepare(root)
    login = credentials()
    if login:
        _set_up_authentication(root, login)
    # Read when MLflow's server is imported, in small envelopes: its own figures for Prometheus are then at /metrics.
    os.environ |= {"prometheus_multiproc_dir": str(_metrics_folder(root))}
    # MLflow guards its app against foreign hosts and origins if uvicorn is there when it is imported.
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    database = database_uri(root)
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(artifacts_folder(root)),
        # Nothing here runs in the server: no judges, no scorers.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with exclusive(root):
        initialize_backend_stores(database, database, "mlflow-artifacts:/")
    # MLflow's own rules take every page of this machine and leave out some paths; bodies may be files here.
    app = BoundedBody(FirstVisit(_app(guarded=login is not None)), MOST_BODY_BYTES, takes_files)
    Server(OwnCallersOnly(app, Settings(host).callers(port, json_only=False)), host, port).run()


def takes_files(path: str) -> bool:
    """True for the paths of MLflow's API that store an artifact's file."""
    return "/mlflow-artifacts/" in path or path.endswith("/upload-artifact")


class FirstVisit:
    """Store FIRST_VISIT in browsers on their first visit; values already set there stay. Remove the assistant, and fold
    the menu on a phone."""

    def __init__(self, app: App) -> None:
        self._app = app
        settings = json.dumps({key: json.dumps(value) for key, value in FIRST_VISIT.items()})
        self._head = f"{_NO_ASSISTANT}<script>{_REMEMBER % settings}{_FOLD_MENU}</script>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        # Asked for whole: a browser may have kept the page from before.
        conditional = (b"if-none-match", b"if-modified-since", b"range")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in conditional]
        start_messages: list[Any] = []
        body = bytearray()

        async def with_script(message: Any) -> None:
            if message["type"] == "http.response.start":
                start_messages.append(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            page = bytes(body).replace(b"<head>", b"<head>" + self._head, 1)
            kept = [(name, value) for name, value in start_messages[0]["headers"] if name.lower() != b"content-length"]
            await send({**start_messages[0], "headers": [*kept, (b"content-length", str(len(page)).encode())]})
            await send({"type": "http.response.body", "body": page})

        await self._app({**scope, "headers": headers}, receive, with_script)


def _metrics_folder(root: Path) -> Path:
    """Create the folder in which the exporter keeps a process's counts; counts of earlier processes are removed."""
    folder = root / "mlflow" / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _app(*, guarded: bool) -> Any:
    if not guarded:
        from mlflow.server.fastapi_app import app

        return app
    from mlflow.server import app as flask_app
    from mlflow.server.auth import create_app

    return create_app(flask_app)


def _set_up_authentication(root: Path, login: Credentials) -> None:
    """Recreate MLflow's users at each start: the user of STEMMA_AUTH, so that a changed password holds at once."""
    folder = make_servers_folder(root)
    users = folder / "mlflow-users.db"
    users.unlink(missing_ok=True)
    ini = folder / "mlflow-auth.ini"
    write_private(
        ini,
        "[mlflow]\n"
        "default_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{users}\n"
        f"auth_cache_ttl_seconds = {CHECKED_ANEW_EVERY_S}\n",
    )
    os.environ |= {
        "MLFLOW_AUTH_CONFIG_PATH": str(ini),
        "MLFLOW_AUTH_ADMIN_USERNAME": login.user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": login.password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        # A route without a defined permission is closed.
        "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    try:
        serve(options.root.absolute(), options.host, options.port)
    except StemmaError as error:
        sys.exit(str(error))
