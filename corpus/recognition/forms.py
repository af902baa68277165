"""Forms of data: the contents of given files, recognised from a sample of their records, with the reason.

A form is tried by the very code that reads it later, so that the recognised form is the one in which `instructions`,
`preferences` and `ingest` read the files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

from corpus.documents.quarantine import Rejected
from corpus.instructions import PROMPT_FIELDS, RESPONSES, pair_of
from corpus.pairs.files import CONVERSATIONS, Pair, turns_field, with_lists
from corpus.pairs.rankings import answers_field, is_scored
from corpus.preferences import pairs_of
from corpus.readers.config import FileDocuments, FileInstructions, FilePreferences, HuggingFaceDocuments
from corpus.readers.contents import NAMED, content_format, unread_content
from corpus.readers.hub import CARD, SPLITS, STATE, card_lists_files
from corpus.readers.plan import COMPRESSION_SUFFIXES, named_format, suffix_of
from corpus.readers.record import Record, Unreadable, field_names, has_numbered_columns, is_given, pick, text_fields
from corpus.readers.records import records_in
from corpus.readers.streams import refuse_binary
from corpus.readers.unread import MAGIC_BYTES, by_unread_format, suffix_by_magic
from corpus.recognition.other_purposes import (
    MOST,
    benchmark_items,
    has_field,
    judged_answers,
    list_in_an_object,
    rendered_chat,
    separate_messages,
    side_of_a_pair,
    table_in_an_object,
)
from infra.errors import ConfigError, Problem, StageError
from infra.io.bounded import opened
from infra.io.json import BadJson, parse_json
from infra.io.sources import Place, by_name, size_of

Kind = Literal["documents", "instructions", "preferences"]
KINDS: tuple[Kind, ...] = ("documents", "instructions", "preferences")
RECORD_FORMATS = ("jsonl", "parquet", "arrow", "csv")

SAMPLED_FILES, SAMPLED_RECORDS = 8, 40
"""Files of each source, spread over all of them by name, and records of each."""
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
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"%PDF": "",
    b"PK\x03\x04": "",
    b"{\\rtf": "",
    b"\xd0\xcf\x11\xe0": "",
}
"""First bytes of files whose name does not show the format; "" for what no reader here reads."""
_FIXES = {"jsonl": "write one JSON object per line, or one list of objects", "csv": "see that it is a table"}
"""By format: what to do about records that cannot be read."""


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
class Group:
    """Files of one form among those behind a path.

    source: the keys that name them in a config. readings: the likeliest first; a second one is as likely. fields: of
    their records. records, record_bytes: in the sample.
    """

    source: Mapping[str, Any]
    files: Sequence[Place]
    format: str
    readings: Sequence[Reading]
    sample: Sequence[Record] = ()
    fields: Sequence[str] = ()


@dataclass(frozen=True)
class Wish:
    """A reading that a person asked for: its kind, or the field of a document's text; "" where that is to be seen."""

    kind: Kind | Literal[""] = ""
    text_field: str = ""


ANY = Wish()
NAMED_FILES = 200
"""Number of files of several forms up to which a config names each of them."""


def groups_of(path: str, wish: Wish = ANY) -> tuple[list[Group], list[str]]:
    """The files behind a path, folder or glob by form, and notes of what is left out.

    Raises:
        ConfigError: `missing_source`, `empty_source`; `unreadable_source` where no form fits.
        StageError: what the readers raise.
    """
    if _is_dataset(Path(path)):
        paths_read = [file for file in by_name(HuggingFaceDocuments(dataset=path).places()) if size_of(file)]
        if not paths_read:
            raise ConfigError(Problem("empty_source", path, "expected records, found empty files"))
        note = f"{path}: a Hugging Face dataset, of which the split train is read"
        return [
            _group({"kind": "huggingface", "dataset": path}, paths_read, named_format(paths_read[0]), path, wish)
        ], [note]
    chosen = FileDocuments(paths=(path,)).selection()
    paths_read = [file for file in by_name(chosen.read) if size_of(file)]
    if not paths_read:
        code = "empty_source" if Path(path).exists() else "missing_source"
        left = f"; {chosen.note}" if chosen.note else ""
        raise ConfigError(Problem(code, path, f"expected non-empty files{left}", "correct the path"))
    notes = [f"{path}: {chosen.note}"] if chosen.note else []
    by_form: dict[tuple[str, str], list[Place]] = {}
    for file in paths_read:
        by_form.setdefault((_format(file), _suffix(file) if len(paths_read) > 1 else ""), []).append(file)
    unread = by_unread_format(
        (file, _unread_suffix(file)) for (kind, _), files in by_form.items() if not kind for file in files
    )
    notes += [f"{path}: left out, since no reader reads them: {group.note}; {group.fix}" for group in unread]
    readable = {key: files for key, files in by_form.items() if key[0]}
    if not readable:
        raise ConfigError(
            *(
                Problem("unreadable_source", path, f"expected text or records, found {group.note}", group.fix)
                for group in unread
            )
        )
    joined = _joined(readable)
    is_alone = len(joined) == 1 and not unread
    groups = []
    for (kind, suffixes), files in joined.items():
        paths = [path] if is_alone else [_pattern(path, suffix, files) for suffix in suffixes]
        flat = [pattern for some in paths for pattern in (some if isinstance(some, list) else [some])]
        try:
            groups.append(_group({"kind": "files", "paths": flat}, files, kind, path, wish))
        except ConfigError as error:
            parts = _by_fields(files, kind, path) if error.problems[0].code == "two_forms" else []
            if len(parts) < 2 or wish != ANY:
                raise
            groups += _groups_by_reading(parts, kind, path)
            notes.append(f"{path}: its {kind} files have several forms; each form is a source, and names its files")
    return groups, notes


def _by_fields(files: Sequence[Place], kind: str, path: str) -> list[list[Place]]:
    """Files by the field names of their first records; none if there are too many to be named in a config."""
    if len(files) > NAMED_FILES:
        return []
    parts: dict[frozenset[str], list[Place]] = {}
    for file in files:
        records = (item for item in records_in(file, kind, "auto", path) if isinstance(item, Record))
        parts.setdefault(frozenset(next((record.value for record in records), {})), []).append(file)
    return list(parts.values())


def _groups_by_reading(parts: Sequence[Sequence[Place]], kind: str, path: str) -> list[Group]:
    """Groups of files that are read in the same way: optional fields alone do not part them."""

    def group(files: Sequence[Place]) -> Group:
        return _group({"kind": "files", "paths": [str(file) for file in files]}, files, kind, path, ANY)

    by_reading: dict[tuple[str, str], list[Place]] = {}
    for part in parts:
        reading = group(part).readings[0]
        by_reading.setdefault((reading.kind, repr(sorted(reading.keys.items()))), []).extend(part)
    return [group(by_name(files)) for files in by_reading.values()]


def _joined(by_form: Mapping[tuple[str, str], list[Place]]) -> dict[tuple[str, tuple[str, ...]], list[Place]]:
    """Suffixes of one format together: texts of whatever suffix, and records, whose fields are sampled over all."""
    suffixes: dict[str, list[str]] = {}
    for kind, suffix in by_form:
        suffixes.setdefault(kind, []).append(suffix)
    return {
        (kind, tuple(endings)): by_name(file for ending in endings for file in by_form[kind, ending])
        for kind, endings in suffixes.items()
    }


def _pattern(path: str, suffix: str, files: Sequence[Place]) -> str | list[str]:
    """Return the pattern that matches the files of a suffix below a path; each file by itself where they have no suffix
    or a glob names them."""
    if suffix and Path(path).is_dir():
        return f"{path.rstrip('/')}/**/*{suffix}"
    return [str(file) for file in files if _suffix(file) == suffix]


def _suffix(file: Place) -> str:
    suffixes = [suffix for suffix in Path(file.name).suffixes if re.fullmatch(r"\.[A-Za-z]\w*", suffix)]
    packed = suffixes[-1:] if suffixes and suffixes[-1].lower() in COMPRESSION_SUFFIXES else []
    return "".join([*suffixes[: len(suffixes) - len(packed)][-1:], *packed])


def _format(file: Place) -> str:
    """Return the format of a file by its name, or else by its first bytes; "" if it is unknown."""
    named = named_format(file)
    if named in ("markdown", "tex"):  # one source together with texts: each file is read by its own name
        return "text"
    if named != "text":
        is_misnamed = named in RECORD_FORMATS and size_of(file) > 0
        if is_misnamed and unread_content(file, named):
            return ""
        return "" if named == "unread" else (is_misnamed and content_format(file, named, "auto", "")) or named
    with opened(file) as stream:
        start = stream.peek(4096)[:4096]
        if (recognised := next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)) is not None:
            return recognised
        try:
            refuse_binary(stream, file, "auto")
        except StageError:
            return ""
    if unread_content(file, "text"):
        return ""
    if content := content_format(file, "text", "auto", "text"):
        return content
    first_line = start.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    try:
        return "jsonl" if isinstance(parse_json(first_line), dict) else "text"
    except BadJson:
        return "text"


def _unread_suffix(file: Place) -> str:
    """The suffix in UNREAD of a file that no reader reads, by its name or its first bytes; "" for another one."""
    if named_format(file) == "unread":
        return suffix_of(file)
    with opened(file) as stream:
        return suffix_by_magic(stream.peek(MAGIC_BYTES)) or unread_content(file, named_format(file))


def _is_dataset(folder: Path) -> bool:
    """Return True if a folder was made by `save_to_disk`, or fetched from the hub with data in it."""
    if not folder.is_dir():
        return False
    if (folder / SPLITS).exists() or (folder / STATE).exists():
        return True
    from_hub = (folder / ".gitattributes").exists() or (folder / ".cache" / "huggingface").is_dir()
    parquet = any((folder / "data").glob("*-*-of-*.parquet"))
    return (folder / CARD).exists() and (card_lists_files(folder) or from_hub or parquet)


def _group(source: dict[str, Any], files: Sequence[Place], kind: str, path: str, wish: Wish) -> Group:
    if kind not in RECORD_FORMATS:
        named = named_format(files[0])
        if kind in NAMED and kind != named and (kind != "text" or named in RECORD_FORMATS):
            source = {**source, "format": kind}
        return Group(source, files, kind, [Reading("documents", {}, f"{kind} files")])
    if kind != named_format(files[0]):
        source = {**source, "format": kind}
    sample, put_aside = _sampled(files, kind, path)
    if not sample:
        reason = f": {put_aside[0].reason}" if put_aside else ""
        where = put_aside[0].place if put_aside else str(files[0])
        message = f"expected records, found none that can be read{reason}"
        raise ConfigError(Problem("unreadable_source", where, message, _FIXES.get(kind, "")))
    if len(sample) == 1 and (problem := table_in_an_object(sample[0])):
        raise ConfigError(problem)
    if len(put_aside) > len(sample):
        message = f"expected records, found {len(put_aside)} of {len(put_aside) + len(sample)} that cannot be read"
        message = f"{message}: {put_aside[0].reason}"
        raise ConfigError(Problem("unreadable_source", put_aside[0].place, message, _FIXES.get(kind, "")))
    is_asked_for = bool(wish.kind or wish.text_field)
    if not is_asked_for and (problem := benchmark_items(sample)):
        raise ConfigError(problem)
    readings = readings_of(sample, kind, wish)
    if readings and not is_asked_for and (problem := _other_purpose(sample, readings)):
        raise ConfigError(problem)
    names = sorted({name for record in sample[:SAMPLED_RECORDS] for name in record.value})
    if not readings and len(sample) == 1 and (problem := list_in_an_object(sample[0])):
        raise ConfigError(problem)
    if not readings:
        finding = f"of {len(sample)} records {_most_prose(sample)}: {field_names(sample[0].value)}"
        message = f"expected pairs, or a field with prose; {finding}"
        fix = "set the kind with --as and the text field with --text-field"
        raise ConfigError(Problem("unreadable_source", sample[0].place, message, fix))
    for reading in readings:
        _check_files(reading, sample, kind)
    if kind == "csv" and has_numbered_columns(sample[0].value):
        more = "the first row looks like a record, not like names of columns (`header: first_row` takes it as names)"
        readings = [replace(reading, why=f"{reading.why}; {more}") for reading in readings]
    if put_aside:
        more = f"{len(put_aside)} other records cannot be read, e.g. {put_aside[0].reason}"
        readings = [replace(reading, why=f"{reading.why}; {more}") for reading in readings]
    return Group(source, files, kind, readings, sample, names)


def _other_purpose(sample: Sequence[Record], readings: Sequence[Reading]) -> Problem | None:
    """The problem of records whose likeliest reading would teach what they are not for."""
    if readings[0].kind == "documents":
        problems = (
            problem(sample, reading.text_field)
            for reading in readings
            for problem in (separate_messages, rendered_chat, side_of_a_pair)
        )
        return next((problem for problem in problems if problem), None)
    return judged_answers(sample) if readings[0].kind == "instructions" else None


def _check_files(reading: Reading, sample: Sequence[Record], kind: str) -> None:
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


def _sampled(files: Sequence[Place], kind: str, path: str) -> tuple[list[Record], list[Rejected]]:
    chosen = [files[round(n * (len(files) - 1) / max(1, SAMPLED_FILES - 1))] for n in range(SAMPLED_FILES)]
    items: list[Record | Rejected] = []
    for file in dict.fromkeys(chosen):
        items += islice(records_in(file, kind, "auto", path), SAMPLED_RECORDS)
    records = [replace(item, value=_with_texts(item.value)) for item in items if isinstance(item, Record)]
    return records, [item for item in items if isinstance(item, Rejected)]


def _with_texts(value: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the texts that a binary column holds."""
    return {name: item.decode("utf-8", "replace") if isinstance(item, bytes) else item for name, item in value.items()}


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


def _most_prose(sample: Sequence[Record]) -> str:
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
