"""The first records of what a config says to read, so that a wrong field or an empty folder is told before a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig
from corpus.documents.quarantine import Rejected
from corpus.readers.config import DatasetSelection, FileSelection, InstructionOptions, PreferenceOptions
from corpus.readers.plan import FilePart
from infra.errors import Problem, StageError
from infra.io.sources import SCHEME, Place, by_name, files_below, size_of

LOOKED_AT = 20
"""Records of a source. One that cannot be read is put aside later; where none of so many can, the key is wrong."""


def first_record_problems(config: IngestConfig | InstructionsConfig | PreferencesConfig) -> list[Problem]:
    """What is wrong with the first file of each source: no files, a missing field, no record that can be read.

    A file that is not there is left to whoever hashes it.
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
            places = [place for place in by_name(source.places()) if not isinstance(place, Path) or place.exists()]
            filled = next((place for place in places if size_of(place)), None)
            if filled is not None:
                problems += _of_records(source, filled, key)
            elif places:
                problems.append(Problem("empty_source", key, f"expected records, found empty files: {places[0]}, …"))
        except StageError as error:
            problems += error.problems
    return problems


def _empty_folders(source: FileSelection | DatasetSelection, key: str) -> Iterator[Problem]:
    """Raises StageError as `FileSelection.selection` does."""
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


def _of_records(source: Any, place: Place, key: str) -> Iterator[Problem]:
    """Raises StageError as the readers do."""
    items = list(islice(_records(source, place, key), LOOKED_AT))
    rejected = [item for item in items if isinstance(item, Rejected)]
    if items and len(rejected) == len(items):
        first = rejected[0]
        message = f"of its first {len(items)} records none can be read: {first.reason}"
        yield Problem("unreadable_source", first.place, message, f"see {key}: its format, encoding and fields")


def _records(source: Any, place: Place, key: str) -> Iterator[object]:
    from corpus.instructions import file_pairs as instruction_pairs
    from corpus.preferences import file_pairs as preference_pairs
    from corpus.readers.texts import read_texts

    if isinstance(source, InstructionOptions):
        return instruction_pairs(source, [place], key)
    if isinstance(source, PreferenceOptions):
        return preference_pairs(source, [place], key)
    return read_texts(source, FilePart(place, size_of(place)), key)
