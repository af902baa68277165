"""The report stage: one self-contained page about the whole pipeline.

python -m evaluation.report --input pretrain=DIR --input sft=DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from evaluation.config import CLAIMS, FIRST_SCREEN, ReportConfig
from evaluation.pages.parts import Figure, Opening, Section, render_page
from evaluation.pages.report.benchmarks.answer_sections import answers, answers_over_training
from evaluation.pages.report.benchmarks.benchmark_sections import benchmarks
from evaluation.pages.report.benchmarks.failure_section import failure_classes
from evaluation.pages.report.benchmarks.needle_section import needle
from evaluation.pages.report.branch_sections import branches
from evaluation.pages.report.opening import opening
from evaluation.pages.report.origin_sections import data, lineage, reproduce, stages
from evaluation.pages.report.safety.mitigation_section import mitigations
from evaluation.pages.report.safety.safety_sections import bias, memorisation
from evaluation.pages.report.safety.toxicity_section import toxicity
from evaluation.pages.report.training.alignment_sections import alignment, distillation, preference_tuning
from evaluation.pages.report.training.cost_section import cost, ettr_of
from evaluation.pages.report.training.logbook_section import logbook
from evaluation.pages.report.training.planned_section import planned, profiles
from evaluation.pages.report.training.training_sections import averaging, pretraining, reward_model, tuning
from evaluation.pages.verdicts import Claim, claims
from evaluation.pages.words import seconds
from evaluation.results.pipeline import PipelineResults
from infra.run import Result, Run


def report(config: ReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write report.html from the artifacts of a pipeline, by stage id; any of them may be missing.

    The page loads no external resources, and shows model output as text, never as markup.
    """
    pipeline = PipelineResults(inputs)
    judged = claims(pipeline)
    first_screen = opening(pipeline, judged)
    page = _page(config, pipeline, judged, first_screen, len(inputs))
    states = [claim.state for claim in judged]
    (out_dir / "report.html").write_text(page, encoding="utf-8")
    rows = [{"state": claim.state, "sign": claim.sign, "title": claim.title, "text": claim.text} for claim in judged]
    (out_dir / CLAIMS).parent.mkdir(exist_ok=True)
    (out_dir / CLAIMS).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if first_screen is not None:
        shown = {
            "key_figures": [asdict(figure) for figure in first_screen.key_figures],
            "samples": list(first_screen.samples),
        }
        (out_dir / FIRST_SCREEN).write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    run.progress(1, 1, "pages")
    holding = states.count("holds")
    figures = {"claims": float(len(states)), "claims_that_hold": float(holding)}
    figures["claims_that_hold_slightly"] = float(slight := states.count("slight"))
    headline = f"{holding} of {len(states)} claims hold" + (f", {slight} more by a little" if slight else "")
    return Result(figures, headline if states else "no claims to judge")


def render(config: ReportConfig, inputs: Mapping[str, Path]) -> tuple[str, list[Claim]]:
    """Return the page, and the claims at its head."""
    pipeline = PipelineResults(inputs)
    judged = claims(pipeline)
    return _page(config, pipeline, judged, opening(pipeline, judged), len(inputs)), judged


def _page(
    config: ReportConfig, pipeline: PipelineResults, judged: list[Claim], first_screen: Opening | None, step_count: int
) -> str:
    page_sections = sections(pipeline, config.samples, config.command)
    if first_screen and first_screen.chart:
        page_sections = [_without_chart(section, first_screen.chart) for section in page_sections]
    title = config.title or "Training report"
    # The report itself is a stage of the run too.
    rows = facts(pipeline, step_count + 1)
    return render_page(title, "training report", rows, page_sections, judged, first_screen)


def facts(pipeline: PipelineResults, stage_count: int | None = None) -> list[tuple[str, str]]:
    """Return the line under the title: models, stages, time and duration.

    Args:
        stage_count: number of stages, by default that of the artifacts.
    """
    manifests = [artifact.manifest for artifact in pipeline.artifacts.values() if artifact.manifest]
    rows = [("models", ", ".join(pipeline.models) or "none"), ("stages", str(stage_count or len(pipeline.artifacts)))]
    if manifests:
        finished = max(manifest.finished for manifest in manifests)
        rows.append(("sum of stage times", seconds(sum(manifest.seconds for manifest in manifests))))
        if len({manifest.run_id for manifest in manifests}) == 1:
            first = min(manifest.started for manifest in manifests)
            elapsed = datetime.fromisoformat(finished) - datetime.fromisoformat(first)
            rows.append(("elapsed", seconds(elapsed.total_seconds())))
        if ettr := ettr_of(pipeline):
            rows.append(("effective time (ETTR)", ettr))
        rows.append(("finished", finished[:16].replace("T", " ") + " UTC"))
        finished_by = {str(manifest.code.get("commit") or "")[:10]: manifest.finished for manifest in manifests}
        commits = sorted(finished_by.keys() - {""}, key=lambda commit: finished_by[commit], reverse=True)
        others = f" and {len(commits) - 1} earlier commits" if len(commits) > 2 else ""
        rows.append(("code", ", ".join(commits[: 1 if others else 2]) + others or "not recorded"))
    return rows


def sections(pipeline: PipelineResults, samples: int, command: str) -> list[Section]:
    """Return every section that is not empty, in reading order."""
    candidates = [
        *(pretraining(pipeline, id) for id in pipeline.steps("pretrain")),
        *(averaging(pipeline, id) for id in pipeline.steps("average")),
        *_tunings(pipeline),
        *(preference_tuning(pipeline, id) for id in pipeline.steps("preference_tuning")),
        *(distillation(pipeline, id) for id in pipeline.steps("distill")),
        *(alignment(pipeline, id) for id in pipeline.steps("rlhf")),
        branches(pipeline),
        benchmarks(pipeline),
        *(needle(pipeline, id) for id in pipeline.steps("needle")),
        failure_classes(pipeline),
        answers(pipeline, samples),
        answers_over_training(pipeline),
        toxicity(pipeline),
        bias(pipeline),
        memorisation(pipeline),
        *(mitigations(pipeline, id) for id in pipeline.steps("mitigations")),
        data(pipeline),
        stages(pipeline),
        logbook(pipeline),
        cost(pipeline),
        planned(pipeline),
        profiles(pipeline),
        lineage(pipeline),
        reproduce(pipeline, command),
    ]
    return [_compact(section) for section in candidates if section]


def _without_chart(section: Section, shown: Figure) -> Section:
    """Return the section without a chart that the first screen shows; its caption is kept, further charts fold."""
    figures = [figure for figure in section.figures if figure.svg != shown.svg]
    if len(figures) == len(section.figures):
        return section
    captions = [f"{figure.means} {figure.weak}" for figure in section.figures if figure.svg == shown.svg]
    lead = " ".join([section.lead, *captions]).strip()
    if len(figures) == 1:
        return replace(section, lead=lead, figures=(), folded_figures=figures)
    return replace(section, lead=lead, figures=figures)


CLOSED = {
    "samples", "over-training", "memorisation", "mitigations", "stages", "logbook", "cost", "planned", "profile",
    "lineage", "reproduce", "branches", "failures", "reward-model",
}  # fmt: skip
"""Sections that show their title only until they are opened, by the first part of their anchor."""


def _compact(section: Section) -> Section:
    """Return the section with its tables behind their titles if a chart shows the same figures, and closed if a reader
    needs it for a question only."""
    is_closed = any(section.id == name or section.id.startswith(f"{name}-") for name in CLOSED)
    tables = [replace(table, folded=bool(table.title)) for table in section.tables]
    return replace(section, closed=is_closed, tables=section.tables if is_closed else tables)


def _tunings(pipeline: PipelineResults) -> list[Section]:
    """Return the usual tuning with the usual reward model in one section, and each named step in a separate one."""
    tunings, rewards = pipeline.steps("sft"), pipeline.steps("reward_model")
    tuning_sections = [tuning(pipeline, "sft", "reward_model")]
    tuning_sections += [tuning(pipeline, id) for id in tunings if id != "sft"]
    return [*tuning_sections, *(reward_model(pipeline, id) for id in rewards if id != "reward_model")]


if __name__ == "__main__":
    from infra.alone import main

    main(report, ReportConfig)
