"""The corpus report: what was read, what was taken away and why, and what went into the shards, on one page.

python -m evaluation.corpus_report --input ingest=DIR --input clean=DIR --input shard=DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from corpus.validation.drift import compare
from evaluation.config import CorpusReportConfig
from evaluation.corpus_page import text_sections as text
from evaluation.corpus_page import token_sections as tokens
from evaluation.corpus_page.corpus import Corpus
from evaluation.corpus_page.opening import opening
from evaluation.page.parts import render_page
from evaluation.page.verdicts import Claim
from evaluation.pipeline_results import PipelineResults
from evaluation.report import facts
from infra.run import Result, Run

FACTS = "facts.json"
PAGE = Path("aux") / "corpus_report.html"


def corpus_report(config: CorpusReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes facts.json, the distributions that the next report is compared with, and aux/corpus_report.html.

    inputs: the stages of the chain by id, any of which may be missing; `previous`, where there is one, is the last
    report of this pipeline, against which the page shows the drift. It bears on nothing but the page.
    """
    stages = {name: folder for name, folder in inputs.items() if name != "previous"}
    corpus = Corpus(stages)
    before = inputs["previous"] / FACTS if "previous" in inputs else None
    old = json.loads(before.read_text(encoding="utf8")) if before and before.exists() else None
    claims = []
    for id in corpus.artifacts:
        if verdict := corpus.json(id, "verdict.json"):
            count, suite = len(verdict["expectations"]), verdict["suite"]
            held = sum(one["success"] for one in verdict["expectations"])
            message = f"{held} of {count} expectations hold of {verdict['rows']:,} rows (suite {suite})"
            claims.append(Claim("holds" if verdict["success"] else "fails", id.replace("_", " "), message))
    made = [
        text.sources(corpus),
        text.funnel(corpus),
        text.rules(corpus),
        text.personal_data(corpus),
        text.duplicates(corpus),
        text.contamination(corpus),
        text.languages_and_lengths(corpus),
        tokens.mixture(corpus),
        tokens.tokenizer(corpus),
        tokens.shards(corpus),
        tokens.drifted(compare(old, corpus.facts)),
    ]
    about = [(name, value) for name, value in facts(PipelineResults(stages)) if name != "models"]
    page = render_page(config.title or "Corpus", "corpus report", about, made, claims, opening(corpus))
    (out_dir / PAGE).parent.mkdir(exist_ok=True)
    (out_dir / PAGE).write_text(page, encoding="utf-8")
    (out_dir / FACTS).write_text(json.dumps(corpus.facts, indent=1) + "\n", encoding="utf-8")
    run.progress(1, 1, "pages")
    documents, text_bytes = corpus.totals(corpus.chain[-1]) if corpus.chain else (0, 0)
    figures = {"documents": documents, "text_bytes": text_bytes}
    return Result(figures, f"{documents:,} documents, {text_bytes / 1e6:.1f} MB after {len(corpus.chain)} stages")


if __name__ == "__main__":
    from infra.alone import main

    main(corpus_report, CorpusReportConfig)
