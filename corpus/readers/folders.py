"""Data files among all the files of a folder: no side files of programs, and no file of another split than train."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Generic, Literal, NamedTuple, TypeVar

SPLIT_WORDS = {
    "train": ("train", "training", "trainset"),
    "validation": (
        "validation", "valid", "val", "valset", "dev", "devel", "devset",
        "holdout", "hold-out", "hold_out", "heldout", "held-out", "held_out",
    ),
    "test": ("test", "testing", "testset", "eval", "evaluation", "evalset"),
}  # fmt: skip
"""The words that the Hugging Face hub looks for in file names where a dataset does not list its files, and further
ones that people use."""
RECORD_SUFFIXES = (
    ".parquet", ".arrow", ".feather", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".raw", ".tokens",
)  # fmt: skip
"""Suffixes of files that a dataset keeps its records in. A program's train.py and test.py name no splits."""
COMPRESSIONS = ("", ".gz", ".zst", ".bz2", ".xz")

SIDE_FILES = (
    "_SUCCESS", "_FAILURE", "_committed_*", "_started_*", "_metadata", "_common_metadata",  # Spark, Hadoop
    "*.crc",
    "Thumbs.db", "ehthumbs.db", "desktop.ini",  # Windows
    "*~", "*.swp", "*.swo", "#*#", "~$*", "*.bak", "*.orig", "*.tmp", "*.lock", "*.pyc",  # editors and other programs
    "*.incomplete", "*.crdownload", "*.part", "*.partial", "*.download", "*.aria2",  # downloads that did not end
)  # fmt: skip
CARDS = (
    "README*", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "CITATION*", "AUTHORS*", "CONTRIBUTING*", "CHANGELOG*",
    "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json",
    "*SUMS", "*SUMS.txt", "*.md5", "*.sha1", "*.sha256", "checksums*", "MANIFEST*",
)  # fmt: skip
"""Files that describe a dataset, beside its records. In a folder of texts alone they are texts too."""
SIDE_FOLDERS = (
    "__MACOSX", "_temporary", "_delta_log", "_spark_metadata", "_logs", "__pycache__", "lost+found",
    "@eaDir", "System Volume Information", "$RECYCLE.BIN",
)  # fmt: skip

Splits = Literal["train", "all"]
T = TypeVar("T")


class FolderFiles(NamedTuple, Generic[T]):
    """Files of a folder: those to read, side files, and those of other splits."""

    read: tuple[T, ...]
    side: tuple[T, ...] = ()
    other_splits: tuple[T, ...] = ()

    @property
    def note(self) -> str:
        """Files that are left out, with the reason and one example for each; "" where there are none."""
        reasons = {
            "hidden, a dataset card or a side file of another program": self.side,
            "of a validation or test split (`splits: all` reads them)": self.other_splits,
        }
        parts = [f"{len(files):,} {reason}, e.g. {files[0]}" for reason, files in reasons.items() if files]
        return f"files left out: {'; '.join(parts)}" if parts else ""


def select(files: Iterable[tuple[T, str]], splits: Splits) -> FolderFiles[T]:
    """The data files among all files of one folder.

    Args:
        files: each with its path relative to the folder, with slashes.
        splits: train leaves out the files that are named after a validation or test split, if others are left.
    """
    named_files = list(files)
    is_dataset = any(is_record_file(name) and ".txt" not in name and not _is_card(name) for _, name in named_files)
    out = {name for _, name in named_files if is_side_file(name) or (is_dataset and _is_card(name))}
    side = [file for file, name in named_files if name in out]
    data = [(file, name) for file, name in named_files if name not in out]
    other_splits = set(_of_other_splits([name for _, name in data])) if splits == "train" else set()
    return FolderFiles(
        tuple(file for file, name in data if name not in other_splits),
        tuple(side),
        tuple(file for file, name in data if name in other_splits),
    )


def is_side_file(name: str) -> bool:
    """Return True if a path in a folder is hidden, or written by a program next to the data: `_SUCCESS`, `a.txt~`."""
    *folders, last = PurePosixPath(name).parts
    in_side_folder = any(part in SIDE_FOLDERS for part in folders)
    return is_hidden(name) or in_side_folder or any(fnmatchcase(last, side) for side in SIDE_FILES)


def _is_card(name: str) -> bool:
    return any(fnmatchcase(PurePosixPath(name).name, card) for card in CARDS)


def is_hidden(name: str) -> bool:
    """Return True if a path in a folder is hidden, or in a hidden folder."""
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def split_of(name: str, requested: str = "train") -> str:
    """The split that a path in a folder names: train, validation, test or the one asked for; "" where it names none."""
    for split, words in {**SPLIT_WORDS, requested: SPLIT_WORDS.get(requested, (requested,))}.items():
        if re.search(rf"(^|[/_.=-])({'|'.join(map(re.escape, words))})([/_.-]|\d|$)", name, re.IGNORECASE):
            return split
    return ""


def _of_other_splits(names: Sequence[str]) -> list[str]:
    """Record files of a validation or test split. Where no file is named train, only what is named exactly after such a
    split counts: test.jsonl, not test_pilots_remember.jsonl."""
    records = [name for name in names if is_record_file(name)]
    by_name = {name: split_of(name) for name in records}
    other_splits = [name for name, split in by_name.items() if split in ("validation", "test")]
    if "train" not in by_name.values():
        other_splits = [name for name in other_splits if _is_exactly_a_split(name)]
    return other_splits if len(other_splits) < len(records) else []


def _is_exactly_a_split(name: str) -> bool:
    *folders, last = PurePosixPath(name.lower()).parts
    stem = re.sub(r"([-_]\d+)?([-_]of[-_]\d+)?$", "", last.partition(".")[0])
    words = (*SPLIT_WORDS["validation"], *SPLIT_WORDS["test"])
    return stem in words or any(folder in words for folder in folders)


def is_record_file(name: str) -> bool:
    """Return True if a file's name ends as files of records do, compressed or not."""
    return name.lower().endswith(tuple(suffix + packed for suffix in RECORD_SUFFIXES for packed in COMPRESSIONS))
