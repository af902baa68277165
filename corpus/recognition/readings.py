"""Readings of a sample of records: as documents, instructions or preferences, with the keys that fit and the reason.

Each is tried by the very code that reads such records later.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from corpus.documents.quarantine import Rejected
from corpus.instructions import PROMPT_FIELDS, RESPONSES, pair_of
from corpus.pairs.files import CONVERSATIONS, Pair, turns_field, with_lists
from corpus.pairs.rankings import answers_field, is_scored
from corpus.preferences import pairs_of
from corpus.readers.config import FileDocuments, FileInstructions, FilePreferences
from corpus.readers.record import Record, Unreadable, field_names, is_given, pick, text_fields
from corpus.recognition.other_purposes import (
    MOST,
    has_field,
)
from infra.errors import ConfigError, Problem

Kind = Literal["documents", "instructions", "preferences"]
KINDS: tuple[Kind, ...] = ("documents", "instructions", "preferences")

TEXT_NAMES = (
    "text", "content", "body", "document", "article", "page_content", "raw_content", "markdown", "code", "story",
    "full_text", "fulltext", "passage", "abstract", "transcript", "maintext",
)  # fmt: skip
"""Fields that hold a document's text, the most usual first; of nested ones the last part."""
FURTHER_PROMPTS = (
    "input",
    "input.messages",
    "user",
    "human",
    "problem",
    "Question",
    "Instruction",
    "Prompt",
    "user_message",
    "input_text",
)
FURTHER_RESPONSES = (
    "solution",
    "assistant",
    "reply",
    "target",
    "Answer",
    "Response",
    "Output",
    "Completion",
    "assistant_message",
    "output_text",
)
SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction")
"""Fields of the system's message, next to a prompt or a conversation."""
FURTHER_ANSWERS = (
    ("better", "worse"), ("preferred", "dispreferred"), ("accepted", "rejected"), ("win", "lose"), ("good", "bad"),
    ("response_chosen", "response_rejected"), ("answer_chosen", "answer_rejected"), ("response_j", "response_k"),
    ("preferred_output", "non_preferred_output"),
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One way to read some files.

    keys: config keys of the source that differ from their default. why: the evidence in the sample.
    """

    kind: Kind
    keys: Mapping[str, str | bool | int | None] = field(default_factory=dict)
    why: str = ""

    @property
    def text_field(self) -> str:
        return str(self.keys.get("text_field") or "text")

    def __str__(self) -> str:
        keys = "".join(f", {key}: {'null' if value is None else value}" for key, value in self.keys.items())
        return f"{self.kind}{keys} ({self.why})"


@dataclass(frozen=True)
class Wish:
    """A reading that a person asked for: its kind, or the field of a document's text; "" where that is to be seen."""

    kind: Kind | Literal[""] = ""
    text_field: str = ""


ANY = Wish()


def readings_of(sample: Sequence[Record], kind: str = "jsonl", wish: Wish = ANY) -> list[Reading]:
    """The readings of some records: the likeliest, and those that are as likely; none where no form fits.

    Preferences go before instructions, which go before documents: each is the more special form.
    """
    if wish.text_field:
        keys = _unlike_default(FileDocuments, {"text_field": wish.text_field})
        return [Reading("documents", keys, f"--text-field {wish.text_field}")]
    pairs = [replace(record, value=with_lists(record.value, kind)) for record in sample]
    judged = _best(pairs, _preference_options(pairs), _as_preference, "preferences")
    texts = _document_readings(sample)
    instruction = _best(pairs, _instruction_options(pairs), _as_instruction, "instructions")
    if wish.kind:
        choices: dict[str, Sequence[Reading | None]] = {
            "preferences": [judged], "instructions": [instruction], "documents": texts,
        }  # fmt: skip
        return [reading for reading in choices[wish.kind] if reading]
    if judged:
        return [judged]
    if instruction is None:
        return texts
    # Of other fields the text may be anything: a source, the first question once more.
    usual = [reading for reading in texts if reading.text_field.rpartition(".")[2].lower() in TEXT_NAMES]
    rival = next((reading for reading in usual if _rivals(sample, reading.text_field, instruction)), None)
    return [instruction, rival] if rival else [instruction]


def check_sample(reading: Reading, sample: Sequence[Record], kind: str) -> None:
    """Raise ConfigError `two_forms` where of a file among several no record has this reading."""
    fitting: Counter[str] = Counter()
    for record in sample:
        if reading.kind == "documents":
            fits = _text_of(record, reading.text_field) != ""
        else:
            read = _as_instruction if reading.kind == "instructions" else _as_preference
            fits = not read(replace(record, value=with_lists(record.value, kind)), reading.keys)
        fitting[str(record.file)] += fits
    without = [file for file, count in fitting.items() if not count]
    if without and len(without) < len(fitting):
        other = next(record for record in sample if str(record.file) == without[0])
        message = f"expected files of one form, {reading}; this one has {field_names(other.value)}"
        raise ConfigError(Problem("two_forms", without[0], message, "give the files of each form separately"))


def _best(
    sample: Sequence[Record],
    options: Iterator[dict[str, Any]],
    read: Callable[[Record, Mapping[str, Any]], str],
    kind: Kind,
) -> Reading | None:
    """The options by which most records are read, if these are at least half of all; of equal ones the first."""
    best: tuple[int, dict[str, Any], Counter[str]] | None = None
    for keys in options:
        faults = Counter(fault for record in sample if (fault := read(record, keys)))
        fitting = len(sample) - faults.total()
        if best is None or fitting > best[0]:
            best = fitting, keys, faults
        if fitting == len(sample):
            break
    if best is None or best[0] < MOST * len(sample):
        return None
    fitting, keys, faults = best
    why = f"{fitting} of {len(sample)} sampled records: {_form(sample, kind, keys)}"
    if reasoning := next((name for name in _REASONING if any(_has_key(record.value, name) for record in sample)), ""):
        why += f"; not read: {reasoning} of messages"
    if faults:
        why += f"; {faults.total()} would be put aside, e.g. {faults.most_common(1)[0][0]}"
    return Reading(kind, keys, why)


_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages whose text precedes the answer, which no pair holds."""


def _has_key(value: Any, name: str) -> bool:
    """Return True if a message in a record has text under a name."""
    lists = (item for item in value.values() if isinstance(item, list))
    return any(isinstance(item, Mapping) and bool(item.get(name)) for messages in lists for item in messages)


def _form(sample: Sequence[Record], kind: Kind, keys: Mapping[str, Any]) -> str:
    record = next((item for item in sample if turns_field(item)), sample[0])
    if kind == "preferences":
        ranking = FilePreferences(paths=("x",), **keys)
        if answers := answers_field(record, ranking):
            return f"ranked answers under {answers}"
        return f"two answers under {ranking.chosen_field} and {ranking.rejected_field}"
    options = FileInstructions(paths=("x",), **keys)
    names = [
        name
        for name in (options.prompt_field, *PROMPT_FIELDS, options.response_field, *RESPONSES)
        if is_given(record.value, name)
    ]
    if (turns := turns_field(record)) and len(names) < 2:
        return f"conversations under {turns}"
    return f"prompt and response under {' and '.join(dict.fromkeys(names[:1] + names[-1:]))}"


def _as_instruction(record: Record, keys: Mapping[str, Any]) -> str:
    """Why a record is no instruction; "" where it is one."""
    try:
        pair_of(record, FileInstructions(paths=("x",), **keys))
    except Unreadable as why:
        return str(why)
    return ""


def _as_preference(record: Record, keys: Mapping[str, Any]) -> str:
    source = FilePreferences(paths=("x",), **keys)
    # A list of answers without ranks or scores may as well be answers that are all right.
    if (answers := answers_field(record, source)) and not is_scored(record.value, answers):
        return "answers without ranks or scores"
    pairs = list(pairs_of(record, source))
    return next((item.reason for item in pairs if isinstance(item, Rejected)), "" if pairs else "no pair")


def _instruction_options(sample: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Keys to try, the plainest first."""
    further: dict[str, Any] = {}
    if has_field(sample, "context") and not has_field(sample, "input"):
        further = {"input_field": "context"}  # as in Dolly and SQuAD
    further |= _system(sample, FileInstructions)
    is_pair = any(has_field(sample, name) for name in ("instruction", *PROMPT_FIELDS))
    is_chat = any(has_field(sample, name) for name in CONVERSATIONS)
    if is_pair or is_chat:
        yield dict(further)
        yield {**further, "trim_conversations": True}
    prompts = [name for name in ("instruction", *PROMPT_FIELDS, *FURTHER_PROMPTS) if has_field(sample, name)]
    responses = [name for name in ("output", *RESPONSES, *FURTHER_RESPONSES) if has_field(sample, name)]
    for prompt, response in product(prompts, responses):
        keys: dict[str, Any] = {**further, "prompt_field": prompt, "response_field": response}
        if prompt == "input":
            keys["input_field"] = None
        yield _unlike_default(FileInstructions, keys)


def _preference_options(sample: Sequence[Record]) -> Iterator[dict[str, Any]]:
    names = [("chosen", "rejected"), *FURTHER_ANSWERS]
    for chosen, rejected in names:
        if not (has_field(sample, chosen) and has_field(sample, rejected)):
            continue
        names_of_answers = {"chosen_field": chosen, "rejected_field": rejected}
        keys = _unlike_default(FilePreferences, names_of_answers) | _system(sample, FilePreferences)
        texts = [value for record in sample if isinstance(value := pick(record.value, chosen), str)]
        if texts and sum("Assistant:" in text and "Human:" in text for text in texts) >= MOST * len(texts):
            yield {**keys, "dialogue": True}
        yield keys
        yield {**keys, "trim_conversations": True}
        for prompt in FURTHER_PROMPTS:
            if has_field(sample, prompt):
                further = {"input_field": None} if prompt == "input" else {}
                yield {**keys, "prompt_field": prompt, **further}
    if any(has_field(sample, name) for name in ("answers", "completions", "responses")):
        yield _system(sample, FilePreferences)


def _system(sample: Sequence[Record], config: Any) -> dict[str, Any]:
    """The key of the field with the system's message; empty where there is none, or the default is that field."""
    named = next((name for name in SYSTEMS if has_field(sample, name)), "")
    is_text = any(isinstance(pick(record.value, named), str | list) for record in sample) if named else False
    return _unlike_default(config, {"system_field": named}) if is_text else {}


def _unlike_default(config: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if config.model_fields[name].default != value}


def _document_readings(sample: Sequence[Record]) -> list[Reading]:
    """The field that holds the text; a second one where it is as likely."""
    sizes = {name: size for name in _text_names(sample) if (size := _prose_bytes(sample, name))}
    if not sizes:
        return []
    biggest = max(sizes, key=sizes.__getitem__)
    usual = [name for known in TEXT_NAMES for name in sizes if name.rpartition(".")[2].lower() == known]

    def reading(name: str) -> Reading:
        with_it = sum(_text_of(record, name) != "" for record in sample)
        size = f"{round(sizes[name]):,} bytes on average"
        why = f"{with_it} of {len(sample)} sampled records have prose under {name}, {size}"
        if left := [other for other in sizes if other != name]:
            why += f"; not read: prose under {', '.join(left)}"
        content = "plain"
        if sum(is_page(_text_of(record, name)) for record in sample) >= MOST * with_it:
            content, why = "html", f"{why}; they are pages of HTML, whose main text is read"
        return Reading("documents", _unlike_default(FileDocuments, {"text_field": name, "content": content}), why)

    if usual and sizes[usual[0]] >= sizes[biggest] / 4:
        return [reading(usual[0])]
    if usual:
        return [reading(biggest), reading(usual[0])]
    others = sorted((name for name in sizes if name != biggest), key=lambda name: -sizes[name])
    return [reading(biggest), *(reading(name) for name in others[:1] if sizes[name] >= sizes[biggest] / 2)]


def _text_names(sample: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in sample for name in text_fields(record.value)))


def most_prose(sample: Sequence[Record]) -> str:
    """The number of records with prose in a field that most records lack, for a message."""
    counts = {name: sum(is_prose(_text_of(record, name)) for record in sample) for name in _text_names(sample)}
    best = max(counts, key=counts.__getitem__, default="")
    return f"{counts[best]} have some, under {best}" if best and counts[best] else "none has one"


def _text_of(record: Record, name: str) -> str:
    value = pick(record.value, name)
    return value.strip() if isinstance(value, str) else ""


def _prose_bytes(sample: Sequence[Record], name: str) -> float:
    """Return the bytes of text per record in UTF-8; 0 for a field that most records lack, or that holds no prose or
    code: ids, addresses, numbers, embeddings, base64.
    """
    texts = [text for record in sample if (text := _text_of(record, name))]
    if len(texts) < MOST * len(sample) or sum(map(is_prose, texts)) < MOST * len(texts):
        return 0.0
    return math.fsum(len(text.encode("utf-8", "replace")) for text in texts) / len(sample)


_WORD = re.compile(r"[^\W\d_]{1,40}")
_NO_SPACES = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def is_prose(text: str) -> bool:
    """Return True if a text reads like prose or code: words with space between them, or a script without such space."""
    text = text[:20_000]
    if len(_NO_SPACES.findall(text)) > len(text) / 4:
        return True
    words, parts = _WORD.findall(text), text.split()
    letters = sum(map(len, words))
    # 0.31, -0.2, … has parts, and no words; a hash and base64 have words, and no parts.
    return len(parts) > 1 and letters >= len(text) * 0.4 and len(text) / len(parts) <= 40


_END_OF_BLOCK = re.compile(r"</(?:html|body|div|p|article|section|table|ul|ol|h[1-6])\s*>", re.IGNORECASE)


def is_page(text: str) -> bool:
    """Return True if a text is HTML: it begins with a tag, and closes a block."""
    return text.lstrip()[:1] == "<" and _END_OF_BLOCK.search(text) is not None


def _rivals(sample: Sequence[Record], name: str, pair: Reading) -> bool:
    """Return True if a text next to pairs is as likely the purpose of the files: it is longer than the pair and does
    not hold it, as the `text` of Alpaca does, which is the pair once more."""
    source = FileInstructions(paths=("x",), **dict(pair.keys))
    longer, once_more, counted = 0, 0, 0
    for record in sample:
        text = _text_of(record, name)
        try:
            parsed: Pair = pair_of(record, source)
        except Unreadable:
            continue
        counted += 1
        texts = list(parsed.fields.values())
        once_more += any(part.strip() and part in text for part in (texts[-1],)) or any(text in part for part in texts)
        longer += len(text) > sum(map(len, texts))
    return counted > 0 and longer >= MOST * counted and once_more < MOST * counted
