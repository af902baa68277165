"""A round of feedback: answers are drawn, the run waits for people, and the pipeline learns from what they chose.

stemma feedback round configs/quickstart.yaml
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run, suspend_flow_run
from prefect.runtime import flow_run
from prefect.states import Failed, State

from evaluation.people.pairs import KEY, PREFERENCES, TIES, Export
from flows.config.forms import renamed
from flows.config.graph import Selection
from flows.config.pipeline_config import PipelineConfig, dump
from flows.config.read import load, parse
from flows.deployment.deploy import apply_deployment
from flows.feedback.gain import FEEDBACK, JUDGED, as_markdown, compare_round, pairs_of, rounds_of
from flows.prefect.execution import RUNNER, PipelineRun
from flows.prefect.schedules import Schedule, timing_by_now, timing_of
from flows.runs.journal import new_run_id
from infra.errors import ConfigError, Problem, StemmaError
from infra.project import root_of
from infra.run import Run
from infra.store.reference import opened
from infra.store.roots import shown_root
from infra.store.store import Store
from tasks.stages import STAGES

ROUND = "feedback-round"
"""Name in the deployment `<pipeline>/feedback-round`."""


@flow(name=ROUND, task_runner=RUNNER, persist_result=False)
def feedback_round(
    config_path: str,
    model: str = "rlhf",
    pairs: int = 100,
    temperature: float = 0.7,
    max_new_tokens: int = 256,
    wait_days: float = 30.0,
    root: str = "",
) -> State:
    """Draw two answers of a model per prompt, wait until they are judged, and run the pipeline with the pairs of this
    round and all before it among its preferences. The page then shows the model's gain.

    Args:
        config_path: of the pipeline, read when the round begins and again when it goes on.
        model: a step's newest artifact.
        wait_days: days without judgements after which the run fails.
    """
    try:
        config, store = load(Path(config_path), root=lambda: root_of(root)), Store(root_of(root))
        if problem := _no_preferences(config):
            raise ConfigError(problem)
        folder = _folder_of(store.root, flow_run.get_id() or new_run_id())
        if not (folder / KEY).exists():
            _draw(config, store, model, pairs, (temperature, max_new_tokens), folder)
            _tell_judges(folder, config_path)
    except StemmaError as error:
        return Failed(message=str(error))
    if not pairs_of(folder).exists():
        suspend_flow_run(timeout=round(wait_days * 24 * 3600))
    if not pairs_of(folder).exists():
        fix = f"stemma feedback import {folder} FILE …, then Retry"
        return Failed(message=f"no judgements of {folder} have come: {fix}")
    try:
        learning = with_feedback(config, store.root)
    except StemmaError as error:
        return Failed(message=str(error))
    run = PipelineRun(learning, Selection(), store, new_run_id(), False, config_path)
    state = run.run()
    if made := run.manifests.get(model):
        _tell_gain(store, folder, model, f"{made.stage}/{made.fingerprint}")
    return state


def with_feedback(config: PipelineConfig, root: Path) -> PipelineConfig:
    """The pipeline with the preference pairs and the ties of all its judged rounds. Each is a separate source, so that
    lineage records which round's labels a model learnt from. The reward model learns the share of votes for an
    answer."""
    data = dump(config)
    rounds = [
        {"kind": "files", "paths": paths, "prompt_field": "prompt", "votes_field": "votes"}
        for folder in rounds_of(config.name, root)
        if (paths := _judged_files(folder))
    ]
    data["preferences"] = {**data["preferences"], "read": [*data["preferences"]["read"], *rounds]}
    return parse(data)


def go_on(export: Export) -> str:
    """Resume the round that this export belongs to, where it waits; the id of its run, "" where none waits.

    Prefect's client must point at the server.
    """
    waiting = export.drawn.get("flow_run")
    if not waiting:
        return ""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(waiting).state
    if state is None or not state.is_paused():
        return ""
    resume_flow_run(waiting)
    return str(waiting)


def _no_preferences(config: PipelineConfig) -> Problem | None:
    if config.section("preferences") is not None:
        return None
    message = "a round adds pairs to the sources of the section preferences, and there is none"
    return Problem("missing_section", "preferences", message, "add preferences:, reward_model: and rlhf:")


def _folder_of(root: Path, run: str) -> Path:
    """Folder of a round, also when its run goes on. Its name is the round's time, by which rounds are ordered, and the
    beginning of the id of its flow run."""
    known = next((root / FEEDBACK).glob(f"*-{run[:8]}"), None)
    return known or root / FEEDBACK / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{run[:8]}"


def _judged_files(folder: Path) -> list[str]:
    """The files of a round with pairs in them: perhaps all of them were ties, or none was."""
    files = [folder / JUDGED / name for name in (PREFERENCES, TIES)]
    return [str(path) for path in files if path.exists() and path.stat().st_size]


def _draw(
    config: PipelineConfig, store: Store, model: str, pairs: int, sampling: tuple[float, int], folder: Path
) -> None:
    from training.generation.candidates import CandidateSampling, prompts_of_both_sides, write_export

    models = [name for name, stage in STAGES.items() if stage.makes == "model"]
    model_folder = opened(store, model, models)[0]
    noted: dict[str, Any] = {"pipeline": config.name, "flow_run": flow_run.get_id()}
    # Each round asks other prompts.
    drawing = CandidateSampling(*sampling, seed=config.seed + len(list((store.root / FEEDBACK).glob("*"))))
    work = Run(store.root / ".work" / FEEDBACK)
    write_export({model: model_folder}, prompts_of_both_sides(store.root), pairs, drawing, folder, work, **noted)


def _tell_judges(folder: Path, config_path: str) -> None:
    text = f"""# Answers wait to be judged

Open `{folder / "judge.html"}` in a browser, or import `{folder / "tasks.json"}` into Label Studio. When the files of
judgements have come back:

    stemma feedback import {folder} FILE …

This goes on with the round; so does **Resume** here, after `import --wait`. It then runs `{config_path}` with the
pairs.
"""
    create_markdown_artifact(text, key="judge", description="Answers to judge")


def _tell_gain(store: Store, folder: Path, model: str, after: str) -> None:
    """Shows in the page what the round gained. A failure to show it is no failure of the round, which has ended."""
    try:
        text = as_markdown(compare_round(store, folder, model, after))
        create_markdown_artifact(text, key="round", description="Gain of the round")
    except Exception as error:
        get_run_logger().warning(f"the gain of the round could not be measured: {type(error).__name__}: {error}")


def deploy_feedback(
    config: PipelineConfig, root: Path, config_path: str, schedule: Schedule | None = None, **parameters: Any
) -> UUID:
    """Makes or updates `<pipeline>/feedback-round`. parameters: of `flows.feedback.round.feedback_round`."""
    timing = timing_of(schedule) if schedule else timing_by_now(f"{config.name}/{ROUND}")
    message = "Draws answers, waits until people have judged them, and trains on what they chose."
    flow = renamed(feedback_round, config.name)
    given = {**parameters, "config_path": str(Path(config_path).absolute()), "root": shown_root(root)}
    return apply_deployment(config, root, flow, ROUND, given, message, timing)
