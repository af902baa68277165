"""Answers of a teacher that is an endpoint: the responses of instructions, written by it from their prompts.

Answers are kept by request in a file that all builds of a store share (`corpus.generation.answers`): a stage that was
stopped asks for those that are missing, and none is paid for twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.endpoint import Endpoint, EndpointFailure, Request
from infra.errors import StemmaError, stage_error
from infra.run import Run
from training.config import DistillConfig
from training.core import ranks

_FAULTS = ("failed", "truncated", "empty")


@dataclass(frozen=True)
class TeacherAnswers:
    """Rows whose responses the teacher wrote, in their order. left_out: rows without a proper answer, by fault."""

    rows: list[dict[str, Any]]
    left_out: Mapping[str, int]
    completion_tokens: int


def teacher_answers(rows: Sequence[Mapping[str, Any]], config: DistillConfig, run: Run) -> TeacherAnswers:
    """Return the rows with the teacher's answers as responses; every rank must call, the first asks.

    Raises StageError as `Endpoint.ask` does, and `unanswered` where more are without a proper answer than
    `answer_limits` allows, on every rank.
    """
    outcome: TeacherAnswers | StemmaError | None = None
    if ranks.is_first():
        try:
            outcome = asyncio.run(_ask_teacher(rows, config, run))
        except StemmaError as error:
            outcome = error
    outcome = ranks.from_first(outcome)
    if isinstance(outcome, StemmaError):
        raise outcome
    assert outcome is not None
    return outcome


async def _ask_teacher(rows: Sequence[Mapping[str, Any]], config: DistillConfig, run: Run) -> TeacherAnswers:
    assert config.endpoint is not None
    answers = AnswerStore(run.answers_dir)
    endpoint = Endpoint(config.endpoint, config.sampling, answers, "distill.endpoint")
    slots = asyncio.Semaphore(config.endpoint.concurrency)
    done, fault_seen = 0, False

    async def ask(row: Mapping[str, Any]) -> EndpointAnswer | EndpointFailure | None:
        nonlocal done, fault_seen
        if (messages := _messages(row)) is None:
            return EndpointFailure("a conversation with calls of tools")
        async with slots:
            # Nothing more is sent after a stop; answers that are under way are still received and kept.
            if fault_seen or run.cancelled:
                return None
            try:
                answer = await endpoint.ask(Request(messages))
            except BaseException:
                fault_seen = True
                raise
        done += 1
        run.progress(done, len(rows), "answers", "the teacher answers")
        return answer

    try:
        replies = await asyncio.gather(*map(ask, rows), return_exceptions=True)
    finally:
        await endpoint.close()
        answers.close()
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    run.stop_if_cancelled()
    faults = Counter[str]()
    kept = []
    for row, reply in zip(rows, replies, strict=True):
        fault = reply.fault if isinstance(reply, EndpointAnswer) else "failed"
        faults[fault] += 1
        if isinstance(reply, EndpointAnswer) and not fault:
            known = {key: value for key, value in row.items() if key != "tool_calls"}
            kept.append({**known, "response": reply.text.strip()})
    for fault in _FAULTS:
        allowed = getattr(config.answer_limits, fault)
        if faults[fault] > allowed * len(rows):
            message = (
                f"{faults[fault]:,} of {len(rows):,} answers of the teacher are {fault}; {allowed:.0%} are allowed"
            )
            fix = "raise sampling.max_tokens for truncated ones, or the limit"
            raise stage_error("unanswered", f"distill.answer_limits.{fault}", message, fix)
    counts = endpoint.counts
    message = f"{len(kept):,} answers of {config.endpoint.model}, {counts['cached']:,} of them cached"
    run.event("teacher_answers", f"distill: {message}")
    return TeacherAnswers(kept, {fault: faults[fault] for fault in _FAULTS}, counts["completion_tokens"])


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Return the turns of a row up to its question; None where a turn is no plain text."""
    turns = [*row.get("history", ()), {"role": "user", "content": row["prompt"]}]
    if row.get("steps") or any(not isinstance(turn.get("content"), str) or turn.get("tool_calls") for turn in turns):
        return None
    return [{"role": str(turn["role"]), "content": turn["content"]} for turn in turns]
