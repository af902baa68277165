"""A pipeline's benchmarks in lm-eval: tasks in its format, data sets kept with the run, its output silenced."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.utils
import torch
from lm_eval.tasks import TaskManager

from corpus.decontaminate.items import Item
from evaluation.config import BenchmarksConfig, BenchmarkTask, lm_eval_files
from evaluation.generation.chat_prompts import check_template
from evaluation.generation.language_model import LoadedModel
from evaluation.generation.random_state import seeded
from evaluation.harness.delimiters import SPACE, cloze_parts, common_delimiter, delimited_choices
from evaluation.harness.integrity import AnswerLog
from evaluation.harness.item_texts import plain_item, question_item, raw_fields
from evaluation.harness.model import ReportingHFLM
from evaluation.harness.named_tasks import load_named, shots_problem
from evaluation.harness.shots import shots_spec
from evaluation.harness.task_file import as_file_task, check_rows
from evaluation.harness.task_rows import json_lines_of, task_rows
from evaluation.harness.template_faults import check_items, named
from evaluation.harness.text_dates import dates_as_text
from evaluation.harness.vllm_model import VllmLM
from infra.errors import StageError, StemmaError, stage_error
from infra.run import Run

BOOTSTRAP_ITERATIONS = 1000
"""Iterations for lm-eval metrics without a closed-form standard error, such as perplexity."""


def evaluate_model(
    config: BenchmarksConfig,
    lm: LoadedModel | VllmLM,
    run: Run,
    *,
    prefix: str | None = None,
    share: bool = True,
    own_shots: bool = True,
    only: int | None = None,
) -> dict[str, Any]:
    """Return lm-eval's own results for a model: results, configs, samples, versions; and `answers` of an `AnswerLog`.

    Args:
        prefix: text before every question.
        share: see `ReportingHFLM`.
        own_shots: with `num_fewshot: 0`, let a task keep the number in its YAML.
        only: number of the one task to ask; None for all.

    Raises StageError naming the task whose file lm-eval cannot read.
    """
    device = torch.device("cpu") if isinstance(lm, VllmLM) else lm.device
    with quiet(run.event), own_cache(run.work_dir / "datasets"), seeded(config.seed, device):
        harness_model: ReportingHFLM
        if isinstance(lm, VllmLM):
            harness_model = lm
        else:
            harness_model = ReportingHFLM(run, lm.model, lm.tokenizer, config.batch_size, share)
        if config.chat_template:
            check_template(harness_model.tokenizer, config.chat_template_kwargs, "benchmarks.chat_template_kwargs")
            harness_model.chat_template_args = dict(config.chat_template_kwargs)
        harness_model.answers = AnswerLog()
        mirror = Path(config.tasks_mirror) if config.tasks_mirror else None
        loaded = [
            loaded_task
            for index, task in enumerate(config.tasks)
            if only in (None, index)
            for loaded_task in _load(index, task, mirror, config.num_fewshot, config.rows_for_shots, config.limit)
        ]
        tasks = TaskManager(include_defaults=False).load(loaded)
        own_files = {task.name for task in config.tasks if task.kind != "lm_eval"}
        for name, task in tasks["tasks"].items():
            _set_fewshot(task, config, own_shots)
            shots = task.get_config("num_fewshot") or 0
            if name not in own_files and (problem := shots_problem(task, shots, "benchmarks.num_fewshot")):
                raise StageError(problem)
        # lm-eval's simple_evaluate would do the same, and then ask git, pip and the drivers about this machine.
        with named("", "benchmarks.tasks"):
            results = lm_eval.evaluate(
                lm=harness_model,
                task_dict=tasks,
                limit=config.limit,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
                system_instruction=prefix or config.system_instruction,
                apply_chat_template=config.chat_template,
                fewshot_as_multiturn=config.chat_template and config.fewshot_as_multiturn is not False,
            )
    return {**(results or {}), "answers": harness_model.answers.as_results()}


def task_items(index: int, task: BenchmarkTask, run: Run, mirror: Path | None = None) -> Iterator[Item]:
    """Yield every item of a task or group in lm-eval's own YAML. Raises StageError naming the task whose file lm-eval
    cannot read."""
    with quiet(run.event), own_cache(run.work_dir / "datasets"):
        tasks = TaskManager(include_defaults=False).load(_load(index, task, mirror))["tasks"]
        for name, harness_task in sorted(tasks.items()):
            for number, row in enumerate(harness_task.eval_docs):
                with named(name, f"benchmarks.tasks.{index}", number + 1):
                    item = _item(name, number, harness_task, row)
                yield item


def _item(name: str, number: int, task: Any, row: Any) -> Item:
    """Return an item, built from lm-eval's reading of its record and from the record itself; a target may be a choice's
    number or a list."""
    question, target = task.doc_to_text(row), task.doc_to_target(row)
    choices = list(map(str, task.doc_to_choice(row))) if task.config.doc_to_choice is not None else []
    searched = _decontamination_query(task, row)
    if isinstance(question, int):
        # WinoGrande, for example: the choices are contexts, and the same ending follows each.
        texts = [f"{choice} {target}" for choice in choices]
        return plain_item(name, number, texts, [*choices, str(target), *searched, *raw_fields(row, texts)])
    targets = target if isinstance(target, list) else [target]
    right = [
        choices[target] if isinstance(target, int) and target < len(choices) else str(target) for target in targets
    ]
    further = [*searched, *raw_fields(row, [question, *choices, *right])]
    delimiter = task.config.target_delimiter
    return question_item(name, number, question, right, choices, delimiter=delimiter, further=further)


def _decontamination_query(task: Any, row: Any) -> list[str]:
    """Return a list with the search text that the task's YAML names; empty if it names none or the prompt itself.

    lm-eval's own method of this name raises SyntaxError for a template.
    """
    query = task.config.doc_to_decontamination_query
    if not task.config.should_decontaminate or query in (None, task.config.doc_to_text):
        return []
    if callable(query):
        return [str(query(row))]
    return [str(row[query]) if query in task.features else lm_eval.utils.apply_template(query, row)]


def _set_fewshot(task: Any, config: BenchmarksConfig, own_shots: bool = True) -> None:
    """Set the shots as lm-eval's --num_fewshot does: a task whose own YAML specifies 0 keeps 0."""
    task_shots = task.get_config("num_fewshot")
    if task_shots is None or (task_shots != 0 and (config.num_fewshot or not own_shots)):
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    task.set_fewshot_seed(seed=config.seed)


def task_spec(
    task: BenchmarkTask, num_fewshot: int = 0, rows_for_shots: int | None = None, where: str = "tasks"
) -> dict[str, Any]:
    """Return one of the project's own tasks, or a task of a declared file, as an lm-eval task config.

    Args:
        rows_for_shots: number of rows of its file that are set aside and not scored; see
            `evaluation.harness.shots`.
        where: its place in the config, for errors.

    Raises StageError as `shots_spec` does.
    """
    task = as_file_task(task)
    spec: dict[str, Any] = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(json_lines_of(task, _cache()))}},
        "test_split": "test",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    if task.kind != "text" and (num_fewshot or rows_for_shots):
        spec |= shots_spec(task, num_fewshot, rows_for_shots, where)
    if task.kind == "multiple_choice":
        spec["metric_list"].append({"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True})
        # lm-eval has one delimiter for all items; if they differ, each choice contains its own.
        delimiter = common_delimiter(task, (row for _, row in task_rows(task)))
        return spec | ({} if delimiter == SPACE else {"target_delimiter": delimiter or ""}) | {
            "output_type": "multiple_choice",
            # lm-eval turns a template's result into a number if it looks like one; a field stays unchanged.
            "doc_to_text": _jinja(task.query) + task.query_suffix if task.query_suffix else task.query,
            "doc_to_choice": task.choices if delimiter is not None else partial(delimited_choices, task),
            "doc_to_target": task.gold,
        }  # fmt: skip
    if task.kind == "minimal_pairs":
        return spec | {
            "output_type": "multiple_choice",
            "doc_to_text": "",
            "target_delimiter": "",
            # The good sentence comes last: a tie goes to the first, and must not count as right.
            "doc_to_choice": _jinja(f"[{task.bad}, {task.good}]"),
            "doc_to_target": 1,
        }
    if task.kind == "text":
        measures = ("bits_per_byte", "byte_perplexity", "word_perplexity")
        return spec | {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": task.text,  # as a template, lm-eval takes a document such as [1, 2] for a list
            "metric_list": [{"metric": name} for name in measures],
            "num_fewshot": 0,  # no text precedes a document
        }
    return spec | {
        "output_type": "loglikelihood",
        # lm-eval takes a space at the end of a context as the beginning of what follows, so that this is its
        # lambada_openai, unless the file splits context and continuation itself. No templates: lm-eval parses text that
        # looks like a list as a list.
        "doc_to_text": lambda row: "".join(cloze_parts(task, row)[:2]),
        "doc_to_target": lambda row: cloze_parts(task, row)[2],
        "target_delimiter": "",
    }


def _jinja(expression: str) -> str:
    return "{{" + expression + "}}"


def _load(
    index: int,
    task: BenchmarkTask,
    mirror: Path | None,
    num_fewshot: int = 0,
    rows_for_shots: int | None = None,
    limit: int | None = None,
) -> list[Any]:
    """Return the lm-eval tasks or groups of one entry of the config, with their data read; for a YAML, every prompt is
    built once as a check.

    Args:
        limit: items of each that will be asked.
    """
    if task.built_in:
        return load_named([task.name], mirror, f"benchmarks.tasks.{index}")
    if task.kind not in {"project", "lm_eval"}:
        check_rows(task)
    key = f"benchmarks.tasks.{index}"
    try:
        with named(task.name, key):
            if task.kind == "lm_eval":
                loaded = _load_from_yaml(task)
                for harness_task in TaskManager(include_defaults=False).load(loaded)["tasks"].values():
                    check_items(harness_task, key, limit)
                return loaded
            spec = task_spec(task, num_fewshot, rows_for_shots, key)
            return list(TaskManager(include_defaults=False).load([spec])["tasks"].values())
    except StemmaError:
        raise
    except Exception as error:  # a YAML names functions and templates that may raise anything
        reason = ": ".join(filter(None, (type(error).__name__, *str(error).splitlines()[:1])))
        raise stage_error(
            "bad_task",
            key,
            f"lm-eval cannot read task {task.name} ({task.path}): {reason}",
            "check the file and the names of its fields",
        ) from error


def _load_from_yaml(task: BenchmarkTask) -> list[Any]:
    path = Path(str(task.path))
    lm_eval_files(path)  # raises if the YAML leads out of its folder
    manager = TaskManager(include_path=path if path.is_dir() else path.parent, include_defaults=False)
    if task.name not in manager.task_index:
        raise ValueError(f"it defines {', '.join(manager.all_tasks) or 'no tasks'}")
    source = manager.task_index[task.name].yaml_path
    # Data files are named relative to the YAML that names them; lm-eval takes them relative to the working directory.
    with contextlib.chdir(source.parent if source else path):
        loaded = manager.load([task.name])
    return list(loaded["groups"].values()) or list(loaded["tasks"].values())


def _cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Keep prepared data sets with the run's unfinished work instead of the user's home, with dates as written."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = folder
    try:
        with dates_as_text():
            yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Cache compiled templates. lm-eval compiles a task's templates several times for each item, 0.3 ms each."""
    environment = lm_eval.utils.env
    compiled = environment.from_string
    environment.from_string = functools.lru_cache(maxsize=1024)(compiled)
    try:
        yield
    finally:
        environment.from_string = compiled


class WarningLog(logging.Handler):
    """Handler that passes on each warning of lm-eval once, and at the end the number of further warnings that differ
    only in numbers."""

    def __init__(self, event: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._event = event
        self._seen: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message.startswith(_OUR_WAY):
            return
        kind = re.sub(r"\d+", "0", message)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] == 1:
            self._first[kind] = message
            self._event("lm_eval_warning", f"lm-eval: {message}")

    def end(self) -> None:
        for kind, count in self._seen.items():
            if count > 1:
                self._event("lm_eval_warning", f"lm-eval, {count - 1:,} more like: {self._first[kind][:80]}…")


_OUR_WAY = ("`pretrained` model kwarg is not of type `str`", "Passed an already-initialized model through `pretrained`")
"""Beginnings of warnings about how this project calls lm-eval, which are unrelated to a task or model."""


@contextlib.contextmanager
def quiet(event: Callable[[str, str], None] | None = None) -> Iterator[None]:
    """Silence lm-eval and datasets, which print bars, warnings and whole configs; errors are still raised.

    Templates are compiled once inside the block.

    Args:
        event: called with the name `lm_eval_warning` and the message of each warning of lm-eval, as `Run.event` is;
            None drops them.
    """
    names = ("lm_eval", "datasets", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    multiprocess = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would start one process per core
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    logger, warnings = logging.getLogger("lm_eval"), WarningLog(event) if event else None
    propagate = logger.propagate
    if warnings:
        logger.addHandler(warnings)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), compiled_once():
            yield
    finally:
        if warnings:
            logger.removeHandler(warnings)
            logger.propagate = propagate
            warnings.end()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        os.environ.pop("DISABLE_MULTIPROC")
        if multiprocess is not None:
            os.environ["DISABLE_MULTIPROC"] = multiprocess
