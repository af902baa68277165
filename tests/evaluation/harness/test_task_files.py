"""Benchmarks of one's own: dates stay text, every format is read, and a template that fails is named with its item."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluation.benchmark_text import row_item
from evaluation.config import BenchmarkTask
from evaluation.harness.task_file import check_rows
from evaluation.harness.task_rows import task_rows
from evaluation.harness.tasks import _load, own_cache, quiet
from infra.errors import StageError

DATES = [
    {"query": f"When was ledger {n} closed?", "choices": [f"{1900 + n}-12-31", "1850-01-01"], "gold": 0}
    for n in range(3)
]
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: {text}
doc_to_choice: {choice}
doc_to_target: {target}
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


def loaded(task: BenchmarkTask, tmp_path: Path) -> Any:
    with quiet(), own_cache(tmp_path / "cache"):
        [found] = _load(0, task, None)
        return found


def yaml_task(tmp_path: Path, rows: list[dict[str, Any]], text: str, choice: str, target: str) -> BenchmarkTask:
    lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.yaml").write_text(TASK.format(text=text, choice=choice, target=target))
    return BenchmarkTask(name="mine", kind="lm_eval", path=str(tmp_path / "mine.yaml"))


def test_dates_are_asked_as_they_are_written(tmp_path: Path) -> None:
    rows = [
        {"context": "It was closed on", "continuation": f"{1900 + n}-12-31", "at": "1999-01-01T10:00:00Z"}
        for n in range(3)
    ]
    cloze = loaded(BenchmarkTask(name="c", kind="cloze", path=str(lines(tmp_path / "c.jsonl", rows))), tmp_path)
    assert [cloze.doc_to_target(row) for row in cloze.eval_docs] == ["1900-12-31", "1901-12-31", "1902-12-31"]
    assert cloze.eval_docs[0]["at"] == "1999-01-01T10:00:00Z"
    choice = loaded(
        BenchmarkTask(name="m", kind="multiple_choice", path=str(lines(tmp_path / "m.jsonl", DATES))), tmp_path
    )
    assert choice.doc_to_choice(choice.eval_docs[2]) == ["1902-12-31", "1850-01-01"]


def test_any_column_of_a_task_in_yaml_keeps_its_dates(tmp_path: Path) -> None:
    rows = [{"date": "2024-02-29", "more": {"at": ["2024-03-01"]}, "opts": ["a", "b"], "gold": 1}] * 2
    task = yaml_task(tmp_path, rows, '"{{date}} to {{more.at[0]}}:"', "opts", "gold")
    found = loaded(task, tmp_path)
    assert found.doc_to_text(found.eval_docs[0]) == "2024-02-29 to 2024-03-01:"


def _as_list(path: Path) -> Path:
    path.with_suffix(".json").write_text(json.dumps(DATES))
    return path.with_suffix(".json")


def _as_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(DATES), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def _as_csv(path: Path) -> Path:
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["query", "choices", "gold"], delimiter=";")
        writer.writeheader()
        writer.writerows({**row, "choices": json.dumps(row["choices"])} for row in DATES)
    return path.with_suffix(".csv")


def _as_dataset(path: Path) -> Path:
    (path / "data").mkdir(parents=True)
    for split, rows in (("train", DATES[:1]), ("test", DATES)):
        pq.write_table(pa.Table.from_pylist(rows), path / "data" / f"{split}-00000-of-00001.parquet")
    return path


@pytest.mark.parametrize("written", [_as_list, _as_parquet, _as_csv, _as_dataset])
def test_a_benchmark_is_read_from_every_format(written: Callable[[Path], Path], tmp_path: Path) -> None:
    task = BenchmarkTask(name="m", kind="multiple_choice", path=str(written(tmp_path / "quiz")))
    check_rows(task)
    assert [row for _, row in task_rows(task)] == DATES
    found = loaded(task, tmp_path)
    assert [(found.doc_to_choice(row), found.doc_to_target(row)) for row in found.eval_docs] == [
        (row["choices"], row["gold"]) for row in DATES
    ]
    assert row_item(task, 0, DATES[0]).texts


@pytest.mark.parametrize("choice", ["", "  "])
def test_an_empty_choice_is_refused_by_line(choice: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "q.jsonl", [{"query": "Why?", "choices": ["yes", choice], "gold": 0}])
    with pytest.raises(StageError, match=r"q\.jsonl:1: expected `choices`, a list of strings that are not empty"):
        check_rows(BenchmarkTask(name="q", kind="multiple_choice", path=str(path)))


@pytest.mark.parametrize(("gold", "shown"), [(1.0, "1.0"), ("1", '"1"'), (None, "null"), (True, "true")])
def test_an_answer_that_is_no_whole_number_is_shown(gold: object, shown: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "q.jsonl", [{"query": "Why?", "choices": ["yes", "no"], "gold": gold}])
    with pytest.raises(StageError, match=rf"a whole number from 0 to 1 \(found {shown}\)"):
        check_rows(BenchmarkTask(name="q", kind="multiple_choice", path=str(path)))


GOOD = {"q": "Why?", "opts": ["it's so", 'she said "no"'], "gold": 1, "day": "2024-01-01"}


FAILS = " of task mine fails for"


@pytest.mark.parametrize(
    ("rows", "text", "choice", "target", "message"),
    [
        ([GOOD, {**GOOD, "opts": ["a", ""]}], "q", "opts", "gold", r"doc_to_choice{} item 2 .*choice 2 of 2 is empty"),
        ([{**GOOD, "opts": ["", "a"]}], "q", "opts", "gold", r"doc_to_choice{} .*a choice is empty"),
        ([GOOD], "q", "\"['{{opts[0]}}', 'b']\"", "gold", r"doc_to_choice{} .*not a list of choices"),
        ([{**GOOD, "opts": ["a", "b"]}, GOOD], "q", "\"['{{opts[0]}}', 'b']\"", "gold", r"doc_to_choice{} item 2 "),
        ([GOOD], '"{{day.strip(1, 2)}}"', "opts", "gold", r"doc_to_text{} item 1 .*TypeError"),
        ([GOOD], '"{{day | nosuch}}"', "opts", "gold", r"nosuch"),
        ([GOOD, {**GOOD, "gold": 2}], "q", "opts", "gold", r"doc_to_target{} item 2 .*from 0 to 1, found 2"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_named_with_its_item(
    rows: list[dict[str, Any]], text: str, choice: str, target: str, message: str, tmp_path: Path
) -> None:
    task = yaml_task(tmp_path, rows, text, choice, target)
    with pytest.raises(StageError, match=message.replace("{}", FAILS)) as raised:
        loaded(task, tmp_path)
    assert raised.value.problems[0].code == "bad_task"


@pytest.mark.parametrize("is_column", [False, True], ids=["template", "column"])
@pytest.mark.parametrize("key", ["question", "answer"])
def test_a_null_is_neither_asked_nor_expected_as_the_word_none(key: str, is_column: bool, tmp_path: Path) -> None:
    row = {"question": "Which?", "answer": "This.", key: None}
    lines(tmp_path / "rows.jsonl", [{**row, key: "None"}, row])
    fields = ("question", "answer") if is_column else ('"{{question}}"', '"{{answer}}"')
    template = TASK.format(text=fields[0], choice="", target=fields[1])
    generated = template.replace("doc_to_choice: \n", "").replace("multiple_choice", "generate_until")
    (tmp_path / "mine.yaml").write_text(generated.replace("acc", "exact_match"))
    task = BenchmarkTask(name="mine", kind="lm_eval", path=str(tmp_path / "mine.yaml"))
    with pytest.raises(StageError, match=f"{FAILS} item 2 .*expected a text, found null"):
        loaded(task, tmp_path)


def test_quotes_in_a_list_of_choices_are_no_fault(tmp_path: Path) -> None:
    found = loaded(yaml_task(tmp_path, [GOOD], "q", '"{{opts}}"', "gold"), tmp_path)
    assert found.doc_to_choice(found.eval_docs[0]) == GOOD["opts"]
