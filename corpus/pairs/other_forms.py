"""Converts the forms of vendors and collections into messages and ranked answers, which the readers take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra.io.json import BadJson, parse_json

EXCHANGES = (
    ("human", "assistant"),
    ("user", "assistant"),
    ("user", "bot"),
    ("input", "output"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Fields of a question and its answer in a list of exchanges, as in Firefly (`human`), XTuner (`input`) and others."""
_RANKS = {"model_a": [1, 2], "a": [1, 2], "model_b": [2, 1], "b": [2, 1], "tie": [1, 1]}
"""The ranks of two answers by the first word under `winner`: Chatbot Arena also has `tie (bothbad)`."""


def in_read_form(row: Mapping[str, Any], turns: Sequence[str]) -> Mapping[str, Any]:
    """Return a record with its messages under `messages` and its answers under `answers`; unchanged in any other form.

    Args:
        turns: fields that may be a list of messages, or of exchanges.
    """
    if isinstance(row.get("contents"), list):
        return _of_contents(row)
    if "winner" in row or "winner_model_a" in row:
        return _of_battle(row)
    if isinstance(row.get("prompt"), Mapping) and isinstance(row["prompt"].get("replies"), list):
        return _of_tree(row)
    for name in turns:
        exchanges = row.get(name)
        if isinstance(exchanges, list) and exchanges and (messages := _of_exchanges(exchanges)):
            return {**row, name: messages}
    return row


def _of_contents(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemini's requests: `contents` of messages with `parts`, and `systemInstruction`."""
    contents = row["contents"]
    if not contents or not all(isinstance(message, Mapping) and message.get("parts") for message in contents):
        return row
    messages = [{"role": message.get("role") or "user", "content": _parts(message)} for message in contents]
    system = row.get("systemInstruction") or row.get("system_instruction")
    if isinstance(system, Mapping) and system.get("parts"):
        system = _parts(system)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {**row, "messages": messages}


def _parts(message: Mapping[str, Any]) -> Any:
    parts = message["parts"]
    return [parts] if isinstance(parts, Mapping) else parts


def _of_battle(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Chatbot Arena's judgements: two conversations or, as at Kaggle, lists of prompts and of both models' answers."""
    ranks = _RANKS.get(str(row.get("winner") or _winner(row)).lower().partition(" ")[0])
    first, second = row.get("conversation_a"), row.get("conversation_b")
    if first is None and second is None:
        prompts, *answers = (_texts(row.get(name)) for name in ("prompt", "response_a", "response_b"))
        if not prompts or any(len(texts) != len(prompts) for texts in answers):
            return row
        first, second = (_spoken(zip(prompts, texts, strict=True)) for texts in answers)
    if ranks is None or not (isinstance(first, list) and isinstance(second, list) and first and second):
        return row
    if first[:-1] == second[:-1]:
        return {**row, "prompt": None, "messages": first[:-1], "answers": [first[-1], second[-1]], "ranks": ranks}
    chosen, rejected = (first, second) if ranks[0] <= ranks[1] else (second, first)
    return {**row, "prompt": None, "chosen": chosen, "rejected": rejected}


def _winner(row: Mapping[str, Any]) -> str:
    return next((name for name in ("model_a", "model_b", "tie") if str(row.get(f"winner_{name}")) in ("1", "True")), "")


def _texts(value: Any) -> list[str]:
    """A list of texts, or its JSON; empty for anything else."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except BadJson:
            return []
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else []


def _of_exchanges(exchanges: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a list of questions with their answers; empty for a list of anything else."""
    if all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in exchanges
    ):
        return _spoken(exchanges)
    if not all(isinstance(exchange, Mapping) for exchange in exchanges):
        return []
    if any(exchange.get(key) is not None for exchange in exchanges for key in ("role", "from")):
        return []
    for question, answer in EXCHANGES:
        if all(isinstance(exchange.get(key), str) for exchange in exchanges for key in (question, answer)):
            system = exchanges[0].get("system")
            opening = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            return opening + _spoken((exchange[question], exchange[answer]) for exchange in exchanges)
    return []


def _spoken(pairs: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _of_tree(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAssistant's trees of messages: the conversation of the best replies, and the ranked answers to its prompt."""
    path = [row["prompt"]]
    while replies := _replies(path[-1]):
        path.append(replies[0])
    if len(path) % 2:  # the last message has no answer
        path.pop()
    messages = [{"role": message.get("role"), "content": message.get("text")} for message in path]
    read = {**row, "prompt": row["prompt"].get("text"), "messages": messages}
    ranked = [reply for reply in _replies(row["prompt"]) if _rank(reply) is not None]
    if len(ranked) > 1:
        return {**read, "answers": [reply.get("text") for reply in ranked], "ranks": [_rank(reply) for reply in ranked]}
    return read


def _replies(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The replies to a message, the best first; those without a rank last."""
    replies = [
        reply for reply in message.get("replies") or () if isinstance(reply, Mapping) and not reply.get("deleted")
    ]
    return sorted(replies, key=lambda reply: math.inf if (rank := _rank(reply)) is None else rank)


def _rank(reply: Mapping[str, Any]) -> float | None:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) and not isinstance(rank, bool) else None
