"""A Prefect flow that does nothing, to hold our own cost against.

python benchmarks/infra/empty_flow.py here     in this process
python benchmarks/infra/empty_flow.py worker   through a deployment and the worker
"""

from __future__ import annotations

import sys
import time

from prefect import flow


@flow(name="empty", persist_result=False)
def empty() -> None:
    """Nothing."""


def on_worker() -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name("empty/empty").id
        except ObjectNotFound:
            from prefect.deployments.runner import EntrypointType

            from benchmarks.infra.empty_flow import empty as importable

            deployment = importable.to_deployment(
                name="empty", work_pool_name="stemma", entrypoint_type=EntrypointType.MODULE_PATH
            ).apply()
        run = client.create_flow_run_from_deployment(deployment)
        while not (state := client.read_flow_run(run.id).state) or not state.is_final():
            time.sleep(0.05)


if __name__ == "__main__":
    on_worker() if sys.argv[1] == "worker" else empty()
