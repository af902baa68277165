"""The whole pipeline as one Prefect flow.

stemma run configs/quickstart.yaml
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from prefect import flow
from prefect.states import Failed, State

from flows.config.forms import WITHOUT_FORM
from flows.config.graph import Selection
from flows.config.read import PipelineConfig, load
from flows.prefect.admission import turned_away
from flows.prefect.execution import RUNNER, PipelineRun, flow_run_name
from flows.runs.journal import new_run_id
from infra.errors import StemmaError
from infra.project import PROJECT, root_of
from infra.store.store import Store


@flow(name="pipeline", flow_run_name=flow_run_name, task_runner=RUNNER, persist_result=False)
def pipeline(
    config: Annotated[PipelineConfig, WITHOUT_FORM],
    selection: Selection = Selection(),  # noqa: B008 - frozen
    root: str = "",
    run_id: str = "",
    verify: bool = False,
    config_path: str = "",
) -> State:
    """Build missing artifacts, reuses the others, and reports the decision and its reason for each stage.

    Args:
        root: the store's folder.
        run_id: names the journal, so that the caller can follow it.
        verify: read every byte of reused artifacts.
        config_path: the file the config came from, for messages.
    """
    if state := turned_away(config_path):
        return state
    try:
        store = Store(root_of(root))
    except StemmaError as error:
        return Failed(message=str(error))
    return PipelineRun(config, selection, store, run_id or new_run_id(), verify, config_path).run()


@flow(name="pipeline-file", flow_run_name=flow_run_name, task_runner=RUNNER, persist_result=False)
def pipeline_file(config_path: str, settings: dict[str, Any] = {}, root: str = "") -> State:  # noqa: B006
    """Run the pipeline of a config file, read when the run starts, for deployments in prefect.yaml.

    Args:
        config_path: relative to the project.
        settings: values by dotted key, as `--set` gives them.
    """
    path = PROJECT / config_path
    if state := turned_away(str(path), any_code=True):
        return state
    try:
        texts = {key: json.dumps(value) for key, value in settings.items()}
        config = load(path, texts, lambda: root_of(root))
        store = Store(root_of(root))
    except StemmaError as error:
        return Failed(message=str(error))
    return PipelineRun(config, Selection(), store, new_run_id(), False, str(path)).run()
