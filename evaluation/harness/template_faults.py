"""Faults in the templates and functions of a YAML task, reported with item and field instead of a traceback."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from infra.errors import StageError, StemmaError, stage_error

FIELDS = (
    "doc_to_text", "doc_to_target", "doc_to_choice", "doc_to_image", "doc_to_audio", "doc_to_decontamination_query",
    "process_docs", "process_results",
)  # fmt: skip
SHOWN = 100
"""Characters of an item, and of a template's result, in a message."""


def check_items(task: Any, where: str, limit: int | None = None) -> None:
    """Build the prompt, the choices and the target of every item that will be asked.

    Args:
        task: a ConfigurableTask of lm-eval.
        where: place of the task in the config, for errors.
        limit: items that will be asked; None for all.

    Raises:
        StageError: `bad_task` naming item and field of the first item that a template or function cannot build, that
            has an empty choice, whose question or target is null, or whose target is not the number of a choice.
    """
    name = task.config.task
    for number, row in enumerate(task.eval_docs, 1):
        if limit is not None and number > limit:
            return
        with named(name, where, number):
            question = task.doc_to_text(row)
            choices = task.doc_to_choice(row) if task.config.doc_to_choice is not None else None
            target = task.doc_to_target(row)
        for key, value in (("doc_to_text", question), ("doc_to_target", target)):
            if value is None or (value == "None" and None in row.values()):
                raise _bad_field(name, where, number, row, key, "expected a text, found null")
        if choices is None:
            continue
        if not isinstance(choices, list | tuple) or not choices:
            raise _bad_field(
                name, where, number, row, "doc_to_choice", f"expected a list of choices, found {choices!r:.100}"
            )
        if empty := [number for number, choice in enumerate(choices, 1) if not str(choice)]:
            raise _bad_field(name, where, number, row, "doc_to_choice", f"choice {empty[0]} of {len(choices)} is empty")
        # In tasks such as WinoGrande, the question is the number and the target is a text.
        key, index = ("doc_to_text", question) if isinstance(question, int) else ("doc_to_target", target)
        if isinstance(index, int) and not -len(choices) <= index < len(choices):
            message = f"expected the number of a choice, from 0 to {len(choices) - 1}, found {index}"
            raise _bad_field(name, where, number, row, key, message)


@contextlib.contextmanager
def named(task: str, where: str, number: int = 0) -> Iterator[None]:
    """Raise StageError `bad_task` for an exception of a template or function of a task inside the block.

    Args:
        task: its name; "" to take it from the fault.
        where: place of the task in the config.
        number: item, from 1; 0 to take it from the fault.
    """
    try:
        yield
    except (StemmaError, MemoryError):
        raise
    except Exception as error:
        if (fault := _fault(error)) is None:
            raise
        task, field, row, number = task or fault[0], fault[1], fault[2], number or fault[3]
        kind = type(error).__name__
        reason = (str(error).splitlines() or [""])[0]
        message = f"{kind}: {reason}" if reason else kind
        if field == "doc_to_choice" and kind == "SyntaxError":
            message = "its text is not a list of choices; write it as {{[a, b]}}, which takes any text"
        elif isinstance(error, IndexError) and field == "__init__":
            field, message = "doc_to_choice", "a choice is empty"
        raise _bad_field(task, where, number, row, field, message) from error


def _fault(error: Exception) -> tuple[str, str, Any, int] | None:
    """Return the task, the field whose template or function failed, the item, and its number, which is 0 if unknown;
    None for any other fault."""
    fault: tuple[str, str, Any, int] | None = None
    # lm-eval tries the first item while loading a task.
    number = 0
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, local = frame.f_code, frame.f_locals
        if "lm_eval" not in code.co_filename.replace("\\", "/").split("/"):
            continue
        name = str(getattr(getattr(local.get("self"), "config", None), "task", ""))
        if code.co_name in FIELDS:
            fault = name, code.co_name, local.get("doc"), number
        elif code.co_name == "__init__" and "test_doc" in local:
            number = 1
            if "check_choices" in local:
                fault = name, "__init__", local["test_doc"], number
    return fault


def _bad_field(task: str, key: str, number: int, row: Any, field: str, message: str) -> StageError:
    item = f"item {number:,}" if number else "an item"
    excerpt = json.dumps(dict(row), ensure_ascii=False, default=str)[:SHOWN] if isinstance(row, Mapping) else ""
    location = f"{item} ({excerpt}…)" if excerpt else item
    return stage_error(
        "bad_task", key, f"{field} of task {task} fails for {location}: {message}", f"correct {field} or the item"
    )
