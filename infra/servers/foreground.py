"""One service in the foreground, for a container or a supervisor that is not ours.

    STEMMA_AUTH=… python -m infra.servers.foreground prefect --root /store --host 0.0.0.0

The servers of an installation in parts find each other by STEMMA_PREFECT_URL and STEMMA_MLFLOW_URL.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from infra.servers.environment import server_environ
from infra.servers.ports import HOST
from infra.servers.settings import chosen, settings_of
from infra.servers.specs import DEFAULT_PORTS, NAMES, Spec, flow_run_spec, relay_spec, server_spec, worker_spec
from infra.servers.state import make_servers_folder, prefect_api_url
from infra.store.roots import root_folder

FLOW_RUN = "flow-run"
"""Name of the single run of a pod that Prefect's Kubernetes worker starts, see `infra.launch.kube.runs`."""

READERS = ("metrics", "page")
"""Services that only read the store; their database role only reads leases."""


def spec_for(name: str, root: Path, host: str | None, port: int | None) -> Spec:
    """Return the spec of a service, set up as by `up`. Raises ConfigError for an open address without credentials."""
    settings = chosen(settings_of(root), host)
    if name not in READERS:
        make_servers_folder(root)
        settings.write(root)
    if name in DEFAULT_PORTS:
        if settings.postgres and name not in READERS:
            settings.postgres.prepare()
        return server_spec(name, root, port or DEFAULT_PORTS[name], settings)
    if name == "relay":
        return relay_spec(root)
    api = prefect_api_url(root) or f"http://{HOST}:{DEFAULT_PORTS['prefect']}/api"
    spec = flow_run_spec if name == FLOW_RUN else worker_spec
    return spec(root, api.removesuffix("/api"), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*NAMES, FLOW_RUN))
    parser.add_argument("--root", required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    root = root_folder(options.root)
    spec = spec_for(options.name, root, options.host, options.port)
    # The service replaces this process: signals and the exit code are the service's own.
    os.execve(spec.command[0], spec.command, server_environ(spec.variables))


if __name__ == "__main__":
    main()
