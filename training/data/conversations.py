"""Instruction rows as conversations within the model's length; answers stay whole, and several may share a sequence.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.errors import stage_error
from infra.run import Run
from training.chat.base import Answer, Chat, Conversation, pad
from training.data.preference_pairs import TooLong, prompts_of
from training.model.documents import positions_within
from training.model.loss import IGNORE

Pack = tuple[Conversation, ...]
"""Conversations that share a sequence."""


def answer_in(row: Mapping[str, Any]) -> Answer:
    """The answer of an instruction row."""
    if calls := row.get("tool_calls"):
        return {"role": "assistant", "content": row["response"], "tool_calls": calls}
    text: str = row["response"]
    return text


@dataclass(frozen=True)
class Fitted:
    """Conversations that fit, their rows, the number of truncated conversations, and the number of those left out."""

    conversations: list[Conversation]
    rows: list[Mapping[str, Any]]
    cut: int
    dropped: int

    def told(self, side: str, max_length: int, run: Run) -> Fitted:
        """Log what did not fit, and return self. Raises StageError `no_room` if nothing is left."""
        if self.cut:
            message = f"{self.cut:,} {side} conversations lost their beginning, so that they fit {max_length:,} tokens"
            run.event("prompts_cut", f"sft: {message}")
        if self.dropped:
            message = f"{self.dropped:,} {side} conversations are longer than {max_length:,} tokens and left out"
            run.event("pairs_dropped", f"sft: {message}")
        if not self.conversations:
            raise stage_error(
                "no_room",
                "sft.max_length",
                f"expected {side} conversations that fit {max_length:,} tokens, all {self.dropped:,} are longer",
                "raise it, take a model with more positions, or set too_long: cut_prompt",
            )
        return self


def fitted(chat: Chat, rows: Sequence[Mapping[str, Any]], max_length: int, too_long: TooLong) -> Fitted:
    """Instruction rows as conversations of at most `max_length` tokens each.

    The last answer stays whole, with its `<|end|>`. cut_prompt: a conversation that is longer loses its oldest
    exchanges, and then the beginning of its question; it is left out where less than one token of that would stay.
    drop: every conversation that is too long is left out.
    """
    prompts = prompts_of(chat, rows)
    responses = chat.respond(prompts, [answer_in(row) for row in rows])
    found, kept, cut = [], [], 0
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        room = max_length - len(response)
        is_long = len(prompt) > room
        if is_long and (too_long == "drop" or room < min(chat.least_prompt, len(prompt))):
            continue
        cut += is_long
        found.append(Conversation(chat.shortened(prompt, room), response))
        kept.append(row)
    return Fitted(found, kept, cut, len(rows) - len(found))


def by_weight(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Repeat each row by its `weight`; the fractional part is rounded up or down by the row's id."""
    times = []
    for row in rows:
        whole, rest = divmod(row.get("weight", 1.0), 1)
        times.append(int(whole) + bool(rest and int(row["id"][:8], 16) < rest * 2**32))
    return [row for row, count in zip(rows, times, strict=True) for _ in range(count)]


def packs(conversations: Sequence[Conversation], max_length: int) -> list[Pack]:
    """Pack conversations into sequences of at most `max_length` tokens: the longest first, each where it leaves the
    least space (best fit decreasing)."""
    order = sorted(range(len(conversations)), key=lambda number: (-len(conversations[number].ids), number))
    rooms: list[tuple[int, int]] = []  # room that is left, number of the sequence
    found: list[list[Conversation]] = []
    for number in order:
        one = conversations[number]
        place = bisect_left(rooms, (len(one.ids), -1))
        room, at = rooms.pop(place) if place < len(rooms) else (max_length, len(found))
        if at == len(found):
            found.append([])
        found[at].append(one)
        insort(rooms, (room - len(one.ids), at))
    return [tuple(one) for one in found]


def packed_batch(chat: Chat, sequences: Sequence[Pack]) -> dict[str, Tensor]:
    """A batch of packed conversations for `LanguageModel`: attention and positions keep to each (`documents`,
    `position_ids`), and labels are on every answer of the assistant."""
    batch = {"input_ids": pad([[id_ for one in pack for id_ in one.ids] for pack in sequences], chat.pad)}
    labels, documents = torch.full_like(batch["input_ids"], IGNORE), torch.zeros_like(batch["input_ids"])
    for row, pack in enumerate(sequences):
        start = 0
        for number, one in enumerate(pack):
            stop = start + len(one.ids)
            labels[row, start:stop] = chat.response_batch([one], every_answer=True)["labels"][0]
            documents[row, start:stop] = number
            start = stop
        documents[row, start:] = len(pack)
    return {**batch, "labels": labels, "documents": documents.int(), "position_ids": positions_within(documents)}
