"""Common parts of instructions and preferences: reading pair files, and writing pairs as lines."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from corpus.documents.quarantine import Rejected
from corpus.pairs.dialogues import CHAT_ROLES, ToolExchange, Turn, content_text
from corpus.pairs.other_forms import in_read_form
from corpus.readers.config import PairOptions, Verify
from corpus.readers.contents import refuse_misnamed
from corpus.readers.plan import format_of
from corpus.readers.record import MISSING, Record, is_given, pick
from corpus.readers.records import records_in
from infra.io.json import BadJson, parse_json
from infra.io.sources import Place, by_name

PROMPTS = ("prompt", "question", "query")
"""Fields of a prompt where the config names none and there is no `instruction`."""
CONVERSATIONS = ("conversations", "conversation", "messages")
"""Fields of the turns of a conversation, as in ShareGPT."""
MESSAGES = (*CONVERSATIONS, "prompt", "chosen", "rejected", "contents", "conversation_a", "conversation_b")
"""Fields that may be lists of messages."""
LISTS = (
    *CONVERSATIONS,
    "contents",
    "history",
    "tools",
    "answers",
    "completions",
    "responses",
    "ranks",
    "scores",
    "votes",
)
"""Fields that are lists in every format but CSV, where they are JSON in a cell."""


def prompt_field(record: Record, source: PairOptions, others: Sequence[str] = PROMPTS) -> str | None:
    """The field of the prompt that is not null: the one that the config names or, where it names none, one of
    `others`."""
    is_named = source.prompt_field != PairOptions.model_fields["prompt_field"].default
    return given_field(record, (source.prompt_field, *(() if is_named else others)))


def given_field(record: Record, names: Iterable[str]) -> str | None:
    """The first of these fields that a record has and that is not null."""
    return next((name for name in names if is_given(record.value, name)), None)


def turns_field(record: Record) -> str | None:
    """The field of the turns of a conversation; None where the record has no list of them."""
    return next((name for name in CONVERSATIONS if isinstance(record.value.get(name), list)), None)


def system_of(record: Record, field: str | None) -> str:
    """The system message in a separate field, a text or parts of one; "" without one. Raises Unreadable for parts
    that are not text."""
    value = pick(record.value, field) if field else None
    return content_text(value, "system") if isinstance(value, str | list) else ""


def has_any(record: Record, names: Iterable[str]) -> bool:
    """Return True if a record has one of these fields, null or not."""
    return any(pick(record.value, name) is not MISSING for name in names)


F = TypeVar("F", bound=PairOptions)


def records_of(
    source: F, files: Iterable[Place], key: str, check: Callable[[Record, F, str], None]
) -> Iterator[Record | Rejected]:
    """The records in these files of a source, file after file by name.

    Args:
        key: its dotted config key.
        check: called with the first record of each file, the source and the key; raises where it lacks a field.
    """
    for file in by_name(files):
        is_first, kind = True, format_of(source, file)
        if source.format == "auto":
            # Any name that gives no other format is one of JSON Lines.
            named = kind if kind in ("parquet", "arrow", "csv", "unread", "pdf") else "jsonl"
            refuse_misnamed(file, named, source.encoding, key)
        for item in records_in(file, kind, source.encoding, key, source.header):
            if isinstance(item, Record):
                item = replace(item, value=with_lists(item.value, kind))
            if is_first and not isinstance(item, Rejected):
                check(item, source, key)
                is_first = False
            yield item


def with_lists(row: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a record with the messages and lists that it has as JSON in strings.

    In CSV any cell may be such a string, and an empty one is null. In other formats only conversations and answers are
    looked at: a column of JSON is how databases export them. Records in other forms get the usual fields, see
    `corpus.pairs.other_forms`.
    """
    if kind == "csv":
        return in_read_form({name: _cell(name, text) for name, text in row.items()}, CONVERSATIONS)
    encoded = [name for name in MESSAGES if isinstance(text := row.get(name), str) and text.lstrip()[:1] == "["]
    decoded = {**row, **{name: _cell(name, row[name]) for name in encoded}} if encoded else row
    return in_read_form(decoded, CONVERSATIONS)


def _cell(name: str, text: str) -> Any:
    if not text:
        return None
    if text.lstrip()[:1] != "[":
        return text
    try:
        value = parse_json(text)
    except BadJson:
        value = _python_list(text) if name in (*MESSAGES, *LISTS) else None
        if value is None:
            return text
    is_messages = bool(value) and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)
    return value if is_messages or name in LISTS else text


def _python_list(text: str) -> list[Any] | None:
    """A list as Python or numpy writes it, which is how pandas puts messages into CSV; None for any other text."""
    try:
        value = ast.literal_eval(_BETWEEN_OBJECTS.sub("}, {", text.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, list) else None


_BETWEEN_OBJECTS = re.compile(r"\}\n\s*\{")
"""numpy puts line breaks for commas. In a text of Python's, a line break is escaped."""


class Pair(NamedTuple):
    """One line of train.jsonl or heldout.jsonl.

    fields: prompt and response, or prompt, chosen and rejected. group: pairs of one group are on the same side.
    verify: the rule that checks answers; None where there is none, and the line then lacks the key.
    reference: the text that the rule compares answers with, where that is not the response; the line then has it.
    history: the messages before the prompt; the line has it as `history`, [{"role", "content"}] with the roles system,
        user and assistant, where there was anything.
    weight: how often the pair is to be seen, as `weight` in the line where it is not once.
    votes: for the chosen and for the rejected answer, margin: by how much the chosen one is better, ranking: the id of
    the ranking that the pair is of, whose pairs follow one another. The line has each where it is known.
    with_tools: the conversation, where the assistant may call functions: `history` is then its own, `steps` are calls
    and results between prompt and response, `tool_calls` those of the response, and `tools` describes the functions.
    other: the same conversation with the rejected answer: the line has both answers as messages under
        `chosen_message` and `rejected_message`, and their calls as JSON in the texts of `fields`.
    compared: the text by which near duplicates on the other side are found; the group where it is empty.
    """

    fields: Mapping[str, str]
    source: str
    group: str
    verify: Verify | None = None
    history: Sequence[Turn] = ()
    weight: float = 1.0
    votes: tuple[float, float] | None = None
    margin: float | None = None
    ranking: str = ""
    reference: str = ""
    with_tools: ToolExchange | None = None
    other: ToolExchange | None = None
    compared: str = ""

    @property
    def id(self) -> str:
        """The first 16 hex digits of the SHA-256 of the texts, each closed by a zero byte."""
        texts = [*(part for turn in self.history for part in turn), *self.fields.values()]
        texts += [json.dumps(part, sort_keys=True) for part in (self.with_tools, self.other) if part]
        joined = "".join(f"{text}\0" for text in texts)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """All messages of the pair, in lines."""
        if self.with_tools:
            messages = [*self.with_tools.messages, *([self.other.answer] if self.other else [])]
            return "\n".join(str(message["content"]) for message in messages if message["content"])
        return "\n".join([*(turn.text for turn in self.history), *self.fields.values()])

    def as_line(self) -> str:
        line: dict[str, Any] = {"id": self.id}
        if self.history:
            line["history"] = [{"role": CHAT_ROLES[turn.role], "content": turn.text} for turn in self.history]
        if self.with_tools and self.with_tools.history:
            line["history"] = list(self.with_tools.history)
        line |= self.fields
        if self.with_tools:
            keys = ("steps", "tools") if self.other else ("steps", "tool_calls", "tools")
            tool_fields = {key: list(getattr(self.with_tools, key)) for key in keys}
            line |= {key: value for key, value in tool_fields.items() if value}
        if self.with_tools and self.other:
            line |= {"chosen_message": self.with_tools.answer, "rejected_message": self.other.answer}
        if self.verify:
            line["verify"] = self.verify
        if self.reference:
            line["reference"] = self.reference
        if self.weight != 1:
            line["weight"] = self.weight
        if self.votes:
            line["votes"] = list(self.votes)
        if self.margin is not None:
            line["margin"] = self.margin
        if self.ranking:
            line["ranking"] = self.ranking
        return json.dumps({**line, "source": self.source}, ensure_ascii=False) + "\n"


def prompt_of(record: Record, source: PairOptions) -> str:
    """The prompt, with the input two lines below it where there is one (Alpaca, Taori et al., 2023)."""
    prompt = str(pick(record.value, source.prompt_field)).strip()
    input_text = record.value.get(source.input_field) if source.input_field else None
    return f"{prompt}\n\n{input_text.strip()}" if isinstance(input_text, str) and input_text.strip() else prompt
