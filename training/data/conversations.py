"""Conversations from instruction rows, within the model's length; several may share a sequence.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from training.chat.base import Chat, Conversation, pad
from training.data.rows import Fitted, LengthLimit, Row, TooLong, prompts_of, response_of
from training.model.documents import positions_within
from training.model.loss import IGNORE

Pack = tuple[Conversation, ...]
"""Conversations that share a sequence."""


def fitted_conversations(chat: Chat, rows: Sequence[Row], max_length: int, too_long: TooLong) -> Fitted[Conversation]:
    """Instruction rows as conversations of at most `max_length` tokens each; see `training.data.rows.LengthLimit`."""
    room = LengthLimit(chat, max_length, too_long)
    conversations, kept = [], []
    prompts = prompts_of(chat, rows)
    responses = chat.respond(prompts, [response_of(row) for row in rows])
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        if (shortened := room.fit(prompt, [response])) is not None:
            conversations.append(Conversation(shortened, response))
            kept.append(row)
    return Fitted(conversations, kept, room.cut, room.dropped, "conversations")


def packs(conversations: Sequence[Conversation], max_length: int) -> list[Pack]:
    """Pack conversations into sequences of at most `max_length` tokens: the longest first, each where it leaves the
    least space (best fit decreasing)."""
    order = sorted(range(len(conversations)), key=lambda number: (-len(conversations[number].ids), number))
    rooms: list[tuple[int, int]] = []  # room that is left, number of the sequence
    sequences: list[list[Conversation]] = []
    for number in order:
        one = conversations[number]
        place = bisect_left(rooms, (len(one.ids), -1))
        room, at = rooms.pop(place) if place < len(rooms) else (max_length, len(sequences))
        if at == len(sequences):
            sequences.append([])
        sequences[at].append(one)
        insort(rooms, (room - len(one.ids), at))
    return [tuple(conversations) for conversations in sequences]


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
