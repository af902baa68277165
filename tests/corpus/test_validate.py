"""The suites hold of good data and fail, in plain words, of bad data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from corpus.config import InstructionsConfig, ShardConfig, ValidateConfig
from corpus.documents.parts import DocumentWriter, make_document
from corpus.instructions import instructions
from corpus.shard import shard
from corpus.validate import validate
from corpus.validation.drift import compare
from corpus.validation.page import render
from infra.errors import StageError
from infra.run import Run

TEXTS = [f"This is the text of document number {i}, with some words in it." for i in range(40)]


@pytest.fixture
def documents_of(tmp_path):
    def make(texts, language="", name="data"):
        with DocumentWriter(tmp_path / name / "documents") as writer:
            for text in texts:
                writer.write(make_document(text, "here/a.txt", language=language))
        return tmp_path / name

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
        (TEXTS * 2, "occur for the first time, found: 0.5"),
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
        ([instruction(i) for i in range(30)], [instruction(0)] * 9, "of the pairs occur for the first time"),
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


def test_an_unknown_rule_and_a_verifiable_answer_that_is_missing_are_refused(tmp_path):
    pairs = [
        {"id": f"{i:016x}", "source": "a", "prompt": f"Add one to {i}.", "response": f"{i + 1}"} for i in range(40)
    ]
    pairs[3] |= {"verify": "exact"}
    for name, extra in (
        ("good", {"verify": "exact"}),
        ("rule", {"verify": "roughly"}),
        ("empty", {"verify": "exact", "response": " "}),
    ):
        (tmp_path / name).mkdir()
        for side in ("train", "heldout"):
            rows = [*pairs, {**pairs[0], "id": "f" * 16, **extra}] if side == "train" else pairs[1:3]
            (tmp_path / name / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ValidateConfig(instructions={"min_unique_share": 0.5})
    validate(config, {"data": tmp_path / "good"}, tmp_path, Run(tmp_path / "work"))
    for name in ("rule", "empty"):
        message = refused(tmp_path / name, tmp_path / name, config)
        assert "the rule is known (exact, words:LOW-HIGH), found: 1 of 43" in message, message


def test_a_folder_of_something_else_is_named(build, tmp_path):
    with pytest.raises(StageError, match=r"expected documents/, shards, or train\.jsonl and heldout\.jsonl"):
        build(validate, ValidateConfig(), data=tmp_path)


@pytest.mark.parametrize(
    ("texts", "language", "words"),
    [
        ([*TEXTS, TEXTS[0]], "", "no document is there more than 1 times, found: 2 of 41"),
        (TEXTS, "de", "in the language that their source declares, found: 40 of 40"),
        (TEXTS[:3], "", "at least 20 documents, found: 3"),
    ],
)
def test_cleaned_documents_are_asked_more(documents_of, tmp_path, texts, language, words):
    data = documents_of(texts, language)
    (data / "sources.json").write_text(json.dumps({"here": {"language": "en"}}))
    message = refused(data, tmp_path, ValidateConfig(kind="clean"))
    assert words in message and message.startswith("validate.clean: "), message
    rows = [json.loads(line) for line in (tmp_path / "verdict" / "aux" / "failing_rows.jsonl").open()]
    assert all(row["text"] in texts for row in rows)


def test_good_shards_pass_compressed_or_not(build, documents, trained_tokenizer, shards):
    packed = build(
        shard,
        ShardConfig(sequence_length=64, compression="zstd"),
        documents=documents,
        tokenizer=trained_tokenizer,
    )
    verdicts = [
        json.loads((build(validate, ValidateConfig(), data=data) / "verdict.json").read_text())
        for data in (shards, packed)
    ]
    assert verdicts[0] == verdicts[1] and verdicts[0]["suite"] == "shards" and verdicts[0]["success"]


def edit_meta(shards, **values):
    path = shards / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def lose_a_bit(shards):
    """Sets the highest bit of one token in the middle of the first shard, as a bad disk would."""
    [path] = (shards / "train").glob("shard.00000.mds")
    content = bytearray(path.read_bytes())
    end = int.from_bytes(content[36:40], "little")
    content[end - 1] |= 0x80
    path.write_bytes(content)


def put_on_both_sides(shards):
    index = pq.read_table(shards / "index.parquet").to_pylist()
    heldout = next(row for row in index if row["side"] == "validation")
    pq.write_table(pa.Table.from_pylist([*index, {**heldout, "side": "train"}]), shards / "index.parquet")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose_a_bit, "every id is in the vocabulary, found: 1 of"),
        (put_on_both_sides, "no document is on both sides, found: 2"),
        (lambda shards: edit_meta(shards, sequence_length=65), "every sequence has the length that meta.json says"),
        (lambda shards: edit_meta(shards, end_of_text_id=300), "begins a document at its first token"),
        (lambda shards: edit_meta(shards, unknown_id=0), "stand for what the vocabulary lacks"),
    ],
)
def test_bad_shards_fail(shards, tmp_path, spoil, words):
    data = Path(shutil.copytree(shards, tmp_path / "shards"))
    spoil(data)
    message = refused(data, tmp_path)
    assert words in message and message.startswith("validate.shards: "), message


def test_a_suite_of_ones_own_takes_the_place_of_ours(documents_of, tmp_path):
    suite = tmp_path / "mine.json"
    matches = {"type": "expect_column_values_to_match_regex", "kwargs": {"column": "text", "regex": "^This"}}
    own = {"type": "expect_column_distinct_values_to_be_in_set", "kwargs": {"column": "source", "value_set": ["there"]}}
    suite.write_text(json.dumps({"name": "mine", "expectations": [matches, own]}))
    config = ValidateConfig(documents={"suite": str(suite)})
    message = refused(documents_of(TEXTS), tmp_path, config)
    assert "1 of 2 expectations of the suite mine failed" in message
    assert "expect column distinct values to be in set (column = source, value_set = ['there'])" in message


def test_expectations_of_one_sentence_have_each_an_outcome_of_its_own(documents_of, tmp_path):
    suite = tmp_path / "mine.json"
    lengths = [
        {
            "type": "expect_column_value_lengths_to_be_between",
            "kwargs": {"column": column, "min_value": 16},
            "meta": {"sentence": "nothing is short"},
        }
        for column in ("text", "id", "id")
    ]
    suite.write_text(json.dumps({"name": "mine", "expectations": lengths}))
    message = refused(documents_of(["short"]), tmp_path, ValidateConfig(documents={"suite": str(suite)}))
    assert "1 of 3 expectations of the suite mine failed: expected: nothing is short" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("expectations: [{type: expect_the_unexpected, kwargs: {}}]", "Great Expectations has no such expectation"),
        ("expectations: [{type: expect_column_values_to_not_be_null, kwargs: {}}]", "rejects its arguments"),
        ("name: nothing", "expected a mapping with name and a list of expectations"),
        ("expectations: [{type: a, kwargs: {column: $there}}]", "names of existing limits: KeyError('there')"),
    ],
)
def test_a_broken_suite_is_named(documents_of, tmp_path, content, words):
    suite = tmp_path / "suite.yaml"
    suite.write_text(content)
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError) as caught:
        config = ValidateConfig(documents={"suite": str(suite)})
        validate(config, {"data": documents_of(TEXTS)}, tmp_path / "out", Run(tmp_path / "work"))
    assert words in str(caught.value)


def test_drift_against_the_run_before_is_on_the_page_and_in_no_payload(documents_of, tmp_path, payload):
    """Texts ten times as long in another language; PSI and divergence against scipy."""
    before = documents_of(TEXTS, "en", "before")
    now = documents_of([text * 10 for text in TEXTS[:30]] + TEXTS[:10], "de", "now")
    outs = {name: tmp_path / name for name in ("first", "second", "alone")}
    for name, data, previous in (
        ("first", before, {}),
        ("second", now, {"previous": outs["first"]}),
        ("alone", now, {}),
    ):
        outs[name].mkdir(exist_ok=True)
        validate(ValidateConfig(), {"data": data, **previous}, outs[name], Run(tmp_path / "work"))
    assert payload(outs["second"]) == payload(outs["alone"])
    pages = {name: (out / "aux" / "validation.html").read_text() for name, out in outs.items()}
    # Six rows to look at, each with its text.
    assert "Some of the rows" in pages["alone"] and pages["alone"].count("<pre>text: ") == 6
    assert "no earlier validation" in pages["alone"] and "de: 0.0 % → 100.0 %" in pages["second"]
    profiles = [json.loads((outs[name] / "aux" / "profile.json").read_text()) for name in ("first", "second")]
    lengths = next(one for one in compare(*profiles) if one.name == "characters of text")
    classes = sorted({*profiles[0][lengths.name], *profiles[1][lengths.name]})
    p, q = (np.array([one[lengths.name].get(name, 0) for name in classes]) / 40 for one in profiles)
    assert lengths.jensen_shannon == pytest.approx(jensenshannon(p, q, base=2) ** 2)
    least = [np.maximum(one, 1e-4) for one in (p, q)]
    assert lengths.psi == pytest.approx(rel_entr(*least).sum() + rel_entr(*least[::-1]).sum())
    assert compare(profiles[0], profiles[0])[0].psi == 0


@pytest.mark.parametrize(
    ("found", "shown"), [("11691", "11,691"), ("0.953", "0.953"), ("1234.5", "1,234.5"), ("en", "en")]
)
def test_the_page_groups_what_was_observed(found, shown):
    verdict = {"success": True, "suite": "documents", "rows": 11691, "rows_checked": 11691}
    expectation = {"expectation": "x", "column": "", "sentence": "s", "success": True, "observed": found}
    page = render({**verdict, "expectations": [expectation]}, [], [])
    assert f'<td data-label="found">{shown}</td>' in page and "11,691 rows" in page
