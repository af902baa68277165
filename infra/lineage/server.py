"""The MLflow server of one store, on loopback, in one process.

python -m infra.lineage.server ROOT --port 5000
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import uvicorn

from infra.lineage.tracking import artifacts_folder, check_database, database_uri, exclusive


def serve(root: Path, host: str, port: int) -> None:
    """`mlflow server` without its second process, which would import MLflow once more (5 s)."""
    with exclusive(root):
        check_database(root)
    # MLflow guards its app against foreign hosts and origins if uvicorn is there when it is imported.
    from mlflow.server import constants
    from mlflow.server.fastapi_app import app
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
    uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    serve(options.root.absolute(), options.host, options.port)
