"""Rows of a benchmark from a user's files of any format: the split of each file, and its contents."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus.readers.formats.table_batches import Bad, TableSource
from corpus.readers.formats.table_process import table_rows
from evaluation.config.lm_tasks import letters_and_digits
from evaluation.mirror.layouts import wikitext_pages
from infra.errors import stage_error
from infra.io.bounded import RECORD_BYTES, Expansion, read_expanded
from infra.io.contained import check_inside, homes
from infra.io.json import BadJson, parse_json
from infra.io.sources import files_below

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


_QUOTED = re.compile('"(?:[^"]|"")*"')


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, JSON (a list), CSV, TSV, Parquet or WikiText's raw text; .gz too.

    Raises StageError: `missing_source`, `corrupt_file` naming file and line, `empty_source`, and `too_big` for a file
    that expands far beyond its size on disk (`infra.io.bounded`).
    """
    if not path.is_file():
        raise stage_error("missing_source", str(path), "no such file")
    kind = (path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix).lower()
    if kind not in SUFFIXES:
        raise stage_error("corrupt_file", str(path), f"expected a file that ends in {', '.join(SUFFIXES)} or .gz")
    try:
        rows = _from_parquet(path) if kind == ".parquet" else _from_text(path, kind)
    except (OSError, RecursionError, ValueError, csv.Error) as error:
        raise stage_error("corrupt_file", str(path), f"cannot be read: {str(error).splitlines()[0]}") from error
    if not rows:
        raise stage_error("empty_source", str(path), "expected at least one row, found none")
    return rows


def _from_parquet(path: Path) -> list[dict[str, Any]]:
    expansion, rows = Expansion(path), []
    for item in table_rows(TableSource("parquet", path, (), "", RECORD_BYTES)):
        if isinstance(item, Bad):
            if item.row == 0:
                break
            raise stage_error("corrupt_file", f"{path}, row {item.row:,}", item.reason)
        expansion.add(item.batch.nbytes, item.batch.num_rows * item.batch.num_columns)
        rows += item.batch.to_pylist()
    return rows


def _from_text(path: Path, kind: str) -> list[dict[str, Any]]:
    # Normalize line ends as Python's text mode does.
    text = read_expanded(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    if kind in (".csv", ".tsv"):
        return _table(path, text, "\t" if kind == ".tsv" else ",")
    if kind == ".txt":
        return list(wikitext_pages(text))
    if kind == ".json" and text.lstrip().startswith("["):
        try:
            return _objects(path, enumerate(parse_json(text, path, expected="a list of JSON objects"), 1))
        except BadJson as error:
            raise stage_error("corrupt_file", error.problems[0].path, str(error)) from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((number, parse_json(line, expected="a JSON object on each line")))
            except BadJson as error:
                raise stage_error("corrupt_file", f"{path}:{number}", str(error)) from None
    return _objects(path, rows)


def _table(path: Path, text: str, delimiter: str) -> list[dict[str, Any]]:
    """Return the rows of a table whose first line names its columns. In most TSV files a quote is an ordinary
    character; treated as a quote, it would swallow the lines up to the next one."""
    lines = [line.split(delimiter) for line in text.split("\n") if line]
    is_plain = delimiter == "\t" and all(len(line) == len(lines[0]) for line in lines)
    if is_plain and any(cell.startswith('"') and not _QUOTED.fullmatch(cell) for line in lines for cell in line):
        return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    rows = []
    for row in reader:
        if None in row:
            message = f"expected {len(row) - 1} fields as in the first line, found {len(row) - 1 + len(row[None])}"
            raise stage_error("corrupt_file", f"{path}:{reader.line_num}", message)
        rows.append(row)
    return rows


def _objects(path: Path, rows: Any) -> list[dict[str, Any]]:
    checked = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise stage_error("corrupt_file", f"{path}:{number}", "expected a JSON object")
        checked.append(row)
    return checked


def find_files(
    source: Path, task: str, config: str | None, scored: str, names: Sequence[str] = ()
) -> Mapping[str, list[Path]]:
    """Return the files of each split under `source`, a file or a folder.

    In a folder, files match if their names contain a split (test.jsonl, train-00000-of-00002.parquet); a subfolder
    named after the dataset's config is searched first. Otherwise the single file at any depth that is named after the
    task or one of `names` is the scored split. Raises StageError `missing_source` naming the expected files,
    `unsafe_file` for a link that leads out of the folder.
    """
    if source.is_file():
        return {split_in(source) or scored: [source]}
    if not source.is_dir():
        raise stage_error("missing_source", str(source), "expected a file, or a folder with the task's files")
    files: dict[str, list[Path]] = {}
    for folder in ([source / config] if config and (source / config).is_dir() else []) + [source]:
        check_inside((path for path in folder.iterdir() if path.is_symlink()), homes(source), str(source))
        for path in sorted(folder.iterdir()):
            if _is_data(path) and (split := split_in(path)):
                files.setdefault(split, []).append(path)
        if files:
            return files
    accepted_names = {letters_and_digits(name) for name in (task, *names, *([config] if config else []))}
    for path in sorted(files_below(source)):
        if _is_data(path) and letters_and_digits(path.name.split(".")[0]) in accepted_names:
            return {split_in(path) or scored: [path]}
    expected = " or ".join(dict.fromkeys((task, *names)))
    raise stage_error(
        "missing_source",
        str(source),
        f"expected files named after splits (train, validation, test) or a file named {expected}, found neither",
        f"give the file itself: stemma mirror {task} FILE, or --split {scored}=FILE",
    )


def split_in(path: Path) -> str | None:
    """Return the split in a file's name: `validation` for hellaswag_val.jsonl; None if there is none."""
    words = re.split(r"[^a-z]+", path.name.lower().split(".")[0])
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _is_data(path: Path) -> bool:
    return path.is_file() and path.name.removesuffix(".gz").endswith(SUFFIXES)
