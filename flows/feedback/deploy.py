"""The deployment of a pipeline's rounds of feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from flows.config.forms import renamed
from flows.config.read import PipelineConfig
from flows.deployment.deploy import apply_deployment
from flows.feedback.round import ROUND, feedback_round
from flows.prefect.schedules import Schedule, timing_by_now, timing_of
from infra.store.roots import shown_root


def deploy_feedback(
    config: PipelineConfig, root: Path, config_path: str, schedule: Schedule | None = None, **parameters: Any
) -> UUID:
    """Make or update `<pipeline>/feedback-round`.

    Args:
        parameters: of `flows.feedback.round.feedback_round`.
    """
    timing = timing_of(schedule) if schedule else timing_by_now(f"{config.name}/{ROUND}")
    message = "Draws answers, waits until people have judged them, and trains on their choices."
    flow = renamed(feedback_round, config.name)
    given = {**parameters, "config_path": str(Path(config_path).absolute()), "root": shown_root(root)}
    return apply_deployment(config, root, flow, ROUND, given, message, timing)
