"""Where the solved examples before a question come from: a file of their own, or rows of the task's file that are then
not scored.

lm-eval's own way out, where a task has no other split, is to draw them from the scored one: then what is scored depends
on which of its neighbours stand solved before it, and a row that is there twice may stand solved before itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluation.config import BenchmarkTask
from evaluation.harness.task_file import check_rows
from evaluation.harness.task_rows import task_rows
from infra.errors import StageError, stage_error

SHARE = 4
"""At most every fourth row of a file is put aside."""


def shots_spec(task: BenchmarkTask, shots: int, rows_for_shots: int | None, where: str) -> dict[str, Any]:
    """The keys of an lm-eval task config that say where shots come from, and which rows are scored.

    task: one with a file (`as_file_task`), of a kind that takes shots. shots: as many as are asked for now.
    rows_for_shots: how many rows of its file are put aside, unless it has `shots_path`. where: its place in the config.
    Raises StageError: `no_shots` where there are fewer rows for shots; for `shots_path` what `check_rows` raises.
    """
    rows = _rows(task)
    spec: dict[str, Any] = {}
    if task.shots_path:
        check_rows(task.model_copy(update={"path": task.shots_path}))
        found, aside = _rows(task, Path(task.shots_path)), frozenset[int]()
    else:
        aside = put_aside(len(rows), rows_for_shots or 0)
        found = [rows[number] for number in sorted(aside)]
        if aside:
            spec["process_docs"] = _scored(aside)
    asked = {_text(row) for number, row in enumerate(rows) if number not in aside}
    found = [row for row in found if _text(row) not in asked]
    if len(found) < shots:
        raise _too_few(task, shots, len(found), len(rows), where)
    if found:
        # The first keeps `process_docs`, which is about the scored rows, from the shots.
        spec["fewshot_config"] = {"process_docs": None, "samples": found}
    return spec


def put_aside(rows: int, wanted: int) -> frozenset[int]:
    """Numbers of the rows that are put aside: evenly over the file, whose parts may lie one after the other."""
    count = min(wanted, rows // SHARE)
    return frozenset((2 * number + 1) * rows // (2 * count) for number in range(count))


def _scored(aside: frozenset[int]) -> Callable[[Any], Any]:
    def without_rows_for_shots(docs: Any) -> Any:
        return docs.select([number for number in range(len(docs)) if number not in aside])

    return without_rows_for_shots


def _rows(task: BenchmarkTask, path: Path | None = None) -> list[dict[str, Any]]:
    return [row for _, row in task_rows(task, path)]


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def _too_few(task: BenchmarkTask, shots: int, found: int, rows: int, where: str) -> StageError:
    if task.shots_path:
        message = f"{task.shots_path} has {found} rows that {task.name} does not score, for {shots} shots"
        return stage_error("no_shots", f"{where}.shots_path", message, "ask for fewer shots, or add rows to the file")
    message = f"of the {rows} rows of {task.path} {found} can be put aside for the {shots} shots of {task.name}"
    fix = "ask for fewer shots, or name a file of other rows as `shots_path` of the task"
    return stage_error("no_shots", where, message, fix)
