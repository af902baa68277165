"""Responses of OpenAI's protocol, whole and as chunks of a stream: of chats and of completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from string import ascii_letters, digits
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from training.chat.tool_calls import ParsedToolCall
from training.generation.answer_text import PlacedToken

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The text of single tokens. Some tokenizers drop the space of a token that begins a text, so that each is decoded
    after another token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._before_text = tokenizer.decode(self._before)
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            text = str(self._tokenizer.decode([*self._before, token], clean_up_tokenization_spaces=False))
            self._known[token] = text[len(self._before_text) :]
        return self._known[token]


def as_call(call: ParsedToolCall) -> dict[str, Any]:
    """Return a call for a message. Its id has the nine letters and digits that Mistral's chat templates expect."""
    name = "".join(secrets.choice(ascii_letters + digits) for _ in range(9))
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Shape(Protocol):
    """The form of an endpoint's choices. object, chunk: names of a whole response and of a chunk; prefix: of ids."""

    object: str
    chunk: str
    prefix: str

    def whole(self, text: str, calls: Sequence[dict[str, Any]] = (), reasoning: str = "") -> dict[str, Any]: ...

    def first(self) -> dict[str, Any] | None:
        """Return the content of a stream's first chunk, before any text; None where there is no such chunk."""

    def part(self, text: str) -> dict[str, Any]: ...

    def last(self) -> dict[str, Any]: ...

    def logprobs(self, tokens: Sequence[PlacedToken], texts: TokenTexts) -> dict[str, Any]: ...


class ChatShape:
    object, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, text: str, calls: Sequence[dict[str, Any]] = (), reasoning: str = "") -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"message": message}

    def first(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def last(self) -> dict[str, Any]:
        return {"delta": {}}

    def logprobs(self, tokens: Sequence[PlacedToken], texts: TokenTexts) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = texts[token]
            # A part of a character has bytes that its tokenizer does not name.
            return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else [*text.encode()]}

        content = []
        for placed in tokens:
            likeliest = [entry(*pair) for pair in placed.token.likeliest]
            content.append({**entry(placed.token.id, placed.token.logprob), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}


class TextShape:
    object, chunk, prefix = "text_completion", "text_completion", "cmpl"

    def whole(self, text: str, calls: Sequence[dict[str, Any]] = (), reasoning: str = "") -> dict[str, Any]:
        return {"text": text}

    def first(self) -> dict[str, Any] | None:
        return None

    def part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def last(self) -> dict[str, Any]:
        return {"text": ""}

    def logprobs(self, tokens: Sequence[PlacedToken], texts: TokenTexts) -> dict[str, Any]:
        top: list[dict[str, float] | None] = []
        for placed in tokens:
            token = placed.token
            if token.logprob is None:
                top.append(None)  # the first token of a prompt, before which there is none
                continue
            named: dict[str, float] = {}
            for number, logprob in (*token.likeliest, (token.id, token.logprob)):
                named.setdefault(texts[number], logprob)
            top.append(named)
        return {
            "tokens": [texts[placed.token.id] for placed in tokens],
            "token_logprobs": [placed.token.logprob for placed in tokens],
            "top_logprobs": top,
            "text_offset": [placed.offset for placed in tokens],
        }
