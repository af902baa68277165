"""A mirror of benchmark data: the folders that lm-eval's tasks would fetch from the hub, read from the local disk.

    MIRROR/allenai/ai2_arc/README.md               what the hub calls a dataset card: its configs and their files
    MIRROR/allenai/ai2_arc/ARC-Easy/test.parquet

Each folder is laid out as on the hub, so what `hf download --repo-type dataset` fetched can be put there as it is, and
lm-eval's own command line finds the same data when it is started inside MIRROR. A task's definition (prompt, metric,
version) stays lm-eval's; only where `datasets.load_dataset` looks is another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from corpus.readers.hub import check_dataset
from evaluation.mirror import checker_data

_FILE_FORMATS = frozenset({"json", "csv", "parquet", "arrow", "text"})
"""What a task's `dataset_path` says when it names local files itself."""


class DataMissing(Exception):
    """A task's data are not in the mirror. place: where they were looked for. task: what reads them, where known."""

    def __init__(self, place: Path, dataset: str, name: str | None) -> None:
        super().__init__(f"{dataset}{f' ({name})' if name else ''} is not in {place}")
        self.place, self.dataset, self.name = place, dataset, name
        self.task: str | None = None


class Splits(datasets.DatasetDict):
    """A dataset's splits; one that the mirror lacks is empty, so that a task can be asked without shots from it."""

    def __missing__(self, split: str) -> datasets.Dataset:
        any_split: datasets.Dataset = next(iter(self.values()))
        return any_split.select([])


@contextlib.contextmanager
def mirrored(mirror: Path | None) -> Iterator[None]:
    """Inside the block tasks read their data from `mirror`; nothing is fetched. None is a mirror that has nothing.

    Loading a task whose data are missing raises DataMissing; one whose folder leads elsewhere StageError
    `unsafe_file`.
    """
    checker_data.offer()
    load = datasets.load_dataset

    def from_mirror(path: str, name: str | None = None, **options: Any) -> Any:
        if path in _FILE_FORMATS or Path(path).exists():
            return load(path, name=name, **options)
        folder = (mirror or Path("tasks_mirror")) / path
        if mirror is None or not folder.is_dir():
            raise DataMissing(folder, path, name)
        check_dataset(folder)
        try:
            found = load(str(folder.absolute()), name=name, **_plain(options))
        except (ValueError, FileNotFoundError) as error:
            if "BuilderConfig" in str(error) or isinstance(error, FileNotFoundError):
                raise DataMissing(folder / (name or ""), path, name) from error
            raise
        return Splits(found) if isinstance(found, datasets.DatasetDict) else found

    datasets.load_dataset = from_mirror
    try:
        yield
    finally:
        datasets.load_dataset = load


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is said about the hub alone."""
    return {key: value for key, value in options.items() if key not in {"trust_remote_code", "revision", "token"}}
