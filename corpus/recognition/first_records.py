"""The first records of each source in a config, read so that a wrong field or an empty folder is reported before a
run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig
from corpus.documents.quarantine import Rejected
from corpus.readers.config import (
    DatasetSelection,
    FileSelection,
    InstructionOptions,
    PairOptions,
    PreferenceOptions,
    TextOptions,
)
from corpus.readers.contents import content_format, refuse_misnamed
from corpus.readers.plan import FilePart, format_of, suffix_of
from corpus.readers.streams import refuse_binary
from corpus.readers.unread import MAGIC_BYTES, UnreadFiles, by_unread_format, reads_pdf, suffix_by_magic
from infra.errors import Problem, StageError
from infra.io.bounded import opened
from infra.io.sources import SCHEME, Place, by_name, files_below, size_of

INSPECTED = 20
"""Records of a source that are checked. One that cannot be read is put aside later; if none of them can, the key is
wrong."""
SNIFFED = 1000
"""Files of a source that are opened to detect if they are text."""


def first_record_problems(config: IngestConfig | InstructionsConfig | PreferencesConfig) -> list[Problem]:
    """Return the problems of the first file of each source: no files, a missing field, no record that can be read.

    A missing file is left to the code that hashes it.
    """
    section = {IngestConfig: "ingest", InstructionsConfig: "instructions", PreferencesConfig: "preferences"}
    problems: list[Problem] = []
    for index, source in enumerate(config.read):
        if not isinstance(source, FileSelection | DatasetSelection):
            continue
        key = f"{section[type(config)]}.read.{index}"
        try:
            if empty := list(_empty_folders(source, key)):
                problems += empty
                continue
            files = [file for file in by_name(source.places()) if not isinstance(file, Path) or file.exists()]
            assert isinstance(source, TextOptions | PairOptions)
            if unread := unread_files(source, files):
                if not isinstance(source, TextOptions) or source.broken_files == "stop":
                    problems += [_unread(group, len(files), source, key) for group in unread]
                    continue
                excluded = {file for group in unread for file in group.files}
                files = [file for file in files if file not in excluded]
            if isinstance(source, TextOptions) and source.format == "auto" and source.broken_files == "stop":
                for file in [file for file in files if isinstance(file, Path)][:SNIFFED]:
                    kind = format_of(source, file)
                    refuse_misnamed(file, kind, source.encoding, key, source.text_field, source.content)
            filled = next((file for file in files if size_of(file)), None)
            if filled is not None:
                problems += _of_records(source, filled, key)
            elif files:
                problems.append(Problem("empty_source", key, f"expected records, found empty files: {files[0]}, …"))
        except StageError as error:
            problems += error.problems
    return problems


def unread_files(source: TextOptions | PairOptions, files: Iterable[Place]) -> list[UnreadFiles]:
    """The files of a source that no reader reads, by format: seen from their names, and from the beginning of the first
    SNIFFED of them on disk whose names do not give a format. Raises StageError `missing_source`, `corrupt_file`."""
    unread: list[tuple[Place, str]] = []
    sniffed = 0
    for file in files:
        kind = format_of(source, file)
        if kind == "unread" or (kind == "pdf" and (isinstance(source, PairOptions) or not reads_pdf())):
            unread.append((file, suffix_of(file)))
        elif kind == "text" and isinstance(file, Path) and sniffed < SNIFFED:
            sniffed += 1
            with opened(file) as stream:
                try:
                    refuse_binary(stream, file, source.encoding)
                except StageError:
                    if not content_format(file, kind, source.encoding, ""):  # a table is refused with its format
                        unread.append((file, suffix_by_magic(stream.peek(MAGIC_BYTES))))
    return by_unread_format(unread)


def _unread(unread: UnreadFiles, files: int, source: TextOptions | PairOptions, key: str) -> Problem:
    code = "binary_source" if unread.format == "binary" else "unread_format"
    message = f"of {files:,} files no reader supports {unread.note}"
    hint = "; `broken_files: quarantine` puts them aside" if isinstance(source, TextOptions) else ""
    return Problem(code, f"{key}.paths", message, unread.fix + hint)


def _empty_folders(source: FileSelection | DatasetSelection, key: str) -> Iterator[Problem]:
    """Raise StageError as `FileSelection.selection` does."""
    for number, path in enumerate(source.paths if isinstance(source, FileSelection) else ()):
        folder = Path(path)
        if path.startswith(SCHEME) or not folder.is_dir():
            continue
        if not any(files_below(folder, follow_links=True)):
            message = f"expected files, found an empty folder: {path}"
        elif isinstance(source, FileSelection) and not (chosen := source.selected(path)).read:
            message = f"expected files to read, found none in {path}; {chosen.note}"
        else:
            continue
        where = f"{key}.paths.{number}"
        yield Problem("empty_source", where, message, "correct the path, or put the files there")


def _of_records(source: Any, file: Place, key: str) -> Iterator[Problem]:
    """Raise StageError as the readers do."""
    items = list(islice(_records(source, file, key), INSPECTED))
    rejected = [item for item in items if isinstance(item, Rejected)]
    if items and len(rejected) == len(items):
        first = rejected[0]
        message = f"none of its first {len(items)} records can be read: {first.reason}"
        yield Problem("unreadable_source", first.place, message, f"see {key}: its format, encoding and fields")


def _records(source: Any, file: Place, key: str) -> Iterator[object]:
    from corpus.instructions import file_pairs as instruction_pairs
    from corpus.preferences import file_pairs as preference_pairs
    from corpus.readers.texts import read_texts

    if isinstance(source, InstructionOptions):
        return instruction_pairs(source, [file], key)
    if isinstance(source, PreferenceOptions):
        return preference_pairs(source, [file], key)
    return read_texts(source, FilePart(file, size_of(file)), key)
