"""Texts for people in the MLflow page: names, tags and descriptions of runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from infra.lineage.messages import PipelineStarted, StageFinished, StageStarted
from infra.project import user_name
from infra.store.measurements import figures_by_step

# Without it the page shows what belongs to chatbots instead of training.
VIEW = "?workflowType=machine_learning"
MAX_VALUE = 6000
MAX_NOTE = 8000
MAX_DESCRIPTION = 5000  # of a version in the registry; PostgreSQL takes no more
NOT_IN_A_SLUG = re.compile(r"[^\w\-.]+")


def pipeline_name(message: PipelineStarted) -> str:
    """Return the name of a run, `quickstart 2026-11-21 06:50 UTC`, or the name that it was given."""
    return message.name or f"{message.pipeline} {datetime.fromtimestamp(message.time, UTC):%Y-%m-%d %H:%M} UTC"


def stage_name(message: StageStarted) -> str:
    """Return the name of a stage, `sft 3f9c2a41`: the stage, and the beginning of the address of what it makes."""
    return f"{message.stage} {message.fingerprint[:8]}"


def pipeline_tags(message: PipelineStarted) -> dict[str, str]:
    return _kept(
        {
            **message.tags,
            "stemma.build_id": message.build_id,
            "stemma.pipeline": message.pipeline,
            "stemma.kind": "pipeline",
            **_flow(message),
        }
    )


def stage_tags(message: StageStarted) -> dict[str, str]:
    return _kept(
        {
            **message.tags,
            "stemma.build_id": message.build_id,
            "stemma.pipeline": message.pipeline,
            "stemma.pipeline_build_id": message.parent_id,
            "stemma.kind": "stage",
            "stemma.stage": message.stage,
            "stemma.stage_version": str(message.version),
            "stemma.fingerprint": message.fingerprint,
            "stemma.commit": message.commit,
            "stemma.dirty": str(message.dirty).lower(),
            "stemma.lock": message.lock,
            "stemma.host": message.host,
            "stemma.device": message.device,
            # Shown by the page as the run's version.
            "mlflow.source.git.commit": message.commit,
            **_flow(message),
            **{f"stemma.input.{item.name}": f"{item.stage}@{item.digest}" for item in message.inputs},
        }
    )


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """The config as dotted keys and short texts: {"model.width": "256", "sources": '["a.txt"]'}."""
    return {key[:250]: _text(value) for key, value in _flat(config, "")}


def measured(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a stage that have an interval, without counts, settings and bounds."""
    return {name: value for name, value in figures.items() if f"{name}_low" in figures and f"{name}_high" in figures}


def pipeline_figures(steps: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures by which pipeline runs are compared, as `step.figure`: those measured in each step."""
    by_step = figures_by_step(steps)
    return {f"{step}.{name}": value for step, figures in by_step.items() for name, value in measured(figures).items()}


def pipeline_note(about: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], url_of: Mapping[str, str]) -> str:
    """A table of the stages, each with a link to the run that built it.

    Args:
        url_of: build_id to address in the page.
    """
    lines = [f"Pipeline **{about['pipeline']}**"]
    if about.get("flow_run_url"):
        lines[0] += f", [its flow run in Prefect]({about['flow_run_url']})"
    if rows:
        lines += ["", "| stage | | key figure | seconds |", "| --- | --- | --- | --- |"]
    for stage, row in rows.items():
        url = url_of.get(row.get("build_id", ""))
        name = f"[{stage}]({url})" if url else stage
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        lines.append(f"| {name} | {row.get('outcome', '')} | {_cell(row.get('headline', ''))} | {seconds} |")
    return "\n".join(lines)[:MAX_NOTE]


def stage_note(about: Mapping[str, Any], parent_url: str | None, finished: StageFinished | None) -> str:
    lines = []
    if finished and finished.headline:
        lines.append(f"**{finished.headline}**")
    if finished and finished.error:
        lines.append(f"Failed: {finished.error}")
    if finished and finished.output:
        lines.append(f"Artifact `{finished.output.path}`, digest `{finished.output.digest}`")
    links = [f"[its pipeline]({parent_url})"] if parent_url else []
    if about.get("flow_run_url"):
        links.append(f"[its run in Prefect]({about['flow_run_url']})")
    lines.append(f"Stage **{about['stage']}** of pipeline **{about['pipeline']}**: {', '.join(links) or 'alone'}")
    return "\n\n".join(lines)[:MAX_NOTE]


def description(headline: str, card: str) -> str:
    """Return the registry's description of a version: the headline, and the card as Markdown without front matter."""
    text = card.split("---\n", 2)[-1] if card.startswith("---\n") else card
    full_text = "\n\n".join(filter(None, [f"**{headline}**" if headline and card else headline, text.strip()]))
    if len(full_text) <= MAX_DESCRIPTION:
        return full_text
    notice = "\n\n… The rest is in README.md among the model's files."
    kept = full_text[: MAX_DESCRIPTION - len(notice)]
    # Cut before a section, so that no table or block of code stays open.
    return kept[: kept.rfind("\n## ")].rstrip() + notice if "\n## " in kept else kept.rstrip() + notice


def run_path(experiment_id: str, run_id: str, file: str = "") -> str:
    """The address of a run, or of a file that lies among its artifacts, within the page, wherever its server is."""
    below = f"/artifacts/{file}" if file else ""
    return f"#/experiments/{experiment_id}/runs/{run_id}{below}{VIEW}"


def slug(text: str) -> str:
    """Return a name that is valid in folders and addresses."""
    return NOT_IN_A_SLUG.sub("-", text).strip("-.") or "pipeline"


def _flow(message: PipelineStarted | StageStarted) -> dict[str, str]:
    return {
        "prefect.flow_run_id": message.flow_run_id,
        "prefect.flow_run_url": message.flow_run_url,
        "mlflow.source.name": f"stemma run ({message.pipeline})",
        "mlflow.source.type": "JOB",
        "mlflow.user": user_name(),
    }


def _kept(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if value}


def _flat(value: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            pairs += _flat(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", item))
    return pairs


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
