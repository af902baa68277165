"""Scores of several models on lm-eval's tasks at several numbers of shots: the implementation of `stemma eval`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lm_eval
import torch

from evaluation.benchmarks import chance_level, right_items, rolling_bounds
from evaluation.config import AnswerLimits, FailureClassesConfig
from evaluation.failures.classes import measure_failures
from evaluation.generation.chat_prompts import check_template
from evaluation.generation.language_model import LoadedModel, check_tokenizers, load_model
from evaluation.generation.random_state import seeded
from evaluation.harness.integrity import AnswerLog, answer_counts, check_answers
from evaluation.harness.model import NO_SYSTEM, ReportingHFLM
from evaluation.harness.named_tasks import load_named, set_shots, shots_problem
from evaluation.harness.tasks import BOOTSTRAP_ITERATIONS, own_cache, quiet
from evaluation.harness.vllm_model import VllmLM, served
from evaluation.results.kept_parts import Keep, state_of
from evaluation.statistics.calibration import calibration
from evaluation.statistics.intervals import from_standard_error, wilson
from evaluation.statistics.paired import compare_models
from infra.errors import Problem, StageError
from infra.io.json import parse_own_json
from infra.run import Run

SEED = 1234
"""lm-eval's own default seed for few-shot examples, so that its command line draws the same ones."""


@dataclass(frozen=True)
class EvalOptions:
    """Options for evaluating models.

    tasks: names of lm-eval's tasks or groups; may be empty if there are failure_classes. shots: numbers of solved
    examples before each question; empty keeps each task's own number. limit: only the first N items of each task, and
    of each failure class. mirror: the folder with the tasks' data. batch_size: for tasks that are not multiple choice;
    1 is lm-eval's default, and its padding changes no likelihood. chat_template: ask questions in the model's chat
    template. chat_template_kwargs: values of the template's own variables. system_instruction: text before each
    question, as the system message if chat_template is set. fewshot_as_multiturn: solved examples are turns of the
    chat; None: with chat_template, as on lm-eval's command line. engine: the engine that answers the tasks.
    failure_classes: templated tests, None for none, which this project's own engine answers. answer_limits: shares of
    items that may lack a proper answer.
    """

    tasks: tuple[str, ...]
    shots: tuple[int, ...] = ()
    limit: int | None = None
    mirror: Path | None = None
    seed: int = SEED
    confidence: float = 0.95
    batch_size: int = 1
    chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    engine: Literal["own", "vllm"] = "own"
    failure_classes: FailureClassesConfig | None = None
    answer_limits: AnswerLimits = field(default_factory=AnswerLimits)


@dataclass(frozen=True)
class ModelScores:
    """One model's rows, the calibration of its choices, and lm-eval's records of its items by (task, shots).

    failures: results of the failure classes, None if there were none; they are also rows of the metric `failure_rate`,
    and their cases are items.
    """

    name: str
    path: Path
    results: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    samples: dict[tuple[str, int], list[dict[str, Any]]]
    failures: dict[str, Any] | None = None


@dataclass(frozen=True)
class Evaluation:
    """All models' scores, and every pair of models on the same items, the later minus the earlier."""

    models: list[ModelScores]
    comparisons: list[dict[str, Any]]


def evaluate_models(
    models: Mapping[str, Path],
    options: EvalOptions,
    run: Run,
    tell: Callable[[str], None] = lambda text: None,
    keep: Keep | None = None,
) -> Evaluation:
    """Score every model on every task at every number of shots.

    Args:
        models: folders by the names used in results.
        tell: called with messages on progress.
        keep: stores each model's scores while the next is asked.

    Raises ConfigError `unknown_task`; StageError `missing_task_data`, `bad_task`, `no_shots`, `tokenizer_does_not_fit`,
    before any model is asked.
    """

    def show(name: str, message: str) -> None:
        tell(message)

    with quiet(show), own_cache(run.work_dir / "datasets"):
        loaded = tasks_of(load_named(options.tasks, options.mirror)) if options.tasks else {"tasks": {}}
        _check_shots(loaded["tasks"].values(), options)
        check_tokenizers(models.values())
        scores = []
        for name, folder in models.items():

            def scored(name: str = name, folder: Path = folder) -> ModelScores:
                return _score_model(name, folder, loaded, options, run, tell)

            scores.append(kept_scores(name, folder, scored, keep) if keep else scored())
        aggregations = {name: task.aggregation() for name, task in loaded["tasks"].items()}
        comparisons = compare_models(
            [(model_scores.name, model_scores.results, model_scores.samples) for model_scores in scores],
            aggregations,
            options.confidence,
        )
    return Evaluation(scores, comparisons)


def _score_model(
    name: str,
    folder: Path,
    loaded: Mapping[str, Any],
    options: EvalOptions,
    run: Run,
    report: Callable[[str], None],
) -> ModelScores:
    with ExitStack() as ending:
        vllm = ending.enter_context(served(folder, run)) if options.engine == "vllm" and options.tasks else None
        lm = load_model(folder, run) if vllm is None or options.failure_classes else None
        return _score_tasks(name, folder, lm, vllm, loaded, options, run, report)


def _score_tasks(
    name: str,
    folder: Path,
    lm: LoadedModel | None,
    vllm: VllmLM | None,
    loaded: Mapping[str, Any],
    options: EvalOptions,
    run: Run,
    report: Callable[[str], None],
) -> ModelScores:
    rows: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    samples: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for shots in (options.shots or (None,)) if options.tasks else ():
        report(f"{name}: {', '.join(options.tasks)}" + ("" if shots is None else f", {shots}-shot"))
        with seeded(0, lm.device if lm else torch.device("cpu")):
            for task in loaded["tasks"].values():
                set_shots(task, shots, options.seed)
            harness_model = vllm or _harness_model(run, lm, options)
            if options.chat_template:
                check_template(harness_model.tokenizer, options.chat_template_kwargs, "--chat-template-kwargs")
                harness_model.chat_template_args = dict(options.chat_template_kwargs)
            harness_model.answers = AnswerLog()
            _check_context(name, harness_model, loaded["tasks"].values())
            result = lm_eval.evaluate(
                lm=harness_model,
                task_dict=loaded,
                limit=options.limit,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
                apply_chat_template=options.chat_template,
                system_instruction=options.system_instruction,
                fewshot_as_multiturn=options.chat_template and options.fewshot_as_multiturn is not False,
            )
        if harness_model.leaves_out_system:
            report(f"{name}: {NO_SYSTEM}")
        result = {**(result or {}), "answers": harness_model.answers.as_results()}
        for notice in check_answers(result, options.answer_limits, where=f"{name}: --answer-limit"):
            report(f"{name}: {notice}")
        for row in result_rows(result, options.confidence):
            rows.setdefault((row["task"], row["metric"], row["filter"], row["num_fewshot"]), row)
        for task_name, items in result.get("samples", {}).items():
            samples.setdefault((task_name, result["n-shot"][task_name]), items)
    calibrated = [
        {"task": task, "num_fewshot": shots, **calibration_row}
        for (task, shots), items in samples.items()
        if loaded["tasks"][task].OUTPUT_TYPE == "multiple_choice"
        and (calibration_row := calibration(items, options.confidence))
    ]
    failures = None
    if options.failure_classes and lm:
        report(f"{name}: failure classes")
        failures, cases = measure_failures(
            lm,
            options.failure_classes,
            run,
            seed=options.seed,
            confidence=options.confidence,
            limit=options.limit,
        )
        for row in failure_rows(failures):
            rows[row["task"], row["metric"], "none", 0] = row
            samples[row["task"], 0] = [
                {"doc_id": case["case"], "failure_rate": float(case["failed"])}
                for case in cases
                if case["class"] == row["task"]
            ]
    return ModelScores(name, folder, list(rows.values()), calibrated, samples, failures)


def _harness_model(run: Run, lm: LoadedModel | None, options: EvalOptions) -> ReportingHFLM:
    assert lm is not None
    return ReportingHFLM(run, lm.model, lm.tokenizer, options.batch_size)


def kept_scores(name: str, folder: Path, scored: Callable[[], ModelScores], keep: Keep) -> ModelScores:
    """Return a model's scores as read back from storage; of its items, only the fields that comparisons need.

    They are stored under the state of the model folder's files, so that another choice of models finds them too.
    """

    def as_json() -> Any:
        model_scores = scored()
        metrics = {row["metric"] for row in model_scores.results} | {"doc_id", "filter"}
        samples = [
            [task, shots, [{field: item[field] for field in item.keys() & metrics} for item in items]]
            for (task, shots), items in model_scores.samples.items()
        ]
        # JSON does not support numpy's numbers.
        text = json.dumps(
            [model_scores.results, model_scores.calibration, samples, model_scores.failures],
            default=lambda number: number.item(),
        )
        return parse_own_json(text)

    files = json.dumps(state_of({"model": folder}))
    results, calibrated, samples, failures = keep(hashlib.sha256(files.encode()).hexdigest()[:16], as_json)
    by_task = {(task, shots): items for task, shots, items in samples}
    return ModelScores(name, folder, results, calibrated, by_task, failures)


def tasks_of(loaded: Sequence[Any]) -> dict[str, Any]:
    """Return tasks and groups in the form that lm_eval.evaluate takes."""
    from lm_eval.tasks import TaskManager

    return dict(TaskManager(include_defaults=False).load(list(loaded)))


def _check_shots(tasks: Any, options: EvalOptions) -> None:
    problems: dict[str, Problem] = {}
    for task in tasks:
        for shots in options.shots or (None,):
            set_shots(task, shots, options.seed)
            if problem := shots_problem(task, task.get_config("num_fewshot") or 0):
                problems[task.task_name] = problem
    if problems:
        raise StageError(*problems.values())


def _check_context(model: str, harness_model: ReportingHFLM, tasks: Any) -> None:
    """Raise StageError `context_too_small` if a task's answer length leaves no room for its question."""
    problems = []
    for task in tasks:
        if task.OUTPUT_TYPE != "generate_until":
            continue
        max_new_tokens = (task.config.generation_kwargs or {}).get("max_gen_toks", harness_model.max_gen_toks)
        if max_new_tokens >= harness_model.max_length:
            message = (
                f"{task.task_name} writes up to {max_new_tokens} tokens, "
                f"the model's context has {harness_model.max_length}"
            )
            problems.append(Problem("context_too_small", model, message, "leave the task out for this model"))
    if problems:
        raise StageError(*problems)


def result_rows(results: Mapping[str, Any], confidence: float) -> list[dict[str, Any]]:
    """Return a row for each task, metric and filter of lm-eval's output, with its value and standard error unrounded.

    Shares of right items get the Wilson interval; other metrics get value ± z · standard error if there is one; those
    of whole documents get the bootstrap over documents.
    """
    rows = []
    for task, values in sorted(results["results"].items()):
        counts = results["n-samples"].get(task) or {}
        samples = results.get("samples", {}).get(task, [])
        n = int(counts.get("effective") or len({sample["doc_id"] for sample in samples}) or _group_items(results, task))
        for key, value in sorted(values.items()):
            metric, _, part = key.partition(",")
            if not part or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{part}")
            stderr = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
            right = right_items(metric, float(value), n) if samples else None
            low, high = _bounds(float(value), stderr, right, n, confidence)
            low, high = rolling_bounds(metric, samples, confidence, SEED) or (low, high)
            row = {
                "task": task,
                "metric": metric,
                "filter": part,
                "num_fewshot": int(results["n-shot"].get(task) or 0),
                "value": float(value) if math.isfinite(value) else None,
                "stderr": stderr,
                "low": low,
                "high": high,
                "n": n,
                "higher_is_better": (results["higher_is_better"].get(task) or {}).get(metric),
                "version": results["versions"].get(task),
                **answer_counts(results, task, part),
            }
            if right is not None and metric != "exact_match" and (chance := chance_level(results, task)) is not None:
                row["chance"] = chance
            rows.append(row)
    return rows


def failure_rows(failures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each failure class, in the form of the rows of tasks."""
    return [
        {
            "task": name,
            "metric": "failure_rate",
            "filter": "none",
            "num_fewshot": 0,
            **{field: failure_class[field] for field in ("value", "low", "high", "n")},
            "stderr": math.sqrt(failure_class["value"] * (1 - failure_class["value"]) / failure_class["n"]),
            "higher_is_better": False,
            "version": None,
            **({"chance": failure_class["chance"]} if "chance" in failure_class else {}),
        }
        for name, failure_class in failures["classes"].items()
    ]


def _bounds(
    value: float, stderr: float | None, right: int | None, n: int, confidence: float
) -> tuple[float | None, float | None]:
    """Return bounds.

    Args:
        right: number of right items among n; None if the metric is not a share of right items.
    """
    if right is not None:
        interval = wilson(right, n, confidence)
    elif stderr is not None and math.isfinite(value):
        interval = from_standard_error(value, stderr, confidence)
    else:
        return None, None
    return interval.low, interval.high


def _group_items(results: Mapping[str, Any], name: str) -> int:
    members: Sequence[str] = results.get("group_subtasks", {}).get(name, [])
    return sum(
        len({sample["doc_id"] for sample in results["samples"].get(member, [])}) or _group_items(results, member)
        for member in members
    )
