"""The corpus report: what was read, what was taken away and why, and what went into the shards, on one page.

python -m evaluation.corpus_report --input ingest=DIR --input clean=DIR --input shard=DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from corpus.validation.drift import compare
from evaluation.config import CorpusReportConfig
from evaluation.pages.corpus import text_sections as text
from evaluation.pages.corpus import token_sections as tokens
from evaluation.pages.corpus.corpus import Corpus
from evaluation.pages.parts import Opening, render_page
from evaluation.pages.verdicts import Claim
from evaluation.pages.words import compact, count, language, percent, size
from evaluation.report import facts
from evaluation.results.pipeline import PipelineResults
from infra.io.json import read_own_json
from infra.run import Result, Run

FACTS = "facts.json"
PAGE = Path("aux") / "corpus_report.html"

TOKENS_A_PARAMETER = 20
"""Training tokens per parameter: Hoffmann et al. 2022 (Chinchilla), section 3."""
READINGS = 4
"""Number of readings of a text up to which it is almost as good as the same amount of new text (Muennighoff et al.
2023, section 5)."""
NAMED = 3


def corpus_report(config: CorpusReportConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write facts.json, the distributions that the next report is compared with, and aux/corpus_report.html.

    Args:
        inputs: the stages of the chain by id, any of which may be missing; `previous`, if there is one, is the last
            report of this pipeline, against which the page shows the drift. It affects only the page.
    """
    stages = {name: folder for name, folder in inputs.items() if name != "previous"}
    corpus = Corpus(stages)
    before = inputs["previous"] / FACTS if "previous" in inputs else None
    old = read_own_json(before) if before and before.exists() else None
    claims = []
    for id in corpus.artifacts:
        if verdict := corpus.json(id, "verdict.json"):
            expectations, suite = len(verdict["expectations"]), verdict["suite"]
            met = sum(expectation["success"] for expectation in verdict["expectations"])
            message = f"{met} of {expectations} expectations hold of {verdict['rows']:,} rows (suite {suite})"
            claims.append(Claim("holds" if verdict["success"] else "fails", id.replace("_", " "), message))
    sections = [
        text.sources(corpus),
        text.funnel(corpus),
        text.rules(corpus),
        text.personal_data(corpus),
        text.duplicates(corpus),
        text.duplicates(corpus, "semantic_dedupe"),
        text.contamination(corpus),
        text.languages_and_lengths(corpus),
        tokens.mixture(corpus),
        tokens.tokenizer(corpus),
        tokens.shards(corpus),
        tokens.drifted(compare(old, corpus.facts)),
    ]
    fact_rows = [(name, value) for name, value in facts(PipelineResults(stages)) if name != "models"]
    page = render_page(config.title or "Corpus", "corpus report", fact_rows, sections, claims, opening(corpus))
    (out_dir / PAGE).parent.mkdir(exist_ok=True)
    (out_dir / PAGE).write_text(page, encoding="utf-8")
    (out_dir / FACTS).write_text(json.dumps(corpus.facts, indent=1) + "\n", encoding="utf-8")
    run.progress(1, 1, "pages")
    documents, text_bytes = corpus.totals(corpus.chain[-1]) if corpus.chain else (0, 0)
    figures = {"documents": documents, "text_bytes": text_bytes}
    return Result(figures, f"{documents:,} documents, {text_bytes / 1e6:.1f} MB after {len(corpus.chain)} stages")


def opening(corpus: Corpus) -> Opening | None:
    """Return the amount of text and tokens, its languages, and the size of model that it suits.

    None if no documents are among the stages.
    """
    if not corpus.chain:
        return None
    documents, text_bytes = corpus.totals(corpus.chain[-1])
    meta = corpus.json("shard", "meta.json")
    sentences = []
    if meta:
        tokens = meta["train_tokens"]
        sentences.append(
            f"{tokens:,} tokens to train on and {meta['validation_tokens']:,} to validate with, at "
            f"{meta['train_bytes'] / tokens:.2f} bytes per token."
        )
        once = tokens / TOKENS_A_PARAMETER
        sentences.append(
            f"That fits a model of about {compact(once)} parameters by Chinchilla's {TOKENS_A_PARAMETER} tokens per "
            f"parameter, or of {compact(READINGS * once)} where the text is read {READINGS} times, beyond which "
            "repeating helps little (Muennighoff et al. 2023)."
        )
    remaining = f"{count(documents, 'document')} with {size(text_bytes)} of text{_languages(corpus)}"
    read, read_bytes = corpus.totals(corpus.chain[0])
    share = (
        f", {percent(text_bytes / read_bytes)} of the {size(read_bytes)} that were read" if read and read_bytes else ""
    )
    sentences.append(f"They come from {remaining}{share}." if meta else f"{remaining}{share}.")
    return Opening(sentences)


def _languages(corpus: Corpus) -> str:
    languages = list(corpus.languages.items())
    if not languages:
        return " in an unnamed language"
    labels = [language(code) + ("" if share > 0.995 else f" ({percent(share)})") for code, share in languages[:NAMED]]
    suffix = f" and {len(languages) - NAMED} more" if len(languages) > NAMED else ""
    return f" in {', '.join(labels)}{suffix}"


if __name__ == "__main__":
    from infra.alone import main

    main(corpus_report, CorpusReportConfig)
