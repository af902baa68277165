"""A mirror of benchmark data: the folders that lm-eval's tasks would fetch from the hub, read from the local disk.

    MIRROR/allenai/ai2_arc/README.md               what the hub calls a dataset card: its configs and their files
    MIRROR/allenai/ai2_arc/ARC-Easy/test.parquet

Each folder has the hub's layout. The output of `hf download --repo-type dataset` can be put there unchanged, and
lm-eval's own command line finds the same data when it is started inside MIRROR. A task's definition (prompt, metric,
version) stays lm-eval's; only the place where `datasets.load_dataset` looks changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from corpus.readers.hub import check_dataset
from evaluation.mirror import checker_data

_FILE_FORMATS = frozenset({"json", "csv", "parquet", "arrow", "text"})
"""Values of a task's `dataset_path` if the task names local files itself."""


class DataMissing(Exception):
    """Raised if a task's data are not in the mirror. place: expected location. task: their reader, if known."""

    def __init__(self, place: Path, dataset: str, name: str | None) -> None:
        super().__init__(f"{dataset}{f' ({name})' if name else ''} is not in {place}")
        self.place, self.dataset, self.name = place, dataset, name
        self.task: str | None = None


class Splits(datasets.DatasetDict):
    """Splits of a dataset; a split that the mirror lacks is empty, so a task can be asked without shots from it."""

    def __missing__(self, split: str) -> datasets.Dataset:
        any_split: datasets.Dataset = next(iter(self.values()))
        return any_split.select([])


@contextlib.contextmanager
def mirrored(mirror: Path | None) -> Iterator[None]:
    """Make tasks read their data from `mirror` inside the block; nothing is fetched. None is an empty mirror.

    Loading a task whose data are missing raises DataMissing; if its folder leads elsewhere, it raises StageError
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
            of_the_hub = {"trust_remote_code", "revision", "token"}
            plain = {key: value for key, value in options.items() if key not in of_the_hub}
            dataset = load(str(folder.absolute()), name=name, **plain)
        except (ValueError, FileNotFoundError) as error:
            if "BuilderConfig" in str(error) or isinstance(error, FileNotFoundError):
                raise DataMissing(folder / (name or ""), path, name) from error
            raise
        return Splits(dataset) if isinstance(dataset, datasets.DatasetDict) else dataset

    datasets.load_dataset = from_mirror
    try:
        yield
    finally:
        datasets.load_dataset = load
