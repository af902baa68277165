"""The suites hold of good data and fail, in plain words, of bad data."""

from __future__ import annotations

import json

import pytest

from corpus.config import InstructionsConfig, ValidateConfig
from corpus.documents import DocumentWriter, make_document
from corpus.instructions import instructions
from corpus.validate import validate
from infra.errors import StageError
from infra.run import Run

TEXTS = [f"This is the text of document number {i}, with some words in it." for i in range(40)]


@pytest.fixture
def documents_of(tmp_path):
    def make(texts):
        with DocumentWriter(tmp_path / "data" / "documents") as writer:
            for text in texts:
                writer.write(make_document(text, "here"))
        return tmp_path / "data"

    return make


@pytest.fixture
def pairs_of(tmp_path):
    def make(train, heldout):
        (tmp_path / "data").mkdir()
        for name, rows in (("train", train), ("heldout", heldout)):
            content = "".join(json.dumps({"id": f"{i:016x}", "source": name, **row}) + "\n" for i, row in rows)
            (tmp_path / "data" / f"{name}.jsonl").write_text(content)
        return tmp_path / "data"

    return make


def preference(i, chosen="It is good.", rejected="It is bad."):
    return i, {"prompt": f"How is number {i}?", "chosen": chosen, "rejected": rejected}


def instruction(i, response="The answer is this."):
    return i, {"prompt": f"What is number {i}?", "response": response}


def refused(data, tmp_path, config=None):
    """The one line of the refusal; the verdict, the page and the failing rows are there all the same."""
    out = tmp_path / "verdict"
    out.mkdir()
    with pytest.raises(StageError) as caught:
        validate(config or ValidateConfig(), {"data": data}, out, Run(tmp_path / "work"))
    assert caught.value.problems[0].code == "validation_failed"
    assert "\n" not in str(caught.value)
    assert json.loads((out / "verdict.json").read_text())["success"] is False
    assert "fails" in (out / "aux" / "validation.html").read_text()
    return str(caught.value)


def test_good_documents_pass_and_the_page_needs_no_web(build, documents):
    out = build(validate, ValidateConfig(), data=documents)
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["success"] and verdict["suite"] == "documents" and len(verdict["expectations"]) == 6
    page = (out / "aux" / "validation.html").read_text()
    assert "http" not in page.replace('<html lang="en">', "") and "<script" not in page and "<link" not in page


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (TEXTS[:5], "at least 20 documents, found: 5"),
        (TEXTS + [""] * 10, "have 1 to 5,000,000 characters, found: 10 of 50"),
        (TEXTS * 2, "occurred before, found: 0.5"),
        ([f"{i} 0x{i:08x} {i * 7} ====" for i in range(40)], "look like language, found: 40 of 40"),
        ([text + " caf\ufffd" for text in TEXTS], "U+FFFD, the trace of a wrong encoding, found: 40 of 40"),
    ],
)
def test_bad_documents_fail(documents_of, tmp_path, texts, words):
    message = refused(documents_of(texts), tmp_path)
    assert words in message and message.startswith("validate.documents: "), message


@pytest.mark.parametrize(
    ("train", "heldout", "words"),
    [
        ([instruction(i) for i in range(5)], [instruction(9)], "at least 20 training pairs, found: 5"),
        ([instruction(i) for i in range(30)], [instruction(0)] * 9, "of the pairs occurred before"),
        (
            [instruction(i, f"What is number {i}?") for i in range(30)],
            [instruction(99)],
            "not the prompt again, found: 30",
        ),
        ([instruction(i, "") for i in range(30)], [instruction(99)], "values of response"),
        ([instruction(i, "====" * 9) for i in range(30)], [instruction(99)], "look like language"),
        (
            [preference(i, "Same.", "Same.") for i in range(30)],
            [preference(99)],
            "two different responses, found: 30 of 31",
        ),
        ([preference(i, "Long. " * 40) for i in range(30)], [preference(99)], "times as long as rejected"),
        ([preference(i) for i in range(30)], [], "at least 1 held-out pairs, found: 0"),
    ],
)
def test_bad_pairs_fail(pairs_of, tmp_path, train, heldout, words):
    assert words in refused(pairs_of(train, heldout), tmp_path)


def test_failing_rows_are_attached_and_cut(documents_of, tmp_path, lines_of):
    refused(documents_of([*TEXTS, *["0x00 <b>" * 1000] * 10]), tmp_path)
    rows = lines_of(tmp_path / "verdict" / "aux" / "failing_rows.jsonl")
    assert len(rows) == 10 and all(len(row["text"]) == 500 for row in rows)
    assert "<b>" not in (tmp_path / "verdict" / "aux" / "validation.html").read_text()


def test_limits_come_from_the_config(documents_of, tmp_path):
    config = ValidateConfig(documents={"min_rows": 41})
    assert "at least 41 documents" in refused(documents_of(TEXTS), tmp_path, config)


def test_large_data_is_sampled_and_counted_whole(documents_of, build):
    config = ValidateConfig(max_rows=20, documents={"min_rows": 40})
    verdict = json.loads((build(validate, config, data=documents_of(TEXTS)) / "verdict.json").read_text())
    assert verdict["success"] and verdict["rows"] == 40 and 5 <= verdict["rows_checked"] <= 35


def test_same_bytes_twice(build, payload):
    source = {"kind": "docstrings", "packages": ["networkx"], "limit": 100}
    pairs = build(instructions, InstructionsConfig(read=[source]))
    first, second = (build(validate, ValidateConfig(), data=pairs) for _ in range(2))
    assert payload(first) == payload(second)


def test_a_folder_of_something_else_is_named(build, tmp_path):
    with pytest.raises(StageError, match=r"expected documents/, or train\.jsonl and heldout\.jsonl"):
        build(validate, ValidateConfig(), data=tmp_path)
