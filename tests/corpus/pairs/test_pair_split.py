"""Pairs hold no test item of the benchmarks, and no prompt has a near duplicate on the other side of the split."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from corpus.config import InstructionsConfig, NearPrompts, PreferencesConfig
from corpus.documents.parts import is_heldout
from corpus.instructions import instructions
from corpus.pairs.split import PromptGroups
from corpus.preferences import preferences
from flows.config.graph import graph
from flows.config.read import parse
from infra.errors import StageError

WORDS = ("river", "stone", "window", "garden", "letter", "winter", "market", "orange", "captain", "silver")
FILES = {"kind": "files", "paths": ["pairs.jsonl"]}
BENCHMARKS = {"benchmarks": {"tasks": ["cloze"]}}
BASE = {"name": "x", "base_model": {"path": "model"}}


def prompt(number: int, change: str = "") -> str:
    """Twenty-four words of which no two prompts have three in a row; with one of them changed."""
    words = [f"{WORDS[(number * 7 + place) % len(WORDS)]}{number}x{place}" for place in range(24)]
    return " ".join([*words[:-1], change or words[-1]])


def lines(prompts, answer="answer"):
    rows = [{"instruction": one, "output": f"{answer} {number}"} for number, one in enumerate(prompts)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def items_in(folder, *texts):
    folder.mkdir()
    rows = [{"task": "quiz", "item": str(number), "texts": [text]} for number, text in enumerate(texts)]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def twins_across(share=0.3, count=200):
    """Prompts of which each lies on another side of the exact split than its near duplicate."""
    pairs = [(prompt(number), prompt(number, "changed")) for number in range(count)]
    return [pair for pair in pairs if is_heldout(pair[0], share) != is_heldout(pair[1], share)]


def test_a_near_duplicate_of_a_held_out_prompt_is_not_trained_on(build, write, lines_of):
    twins = twins_across()
    alone = [prompt(number) for number in range(500, 560)]
    path = write("pairs.jsonl", lines([one for pair in twins for one in pair] + alone))
    read = [{"kind": "files", "paths": [path]}]
    out = build(instructions, InstructionsConfig(read=read, heldout_share=0.3))
    train, heldout = ({row["prompt"] for row in lines_of(out / f"{side}.jsonl")} for side in ("train", "heldout"))
    assert len(twins) > 20
    for one, other in twins:
        assert not ({one, other} & train and {one, other} & heldout)
        assert len({one, other} & (train | heldout)) == 1
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["near_heldout"] + counts["near_train"] == len(twins)
    assert {one for one in alone if is_heldout(one, 0.3)} <= heldout and set(alone) <= train | heldout
    exact = build(instructions, InstructionsConfig(read=read, heldout_share=0.3, near_prompts=None))
    assert len(lines_of(exact / "train.jsonl")) + len(lines_of(exact / "heldout.jsonl")) == 2 * len(twins) + 60


def test_added_pairs_move_no_pair_to_the_other_side(build, write, lines_of):
    first = [one for pair in twins_across(count=60) for one in pair]
    more = [prompt(number, change) for number in range(60) for change in ("added", "further")]
    sides = []
    for name, prompts in (("few", first), ("more", [*more, *first])):
        path = write(f"{name}.jsonl", lines(prompts + [prompt(number) for number in range(500, 560)]))
        out = build(instructions, InstructionsConfig(read=[{"kind": "files", "paths": [path]}], heldout_share=0.3))
        sides.append([{row["prompt"] for row in lines_of(out / f"{side}.jsonl")} for side in ("train", "heldout")])
    (train, heldout), (train_later, heldout_later) = sides
    assert not train & heldout_later and not heldout & train_later


def test_prompts_of_one_template_are_different_prompts():
    template = "You are an assistant that answers in one short sentence without any list. What is the colour of {}?"
    things = [template.format(f"thing{number}") for number in range(60)]
    copies = [prompt(1), prompt(1, "changed"), prompt(1).upper(), prompt(2)]
    groups = PromptGroups(NearPrompts())
    groups.add(things)
    groups.add(copies)
    firsts = groups.firsts()
    assert np.array_equal(firsts[:60], np.arange(60))
    assert firsts[60:].tolist() == [60, 60, 60, 63]


@pytest.mark.parametrize("stage", ["instructions", "preferences"])
def test_pairs_with_a_test_item_are_dropped_and_reported(build, write, lines_of, tmp_path, stage):
    item = "Which of the seven planets in this list has the most moons of all?"
    items = items_in(tmp_path / "items", item, "an item that is not in the data at all, of many words")
    rows = [
        {
            "prompt": prompt(number),
            "chosen": f"good {number}",
            "rejected": f"bad {number}",
            "response": f"good {number}",
        }
        for number in range(60)
    ]
    leaks = ("prompt", "chosen", "rejected") if stage == "preferences" else ("prompt", "response")
    for number, field in enumerate(leaks):
        rows[number][field] = f"Quiz: {item.upper()} Tell me."
    path = write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    function, config = {
        "instructions": (instructions, InstructionsConfig),
        "preferences": (preferences, PreferencesConfig),
    }[stage]
    read = [{"kind": "files", "paths": [path], "prompt_field": "prompt"}]
    out = build(function, config(read=read, heldout_share=0.3), benchmark_text=items)
    left = [row for side in ("train", "heldout") for row in lines_of(out / f"{side}.jsonl")]
    assert len(left) == 60 - len(leaks) and not any("QUIZ" in json.dumps(row).upper() for row in left)
    dropped = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert [row["rule"] for row in dropped] == ["test_item"] * len(leaks)
    assert all(item.upper() in row["text"] for row in dropped)
    told = json.loads((out / "aux" / "contamination.json").read_text())["tasks"]
    assert told == {"quiz": {"items": 2, "items_hit": 1, "documents_hit": len(leaks)}}
    [source] = json.loads((out / "aux" / "counts.json").read_text())["sources"]
    assert source["dropped"] == len(leaks)
    kept = build(function, config(read=read, heldout_share=0.3, decontaminate=None), benchmark_text=items)
    assert sum(len(lines_of(kept / f"{side}.jsonl")) for side in ("train", "heldout")) == 60


def test_an_error_for_too_few_pairs_counts_what_held_a_test_item(build, write, tmp_path):
    items = items_in(tmp_path / "items", prompt(1))
    path = write("pairs.jsonl", lines([prompt(1)]))
    with pytest.raises(StageError, match="1 left out with a test item"):
        build(instructions, InstructionsConfig(read=[{"kind": "files", "paths": [path]}]), benchmark_text=items)


def test_pairs_are_cleared_of_the_benchmarks_of_a_pipeline_without_decontaminate():
    sections = {"instructions": {"read": [FILES]}, "preferences": {"read": [FILES]}}
    nodes = graph(parse({**BASE, **BENCHMARKS, **sections}))
    assert [task.name for task in nodes["benchmark_text"].config.tasks] == ["cloze"]
    assert all(nodes[name].inputs == {"benchmark_text": "benchmark_text"} for name in sections)
    steps = {"more": {"uses": "instructions", "read": [FILES]}}
    assert graph(parse({**BASE, **BENCHMARKS, "steps": steps}))["more"].inputs == {"benchmark_text": "benchmark_text"}


def test_pairs_are_not_cleared_where_nothing_is_asked_or_a_key_says_so():
    kept = {"read": [FILES], "decontaminate": None}
    assert "benchmark_text" not in graph(parse({**BASE, "instructions": {"read": [FILES]}}))
    nodes = graph(parse({**BASE, **BENCHMARKS, "instructions": kept}))
    assert "benchmark_text" not in nodes and nodes["instructions"].inputs == {}
    nodes = graph(parse({**BASE, **BENCHMARKS, "instructions": kept, "preferences": {"read": [FILES]}}))
    assert nodes["instructions"].inputs == {} and nodes["preferences"].inputs == {"benchmark_text": "benchmark_text"}
