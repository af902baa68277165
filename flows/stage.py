"""Each stage as a separate Prefect flow, so that the page shows its config as a typed form.

`stemma deploy CONFIG` makes one deployment per stage. Its form is prefilled from the config file. The values in the
form, with their changes, are what runs, and what is downstream of it is offered next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from prefect import Flow, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL
from prefect.states import State

from flows.config.forms import WITHOUT_FORM, form_values
from flows.config.graph import Selection, descendants, graph
from flows.config.read import PipelineConfig, dump, load, parse
from flows.config.steps import OWN_KEYS
from flows.planning.plan import plan
from flows.prefect.admission import turned_away
from flows.prefect.execution import RUNNER, PipelineRun, flow_run_name
from flows.prefect.page import PATIENCE_S
from flows.prefect.page_queue import PageQueue
from flows.runs.journal import new_run_id
from infra.config import StageConfig
from infra.fingerprint import flatten
from infra.project import root_of
from infra.store.store import Store
from tasks.stages import usable_stages


def run_stage(
    section: str,
    config: StageConfig,
    stage: str,
    config_path: str,
    settings: Mapping[str, Any],
    and_below: bool,
    root: str,
) -> State:
    """Run one stage of the pipeline in `config_path` with this config, and offer what is downstream of it next.

    Args:
        settings: values by dotted key for other sections, as `--set` gives them.
    """
    if state := turned_away(config_path):
        return state
    texts = {key: json.dumps(value) for key, value in settings.items()}
    pipeline = load(Path(config_path), texts, lambda: root_of(root))
    changed = parse(with_form(pipeline, stage, section, config), Path(config_path).parent)
    store = Store(root_of(root))
    selection = Selection(from_=(stage,)) if and_below else Selection(only=(stage,))
    state = PipelineRun(changed, selection, store, new_run_id(), False, config_path).run()
    if state.is_completed():
        queue = PageQueue(get_run_logger().warning)
        queue.tell(lambda: _offer_next(pipeline, changed, stage, settings, store, config_path), "what to run next")
        queue.flush(PATIENCE_S)
        queue.close()
    return state


def with_form(pipeline: PipelineConfig, stage: str, section: str, config: StageConfig) -> dict[str, Any]:
    """The pipeline's plain data with a form's values for a stage: in its step if it is a named one, else in its
    section."""
    data, given = dump(pipeline), config.model_dump(mode="json", by_alias=True)
    if stage not in pipeline.steps:
        return {**data, section: given}
    kept = {key: value for key, value in data["steps"][stage].items() if key in OWN_KEYS}
    return {**data, "steps": {**data["steps"], stage: {**kept, **given}}}


def form_of(pipeline: PipelineConfig, stage: str, section: str) -> StageConfig:
    """The config of a stage as its form shows it: that of the whole section, of which a step may read a part."""
    step = pipeline.steps.get(stage)
    config = step.config if step else pipeline.section(section)
    assert config is not None
    return config


def _offer_next(
    before: PipelineConfig,
    after: PipelineConfig,
    stage: str,
    settings: Mapping[str, Any],
    store: Store,
    config_path: str,
) -> None:
    """A page of what is downstream of the stage and is not built for its new result, each with a link to its form."""
    old, new = flatten(dump(before)), flatten(dump(after))
    changed = {key: value for key, value in new.items() if old.get(key) != value}
    nodes = graph(after)
    rows = plan(nodes, store)
    downstream = descendants(nodes, [stage]) - {stage}
    below = [name for name, node in nodes.items() if name in downstream and not node.measures]
    stale = [name for name in below if rows[name].status == "build"]
    lines = [f"`{key}` = {value}" for key, value in changed.items()]
    text = f"### {stage} ran with\n\n" + ("\n".join(f"- {line}" for line in lines) or "- the config file's values")
    if not stale:
        text += "\n\nNothing downstream of it has to be built again."
    else:
        given = {"settings": {**settings, **changed}}
        text += "\n\n### Stages downstream of it that are not built for this result\n\n"
        text += "\n".join(f"- {_form_link(after.name, name, given)}: {rows[name].because[0]}" for name in stale)
        section = nodes[stage].stage.name
        values = {
            "config": form_values(form_of(after, stage, section)),
            "settings": dict(settings),
            "and_below": True,
        }
        text += f"\n\nAll of it at once: {_form_link(after.name, stage, values)} with *and below* switched on."
    if changed:
        text += f"\n\nTo keep the change, write it into `{config_path}`."
    create_markdown_artifact(text, key="next", description=f"After {stage}")


def _form_link(pipeline: str, stage: str, parameters: Mapping[str, Any]) -> str:
    """A link to a stage's form with these values filled in; its name alone if it is not deployed."""
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(f"{pipeline}/{stage}")
        except ObjectNotFound:
            return stage
    base = str(PREFECT_UI_URL.value() or "").rstrip("/")
    values = quote(json.dumps({**deployment.parameters, **parameters}))
    return f"[{stage}]({base}/deployments/deployment/{deployment.id}/run?parameters={values})"


def _flow_of(section: str, config_class: type[StageConfig]) -> Flow[..., Any]:
    """The flow of one section; its form is the config class."""

    def stage_flow(
        config: StageConfig,
        stage: str,
        config_path: str,
        settings: dict[str, Any] = {},  # noqa: B006 - Prefect shows it as the form's default
        and_below: bool = False,
        root: str = "",
    ) -> State:
        """Run one stage of a pipeline.

        Args:
            config: The stage's settings, as the config file has them.
            stage: The stage's id in the pipeline.
            config_path: The pipeline's config file.
            settings: Values for other sections of the config, by dotted key.
            and_below: Also run what is downstream of this stage.
            root: The store's folder.
        """
        return run_stage(section, config, stage, config_path, settings, and_below, root)

    stage_flow.__annotations__["config"] = Annotated[config_class, WITHOUT_FORM]
    # A stage of an installed package may be called as something that this module imports.
    stage_flow.__name__ = stage_flow.__qualname__ = section if section not in globals() else f"{section}_stage"
    decorate = flow(name=section, flow_run_name=flow_run_name, task_runner=RUNNER, persist_result=False)
    return decorate(stage_flow)


FLOWS = {name: _flow_of(name, stage.config) for name, stage in usable_stages().items()}
# Prefect finds a flow by the module and name of its function.
globals().update({flow.fn.__name__: flow for flow in FLOWS.values()})

__all__ = ["FLOWS", "run_stage"]
