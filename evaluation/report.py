"""The report stage: one self-contained page about the whole pipeline.

python -m evaluation.report --input pretrain=DIR --input sft=DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from evaluation.config import CLAIMS, ReportConfig
from evaluation.pages.parts import Section, render_page
from evaluation.pages.report.alignment_sections import alignment, distillation, preference_tuning
from evaluation.pages.report.answer_sections import answers, answers_over_training
from evaluation.pages.report.benchmark_sections import benchmarks
from evaluation.pages.report.branch_sections import branches
from evaluation.pages.report.failure_section import failure_classes
from evaluation.pages.report.logbook_section import logbook
from evaluation.pages.report.mitigation_section import mitigations
from evaluation.pages.report.opening import opening
from evaluation.pages.report.origin_sections import data, lineage, reproduce, stages
from evaluation.pages.report.planned_section import planned, profiles
from evaluation.pages.report.safety_sections import bias, memorisation
from evaluation.pages.report.toxicity_section import toxicity
from evaluation.pages.report.training_sections import pretraining, reward_model, tuning
from evaluation.pages.verdicts import Claim, claims
from evaluation.pages.words import seconds
from evaluation.results.pipeline import PipelineResults
from infra.run import Result, Run


def report(config: ReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write report.html from the artifacts of a pipeline, by stage id; any of them may be missing.

    The page loads no external resources, and shows model output as text, never as markup.
    """
    page, judged = render(config, inputs)
    states = [claim.state for claim in judged]
    (out_dir / "report.html").write_text(page, encoding="utf-8")
    rows = [{"state": claim.state, "sign": claim.sign, "title": claim.title, "text": claim.text} for claim in judged]
    (out_dir / CLAIMS).parent.mkdir(exist_ok=True)
    (out_dir / CLAIMS).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
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
    page_sections = sections(pipeline, config.samples, config.command)
    title = config.title or "Training report"
    page = render_page(title, "training report", facts(pipeline), page_sections, judged, opening(pipeline))
    return page, judged


def facts(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return the line under the title: models, stages, time and duration."""
    manifests = [artifact.manifest for artifact in pipeline.artifacts.values() if artifact.manifest]
    rows = [("models", ", ".join(pipeline.models) or "none"), ("stages", str(len(pipeline.artifacts)))]
    if manifests:
        finished = max(manifest.finished for manifest in manifests)
        rows.append(("stages' times added up", seconds(sum(manifest.seconds for manifest in manifests))))
        if len({manifest.run_id for manifest in manifests}) == 1:
            first = min(manifest.started for manifest in manifests)
            elapsed = datetime.fromisoformat(finished) - datetime.fromisoformat(first)
            rows.append(("first to last", seconds(elapsed.total_seconds())))
        rows.append(("last on", finished[:16].replace("T", " ") + " UTC"))
        commits = {str(manifest.code.get("commit") or "")[:10] for manifest in manifests} - {""}
        rows.append(("code", ", ".join(sorted(commits)) or "not recorded"))
    return rows


def sections(pipeline: PipelineResults, samples: int, command: str) -> list[Section]:
    """Return every section that is not empty, in reading order."""
    candidates = [
        *(pretraining(pipeline, id) for id in pipeline.steps("pretrain")),
        *_tunings(pipeline),
        *(preference_tuning(pipeline, id) for id in pipeline.steps("preference_tuning")),
        *(distillation(pipeline, id) for id in pipeline.steps("distill")),
        *(alignment(pipeline, id) for id in pipeline.steps("rlhf")),
        branches(pipeline),
        benchmarks(pipeline),
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
        planned(pipeline),
        profiles(pipeline),
        lineage(pipeline),
        reproduce(pipeline, command),
    ]
    return [section for section in candidates if section]


def _tunings(pipeline: PipelineResults) -> list[Section]:
    """Return the usual tuning with the usual reward model in one section, and each named step in a separate one."""
    tunings, rewards = pipeline.steps("sft"), pipeline.steps("reward_model")
    tuning_sections = [tuning(pipeline, "sft", "reward_model")]
    tuning_sections += [tuning(pipeline, id) for id in tunings if id != "sft"]
    return [*tuning_sections, *(reward_model(pipeline, id) for id in rewards if id != "reward_model")]


if __name__ == "__main__":
    from infra.alone import main

    main(report, ReportConfig)
