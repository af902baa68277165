"""Preference pairs as token ids: two answers to one prompt, within the model's length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.errors import stage_error
from infra.run import Run
from training.chat.base import Answer, Chat, Conversation

TooLong = Literal["cut_prompt", "drop"]


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class FittedPairs:
    """Pairs that fit, their rows, the number of truncated prompts, and the number of pairs left out."""

    pairs: list[Pair]
    rows: list[Mapping[str, Any]]
    cut: int
    dropped: int

    def told(self, stage: str, side: str, max_length: int, run: Run) -> FittedPairs:
        """Log what did not fit, and return self. Raises StageError `no_room` if nothing is left."""
        tell_lengths(stage, side, max_length, run, self.cut, self.dropped, is_empty=not self.pairs)
        return self


def is_tie(row: Mapping[str, Any]) -> bool:
    """Return True if both answers of a row of `preferences` have equally many votes."""
    votes = row.get("votes")
    return votes is not None and votes[0] == votes[1]


def tell_lengths(stage: str, side: str, max_length: int, run: Run, cut: int, dropped: int, *, is_empty: bool) -> None:
    """Log what did not fit. Raises StageError `no_room` if nothing is left."""
    if cut:
        message = f"{cut:,} {side} prompts lost their beginning, so that prompt and answer fit {max_length:,}"
        run.event("prompts_cut", f"{stage}: {message} tokens")
    if dropped:
        message = f"{dropped:,} {side} pairs are longer than {max_length:,} tokens and left out"
        run.event("pairs_dropped", f"{stage}: {message}")
    if is_empty:
        raise stage_error(
            "no_room",
            f"{stage}.max_length",
            f"expected {side} pairs that fit {max_length:,} tokens, all {dropped:,} are longer",
            "raise it, take a model with more positions, or set too_long: cut_prompt",
        )


def prompts_of(chat: Chat, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The prompts of rows of instructions or preferences, of any length: each with what was said before it (`history`),
    and the calls of functions and their results behind it (`steps`)."""
    return chat.ask(
        [[*row.get("history", ()), {"role": "user", "content": row["prompt"]}, *row.get("steps", ())] for row in rows],
        [row.get("tools", ()) for row in rows],
    )


def answer_of(row: Mapping[str, Any], side: Literal["chosen", "rejected"]) -> Answer:
    """An answer of a row of preferences, a message where it may call functions."""
    answer: Answer = row.get(f"{side}_message") or row[side]
    return answer


def fitted_pairs(chat: Chat, rows: Sequence[Mapping[str, Any]], max_length: int, too_long: TooLong) -> FittedPairs:
    """Rows with `prompt`, `chosen` and `rejected` as pairs of at most `max_length` tokens each.

    Answers stay whole, with their `<|end|>`. cut_prompt: a prompt that leaves no room for the longer answer loses its
    beginning, the same for both; a pair is left out where less than one token of it would stay. drop: every pair that
    is too long is left out.
    """
    prompts = prompts_of(chat, rows)
    chosen = chat.respond(prompts, [answer_of(row, "chosen") for row in rows])
    rejected = chat.respond(prompts, [answer_of(row, "rejected") for row in rows])
    pairs, kept, cut = [], [], 0
    for row, prompt, good, bad in zip(rows, prompts, chosen, rejected, strict=True):
        room = max_length - max(len(good), len(bad))
        is_long = len(prompt) > room
        if is_long and (too_long == "drop" or room < min(chat.least_prompt, len(prompt))):
            continue
        asked = chat.shortened(prompt, room)
        cut += is_long
        pairs.append(Pair(Conversation(asked, good), Conversation(asked, bad)))
        kept.append(row)
    return FittedPairs(pairs, kept, cut, len(rows) - len(pairs))
