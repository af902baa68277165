"""Conversations as the tokens of a model's input, with a mark on those that tuning learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import StageError, stage_error
from infra.io.json import BadJson, parse_json
from training.chat.base import Chat, Conversation
from training.model.loss import IGNORE

SAMPLE: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "5."},
)


@dataclass(frozen=True)
class ShownToken:
    """A token, its text, and True if it contributes to the loss."""

    id: int
    text: str
    learnt: bool


def shown(chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[ShownToken]:
    """A conversation as tuning reads it; one that the assistant does not end, as a prompt. Of an answer nothing is read
    behind the token that ends it.

    Raises StageError for messages that the chat format does not take.

    Args:
        tools: descriptions of functions.
    """
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if answer is not None and (isinstance(answer.get("content"), str) or answer.get("tool_calls")):
        [prompt] = chat.ask([messages[:-1]], [tools])
        [response] = chat.respond([prompt], [{**answer, "content": answer.get("content") or ""}])
    else:
        [prompt], response = chat.ask([messages], [tools]), []
    talk = Conversation(prompt, response or [chat.end])
    labels = chat.response_batch([talk], every_answer=True)["labels"][0].tolist()
    count = len(prompt) + len(response)
    learnt = [False, *(label != IGNORE for label in labels[: count - 1])]
    return [
        ShownToken(number, str(chat.tokenizer.decode([number])), is_learnt)
        for number, is_learnt in zip(talk.ids[:count], learnt, strict=True)
    ]


def shown_template(chat: Chat) -> str:
    """A short conversation in one line, learnt tokens in ⟦ ⟧."""
    try:
        return in_line(shown(chat, SAMPLE))
    except StageError:  # a template for one turn
        return in_line(shown(chat, SAMPLE[2:]))


def in_line(tokens: Sequence[ShownToken]) -> str:
    """Tokens in one line, with ↵ for line breaks and learnt ones in ⟦ ⟧."""
    parts, inside = [], False
    for token in tokens:
        if token.learnt != inside:
            parts.append("⟦" if token.learnt else "⟧")
            inside = token.learnt
        parts.append(token.text.replace("\n", "↵"))
    return "".join(parts) + ("⟧" if inside else "")


def read_conversations(path: Path, limit: int) -> list[tuple[Sequence[Mapping[str, Any]], list[Any]]]:
    """The first conversations of JSON lines: `messages` (or `history`, `prompt`, `steps`, `response`, `tool_calls`) and
    `tools` of each.

    Raises StageError, naming the line.
    """
    conversations: list[tuple[Sequence[Mapping[str, Any]], list[Any]]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(conversations) == limit:
                break
            if not line.strip():
                continue
            try:
                row = parse_json(line, expected="a JSON object on each line")
            except BadJson as error:
                raise stage_error("corrupt_line", f"{path}:{number}", str(error)) from None
            messages = _messages(row, f"{path}:{number}")
            conversations.append((messages, row.get("tools") or []))
    if not conversations:
        raise stage_error("no_rows", str(path), "expected at least one conversation, but the file is empty")
    return conversations


def _messages(row: Any, location: str) -> list[dict[str, Any]]:
    messages = row.get("messages") if isinstance(row, dict) else None
    if messages is None and isinstance(row, dict) and isinstance(row.get("prompt"), str):
        messages = [*(row.get("history") or ()), {"role": "user", "content": row["prompt"]}, *(row.get("steps") or ())]
        if isinstance(row.get("response"), str):
            calls = {"tool_calls": row["tool_calls"]} if row.get("tool_calls") else {}
            messages.append({"role": "assistant", "content": row["response"], **calls})
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise stage_error(
            "bad_row", location, "expected messages, each with role and content, or prompt and response",
            "give the format of aux/ or train.jsonl of the instructions stage, or of OpenAI's chats",
        )  # fmt: skip
    return messages
