"""The MLflow server of one store, in one process; behind MLflow's own authentication where STEMMA_AUTH is set.

python -m infra.lineage.server ROOT --port 5000
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

import uvicorn

from infra.errors import StemmaError
from infra.lineage.migrations import prepare
from infra.lineage.tracking import artifacts_folder, database_uri, exclusive
from infra.servers.callers import OwnCallersOnly
from infra.servers.credentials import Credentials, credentials
from infra.servers.settings import Settings
from infra.servers.state import make_servers_folder, write_private

CHECKED_ANEW_EVERY_S = 60
"""A password's check costs tens of milliseconds: a right one is remembered for so long."""


def serve(root: Path, host: str, port: int) -> None:
    """`mlflow server` without its second process, which would import MLflow once more (5 s)."""
    prepare(root)
    known = credentials()
    if known:
        _set_up_authentication(root, known)
    # Read when MLflow's server is imported, in small envelopes: its own figures for Prometheus then stand at /metrics.
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
    app = OwnCallersOnly(_app(guarded=known is not None), Settings(host).callers(port, json_only=False))
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _metrics_folder(root: Path) -> Path:
    """Where the exporter keeps a process's counts; those of earlier processes are of no use."""
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


def _set_up_authentication(root: Path, known: Credentials) -> None:
    """MLflow's users, made anew at each start: the one of STEMMA_AUTH, so that a changed password holds at once."""
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
        "MLFLOW_AUTH_ADMIN_USERNAME": known.user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": known.password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        # A route that nobody thought of a permission for is closed.
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
