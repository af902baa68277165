"""Rows of a benchmark's file in any format, and the same rows as JSON Lines for lm-eval."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corpus.documents.quarantine import Rejected
from corpus.readers.contents import refuse_misnamed
from corpus.readers.formats.json_lines import is_list
from corpus.readers.hub import dataset_files
from corpus.readers.plan import named_format
from corpus.readers.records import records_in
from evaluation.config import BenchmarkTask
from infra.errors import StageError, stage_error
from infra.io.bounded import file_lines
from infra.io.json import BadJson, parse_json


def task_rows(task: BenchmarkTask, path: Path | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of every row of a task's file, or of its test split where `path` is a dataset's folder.

    Cells of a CSV file that should be a list or a number are parsed.

    Args:
        task: one with a file (`as_file_task`).
        path: another file of the same kind; by default the task's own.

    Raises:
        StageError: `corrupt_line` for a row that cannot be read, and what the readers raise.
    """
    for file in files_of(path or Path(str(task.path))):
        kind = named_format(file)
        named = kind if kind in ("parquet", "arrow", "csv", "unread", "pdf") else "jsonl"
        refuse_misnamed(file, named, "auto", "")
        if not (kind in ("parquet", "arrow", "csv") or is_list(file)):
            yield from _lines(file)
            continue
        for item in records_in(file, kind, "auto", task.name):
            if isinstance(item, Rejected):
                raise stage_error("corrupt_line", item.place, item.reason)
            row = dict(item.value)
            yield item.place, _typed(task, row) if kind == "csv" else row


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the file itself, or the data files of a dataset's folder: its test split or, if there is none, its
    validation split."""
    if not path.is_dir():
        return (path,)
    try:
        return dataset_files(str(path), None, "test", None)
    except StageError as error:
        if error.problems[0].code != "wrong_split":
            raise
    return dataset_files(str(path), None, "validation", None)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in file_lines(file):
        if not line.strip():
            continue
        try:
            row = parse_json(line, expected="a JSON object on each line")
        except BadJson as error:
            raise stage_error("corrupt_line", f"{file}:{number}", str(error)) from None
        if not isinstance(row, dict):
            raise stage_error("corrupt_line", f"{file}:{number}", "expected a JSON object on each line")
        yield f"{file}:{number}", row


def _typed(task: BenchmarkTask, row: Mapping[str, str]) -> dict[str, Any]:
    if task.kind != "multiple_choice":
        return dict(row)
    return {name: _parsed(cell) if name in (task.choices, task.gold) else cell for name, cell in row.items()}


def _parsed(cell: str) -> Any:
    try:
        return parse_json(cell)
    except BadJson:
        return cell


def json_lines_of(task: BenchmarkTask, folder: Path) -> Path:
    """Return the task's file if it is JSON Lines, otherwise a file in `folder` with the same rows as JSON Lines."""
    path = Path(str(task.path))
    if path.is_file() and named_format(path) in ("jsonl", "text") and not is_list(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"rows-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.jsonl"
    with written.open("w", encoding="utf8") as out:
        for _, row in task_rows(task):
            out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return written
