"""The corpus report: right numbers, nothing from the web, drift against the last one that affects nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig, ShardConfig, TokenizerConfig, ValidateConfig
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.ingest import ingest
from corpus.shard import shard
from corpus.tokenizer import tokenizer
from corpus.validate import validate
from evaluation.config import CorpusReportConfig
from evaluation.corpus_report import corpus_report
from evaluation.pages.words import compact
from infra.run import Run
from tests.conftest import built_once

TEXT = (
    "The post came late to the village of number {0}, and with it the news that the bridge had gone, that the river "
    "would have to be crossed by boat, and that {1} people had been seen on the other side, who waited for the ferry. "
    "Nobody could say to whom the boat number {0} belonged. Write to keeper{0}@letters.org for an answer, said a sign. "
)


STAGES = ("ingest", "validate", "clean", "dedupe", "validate_clean", "tokenizer", "shard")


@pytest.fixture(scope="session")
def chain(session_folder: Path) -> dict[str, Path]:
    """Letters with personal data, each tenth one twice, and lists that no rule keeps. Built once for all test workers,
    also for tests/browser/test_reading.py. Read only."""
    folder = session_folder / "corpus-chain"
    with built_once(folder) as is_first:
        if is_first:
            _build_chain(folder)
    return {stage: folder / stage for stage in STAGES}


def _build_chain(folder: Path) -> None:
    letters = [TEXT.format(i, i * 7919) for i in range(120)]
    for name, texts in (("letters", letters + letters[::10]), ("lists", [f"{i} <script>{i}" for i in range(30)])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    read = [
        {"kind": "files", "name": name, "paths": [str(folder / f"{name}.jsonl")], "licence": licence, "language": "en"}
        for name, licence in (("letters", "CC0-1.0"), ("lists", ""))
    ]
    made = {stage: folder / stage for stage in STAGES}

    def build(id: str, function, config, **inputs: Path) -> None:
        made[id].mkdir()
        function(config, inputs, made[id], Run(folder / "work" / id))

    build("ingest", ingest, IngestConfig(read=read))
    build("validate", validate, ValidateConfig(documents={"min_language_like_share": 0}), data=made["ingest"])
    loose = {"gopher_repetition": None, "gopher_quality": {"min_words": 20}}
    build("clean", clean, CleanConfig.model_validate(loose), documents=made["ingest"])
    build("dedupe", dedupe, DedupeConfig(near=None), documents=made["clean"])
    build("validate_clean", validate, ValidateConfig(kind="clean"), data=made["dedupe"])
    build("tokenizer", tokenizer, TokenizerConfig(vocab_size=350), documents=made["dedupe"])
    build("shard", shard, ShardConfig(sequence_length=32), documents=made["dedupe"], tokenizer=made["tokenizer"])


def report(chain: dict[str, Path], out: Path, **more: Path) -> str:
    out.mkdir()
    corpus_report(CorpusReportConfig(title="letters"), {**chain, **more}, out, Run(out.parent / "work"))
    return (out / "aux" / "corpus_report.html").read_text()


def cells(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]


def test_numbers_are_those_of_the_stages(chain: dict[str, Path], tmp_path: Path) -> None:
    page = report(chain, tmp_path / "out")
    rows = cells(page)
    letters = next(row for row in rows if row and row[0] == "letters" and "CC0-1.0" in row)
    assert letters[3] == "132" and letters[6] == "120"
    lists = next(row for row in rows if row and row[0] == "lists")
    assert lists[1] == "unstated" and lists[6] == "0"
    funnel = {row[0]: row[1] for row in rows if row and row[0] in ("ingest", "clean", "dedupe") and len(row) == 5}
    assert funnel["ingest"] == "162" and ["ingest", "162"] in [row[:2] for row in rows]
    assert ["clean", "132"] in [row[:2] for row in rows] and ["dedupe", "120"] in [row[:2] for row in rows]
    assert ["personal data.email", "132"] in rows
    meta = json.loads((chain["shard"] / "meta.json").read_text())
    opening = page[page.index('<div class="opening">') : page.index('<div class="claims">')]
    assert f"{meta['train_tokens']:,} tokens to train on" in opening
    assert f"a model of about {compact(meta['train_tokens'] / 20)} parameters" in opening
    assert "120 documents" in opening and "in English" in opening


def test_a_dropped_document_has_its_value_the_threshold_and_the_key_that_loosens_it(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    page = report(chain, tmp_path / "out")
    rule = next(row for row in cells(page) if row and row[0] == "min characters")
    assert rule[1:5] == ["30", "18.52 %", "≥ 100", "clean.min_characters"]
    assert re.search(r"<summary>lists[^<]*: \d+, needs ≥ 100: clean.min_characters</summary>", page)


def test_the_page_needs_nothing_from_elsewhere_and_shows_text_as_text(chain: dict[str, Path], tmp_path: Path) -> None:
    page = report(chain, tmp_path / "out")
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert page.count("<svg") >= 5


def test_any_stage_may_be_missing(chain: dict[str, Path], tmp_path: Path) -> None:
    for number, names in enumerate((["ingest"], ["ingest", "clean"], ["ingest", "shard", "tokenizer"])):
        page = report({name: chain[name] for name in names}, tmp_path / str(number))
        assert "132" in page


def test_drift_is_shown_against_the_last_report_and_changes_no_payload(chain: dict[str, Path], tmp_path: Path) -> None:
    first = report(chain, tmp_path / "first")
    assert "no earlier report" in first
    facts = json.loads((tmp_path / "first" / "facts.json").read_text())
    facts["language, at the end"] = {"de": 90.0, "en": 30.0}
    (tmp_path / "first" / "facts.json").write_text(json.dumps(facts))
    second = report(chain, tmp_path / "second", previous=tmp_path / "first")
    row = next(row for row in cells(second) if row and row[0] == "language, at the end")
    assert row[1] == "large" and {row[5], row[6]} in ({"75.0 %", "0.0 %"}, {"25.0 %", "100.0 %"})
    report(chain, tmp_path / "alone")
    assert (tmp_path / "alone" / "facts.json").read_bytes() == (tmp_path / "second" / "facts.json").read_bytes()
