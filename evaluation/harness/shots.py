"""Source of solved examples before a question: a separate file, or rows of the task's file that are not scored.

lm-eval's own fallback, if a task has no other split, is to draw them from the scored split. The score then depends on
the neighbours that appear as solved examples, and a row that occurs twice may appear as an example before itself.
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
"""At most one row in 4 of a file is set aside."""


def shots_spec(task: BenchmarkTask, shots: int, rows_for_shots: int | None, where: str) -> dict[str, Any]:
    """Return the keys of an lm-eval task config that define the source of shots and the scored rows.

    Args:
        task: one with a file (`as_file_task`), of a kind that takes shots.
        shots: the number requested now.
        rows_for_shots: number of rows of its file to set aside, unless it has `shots_path`.
        where: its place in the config.

    Raises StageError: `no_shots` if there are fewer rows for shots; for `shots_path`, the errors of `check_rows`.
    """
    rows = _rows(task)
    spec: dict[str, Any] = {}
    if task.shots_path:
        check_rows(task.model_copy(update={"path": task.shots_path}))
        shot_rows, reserved = _rows(task, Path(task.shots_path)), frozenset[int]()
    else:
        reserved = put_aside(len(rows), rows_for_shots or 0)
        shot_rows = [rows[number] for number in sorted(reserved)]
        if reserved:
            spec["process_docs"] = _without_reserved(reserved)
    scored_texts = {_text(row) for number, row in enumerate(rows) if number not in reserved}
    shot_rows = [row for row in shot_rows if _text(row) not in scored_texts]
    if len(shot_rows) < shots:
        raise _too_few(task, shots, len(shot_rows), len(rows), where)
    if shot_rows:
        # `process_docs: None` keeps the function of the scored rows from being applied to the shots.
        spec["fewshot_config"] = {"process_docs": None, "samples": shot_rows}
    return spec


def put_aside(rows: int, requested: int) -> frozenset[int]:
    """Return the numbers of the rows to set aside, evenly over the file, because its parts may follow one another."""
    count = min(requested, rows // SHARE)
    return frozenset((2 * number + 1) * rows // (2 * count) for number in range(count))


def _without_reserved(reserved: frozenset[int]) -> Callable[[Any], Any]:
    def without_rows_for_shots(docs: Any) -> Any:
        return docs.select([number for number in range(len(docs)) if number not in reserved])

    return without_rows_for_shots


def _rows(task: BenchmarkTask, path: Path | None = None) -> list[dict[str, Any]]:
    return [row for _, row in task_rows(task, path)]


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def _too_few(task: BenchmarkTask, shots: int, available: int, rows: int, key: str) -> StageError:
    if task.shots_path:
        message = f"{task.shots_path} has {available} rows that {task.name} does not score, for {shots} shots"
        return stage_error("no_shots", f"{key}.shots_path", message, "use fewer shots, or add rows to the file")
    message = f"only {available} of the {rows} rows of {task.path} can be reserved for the {shots} shots of {task.name}"
    fix = "use fewer shots, or set `shots_path` of the task to a file of other rows"
    return stage_error("no_shots", key, message, fix)
