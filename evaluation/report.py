"""The report stage: one self-contained page about the whole pipeline.

python -m evaluation.report --input pretrain=DIR --input sft=DIR --out OUT
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.config import ReportConfig
from infra.run import Result, Run

if TYPE_CHECKING:
    from evaluation.page.family import Family

TEMPLATES = Path(__file__).parent / "templates"


def report(config: ReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes report.html from the artifacts of a pipeline, by stage id; any of them may be missing.

    The page loads nothing from elsewhere, and shows model output as text, never as markup.
    """
    page, states = render(config, inputs)
    (out_dir / "report.html").write_text(page, encoding="utf-8")
    run.progress(1, 1, "pages")
    held = states.count("holds")
    figures = {"claims": float(len(states)), "claims_that_hold": float(held)}
    return Result(figures, f"{held} of {len(states)} claims hold" if states else "no claims to judge")


def render(config: ReportConfig, inputs: Mapping[str, Path]) -> tuple[str, list[str]]:
    """The page, and the state of each claim at its head."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from evaluation.page.family import Family
    from evaluation.page.sections import sections
    from evaluation.page.verdicts import claims

    family = Family(inputs)
    judged = claims(family)
    # No conditions: everything that is not Markup is escaped, whatever the template is called.
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html.j2").render(
        title=config.title or "Training report",
        kind="training report",
        facts=facts(family),
        claims=judged,
        sections=sections(family, config.samples, config.command),
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
    )
    return page + "\n", [claim.state for claim in judged]


def facts(family: Family) -> list[tuple[str, str]]:
    """The line under the title: models, stages, when and how long."""
    from evaluation.page.words import seconds

    manifests = [one.manifest for one in family.artifacts.values() if one.manifest]
    found = [("models", ", ".join(family.models) or "none"), ("stages", str(len(family.artifacts)))]
    if manifests:
        finished = max(manifest.finished for manifest in manifests)
        found.append(("built in", seconds(sum(manifest.seconds for manifest in manifests))))
        found.append(("last on", finished[:16].replace("T", " ") + " UTC"))
        commits = {str(manifest.code.get("commit") or "")[:10] for manifest in manifests} - {""}
        found.append(("code", ", ".join(sorted(commits)) or "not recorded"))
    return found


if __name__ == "__main__":
    from infra.alone import main

    main(report, ReportConfig)
