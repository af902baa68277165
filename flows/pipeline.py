"""The whole pipeline as one Prefect flow.

stemma run configs/quickstart.yaml
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.states import State

from flows.config import PipelineConfig
from flows.execution import STAGES, PipelineRun, flow_run_name
from flows.journal import new_run_id
from flows.selection import Selection
from infra.project import default_root
from infra.store.store import Store


@flow(name="pipeline", flow_run_name=flow_run_name, task_runner=STAGES, persist_result=False)
def pipeline(
    config: PipelineConfig,
    selection: Selection = Selection(),  # noqa: B008 - frozen
    root: str = "",
    run_id: str = "",
    verify: bool = False,
    config_path: str = "",
) -> State:
    """Builds what is not there yet, reuses the rest, and says of each stage which and why.

    root: the store's folder. run_id: names the journal, so that whoever started this can follow it. verify: read every
    byte of reused artifacts. config_path: the file the config came from, for messages.
    """
    store = Store(Path(root) if root else default_root())
    return PipelineRun(config, selection, store, run_id or new_run_id(), verify, config_path).run()
