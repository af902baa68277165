"""Each rule drops what it is for, says so, and lets the rest through."""

from __future__ import annotations

import json
import textwrap

import pyarrow.parquet as pq
import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run

GOOD = (
    "The committee met on the first day of the month to discuss the plans that the town had made for the new bridge, "
    "and to hear from those who live beside the river. Nobody spoke against it.\n"
    "An engineer showed where the two piers will stand. Some asked what it costs, and who is going to pay for it. "
    "The answer was that half of the money has been promised by the county."
)
WORDS = "alder birch cedar dogwood elm fir ginkgo hazel ivy juniper kapok larch maple nutmeg oak pine".split()  # noqa: SIM905
# The section that turns a rule on, and what breaks that rule and none before it.
BAD = {
    "min_characters": ({}, "The end of it."),
    "max_characters": ({"max_characters": 400}, GOOD + GOOD),
    "gopher_quality.min_words": ({}, GOOD[:160]),
    "gopher_quality.max_words": ({"gopher_quality": {"max_words": 100}}, GOOD + " And so it went on." * 20),
    "gopher_quality.min_mean_word_length": ({}, "I am to be on it as he is to be in it, " * 5),
    "gopher_quality.max_mean_word_length": ({}, "the be of " + "antidisestablishmentarianism " * 60),
    "gopher_quality.max_symbol_word_ratio": ({}, GOOD + " #these #are #many #tags" * 10),
    "gopher_quality.max_bullet_line_share": ({}, "- " + GOOD.replace("\n", " ").replace(". ", ".\n- ")),
    "gopher_quality.max_ellipsis_line_share": ({}, GOOD.replace(".\n", "...\n")),
    "gopher_quality.min_alphabetic_word_share": ({}, GOOD + " 12345 67890" * 30),
    "gopher_quality.min_stop_words": ({}, "Colourless green ideas sleep furiously " * 20),
    "gopher_repetition.max_repeated_paragraph_share": ({}, GOOD + "\n\nThe same again\n\nThe same again" * 3),
    "gopher_repetition.max_repeated_paragraph_character_share": ({}, "\n\n".join([GOOD, *WORDS, GOOD])),
    "gopher_repetition.max_repeated_line_share": ({}, GOOD + "\nto the end\n" + "to the end\n" * 4),
    "gopher_repetition.max_repeated_line_character_share": ({}, "\n".join([GOOD, *WORDS, GOOD])),
    "gopher_repetition.most_common_ngrams.2": ({}, GOOD + " alder birch" * 60),
    "gopher_repetition.repeated_ngrams.5": ({}, GOOD + " " + GOOD.replace("\n", " ")),
    "c4.drop_lorem_ipsum": ({"c4": {}}, GOOD + "\nLorem Ipsum dolor sit amet."),
    "c4.drop_curly_bracket": ({"c4": {}}, GOOD + "\nIt is written {like this}."),
    "c4.min_sentences": ({"c4": {}}, GOOD.replace("Nobody spoke against it.", "Nobody spoke against it")),
    "fineweb.min_ended_line_share": ({"fineweb": {}}, "\n".join(textwrap.wrap(GOOD.replace(".", ""), 60))),
    "fineweb.max_short_line_share": ({"fineweb": {}}, GOOD + "\nof " + ".\nof ".join(WORDS) + "."),
    "fineweb.max_repeated_line_character_share": ({"fineweb": {}}, f"{GOOD}\nAt the end of it.\nAt the end of it."),
    "fineweb.max_lines_per_word": ({"fineweb": {"max_short_line_share": None}}, GOOD + "\n" * 30 + "of it."),
}  # fmt: skip


def ingested(build, write, texts):
    path = write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))


@pytest.mark.parametrize("rule", BAD)
def test_rule_drops_its_text_and_says_why(build, write, rule):
    section, bad = BAD[rule]
    out = build(clean, CleanConfig(**section), documents=ingested(build, write, [GOOD, bad]))
    assert [document.text for document in read_documents(out)] == [GOOD]
    [dropped] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert dropped["rule"] == rule and dropped["text"] == bad and dropped["paper"]
    assert not dropped["low"] <= dropped["value"] <= dropped["high"]
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert (counts["read"], counts["kept"], counts["dropped"][rule]) == (2, 1, 1)
    samples = json.loads((out / "aux" / "samples.json").read_text())
    assert bad.startswith(samples[rule][0]["text"]) and GOOD.startswith(samples["kept"][0]["text"])


@pytest.mark.parametrize("rule", BAD)
def test_rule_can_be_turned_off(build, write, rule):
    section, bad = BAD[rule]
    family, _, key = rule.rpartition(".") if "." in rule else ("", "", rule)
    family, _, key = (family, "", key) if "ngrams" not in family else (*family.partition(".")[:2], family.split(".")[1])
    off = {key: False if key.startswith("drop_") else () if "ngrams" in key else None}
    config = CleanConfig(**{**section, family: {**section.get(family, {}), **off}} if family else off)
    out = build(clean, config, documents=ingested(build, write, [GOOD, bad]))
    assert rule not in pq.read_table(out / "aux" / "dropped.parquet")["rule"].to_pylist()
    assert rule not in json.loads((out / "aux" / "counts.json").read_text())["dropped"]


def test_c4_takes_lines_out_and_the_account_says_how_many(build, write):
    page = (
        "Home | About | Contact\n" + GOOD + "[12]\nPlease turn on JavaScript to go on.\nWe use cookies on this page.\n"
    )
    out = build(clean, CleanConfig(c4={}), documents=ingested(build, write, [page]))
    [document] = read_documents(out)
    assert document.text == GOOD
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["changed"] == 1
    assert {key: counts["counts"][f"c4.{key}"] for key in ("kept", "line_ends", "line_words", "line_phrases")} == {
        "kept": 2, "line_ends": 1, "line_words": 1, "line_phrases": 1,
    }  # fmt: skip
    [change] = pq.read_table(out / "aux" / "changed.parquet").to_pylist()
    assert change["new_id"] == document.id != change["id"] and change["by"] == "quality"


def test_nothing_left_names_the_rules_that_took_everything(build, write):
    texts = ["of the", "to the", BAD["gopher_quality.min_stop_words"][1]]
    with pytest.raises(
        StageError,
        match=r"no document is left of 3; the rule min_characters \(at least 100\) took 2; "
        r"then gopher_quality.min_stop_words 1",
    ):
        build(clean, CleanConfig(), documents=ingested(build, write, texts))


def test_same_bytes_whatever_the_number_of_workers(tmp_path, build, write, payload):
    texts = [f"{GOOD} This is number {i}." for i in range(40)] + [bad for _, bad in BAD.values()]
    source = ingested(build, write, texts)
    # Two partitions of the same documents.
    table = pq.read_table(source / "documents" / "part-00000.parquet")
    pq.write_table(table.slice(0, 30), source / "documents" / "part-00000.parquet")
    pq.write_table(table.slice(30), source / "documents" / "part-00001.parquet")
    payloads = []
    for workers in (1, 2):
        out = tmp_path / f"with-{workers}"
        out.mkdir()
        run = Run(tmp_path / f"work-{workers}", LaunchConfig(workers=workers))
        clean(CleanConfig(c4={}), {"documents": source}, out, run)
        payloads.append(payload(out))
    assert payloads[0] == payloads[1] and "documents/part-00001.parquet" in payloads[0]


def test_most_real_docstrings_stay(documents):
    counts = json.loads((documents / "aux" / "counts.json").read_text())
    assert counts["kept"] > 0.8 * counts["read"]
