"""Writer of a benchmark's data into a mirror in the hub's layout, with a trial of the task on them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import yaml

from evaluation.config import ROWS_FOR_SHOTS
from evaluation.config.lm_tasks import check_names
from evaluation.config.task_sources import MIRROR_RECORD
from evaluation.harness.named_tasks import load_named, manager_of
from evaluation.harness.shots import SHARE
from evaluation.harness.tasks import own_cache, quiet
from evaluation.mirror.layouts import FILE_NAMES, LAYOUTS
from evaluation.mirror.rows import find_files, read_rows
from infra.errors import ConfigError, Problem, StageError, stage_error
from infra.io.files import sync
from infra.io.tables import damaged, read_state, unwritable

CARD = "README.md"
_LOST = "mirror its tasks again"
PUT_ASIDE, PUT_ASIDE_SHARE = ROWS_FOR_SHOTS, SHARE
"""Rows set aside for shots if a task's own split for them is missing: PUT_ASIDE rows, at most 1/4 of all."""


@dataclass(frozen=True)
class Definition:
    """Source of a task's questions: the hub's dataset, its config, the scored split, and the split of the shots.

    takes_shots: False if its YAML specifies 0, which lm-eval keeps.
    """

    task: str
    dataset: str
    config: str | None
    scored: str
    shots: str | None
    takes_shots: bool = True


def definition(task: str) -> Definition:
    """Return the definition in lm-eval's YAML. Raises ConfigError: `unknown_task`; `no_dataset` for groups and
    generated data."""
    check_names([task], "TASK")
    entry = manager_of(task).task_index.get(task)
    settings = (entry.cfg or {}) if entry else {}
    if not isinstance(settings.get("task"), str) or "/" not in str(settings.get("dataset_path", "")):
        subtasks = settings.get("task") if isinstance(settings.get("task"), list) else []
        members = [str(name) for name in subtasks or [] if isinstance(name, str)] or sorted(entry.tags if entry else ())
        message = f"{task} is not a single task with a dataset of the hub"
        fix = f"mirror its tasks one by one: {', '.join(members[:8])}" if members else "see its YAML"
        raise ConfigError(Problem("no_dataset", "TASK", message, fix))
    scored = settings.get("test_split") or settings.get("validation_split") or "test"
    shots = settings.get("fewshot_split") or settings.get("training_split")
    if shots is None and settings.get("validation_split") not in (None, scored):
        shots = settings["validation_split"]
    takes_shots = settings.get("num_fewshot") != 0
    return Definition(task, settings["dataset_path"], settings.get("dataset_name"), scored, shots, takes_shots)


@dataclass(frozen=True)
class Mirrored:
    """Content of a mirror for a task: its folder, rows of each split, and the first prompt as the task builds it."""

    definition: Definition
    folder: Path
    splits: Mapping[str, int]
    put_aside: int
    layout: str
    prompt: str


def mirror_task(
    task: str, source: Path | None, mirror: Path, splits: Mapping[str, Path] | None = None, shots: int | None = None
) -> Mirrored:
    """Write a task's data into the mirror.

    Nothing is written unless the task could build a prompt and an answer from every row, and then everything or nothing
    is. Raises ConfigError `unknown_task`, `no_dataset`; StageError as `read_rows` and `find_files` do, `wrong_layout`,
    `bad_task`, `damaged_state`, `disk_full`.

    Args:
        source: a file or a folder.
        splits: files by split, in addition to or instead of it.
        shots: number of rows that are taken from the end of the scored split for its shots; by default up to 20 if
            the task takes shots and its own split for them is missing. StageError `has_shots` if that split exists.
    """
    spec = definition(task)
    folder = (mirror / spec.dataset).resolve()  # for a link, replace the folder itself
    with _locked(folder):
        return _mirror(spec, source, mirror, folder, splits or {}, shots)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one call at a time change a dataset: each call keeps the existing rows of other splits and configurations."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise unwritable(error, folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _mirror(
    spec: Definition, source: Path | None, mirror: Path, folder: Path, splits: Mapping[str, Path], shots: int | None
) -> Mirrored:
    task = spec.task
    _recover(folder)
    files = dict(find_files(source, task, spec.config, spec.scored, FILE_NAMES.get(task, ()))) if source else {}
    if source and source.is_file() and spec.scored not in files and not splits:
        files = {spec.scored: list(next(iter(files.values())))}
    files |= {split: [path] for split, path in splits.items()}
    rows, layout = {}, ""
    for split, paths in files.items():
        source_rows = [row for path in paths for row in read_rows(path)]
        rows[split], layout = _converted(spec, source_rows, paths[0])
    earlier, before = _existing_rows(folder, spec.config), _reserved_before(folder, spec.config)
    if before and spec.scored in rows:
        # They were rows of the scored split, which is now read again with all of them.
        earlier.pop(_shots_split(spec), None)
    elif before and _shots_split(spec) in rows:
        # The split of the shots now has its own file: the rows that replaced it are scored again.
        earlier[spec.scored] += earlier.pop(_shots_split(spec))
    new_splits = {spec.scored, _shots_split(spec)} & rows.keys()
    for split, kept in earlier.items():
        rows.setdefault(split, kept)
    if spec.scored not in rows:
        message = f"{task} scores the split {spec.scored}, found {', '.join(rows) or 'none'}"
        raise stage_error("missing_source", str(source or ""), message, f"--split {spec.scored}=FILE sets it")
    reserved = _reserve_shots(spec, rows, shots)
    still = reserved or (0 if new_splits else before)
    with tempfile.TemporaryDirectory(prefix="stemma-mirror-") as trial:
        trial_copy = Path(trial) / spec.dataset
        if folder.is_dir():
            shutil.copytree(folder, trial_copy)
        _write(trial_copy, spec, rows, files, layout, still)
        prompt = _try_out(task, Path(trial), rows[spec.scored])
        _replace(trial_copy, folder)
    counts = {split: len(split_rows) for split, split_rows in rows.items()}
    return Mirrored(spec, mirror / spec.dataset, counts, reserved, layout or "as on the hub", prompt)


def _replace(source: Path, folder: Path) -> None:
    """Replace the folder by `source` as a whole: half of the files would be read as a different test."""
    staging, old = _swap_folders(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(source, staging)
        for path in staging.rglob("*"):
            sync(path)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(staging, ignore_errors=True)
        full = f"[Errno {errno.ENOSPC}]" in str(error)
        raise unwritable(OSError(errno.ENOSPC, "") if full else error, folder) from error
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Restore the folder after a kill between the two renames, and remove what it left next to the folder."""
    staging, old = _swap_folders(folder)
    if old.is_dir() and not folder.exists():
        old.rename(folder)
    for path in (staging, old):
        shutil.rmtree(path, ignore_errors=True)


def _swap_folders(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a folder's next content and of its previous content during a replacement."""
    return folder.with_name(f".{folder.name}.fresh"), folder.with_name(f".{folder.name}.old")


def _converted(spec: Definition, rows: list[dict[str, Any]], path: Path) -> tuple[list[dict[str, Any]], str]:
    layout = LAYOUTS.get((spec.dataset, spec.config))
    if layout is None or not layout.fits(rows[0]):
        return rows, ""
    converted = []
    for number, row in enumerate(rows, 1):
        try:
            converted.append(layout.convert(row))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise stage_error(
                "wrong_layout",
                f"{path}:{number}",
                f"this row, in the layout of {layout.name}, cannot be put as {spec.dataset} has it: {error}",
                f"mirror {spec.task} from the files of {spec.dataset} themselves",
            ) from error
    return converted, layout.name


def _shots_split(spec: Definition) -> str:
    """Return the split to which rows are set aside."""
    return spec.shots if spec.shots and spec.shots != spec.scored else "train"


def _reserve_shots(spec: Definition, rows: dict[str, list[dict[str, Any]]], shots: int | None) -> int:
    """Move rows from the end of the scored split to the split of the shots; return their number."""
    target, scored = _shots_split(spec), rows[spec.scored]
    if shots is None:
        needs_shots = spec.takes_shots and not rows.get(target)
        shots = 0 if not needs_shots else min(PUT_ASIDE, len(scored) // PUT_ASIDE_SHARE)
    if not shots:
        return 0
    if rows.get(target):
        message = f"the split {target} already has {len(rows[target]):,} rows for few-shot examples"
        raise stage_error("has_shots", "--shots", message, "leave --shots out")
    if shots >= len(scored):
        raise stage_error("too_many_shots", "--shots", f"{shots} of {len(scored)} rows would leave none to score")
    rows[target] = [*scored[-shots:]]
    rows[spec.scored] = scored[:-shots]
    return shots


def _existing_rows(folder: Path, config: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that an earlier call has written."""
    record = _record(folder).get(config or "default", {})
    kept = {}
    for split in record.get("splits", {}):
        path = folder / (config or "default") / f"{split}.parquet"
        try:
            kept[split] = pyarrow.parquet.read_table(path).to_pylist()
        except (pa.ArrowException, FileNotFoundError) as error:
            raise damaged(path, str(error).splitlines()[0], f"delete {folder}, and {_LOST}") from error
    return kept


def _reserved_before(folder: Path, config: str | None) -> int:
    """Return the number of existing rows that an earlier call has set aside."""
    return int(_record(folder).get(config or "default", {}).get("put_aside_for_shots", 0))


def _record(folder: Path) -> dict[str, Any]:
    record = read_state(folder / MIRROR_RECORD, f"delete {folder}, and {_LOST}", {})
    if not isinstance(record, dict) or not all(
        isinstance(entry, dict) and "splits" in entry for entry in record.values()
    ):
        raise damaged(folder / MIRROR_RECORD, "not as expected", f"delete {folder}, and {_LOST}")
    return record


def _write(
    folder: Path,
    spec: Definition,
    rows: Mapping[str, list[dict[str, Any]]],
    files: Mapping[str, list[Path]],
    layout: str,
    reserved: int,
) -> None:
    config = spec.config or "default"
    (folder / config).mkdir(parents=True, exist_ok=True)
    try:
        # One table of all rows, so that all splits have one schema; rows of unlabelled splits may have no answers.
        all_rows = [row for split_rows in rows.values() for row in split_rows]
        fields = dict.fromkeys(field for row in all_rows for field in row)
        table = pa.Table.from_pydict({field: [row.get(field) for row in all_rows] for field in fields})
    except pa.ArrowException as error:
        raise stage_error("wrong_layout", spec.task, f"its rows have no common columns: {error}") from error
    offset = 0
    for split, split_rows in rows.items():
        pyarrow.parquet.write_table(table.slice(offset, len(split_rows)), folder / config / f"{split}.parquet")
        offset += len(split_rows)
    record = _record(folder)
    kept = [
        source for source in record.get(config, {}).get("sources", []) if source.get("split", "") in rows.keys() - files
    ]
    new = [(split, path) for split, paths in files.items() for path in paths]
    sources = kept + [{"split": split, "file": str(path), "sha256": _sha256(path)} for split, path in new]
    record[config] = {
        "splits": {split: len(split_rows) for split, split_rows in rows.items()},
        "sources": sources,
        "layout": layout or "as on the hub",
        "put_aside_for_shots": reserved,
    }
    (folder / MIRROR_RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    configs = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": f"{name}/{split}.parquet"} for split in entry["splits"]],
        }
        for name, entry in record.items()
    ]
    head = yaml.safe_dump({"configs": configs}, sort_keys=False, allow_unicode=True)
    (folder / CARD).write_text(f"---\n{head}---\n\nA mirror; {MIRROR_RECORD} lists the sources of its rows.\n", "utf8")


def _try_out(task: str, mirror: Path, rows: list[dict[str, Any]]) -> str:
    """Return the first prompt, after building prompt and target of every row. Raises StageError `bad_task`."""
    with quiet(), own_cache(mirror / ".cache"):
        loaded = load_named([task], mirror, "TASK")[0]
        first = ""
        for number, doc in enumerate(loaded.eval_docs, 1):
            try:
                question, target = loaded.doc_to_text(doc), loaded.doc_to_target(doc)
                choices = loaded.doc_to_choice(doc) if loaded.config.doc_to_choice is not None else None
                if choices is not None and isinstance(target, int) and not 0 <= target < len(choices):
                    raise ValueError(f"its answer is number {target} of {len(choices)} choices")
                if number == 1:
                    first = choices[question] if isinstance(question, int) and choices else str(question)
            except Exception as error:  # a task's own code may raise anything
                fields = ", ".join(rows[0])
                raise StageError(
                    Problem(
                        "bad_task",
                        f"TASK, row {number}",
                        f"{task} cannot make a question of it: {type(error).__name__}: {error}; it has {fields}",
                        "give the dataset's own files; its README on the hub names the fields",
                    )
                ) from error
    return first


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
