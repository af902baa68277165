"""Benchmark files: the file that a task reads, and a check of each line before any model is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evaluation.config import DATA_DIR, BenchmarkTask
from evaluation.harness.task_rows import task_rows
from infra.errors import stage_error


def as_file_task(task: BenchmarkTask) -> BenchmarkTask:
    """Return one of the project's own tasks as a file task; other tasks unchanged."""
    if task.kind != "project":
        return task
    path = str(DATA_DIR / f"{task.name}.jsonl")
    if task.name == "minimal_pairs":
        return BenchmarkTask(name=task.name, kind="minimal_pairs", path=path)
    return BenchmarkTask(name=task.name, kind="multiple_choice", path=path, query="context", query_suffix="")


def check_rows(task: BenchmarkTask) -> None:
    """Raise StageError naming file, line and field of the first row that does not fit the task's kind."""
    items = 0
    for location, row in task_rows(task):
        items += 1
        if wrong := _what_is_missing(task, row):
            fix = f"name the fields of your file in benchmarks.tasks ({task.kind} task {task.name})"
            fields = ", ".join(map(str, row)) or "no fields"
            raise stage_error("bad_task", location, f"expected {wrong}; it has {fields}", fix)
    if not items:
        raise stage_error("empty_source", str(task.path), "expected at least one item, found none")


def _what_is_missing(task: BenchmarkTask, row: Mapping[str, Any]) -> str:
    """Return a description of what the row lacks; empty if the row fits the kind."""
    if task.kind == "multiple_choice":
        choices = row.get(task.choices)
        if not isinstance(row.get(task.query), str):
            return f"`{task.query}` (the query), a string"
        if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) for c in choices)):
            return f"`{task.choices}`, a list of at least two strings"
        if not all(choice.strip() for choice in choices):
            return f"`{task.choices}`, a list of strings that are not empty"
        gold = row.get(task.gold)
        if isinstance(gold, bool) or not (isinstance(gold, int) and 0 <= gold < len(choices)):
            value = f" (found {json.dumps(gold, default=str)[:40]})" if task.gold in row else ""
            return f"`{task.gold}`, a whole number from 0 to {len(choices) - 1}{value}"
    elif task.kind == "minimal_pairs":
        for field in (task.good, task.bad):
            if not isinstance(row.get(field), str) or not row[field].strip():
                return f"`{field}`, a string that is not empty"
    elif task.kind == "text":
        if not isinstance(row.get(task.text), str) or not row[task.text].strip():
            return f"`{task.text}`, a string"
        if task.domain in row and not isinstance(row[task.domain], str):
            return f"`{task.domain}`, a string"
    elif task.context in row:
        for field in (task.context, task.continuation):
            # A context may be a line break alone.
            if not isinstance(row.get(field), str) or not (row[field] if field == task.context else row[field].strip()):
                return f"`{field}`, a string that is not empty"
    elif not isinstance(row.get(task.text), str) or not all(
        map(str.strip, row[task.text].rstrip().rpartition(" ")[::2])
    ):
        return (
            f"`{task.text}`, a string of at least two words that ends with one, or `{task.context}` and "
            f"`{task.continuation}`"
        )
    return ""
