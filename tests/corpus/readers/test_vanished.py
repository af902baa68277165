"""A source of which a stage leaves nothing is told of, with the rule that took it."""

from __future__ import annotations

import io
import json

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.stage import decontaminate
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.ingest import ingest
from infra.launch.config import LaunchConfig
from infra.run import Run

KEPT = "The mill by the river stood still, and nobody could say why its wheels had not turned since the {}th of March."
ITEM = "Nobody in the room could say with certainty which of the two had spoken first, when the lamp went out."


@pytest.mark.parametrize(
    ("stage", "config", "lost", "rule"),
    [
        (clean, CleanConfig(gopher_quality=None, gopher_repetition=None, min_characters=40), ["too short"] * 3, "min"),
        (dedupe, DedupeConfig(), [KEPT.format(number) for number in range(3)], "exact"),
        (decontaminate, DecontaminateConfig(), [f"{ITEM} {number}" for number in range(3)], "test_item"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_source_of_which_nothing_is_left_is_told_with_the_rule_that_took_it(
    build, write, tmp_path, stage, config, lost, rule, is_lost
):
    texts = {"books": [KEPT.format(number) for number in range(40)], "web": lost}
    if not is_lost:
        texts["web"] = [*lost, "One page of it was not like the others, and so it could stay where it had always been."]
    read = []
    for name, rows in texts.items():
        path = write(f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in rows))
        read.append({"kind": "files", "name": name, "paths": [path]})
    inputs = {"documents": build(ingest, IngestConfig(read=read)), "benchmark_text": tmp_path / "items"}
    inputs["benchmark_text"].mkdir()
    (inputs["benchmark_text"] / "items.jsonl").write_text(
        json.dumps({"task": "told", "item": "1", "texts": [ITEM]}) + "\n"
    )
    journal, out = io.StringIO(), tmp_path / "out"
    out.mkdir()
    result = stage(config, inputs, out, Run(tmp_path / "work", LaunchConfig(workers=1), journal=journal))
    events = [json.loads(line) for line in journal.getvalue().splitlines()]
    told = [event for event in events if event.get("name") == "source_vanished"]
    vanished = json.loads((out / "aux" / "counts.json").read_text()).get("vanished", {})
    if not is_lost:
        assert not told and not vanished and "WARNING" not in result.headline
        return
    [event] = told
    assert f"{stage.__name__} keeps 0 of the 3 documents of the source web: " in event["message"]
    assert event["rule"].startswith(rule) and event["dropped"] == 3
    assert list(vanished) == ["web"] and "WARNING: nothing left of web" in result.headline
