"""lm-eval's own tasks, loaded by name with data from a mirror, and the source of their few-shot examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetGenerationError
from jinja2 import TemplateError
from lm_eval.tasks import TaskManager
from yaml import YAMLError

from evaluation.config.lm_tasks import check_names, folders_of, known_tasks, tasks_dir
from evaluation.config.task_sources import how_to_mirror
from evaluation.mirror import checker_data
from evaluation.mirror.local import DataMissing, mirrored
from infra.errors import Problem, StageError

TASK_ERRORS = (KeyError, IndexError, ValueError, OSError, TypeError, DatasetGenerationError, TemplateError, YAMLError)
"""Errors that lm-eval and datasets raise for a task that they cannot read."""


def load_named(names: Sequence[str], mirror: Path | None, path: str = "--tasks") -> list[Any]:
    """Return lm-eval's tasks and groups of these names, with their data read from the mirror.

    Raises StageError with a problem for each name whose data are missing (`missing_task_data`, with the command that
    adds them) or that cannot be read (`bad_task`). Raises ConfigError as `check_names` does.
    """
    check_names(names, path)
    tasks: list[Any] = []
    problems = []
    for name in names:
        try:
            with mirrored(mirror):
                tasks += _load(name)
        except DataMissing as missing:
            problems.append(_missing(name, path, missing, mirror))
        except (*TASK_ERRORS, ImportError) as error:
            problems.append(_unreadable(name, path, error, mirror))
    if problems:
        raise StageError(*problems)
    checker_data.seed_language_detection()
    return tasks


def _load(name: str) -> list[Any]:
    manager = manager_of(name)
    try:
        loaded = manager.load([name])
    except DataMissing as missing:
        is_task = isinstance((manager.task_index[name].cfg or {}).get("task"), str)
        missing.task = name if is_task else _reader(name, missing, manager)
        raise
    return list(loaded["groups"].values()) or list(loaded["tasks"].values())


def manager_of(name: str) -> TaskManager:
    """Return lm-eval's manager of a task, group or tag and of all that belongs to it.

    A manager of all that lm-eval knows reads 14,000 files, which takes ten seconds of a slow core.
    """
    manager = TaskManager(include_defaults=False)
    index, sources = manager.task_index, known_tasks()
    read: set[str] = set()
    pending, seen = {name}, {name}
    while pending:
        for folder in sorted(set().union(*map(folders_of, pending)) - read):
            read.add(folder)
            entries = TaskManager(include_path=tasks_dir() / folder, include_defaults=False).task_index
            for key, entry in entries.items():
                if entry.yaml_path is None:  # a tag, whose tasks may be in several folders
                    index.setdefault(key, entry).tags.update(entry.tags)
                elif entry.yaml_path == tasks_dir() / sources.get(key, ""):  # where names are taken twice, lm-eval's
                    index[key] = entry
        pending = set().union(*map(members_of, filter(None, map(index.get, pending)))) - seen
        seen |= pending
    return manager


def members_of(entry: Any) -> set[str]:
    """The names that a group or tag of lm-eval's index is made of."""

    def names(item: Any) -> set[str]:
        if isinstance(item, dict):
            return names(item.get("group")) | names(item.get("task"))
        return {item} if isinstance(item, str) else set().union(*map(names, item or []))

    return set(entry.tags if entry.yaml_path is None else names((entry.cfg or {}).get("task")))


def _reader(group: str, missing: DataMissing, manager: TaskManager) -> str | None:
    """Return a task of a group that reads the missing dataset: groups themselves are not mirrored."""
    reads = [
        name
        for name, entry in manager.task_index.items()
        if isinstance((entry.cfg or {}).get("task"), str)
        and (entry.cfg.get("dataset_path"), entry.cfg.get("dataset_name")) == (missing.dataset, missing.name)
    ]
    return min(reads, key=lambda name: (not name.startswith(group), len(name), name), default=None)


def _missing(name: str, path: str, missing: DataMissing, mirror: Path | None) -> Problem:
    dataset = missing.dataset + (f" ({missing.name})" if missing.name else "")
    location = f"; expected at {missing.place}" if mirror else " and no mirror was named"
    message = f"{name} reads the dataset {dataset}, which is not available{location}"
    fix = how_to_mirror(missing.task or name, mirror)
    if missing.task != name:
        fix += f"; and so each task of {name}"
    return Problem("missing_task_data", path, message, fix)


def _unreadable(name: str, path: str, error: BaseException, mirror: Path | None) -> Problem:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        message = f"{name} needs the Python package {error.name}, which is not installed"
        return Problem("bad_task", path, message, f"pip install {error.name}")
    message = f"lm-eval cannot read {name} from {mirror}: {reason}"
    fix = "its data in the mirror lack a split or field of the task; rewrite them with stemma mirror"
    return Problem("bad_task", path, message, fix)


def set_shots(task: Any, shots: int | None, seed: int) -> None:
    """Set the shots as lm-eval's --num_fewshot does: None keeps the task's own number, and a task whose YAML specifies
    0 keeps 0."""
    if not hasattr(task, "own_shots"):
        task.own_shots = task.get_config("num_fewshot")
    if shots is not None and task.own_shots != 0:
        task.set_config(key="num_fewshot", value=shots)
    else:
        task.set_config(key="num_fewshot", value=task.own_shots or 0)
    task.set_fewshot_seed(seed=seed)


def shots_problem(task: Any, shots: int, path: str = "--num-fewshot") -> Problem | None:
    """Return the problem that keeps a task from `shots` shots; None if there is no problem.

    Shots come from a split that is not scored. lm-eval itself falls back to the scored split, where an item may appear
    as a solved example before itself.
    """
    config, sampler = task.config, getattr(task, "sampler", None)
    if not shots or sampler is None or task.get_config("num_fewshot") == 0:
        return None
    scored = config.test_split if task.has_test_docs() else config.validation_split
    has_samples = task.fewshot_cfg.samples is not None if task.fewshot_cfg else False
    split = task.fewshot_cfg.split if task.fewshot_cfg else None
    split = split or config.training_split or (config.validation_split if config.validation_split != scored else None)
    if not has_samples and split in (None, scored):
        train_split = task.dataset.get("train") if hasattr(task.dataset, "get") else None
        if not train_split:
            message = (
                f"{task.task_name} has only the scored split ({scored}), so {shots} few-shot examples cannot be drawn"
            )
            fix = "stemma mirror TASK FROM --shots N reserves N rows; a custom YAML sets other rows as `train`"
            return Problem("no_shots", path, message, f"{fix} in its data_files")
        docs = config.process_docs(train_split) if config.process_docs else train_split
        sampler.replace_df(list(docs))
    if len(sampler.df) < shots:
        message = f"{task.task_name} needs {shots} few-shot examples, but its split {split} has {len(sampler.df)} rows"
        fix = f"stemma mirror {task.task_name} FROM --split {split}=FILE adds them; a custom YAML can set more"
        return Problem("no_shots", path, message, fix)
    return None
