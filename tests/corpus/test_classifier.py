"""The quality classifier learns good from bad sources, says how well, and keeps by its rule."""

from __future__ import annotations

import json
import random

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError

OFF = {"min_characters": None, "gopher_quality": None, "gopher_repetition": None, "personal_data": None}
PROSE = "the a river town bridge council paper letter history study because therefore however described measured"
SPAM = "buy cheap now click here free offer winner casino pills discount limited deal subscribe the a"


def texts(words, count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(words.split(), k=60)) for _ in range(count)]


@pytest.fixture
def documents(build, write):
    def source(name, rows):
        path = write(f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in rows))
        return {"kind": "files", "name": name, "paths": [path]}

    mixed = texts(SPAM, 150, 1) + texts(PROSE, 50, 2)
    return build(ingest, IngestConfig(read=[source("books", texts(PROSE, 200, 3)), source("crawl", mixed)]))


def kept_of_crawl(out):
    kept = [document.text for document in read_documents(out) if document.source.startswith("crawl")]
    spam = sum("casino" in text for text in kept)
    return spam, len(kept) - spam


def test_threshold_keeps_what_looks_good(build, documents, payload):
    config = CleanConfig(**OFF, classifier={"good": ["books"], "bad": ["crawl"], "keep": "threshold"})
    out = build(clean, config, documents=documents)
    spam, prose = kept_of_crawl(out)
    assert spam == 0 and prose >= 40
    assert sum(document.source.startswith("books") for document in read_documents(out)) == 200
    learned = json.loads((out / "aux" / "counts.json").read_text())["classifier"]
    assert learned["classifier_examples"] == 400 and 0.8 < learned["classifier_heldout_accuracy"] <= 1
    assert "classifier/model.safetensors" in payload(out)
    assert payload(out) == payload(build(clean, config, documents=documents))


def test_pareto_keeps_most_of_the_good_and_some_of_the_bad(build, documents):
    def kept(alpha):
        section = {"good": ["books"], "bad": ["crawl"], "alpha": alpha}
        return kept_of_crawl(build(clean, CleanConfig(**OFF, classifier=section), documents=documents))

    # A draw is above 1 - score with probability (2 - score)^-alpha: 0.002 for a score of 0 and an alpha of 9.
    assert kept(9)[0] < 10 < kept(1)[0] < 110


def test_missing_sources_are_named(build, documents):
    config = CleanConfig(**OFF, classifier={"good": ["novels"], "bad": ["crawl"]})
    with pytest.raises(StageError, match=r"sources novels; there are books \(200\), crawl \(200\)"):
        build(clean, config, documents=documents)
