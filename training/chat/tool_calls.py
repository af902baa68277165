"""Calls of functions in a model's answer, read during generation.

Four formats are supported: `<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen, SmolLM3); after
`[TOOL_CALLS]` a JSON list or `name{arguments}` (Mistral); an answer that consists only of `{"name", "parameters"}`,
after `<|python_tag|>` or without it (Llama 3); and a message to `functions.NAME` in channels (gpt-oss). Text that is
not a call of one of the request's functions stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from infra.io.json import BadJson, parse_json
from training.chat.channels import Addressed, ChannelReader, Reasoning, channel_marks

OPEN, CLOSE, LIST, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
MARKS = (OPEN, CLOSE, LIST, PYTHON, "[ARGS]", "[CALL_ID]")
_NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class ParsedToolCall:
    """A call of a function. arguments: JSON of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """The form in which a call is written where the answer must be one. arguments: the key of the arguments; before and
    after: texts around the object."""

    arguments: str
    before: str = ""
    after: str = ""


class AnswerReader(Protocol):
    """Reader of one answer in parts."""

    def add(self, text: str) -> Iterator[str | Reasoning | ParsedToolCall]:
        """Yield the parts that are final after further text of the answer."""

    def end(self) -> Iterator[str | Reasoning | ParsedToolCall]:
        """Yield the rest, once the answer has ended."""


class AnswerFormat:
    """The format of a model's answers to chats: messages in channels, or text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        self._known = frozenset(mark for mark in MARKS if mark in known)
        self._marks = frozenset(known[mark] for mark in self._known)
        self._channel_marks = channel_marks(tokenizer)
        self._template = str(tokenizer.chat_template or "")

    @property
    def has_channels(self) -> bool:
        return bool(self._channel_marks)

    @property
    def marks(self) -> frozenset[int]:
        """Tokens of the marks around calls."""
        return self._marks

    @property
    def form(self) -> CallForm:
        """The form of a call that the reader understands, the model's own where its tokens or chat template show it."""
        if OPEN in self._known or OPEN in self._template:
            return CallForm("arguments", f"{OPEN}\n", f"\n{CLOSE}")
        return CallForm("parameters" if '"parameters": ' in self._template else "arguments")

    def shown(self, names: Collection[str]) -> frozenset[int]:
        """Return the tokens that a reader of answers needs in their text, where special ones are left out."""
        return self._channel_marks or (self._marks if names else frozenset())

    def reader(self, names: Collection[str]) -> AnswerReader | None:
        """Return a reader of one answer, None where its text has no parts. names: of the functions that the request
        describes."""
        if self._channel_marks:
            return ChannelCallReader(names)
        return CallReader(names) if names else None


class ChannelCallReader:
    """Texts, reasoning and calls of one answer in channels.

    Args:
        names: Of the functions that the request describes.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._messages = ChannelReader()

    def add(self, text: str) -> Iterator[str | Reasoning | ParsedToolCall]:
        yield from map(self._part, self._messages.add(text))

    def end(self) -> Iterator[str | Reasoning | ParsedToolCall]:
        yield from map(self._part, self._messages.end())

    def _part(self, part: str | Reasoning | Addressed) -> str | Reasoning | ParsedToolCall:
        if not isinstance(part, Addressed):
            return part
        arguments, rest = _value_and_rest(part.text.strip())
        called = {"name": part.recipient.removeprefix("functions."), "arguments": arguments}
        return (None if rest.strip() else _call(called, self._names)) or str(part)


class CallReader:
    """Texts and calls of one answer.

    Args:
        names: Of the functions that the request describes.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pending = ""
        self._is_first = True

    def add(self, text: str) -> Iterator[str | ParsedToolCall]:
        """Yield the texts and calls that are final after further text of the answer."""
        self._pending += text
        while (part := self._next()) is not None:
            yield part

    def end(self) -> Iterator[str | ParsedToolCall]:
        """Yield the rest, once the answer has ended."""
        rest, self._pending = self._pending, ""
        if calls := self._calls(rest):
            yield from calls
        elif rest:
            yield rest

    def _next(self) -> str | ParsedToolCall | None:
        """Return the next final text or call; None where more text is needed."""
        pending = self._pending
        begun = pending.lstrip()
        if self._is_first and (not begun or begun[0] == "{" or _may_begin(begun, PYTHON)):
            return None  # an answer that may be a call as a whole
        self._is_first = False
        place = min((at for mark in (OPEN, LIST) if (at := pending.find(mark)) >= 0), default=-1)
        if place < 0:
            # White space and possible beginnings of a mark wait for the text after them.
            marks = (at for at in range(len(pending)) if any(_may_begin(pending[at:], mark) for mark in (OPEN, LIST)))
            return self._cut(len(pending[: next(marks, len(pending))].rstrip()))
        if before := pending[:place].rstrip():
            self._pending = pending[place:]
            return before
        if pending.startswith(LIST, place) or (stop := pending.find(CLOSE, place)) < 0:
            return None
        whole = pending[place : stop + len(CLOSE)]
        self._pending = pending[stop + len(CLOSE) :]
        calls = self._calls(whole)
        return calls[0] if calls else whole

    def _cut(self, length: int) -> str | None:
        certain, self._pending = self._pending[:length], self._pending[length:]
        return certain or None

    def _calls(self, text: str) -> list[ParsedToolCall]:
        """Return the calls that a text consists of; none where one of them is not of a function of the request."""
        given = text.strip()
        if given.startswith(OPEN):
            calls = self._objects(given.removeprefix(OPEN).removesuffix(CLOSE))
        elif given.startswith(LIST):
            calls = self._after_list(given.removeprefix(LIST))
        elif given.startswith((PYTHON, "{")):
            calls = self._objects(given.removeprefix(PYTHON))
        else:
            return []
        return calls or []

    def _objects(self, text: str) -> list[ParsedToolCall] | None:
        """Return calls as JSON objects, one after the other or separated by semicolons; None where there is anything
        else."""
        calls: list[ParsedToolCall] = []
        rest = text.strip()
        while rest:
            value, rest = _value_and_rest(rest)
            if (call := self._call(value)) is None:
                return None
            calls.append(call)
            rest = rest.lstrip().removeprefix(";").lstrip()
        return calls

    def _after_list(self, text: str) -> list[ParsedToolCall] | None:
        if text.lstrip().startswith("["):
            values, rest = _value_and_rest(text.lstrip())
            given = [self._call(value) for value in values or ()]
            return None if rest.strip() or None in given else [one for one in given if one]
        calls: list[ParsedToolCall] = []
        rest = text
        while rest.strip():
            if (named := _NAMED.match(rest)) is None:
                return None
            value, rest = _value_and_rest(rest[named.end() :])
            if (call := self._call({"name": named[1], "arguments": value})) is None:
                return None
            calls.append(call)
        return calls

    def _call(self, value: Any) -> ParsedToolCall | None:
        return _call(value, self._names)


def _call(value: Any, names: Collection[str]) -> ParsedToolCall | None:
    """Return the call of one of the named functions that an object is, None for any other."""
    if not isinstance(value, Mapping) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = _value_and_rest(arguments)
    if not isinstance(arguments, Mapping):
        return None
    return ParsedToolCall(str(value["name"]), json.dumps(arguments, ensure_ascii=False))


def _value_and_rest(text: str) -> tuple[Any, str]:
    """Return the JSON object or list at the beginning of a text, None where there is none, and the text after it."""
    depth, in_string, escaped = 0, False, False
    for place, letter in enumerate(text):
        if in_string:
            in_string, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
            if depth == 0:
                try:
                    return parse_json(text[: place + 1]), text[place + 1 :]
                except BadJson:
                    return None, ""
        if depth == 0:
            break
    return None, ""


def _may_begin(text: str, mark: str) -> bool:
    """Return True if a text begins with a mark, or is a beginning of it."""
    return text.startswith(mark) or mark.startswith(text)
