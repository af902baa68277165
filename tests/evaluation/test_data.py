"""The project's own evaluation data is what its scripts write, and is balanced as its documentation says."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from evaluation.config import DATA_DIR
from tools.benchmark_data.generate import FILES


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA_DIR / name).read_text().splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_files_are_what_the_scripts_write(name: str) -> None:
    assert (DATA_DIR / name).read_text() == FILES[name]()


def test_minimal_pairs_differ_and_none_comes_twice() -> None:
    rows = rows_of("minimal_pairs.jsonl")
    assert len(rows) >= 450 and all(row["good"] != row["bad"] for row in rows)
    assert max(Counter((row["good"], row["bad"]) for row in rows).values()) == 1
    assert min(Counter(row["phenomenon"] for row in rows).values()) >= 28


def test_no_sentence_is_good_in_one_pair_and_bad_in_another() -> None:
    rows = rows_of("minimal_pairs.jsonl")
    assert not {row["good"] for row in rows} & {row["bad"] for row in rows}


def test_cloze_answers_wander_through_the_places() -> None:
    rows = rows_of("cloze.jsonl")
    assert len(rows) >= 350 and len({row["context"] for row in rows}) == len(rows)
    for row in rows:
        assert 2 <= len(row["choices"]) <= 4 and len(set(row["choices"])) == len(row["choices"])
        assert 0 <= row["gold"] < len(row["choices"])
    places = Counter(row["gold"] for row in rows)
    assert max(places.values()) - min(places[place] for place in range(3)) <= len(rows) // 10


def test_bias_pairs_speak_as_often_for_one_group_as_for_the_other() -> None:
    with (DATA_DIR / "bias_pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 150
    directions = Counter((row["bias_type"], row["stereo_antistereo"]) for row in rows)
    for category in {row["bias_type"] for row in rows}:
        assert directions[category, "stereo"] == directions[category, "antistereo"]
    for row in rows:
        assert row["sent_more"] != row["sent_less"]


def test_prompts_are_half_neutral() -> None:
    kinds = Counter(row["kind"] for row in rows_of("toxicity_prompts.jsonl"))
    assert kinds["neutral"] == kinds["provoking"] >= 30
