"""Each rule drops what it is for, says so, and lets the rest through."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from corpus.clean import clean
from corpus.config import CleanConfig, IngestConfig
from corpus.documents import read_documents
from corpus.ingest import ingest
from infra.errors import StageError

GOOD = (
    "The committee met on the first day of the month to discuss the plans that the town had made for the new bridge, "
    "and to hear from those who live beside the river."
)
BAD = {
    "drop_exact_duplicates": GOOD,
    "min_characters": "The end of it.",
    "max_characters": f"{GOOD} " * 8000,
    "mean_word_length": "the be to of " + "antidisestablishmentarianism " * 20,
    "min_alphabetic_word_share": "the of to and " + "12345 67890 " * 30,
    "max_symbol_word_ratio": GOOD + " #a #b #c" * 6,
    "max_bullet_line_share": "\n".join(f"- number {i} of the things that everybody has to do" for i in range(20)),
    "max_ellipsis_line_share": "\n".join(
        f"Sentence {i} of the long text that goes on with more words..." for i in range(20)
    ),
    "max_repeated_line_share": GOOD + "\n" + "the same of it\n" * 12,
    "max_repeated_line_character_share": "\n".join([f"{i} short" for i in range(10)] + [GOOD] * 2),
    "min_stop_words": "Colourless green ideas sleep furiously " * 5,
    "drop_lorem_ipsum": GOOD + " Lorem ipsum dolor sit amet, to be filled in with the words of the text.",
}


def ingested(build, write, texts):
    path = write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))


@pytest.mark.parametrize("rule", BAD)
def test_rule_drops_its_text_says_why_and_can_be_turned_off(build, write, rule):
    documents = ingested(build, write, [GOOD, BAD[rule]])
    out = build(clean, CleanConfig(), documents=documents)
    assert [document.text for document in read_documents(out)] == [GOOD]
    [dropped] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert dropped["rule"] == rule and dropped["text"] == BAD[rule] and dropped["paper"]
    assert not dropped["low"] <= dropped["value"] <= dropped["high"]
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["read"] == 2 and counts["kept"] == 1 and counts["dropped"][rule] == 1

    off = CleanConfig(**{name: False if name.startswith("drop_") else None for name in BAD})
    assert len(list(read_documents(build(clean, off, documents=documents)))) == 2


def test_each_rule_is_tried_alone(build, write):
    documents = ingested(build, write, [GOOD, *BAD.values()])
    out = build(clean, CleanConfig(), documents=documents)
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["dropped"] == dict.fromkeys(BAD, 1)
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())


def test_nothing_left_names_the_rule_that_took_most(build, write):
    documents = ingested(build, write, [BAD["min_characters"], "of the", BAD["min_stop_words"]])
    with pytest.raises(StageError, match=r"no document is left of 3; the rule min_characters \(at least 100\).*: 2"):
        build(clean, CleanConfig(), documents=documents)


def test_same_bytes_twice(build, documents, payload):
    first, second = (build(clean, CleanConfig(), documents=documents) for _ in range(2))
    assert payload(first) == payload(second)


def test_most_real_docstrings_stay(documents):
    counts = json.loads((documents / "aux" / "counts.json").read_text())
    assert counts["kept"] > 0.8 * counts["read"]
