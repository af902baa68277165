"""Public data sets, read as they are: books, an encyclopedia, instructions, preferences."""

from __future__ import annotations

import json

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig, ValidateConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.instructions import instructions
from corpus.preferences import preferences
from corpus.validate import validate


def test_novels_in_latin_1_are_cut_validated_and_mostly_kept(build, real_data):
    path = f"{real_data('nltk_gutenberg')}/c*.txt"
    source = {"kind": "files", "paths": [path], "encoding": "latin-1", "cut_characters": 3000}
    documents = build(ingest, IngestConfig(read=[source]))
    build(validate, ValidateConfig(), data=documents)
    # Dialogue: every quotation mark is a word without a letter.
    config = CleanConfig(gopher_quality={"min_alphabetic_word_share": 0.7})
    kept = list(read_documents(build(clean, config, documents=documents)))
    total = sum(1 for _ in read_documents(documents))
    assert {document.source for document in kept} == {
        "files/carroll-alice.txt",
        "files/chesterton-ball.txt",
        "files/chesterton-brown.txt",
        "files/chesterton-thursday.txt",
    }
    assert total > 350 and len(kept) > 0.98 * total


def test_wikitext_is_cut_into_documents(build, real_data):
    source = {"kind": "files", "paths": [real_data("wikitext2")], "cut_characters": 3000}
    documents = list(read_documents(build(ingest, IngestConfig(read=[source]))))
    assert len(documents) > 500
    assert sum(len(document.text) for document in documents) == pytest.approx(2_850_000, rel=0.03)


def test_instruction_file_of_a_book(build, real_data, lines_of):
    source = {"kind": "files", "paths": [f"{real_data('rasbt_sft_dpo')}/ch07/01*/*.json"]}
    out = build(instructions, InstructionsConfig(read=[source]))
    build(validate, ValidateConfig(), data=out)
    counts = json.loads((out / "aux" / "counts.json").read_text())
    kept = len(lines_of(out / "train.jsonl")) + len(lines_of(out / "heldout.jsonl"))
    # Prompts that differ in a word stand on one side alone.
    near = counts["near_heldout"] + counts["near_train"]
    assert kept + near == 1100 and near < 11


def test_preference_file_of_a_book(build, real_data, lines_of):
    source = {"kind": "files", "paths": [f"{real_data('rasbt_sft_dpo')}/ch07/04*/*.json"]}
    out = build(preferences, PreferencesConfig(read=[source]))
    build(validate, ValidateConfig(), data=out)
    kept = len(lines_of(out / "train.jsonl")) + len(lines_of(out / "heldout.jsonl"))
    counts = json.loads((out / "aux" / "counts.json").read_text())
    [source] = counts["sources"]
    # Six pairs have two answers that are the same; prompts that differ in a word stand on one side alone.
    near = counts["near_heldout"] + counts["near_train"]
    assert (kept + near, source["read"], source["quarantined"]) == (1094, 1094, 6) and near < 11


def test_helpful_and_harmless_dialogues(build, real_data, lines_of):
    source = {"kind": "files", "paths": [real_data("hh_rlhf")], "dialogue": True}
    out = build(preferences, PreferencesConfig(read=[source]))
    build(validate, ValidateConfig(), data=out)
    [counts] = json.loads((out / "aux" / "counts.json").read_text())["sources"]
    assert counts["read"] + counts["quarantined"] == 2312 and counts["quarantined"] < 10
    train, heldout = (lines_of(out / f"{side}.jsonl") for side in ("train", "heldout"))
    first_turns = [
        {pair["prompt"].split("\n\n")[0].removeprefix("Human: ") for pair in side} for side in (train, heldout)
    ]
    assert not first_turns[0] & first_turns[1]
