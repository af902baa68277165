"""Counts behind each score, limits of what may be without a proper answer, and lm-eval's warnings."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig
from evaluation.evaluate import result_rows
from evaluation.generation.language_model import load_model, token_log_likelihoods
from evaluation.harness.integrity import COUNTS, answer_counts
from infra.errors import StageError
from infra.run import Run

WRITES = """
task: writes
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: a
generation_kwargs: {{max_gen_toks: 6, do_sample: false{until}}}
filter_list:
  - {{name: number, filter: [{{function: regex, regex_pattern: '(\\d+) apples'}}, {{function: take_first}}]}}
  - {{name: none, filter: [{{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""


def score(config: dict[str, Any], model: Path, tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """results.json and the events of the journal."""
    journal, out = io.StringIO(), tmp_path / "out"
    out.mkdir(exist_ok=True)
    run = Run(tmp_path / "work", journal=journal)
    benchmarks(BenchmarksConfig.model_validate(config), {"model": model}, out, run)
    events = [line for line in map(json.loads, journal.getvalue().splitlines()) if line["kind"] == "event"]
    return json.loads((out / "results.json").read_text()), events


def choices(tmp_path: Path, queries: list[str]) -> dict[str, Any]:
    rows = [{"query": query, "choices": ["yes", "no"], "gold": 0} for query in queries]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "quiz", "kind": "multiple_choice", "path": str(tmp_path / "rows.jsonl")}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory, new_model: Callable[..., Path]) -> Path:
    """A GPT-2 whose layers overflow at the token of ~, and at no other."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = new_model(tmp_path_factory.mktemp("overflows"), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(GPT2Config.from_dict({**config.to_dict(), "tie_word_embeddings": False}))
    (token,) = tokenizer.encode("~", add_special_tokens=False)
    with torch.no_grad():
        model.transformer.wte.weight[token] = 3e38
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("wrong", [1, 100])
def test_scores_with_failed_items_are_refused(overflowing: Path, tmp_path: Path, wrong: int) -> None:
    task = choices(tmp_path, [f"{'~' if number < wrong else ''} question {number}" for number in range(100)])
    with pytest.raises(StageError, match=f"quiz: {wrong} of 100 items failed") as refused:
        score({"tasks": [task]}, overflowing, tmp_path)
    assert refused.value.problems[0].code == "bad_answers"
    assert refused.value.problems[0].path == "benchmarks.answer_limits.failed"
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_limit_lets_some_items_fail_and_counts_them_beside_the_score(overflowing: Path, tmp_path: Path) -> None:
    task = choices(tmp_path, [f"{'~' if number < 2 else ''} question {number}" for number in range(50)])
    config = {"tasks": [task], "answer_limits": {"failed": 0.04}}
    results, events = score(config, overflowing, tmp_path)
    acc = results["tasks"]["quiz"]["acc"]
    assert [acc[field] for field in COUNTS] == [50, 48, 2, 0, 0, 0]
    assert any(event["name"] == "answers" and "2 of 50 items failed" in event["message"] for event in events)


def test_answers_of_no_numbers_have_failed(overflowing: Path, tmp_path: Path) -> None:
    rows = [{"q": f"{'~' if number == 3 else ''} {number}", "a": "1"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "writes.yaml").write_text(WRITES.format(until=""))
    task = {"name": "writes", "kind": "lm_eval", "path": str(tmp_path / "writes.yaml")}
    with pytest.raises(StageError, match="1 of 8 items failed"):
        score({"tasks": [task]}, overflowing, tmp_path)


def test_truncated_and_unparsable_answers_are_counted_by_filter(model_dir: Path, tmp_path: Path) -> None:
    # The first prompt is longer than the model's context of 128 tokens.
    rows = [{"q": "many words " * (80 if number == 0 else 1), "a": "1"} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "writes.yaml").write_text(WRITES.format(until=', until: ["~~"]'))
    task = {"name": "writes", "kind": "lm_eval", "path": str(tmp_path / "writes.yaml")}
    results, _ = score({"tasks": [task]}, model_dir, tmp_path)
    by_number, as_written = (results["tasks"]["writes"][name] for name in ("exact_match_number", "exact_match"))
    assert (by_number["unparsable"], as_written["unparsable"]) == (5, 0)
    assert by_number["truncated"] == as_written["truncated"] == 5
    assert by_number["asked"] == by_number["answered"] == 5
    with pytest.raises(StageError, match=r"writes \(number\): 5 of 5 items got an answer in which") as refused:
        score({"tasks": [task], "answer_limits": {"unparsable": 0.5}}, model_dir, tmp_path)
    assert len(refused.value.problems) == 1


def test_a_prompt_that_is_cut_is_counted_and_no_other(model_dir: Path, tmp_path: Path) -> None:
    task = choices(tmp_path, ["many words " * 80, "short", "brief"])
    results, events = score({"tasks": [task]}, model_dir, tmp_path)
    assert results["tasks"]["quiz"]["acc"]["truncated"] == 1
    warnings = [event["message"] for event in events if event["name"] == "lm_eval_warning"]
    assert any("exceeds model's maximum length (128)" in message for message in warnings)


def test_warnings_of_lm_eval_are_events_once(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "a": "1"}\n{"q": "b", "a": "2"}\n')
    (tmp_path / "writes.yaml").write_text(WRITES.format(until=""))
    task = {"name": "writes", "kind": "lm_eval", "path": str(tmp_path / "writes.yaml")}
    _, events = score({"tasks": [task]}, model_dir, tmp_path)
    warnings = [event["message"] for event in events if event["name"] == "lm_eval_warning"]
    assert len([message for message in warnings if "No `until` specified" in message]) == 1
    assert len(warnings) == len(set(warnings))


def _generated(doc: int, text: str, value: str) -> dict[str, Any]:
    return {"doc_id": doc, "resps": [[text]], "filtered_resps": [value], "filter": "number", "exact_match": 0.0}


@pytest.mark.parametrize(("default", "unparsable"), [(None, 1), (-1, 1), (0, 0)])
def test_answers_that_a_map_lacks_are_unparsable_unless_others_map_to_the_same(
    default: int | None, unparsable: int
) -> None:
    step = {"function": "map", "mapping_dict": {"yes": 1, "no": 0}, "default_value": default}
    results = {
        "configs": {"quiz": {"filter_list": [{"name": "number", "filter": [step]}]}},
        "samples": {"quiz": [_generated(0, "yes", 1), _generated(1, "perhaps", default)]},
    }
    assert answer_counts(results, "quiz", "number")["unparsable"] == unparsable


def test_counts_of_a_group_are_those_of_its_tasks() -> None:
    filters = [{"name": "number", "filter": [{"function": "regex", "fallback": "?"}, {"function": "take_first"}]}]
    task = {"filter_list": filters, "output_type": "generate_until"}
    found = {
        "results": {},
        "configs": {"one": task, "two": task},
        "samples": {
            "one": [_generated(0, " \n", "?"), _generated(1, "3", "3"), _generated(2, "none", "?")],
            "two": [_generated(0, "4", "4")],
        },
        "n-samples": {"one": {"effective": 3}, "two": {"effective": 2}},
        "group_subtasks": {"both": ["one", "two"]},
        "answers": {"one": {"truncated": [1, 2]}},
    }
    assert list(answer_counts(found, "one", "number").values()) == [3, 3, 0, 2, 1, 1]
    # An item without any record has failed.
    assert list(answer_counts(found, "two", "number").values()) == [2, 1, 1, 0, 0, 0]
    assert list(answer_counts(found, "both", "number").values()) == [5, 4, 1, 2, 1, 1]
    row = {"exact_match,number": 0.5}
    found |= {"results": {"both": row}, "n-shot": {}, "higher_is_better": {}, "versions": {}}
    [scored] = result_rows(found, 0.95)
    assert (scored["asked"], scored["failed"]) == (5, 1)


def test_likelihoods_of_texts_that_are_no_numbers_are_refused(overflowing: Path, run: Run) -> None:
    lm = load_model(overflowing, run)
    fine, wrong = ([0, *lm.tokenizer.encode(text, add_special_tokens=False)] for text in ("a file", "a ~ file"))
    assert len(token_log_likelihoods(lm, [fine], run)) == 1
    with pytest.raises(StageError, match="1 of 2 likelihoods are NaN"):
        token_log_likelihoods(lm, [fine, wrong], run, "bias")
