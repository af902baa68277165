"""A data set's records as prompts and answers, by one of several templates drawn for each (T0, FLAN)."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, NamedTuple

from corpus.readers.config import OPTIONS, InstructionTemplate, fields_of
from corpus.readers.record import MISSING, Record, Unreadable, field_names, pick
from infra.errors import stage_error


class Exchange(NamedTuple):
    """A template's result for a record. group: the same for records that ask the same, whatever their phrasing."""

    prompt: str
    answer: str
    group: str


def exchange_of(record: Record, templates: Sequence[InstructionTemplate], seed: int) -> Exchange:
    """Return prompt and answer by one of the templates, drawn by the record's content and the seed alone.

    Raises Unreadable where the record lacks a field that a prompt or the drawn template names, or has a label without
    words.
    """
    drawn = _exchange(record, templates[_number_of(record, seed) % len(templates)])
    prompt_fields = sorted({field for template in templates for field in _fields_asked(template)})
    group = "\0".join(f"{field}\0{_text(record, field)}" for field in prompt_fields)
    return Exchange(*drawn, group)


def check_fields(record: Record, templates: Sequence[InstructionTemplate], key: str) -> None:
    """Raise StageError `wrong_field` where the record lacks a field that a template names.

    Args:
        key: of the templates.
    """
    for number, template in enumerate(templates):
        fields_by_part = {"prompt": fields_of(template.prompt), "answer": fields_of(template.answer)}
        fields_by_part["choices"] = [*template.choices]
        for part, fields in fields_by_part.items():
            for field in fields:
                if (field == OPTIONS and template.choices) or _value_of(record, field) is not MISSING:
                    continue
                near = difflib.get_close_matches(field, field_names(record.value).split(", "), n=1, cutoff=0.5)
                raise stage_error(
                    "wrong_field",
                    record.place,
                    f"expected the field {field}; the fields are: {field_names(record.value)}",
                    f"name {near[0] if near else 'one of these'} in {key}.{number}.{part}",
                )


def _number_of(record: Record, seed: int) -> int:
    content = json.dumps([seed, record.value], sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def _exchange(record: Record, template: InstructionTemplate) -> tuple[str, str]:
    def value(field: str) -> str:
        if field == OPTIONS and template.choices:
            return _options(record, template)
        if words := template.choices.get(field):
            return _word(record, field, words)
        return _text(record, field)

    return _filled(template.prompt, value), _filled(template.answer, value)


def _filled(text: str, value: Callable[[str], str]) -> str:
    """The text with the values of its fields, whose own braces mean nothing."""
    pieces = Formatter().parse(text)
    return "".join(literal + (value(field) if field is not None else "") for literal, field, _, _ in pieces).strip()


def _word(record: Record, field: str, words: dict[str, str]) -> str:
    label = _text(record, field)
    if label not in words:
        raise Unreadable(f"choices.{field} has no words for {label[:40]!r}, only for {', '.join(words)}")
    return _filled(words[label], lambda name: _text(record, name))


def _options(record: Record, template: InstructionTemplate) -> str:
    """The words of all labels, a line each, as in FLAN, but for places that this record's list does not have."""
    options: dict[str, None] = {}
    for words in template.choices[template.answered].values():
        if all(_value_of(record, name) is not MISSING for name in fields_of(words)):
            options[_filled(words, lambda name: _text(record, name))] = None
    return "\n".join(f"- {word}" for word in options)


def _fields_asked(template: InstructionTemplate) -> list[str]:
    """Fields of a record that are in its prompt unchanged."""
    return [name for name in fields_of(template.prompt) if not (template.choices and name == OPTIONS)]


def _value_of(record: Record, field: str) -> Any:
    """Return the value of a dotted field, whose last part may be a place in a list, from 0."""
    value = pick(record.value, field)
    if value is MISSING and "." in field:
        before, _, index_text = field.rpartition(".")
        items = pick(record.value, before)
        if isinstance(items, list) and index_text.isdigit() and int(index_text) < len(items):
            return items[int(index_text)]
    return value


def _text(record: Record, field: str) -> str:
    """Return a value as text for a template: texts and numbers unchanged, a list of texts as its lines."""
    value = _value_of(record, field)
    if value is MISSING:
        raise Unreadable(f"no field {field}")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "\n".join(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise Unreadable(f"the field {field} is not a text or number, or is empty")
