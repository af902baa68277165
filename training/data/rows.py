"""Rows of instructions and preferences: their prompts and answers, and the ones that fit within a model's length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from corpus.pairs.dialogues import opening_of
from evaluation.statistics.clustered import number_clusters
from infra.errors import stage_error
from infra.run import Run
from training.chat.base import Answer, Chat

E = TypeVar("E")
Row = Mapping[str, Any]
TooLong = Literal["cut_prompt", "drop"]


# What a row holds.


def prompts_of(chat: Chat, rows: Sequence[Row]) -> list[list[int]]:
    """The prompts of rows of instructions or preferences, of any length: each after the messages before it (`history`),
    and followed by the calls of functions and their results (`steps`)."""
    return chat.ask(
        [[*row.get("history", ()), {"role": "user", "content": row["prompt"]}, *row.get("steps", ())] for row in rows],
        [row.get("tools", ()) for row in rows],
    )


def response_of(row: Row) -> Answer:
    """The answer of an instruction row, a message where it calls functions."""
    if calls := row.get("tool_calls"):
        return {"role": "assistant", "content": row["response"], "tool_calls": calls}
    text: str = row["response"]
    return text


def answer_of(row: Row, side: Literal["chosen", "rejected"]) -> Answer:
    """An answer of a row of preferences, a message where it may call functions."""
    answer: Answer = row.get(f"{side}_message") or row[side]
    return answer


def is_tie(row: Row) -> bool:
    """Return True if both answers of a row of preferences have equally many votes."""
    votes = row.get("votes")
    return votes is not None and votes[0] == votes[1]


def by_weight(rows: Sequence[Row]) -> list[Row]:
    """Repeat each row by its `weight`; the fractional part is rounded up or down by the row's id."""
    times = []
    for row in rows:
        count, fraction = divmod(row.get("weight", 1.0), 1)
        times.append(int(count) + bool(fraction and int(row["id"][:8], 16) < fraction * 2**32))
    return [row for row, count in zip(rows, times, strict=True) for _ in range(count)]


def prompt_clusters(rows: Iterable[Row]) -> NDArray[np.int64]:
    """The number of the prompt of each row (N,): pairs of a ranking, separate pairs of one prompt, and turns of one
    dialogue share it."""
    return number_clusters(opening_of(row["prompt"], row.get("history") or ()) for row in rows)


# The ones that fit.


@dataclass(frozen=True)
class Fitted(Generic[E]):
    """Examples that fit, their rows, the number of shortened prompts, and the number of examples left out.

    kind: what an example is called in messages, in the plural.
    """

    examples: list[E]
    rows: list[Row]
    cut: int
    dropped: int
    kind: str

    def report(self, stage: str, side: str, max_length: int, run: Run) -> Fitted[E]:
        """Log what did not fit, and return self. Raises StageError `no_room` if nothing is left."""
        if self.cut:
            message = f"the prompts of {self.cut:,} {side} {self.kind} were truncated at the beginning to fit"
            run.event("prompts_cut", f"{stage}: {message} {max_length:,} tokens with their answers")
        if self.dropped:
            message = f"{self.dropped:,} {side} {self.kind} are longer than {max_length:,} tokens and left out"
            run.event("pairs_dropped", f"{stage}: {message}")
        if not self.examples:
            raise stage_error(
                "no_room",
                f"{stage}.max_length",
                f"expected {side} {self.kind} that fit {max_length:,} tokens, but all {self.dropped:,} are longer",
                "raise it, use a model with more positions, or set too_long: cut_prompt",
            )
        return self

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Return the figures of a stage about examples that did not fit."""
        return {f"{prefix}prompts_cut": float(self.cut), f"{prefix}pairs_dropped": float(self.dropped)}


class LengthLimit:
    """The room of `max_length` tokens in which a prompt and its longest answer must fit.

    Answers stay whole, with their `<|end|>`. cut_prompt: a prompt that leaves no room loses its oldest exchanges, and
    then its beginning; an example is left out where less than one token of it would stay. drop: every example that is
    too long is left out.

    cut, dropped: prompts that were shortened, and examples that were left out, so far.
    """

    def __init__(self, chat: Chat, max_length: int, too_long: TooLong) -> None:
        self._chat, self._max_length, self._too_long = chat, max_length, too_long
        self.cut = self.dropped = 0

    def fit(self, prompt: list[int], answers: Iterable[Sequence[int]]) -> list[int] | None:
        """Return the prompt, shortened where needed for the longest of its answers; None where it is left out."""
        room = self._max_length - max(map(len, answers))
        is_long = len(prompt) > room
        if is_long and (self._too_long == "drop" or room < min(self._chat.least_prompt, len(prompt))):
            self.dropped += 1
            return None
        self.cut += is_long
        return self._chat.shortened(prompt, room)
