"""Forms of data: the contents of given files, recognised from a sample of their records, with the reason.

A form is tried by the very code that reads it later (`corpus.recognition.readings`), so that the recognised form is the
one in which `instructions`, `preferences` and `ingest` read the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.documents.quarantine import Rejected
from corpus.readers.config import FileDocuments, HuggingFaceDocuments
from corpus.readers.contents import NAMED, content_format, unread_content
from corpus.readers.hub import CARD, SPLITS, STATE, card_lists_files
from corpus.readers.plan import COMPRESSION_SUFFIXES, named_format, suffix_of
from corpus.readers.record import Record, field_names, has_numbered_columns
from corpus.readers.records import records_in
from corpus.readers.streams import refuse_binary
from corpus.readers.unread import MAGIC_BYTES, by_unread_format, suffix_by_magic
from corpus.recognition.other_purposes import (
    benchmark_items,
    judged_answers,
    list_in_an_object,
    rendered_chat,
    separate_messages,
    side_of_a_pair,
    table_in_an_object,
)
from corpus.recognition.readings import ANY, Reading, Wish, check_sample, most_prose, readings_of
from infra.errors import ConfigError, Problem, StageError
from infra.io.bounded import opened
from infra.io.json import BadJson, parse_json
from infra.io.sources import Place, by_name, size_of

RECORD_FORMATS = ("jsonl", "parquet", "arrow", "csv")

SAMPLED_FILES, SAMPLED_RECORDS = 8, 40
"""Files of each source, spread over all of them by name, and records of each."""
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
        finding = f"of {len(sample)} records {most_prose(sample)}: {field_names(sample[0].value)}"
        message = f"expected pairs, or a field with prose; {finding}"
        fix = "set the kind with --as and the text field with --text-field"
        raise ConfigError(Problem("unreadable_source", sample[0].place, message, fix))
    for reading in readings:
        check_sample(reading, sample, kind)
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
