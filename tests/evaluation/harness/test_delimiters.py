"""The text between a question and its answer, by script, in code, and by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evaluation.config import BenchmarkTask
from evaluation.harness.delimiters import delimiter_between
from evaluation.harness.tasks import _load, own_cache, quiet


def asked(tmp_path: Path, kind: str, rows: list[dict[str, Any]], shots: int = 0, **keys: Any) -> list[tuple[str, str]]:
    """(context, continuation) of every request that lm-eval makes of the rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    task = BenchmarkTask.model_validate({"name": "mine", "kind": kind, "path": str(path), **keys})
    with quiet(), own_cache(tmp_path / "cache"):
        [loaded] = _load(0, task, None, shots, shots or None)
        loaded.set_config(key="num_fewshot", value=shots)
        loaded.set_fewshot_seed(seed=1)
        loaded.build_all_requests()
    return [instance.args for instance in loaded.instances]


def quiz(query: str, *choices: str) -> dict[str, Any]:
    return {"query": query, "choices": list(choices), "gold": 0}


@pytest.mark.parametrize(
    ("query", "choice", "delimiter"),
    [
        ("Who wrote it?", "a printer", " "),
        ("1 + 1 =", "2", " "),
        ("오늘 날씨는 어때요?", "좋아요", " "),
        ("Кто это написал?", "печатник", " "),
        ("من كتب هذا؟", "الطابع", " "),
        ("How do you say water in Chinese?", "水", " "),
        ("谁写了这封信？", "是的", ""),
        ("iPhone 的颜色是什么？", "A", ""),
        ("今日の天気はどうですか。", "晴れ", ""),
        ("วันนี้อากาศเป็นอย่างไร", "ดีมาก", ""),
        ("ມື້ນີ້ອາກາດ", "ດີ", ""),
        ("Who wrote it?", " a printer", ""),
        ("Who wrote it?", "\na printer", ""),
    ],
)
def test_the_script_decides(query: str, choice: str, delimiter: str) -> None:
    assert delimiter_between(query, choice, "\nAnswer:") == delimiter
    assert delimiter_between(query, choice) == delimiter


def test_choices_in_a_script_without_spaces_follow_at_once(tmp_path: Path) -> None:
    requests = asked(tmp_path, "multiple_choice", [quiz("谁写了这封信？", "是的", "不是")] * 2)
    assert requests[:2] == [("谁写了这封信？\nAnswer:", "是的"), ("谁写了这封信？\nAnswer:", "不是")]


@pytest.mark.parametrize(
    ("context", "delimiter"),
    [
        ("def add(a, b):\n    return", ""),
        ("int main() {\n  printf(", ""),
        ("Complete it:\n```python\nx =", ""),
        ("import taxes", " "),
        ("They return\nto the village.\nIf he asks, say", " "),
        ("The answer: ", ""),
    ],
)
def test_code_has_its_own_spaces(context: str, delimiter: str) -> None:
    assert delimiter_between(context, "value") == delimiter


def test_answers_of_one_question_get_each_what_they_lack(tmp_path: Path) -> None:
    rows = [quiz("Is it so?", " yes", "no"), quiz("是这样吗？", "是", "不是")]
    assert [answer for _, answer in asked(tmp_path, "multiple_choice", rows)] == [" yes", " no", "是", "不是"]
    parts = (("一二", "三"), ("one two", "three"), ("one two", " three"), ("one two ", "three"))
    rows = [{"context": context, "continuation": follows} for context, follows in parts]
    assert ["".join(pair) for pair in asked(tmp_path, "cloze", rows)] == ["一二三"] + ["one two three"] * 3


def test_a_passage_keeps_the_space_before_its_last_word(tmp_path: Path) -> None:
    rows = [{"text": "one two three"}, {"text": "one two three\n"}]
    assert asked(tmp_path, "cloze", rows) == [("one two ", "three")] * 2


def test_solved_examples_have_the_same_delimiter(tmp_path: Path) -> None:
    rows = [quiz(f"第{n}个问题是什么？", f"答{n}", "无") for n in range(8)]
    context, answer = asked(tmp_path, "multiple_choice", rows, shots=1)[0]
    assert answer == "答0" and "\nAnswer:答" in context
    mixed = [*rows, *(quiz(f"question {n}", f"answer {n}", " none") for n in range(8))]
    for context, _ in asked(tmp_path, "multiple_choice", mixed, shots=2):
        assert "  " not in context and "\nAnswer: 答" not in context and "\nAnswer:answer" not in context


def test_the_key_decides_for_all(tmp_path: Path) -> None:
    rows = [quiz("谁？", "是", "不"), quiz("Who?", " he", "she")]
    answers = [answer for _, answer in asked(tmp_path, "multiple_choice", rows, delimiter="\n")]
    assert answers == ["\n是", "\n不", "\n he", "\nshe"]
    with pytest.raises(ValidationError, match="target_delimiter"):
        BenchmarkTask.model_validate({"name": "x", "kind": "text", "path": "x.jsonl", "delimiter": ""})


def test_lm_evals_own_config_is_left_for_text_with_spaces(tmp_path: Path) -> None:
    from evaluation.harness.tasks import task_spec

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(quiz("Who?", "he", "she")) + "\n")
    spec = task_spec(BenchmarkTask(name="mine", kind="multiple_choice", path=str(path)))
    assert "target_delimiter" not in spec and spec["doc_to_choice"] == "choices"
