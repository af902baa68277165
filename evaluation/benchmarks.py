"""The benchmarks stage: lm-eval's scores of one model, offline.

python -m evaluation.benchmarks --input model=MODEL_DIR --out OUT
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.config import BenchmarksConfig
from evaluation.harness.integrity import answer_counts, check_answers
from evaluation.results.artifacts import snake_case
from evaluation.results.comparison import headline_metric
from evaluation.statistics.intervals import bootstrap_ratio, from_standard_error, wilson
from infra.run import Result, Run

if TYPE_CHECKING:
    from evaluation.generation.language_model import LoadedModel
    from evaluation.harness.vllm_model import VllmLM

SHARES = {"acc", "acc_norm", "exact_match"}
"""Metrics that are a share of right items, where each item is 0 or 1 in all but a few tasks; see `right_items`."""
ROLLING = {"bits_per_byte", "byte_perplexity", "word_perplexity"}
"""Metrics of whole documents."""
GROUP_FIELDS = ("phenomenon", "topic", "category")
"""Fields of an item by which accuracy is also reported in parts."""
FIGURE_NAMES = {"acc": "accuracy", "acc_norm": "accuracy_normalised"}


def benchmarks(config: BenchmarksConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Score a model on the tasks of the config with lm-eval.

    Writes results.json: {"tasks": {task: {metric: {value, stderr, low, high, n, chance?}}}, "parts": {task: …},
    "engine"?: the engine that answered instead of this project's own; next to each value also the number of items
    asked, answered, failed, truncated, empty and unparsable (`evaluation.harness.integrity`), "shots"?: {number:
    tasks}, "domains"?: {task: {domain: {value, low, high, n, bytes}}} in bits per byte, "failure_classes"?: {by,
    classes: {class: {value, low, high, n, tests}}}}, "untrained": {task: {metric: {value, low, high, n}}} of an
    untrained model of the same shape on the tasks with choices, "headlines": {task: metric} where `acc` is not the
    metric to read; aux/lm_eval.json as lm-eval returns it; aux/samples_<task>.jsonl, one line per item;
    aux/failure_cases.jsonl, one line per case of the failure classes.

    Args:
        inputs: model, an HF causal language model with its tokenizer.
    """
    if config.engine == "own":
        from evaluation.generation.language_model import load_model
        from evaluation.harness.task_partitions import by_workers

        lm = None if by_workers(config, run) else load_model(inputs["model"], run)
        return _score(config, lm, inputs["model"], out_dir, run)
    from evaluation.harness.vllm_model import served

    with served(inputs["model"], run) as vllm:
        return _score(config, vllm, inputs["model"], out_dir, run)


def _score(config: BenchmarksConfig, lm: LoadedModel | VllmLM | None, folder: Path, out_dir: Path, run: Run) -> Result:
    from evaluation.harness.task_partitions import evaluate_tasks

    harness_results = evaluate_tasks(config, lm, folder, run)
    check_answers(harness_results, config.answer_limits, run)
    names = [
        name
        for name in sorted(harness_results["results"])
        if any("," in key for key in harness_results["results"][name])
    ]
    results: dict[str, Any] = {
        "tasks": {name: task_metrics(harness_results, name, config.confidence, config.seed) for name in names},
        "parts": {name: parts for name in names if (parts := task_parts(harness_results, name, config.confidence))},
        **({"engine": config.engine} if config.engine != "own" else {}),
    }
    results["untrained"] = _floor(config, lm, folder, harness_results, results["tasks"], run)
    results["headlines"] = headlines(harness_results)
    fields = {task.name: task.domain for task in config.tasks if task.kind == "text"}
    if domains := {
        name: parts for name, field in fields.items() if (parts := text_domains(harness_results, name, field, config))
    }:
        results["domains"] = domains
    if config.shots:
        # Without a number, one of lm-eval's tasks keeps its own number of shots, which is not a column of 0.
        done = config.num_fewshot if config.num_fewshot or not any(harness_results["n-shot"].values()) else None
        results["shots"] = shots_sweep(config, lm, folder, results["tasks"], done, run)
    aux = out_dir / "aux"
    aux.mkdir(parents=True, exist_ok=True)
    if config.failure_classes:
        from evaluation.failures.classes import measure_failures
        from evaluation.generation.language_model import load_model

        model = load_model(folder, run) if lm is None or config.engine == "vllm" else lm
        results["failure_classes"], cases = measure_failures(
            model, config.failure_classes, run, seed=config.seed, confidence=config.confidence
        )
        lines = [json.dumps(case, ensure_ascii=False) + "\n" for case in cases]
        (aux / "failure_cases.jsonl").write_text("".join(lines), encoding="utf-8")
    (out_dir / "results.json").write_text(_json(results), encoding="utf-8")
    for name, samples in harness_results.get("samples", {}).items():
        lines = [json.dumps(brief(sample), ensure_ascii=False, default=str) + "\n" for sample in samples]
        (aux / f"samples_{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    raw = {key: value for key, value in harness_results.items() if key != "samples"}
    (aux / "lm_eval.json").write_text(_json(raw), encoding="utf-8")
    figures = benchmark_figures(results)
    run.metrics(figures)
    return Result(figures, _headline(results))


def _floor(
    config: BenchmarksConfig,
    lm: LoadedModel | VllmLM | None,
    folder: Path,
    harness_results: Mapping[str, Any],
    scored: Mapping[str, Any],
    run: Run,
) -> dict[str, Any]:
    """Return the metrics of an untrained model of the same shape on the tasks with choices, empty for a vLLM server.

    Args:
        harness_results, scored: results of the model itself, whose items the untrained one is asked.
    """
    from evaluation.generation.language_model import LoadedModel, load_model
    from evaluation.generation.untrained import floor_of
    from evaluation.harness.tasks import evaluate_model

    tasks = tuple(task for task in config.tasks if "chance" in scored.get(task.name, {}).get("acc", {}))
    if not tasks or config.engine != "own":
        return {}
    model = lm if isinstance(lm, LoadedModel) else load_model(folder, run)
    items = {
        task.name: [[s["doc"], s["target"], s.get("arguments")] for s in harness_results["samples"][task.name]]
        for task in tasks
    }
    floor_config = config.model_copy(update={"tasks": tasks, "shots": (), "failure_classes": None})

    def measure(untrained: LoadedModel) -> dict[str, Any]:
        # Without a journal: its events are those of the model itself, which are recorded already.
        silent = Run(run.work_dir, run.launch, is_cancelled=lambda: run.cancelled)
        answers = evaluate_model(floor_config, untrained, silent)
        return {task.name: _bounds(task_metrics(answers, task.name, config.confidence, config.seed)) for task in tasks}

    identity = {"config": floor_config.model_dump(mode="json", exclude={"batch_size"}), "items": items}
    return floor_of(model, identity, config.seed, measure) or {}


def _bounds(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    fields = ("value", "low", "high", "n")
    return {name: {field: entry[field] for field in fields if field in entry} for name, entry in metrics.items()}


def headlines(harness_results: Mapping[str, Any]) -> dict[str, str]:
    """Return the metric to read first of each task where that is not `acc`, from lm-eval's results and samples."""
    return {
        name: "acc_norm"
        for name, samples in harness_results.get("samples", {}).items()
        if "acc_norm,none" in harness_results["results"].get(name, {}) and lengths_differ(samples)
    }


def lengths_differ(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the choices of any question differ in length, so that a score by likelihood prefers short ones."""
    for sample in samples:
        arguments = sample.get("arguments") or ()
        pairs = arguments.values() if isinstance(arguments, Mapping) else arguments
        lengths = {len(str(_continuation(pair))) for pair in pairs}
        if len(lengths) > 1:
            return True
    return False


def _continuation(pair: Any) -> Any:
    """Return the continuation of lm-eval's (context, continuation), which a record may hold as a mapping."""
    return pair.get("arg_1", "") if isinstance(pair, Mapping) else pair[1]


def shots_sweep(
    config: BenchmarksConfig,
    lm: LoadedModel | VllmLM | None,
    folder: Path,
    scored: Mapping[str, Any],
    done: int | None,
    run: Run,
) -> dict[str, dict[str, Any]]:
    """Return the tasks' metrics by number of shots.

    Args:
        lm, folder: see `evaluate_tasks`.
        scored: metrics with `done` shots, which are not asked again.
    """
    from evaluation.harness.task_partitions import evaluate_tasks

    sweep = {}
    for shots in sorted(set(config.shots)):
        if shots == done:
            sweep[str(shots)] = dict(scored)
            continue
        results = evaluate_tasks(config.model_copy(update={"num_fewshot": shots}), lm, folder, run, own_shots=False)
        check_answers(results, config.answer_limits, run)
        sweep[str(shots)] = {name: task_metrics(results, name, config.confidence, config.seed) for name in scored}
    return sweep


def task_metrics(
    results: Mapping[str, Any], name: str, confidence: float, seed: int = 17
) -> dict[str, dict[str, float]]:
    """Return the metrics of a task or group in lm-eval's output, with intervals.

    A share of right items gets the Wilson interval, which also holds at 0 and 1; other metrics get value ± z · stderr;
    those of whole documents get the bootstrap over documents, drawn with the seed.
    """
    row = results["results"][name]
    samples = results.get("samples", {}).get(name, [])
    n = _items(results, name)
    metrics = {}
    for key, value in sorted(row.items()):
        metric, _, part = key.partition(",")
        if not part or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = row.get(f"{metric}_stderr,{part}")
        stderr = float(stderr) if isinstance(stderr, (int, float)) else math.nan
        entry = {"value": float(value), "stderr": stderr, "n": n}
        right = right_items(metric, value, n) if samples else None
        if right is not None:
            interval = wilson(right, n, confidence)
            entry |= {"low": interval.low, "high": interval.high}
        elif not math.isnan(stderr):
            interval = from_standard_error(value, stderr, confidence)
            entry |= {"low": interval.low, "high": interval.high}
        elif bounds := rolling_bounds(metric, samples, confidence, seed):
            entry |= dict(zip(("low", "high"), bounds, strict=True))
        if right is not None and metric != "exact_match" and (chance := chance_level(results, name)) is not None:
            entry["chance"] = chance
        label = metric if part == "none" else f"{metric}_{part}"
        kept = {field: round(number, 6) for field, number in entry.items() if not math.isnan(number)}
        metrics[label] = {**kept, **answer_counts(results, name, part)}
    return metrics


def right_items(metric: str, value: float, n: int) -> int | None:
    """Return the number of right items among n; None for a metric that is not a share of right items, such as
    truthfulqa_mc2's acc, a mean of shares of likelihood."""
    right = value * n
    is_count = metric in SHARES and math.isclose(right, round(right), abs_tol=1e-6)
    return round(right) if is_count else None


def chance_level(results: Mapping[str, Any], name: str) -> float | None:
    """Return the expected score of guessing: the mean of one over the number of choices; None without choices."""
    samples = results.get("samples", {}).get(name, [])
    if not samples or results["configs"][name].get("output_type") != "multiple_choice":
        return None
    return math.fsum(1 / len(sample["filtered_resps"]) for sample in samples) / len(samples)


def task_parts(results: Mapping[str, Any], name: str, confidence: float) -> dict[str, dict[str, float]]:
    """Return the accuracy by the items' phenomenon, topic or category, if they name one."""
    samples = [s for s in results.get("samples", {}).get(name, []) if "acc" in s]
    field = next((f for f in GROUP_FIELDS if samples and all(f in s["doc"] for s in samples)), None)
    if field is None or any(sample["acc"] not in (0, 1) for sample in samples):
        return {}
    parts = {}
    for part in sorted({str(sample["doc"][field]) for sample in samples}):
        right = [sample["acc"] == 1 for sample in samples if str(sample["doc"][field]) == part]
        parts[part] = {**wilson(sum(right), len(right), confidence).as_json(), "n": len(right)}
    return parts


def text_domains(
    results: Mapping[str, Any], name: str, field: str, config: BenchmarksConfig
) -> dict[str, dict[str, float]]:
    """Return bits per byte by the documents' domain, if they name one; the interval is the bootstrap over documents."""
    rows = [(sample["doc"].get(field), *sample["bits_per_byte"]) for sample in results.get("samples", {}).get(name, [])]
    parts = {}
    for domain in sorted({str(row[0]) for row in rows if row[0] is not None}):
        log_probs, size = (np.array([row[column] for row in rows if row[0] == domain], float) for column in (1, 2))
        bits = bootstrap_ratio(-log_probs / math.log(2), size, config.seed, config.confidence)
        parts[domain] = {**bits.as_json(), "n": len(size), "bytes": float(size.sum())}
    return parts


def rolling_bounds(
    metric: str, samples: Sequence[Mapping[str, Any]], confidence: float, seed: int
) -> tuple[float, float] | None:
    """Return the bounds of bits per byte and of perplexity per byte or word, by the bootstrap over documents: lm-eval
    gives these metrics no standard error. None for another metric, and for a single document."""
    # An item is (log likelihood of the document, its bytes or words); the metric falls as their ratio rises.
    pairs = [sample[metric] for sample in samples if metric in sample]
    if metric not in ROLLING or len(pairs) < 2:
        return None
    interval = bootstrap_ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs], seed, confidence)
    low, high = (
        -ratio / math.log(2) if metric == "bits_per_byte" else math.exp(-ratio)
        for ratio in (interval.high, interval.low)
    )
    return low, high


def _items(results: Mapping[str, Any], name: str) -> int:
    """Return the number of items of a task, for which lm-eval has one record per filter, or of all tasks of a group."""
    doc_ids = {sample["doc_id"] for sample in results.get("samples", {}).get(name, [])}
    members: Sequence[str] = results.get("group_subtasks", {}).get(name, [])
    return len(doc_ids) or sum(_items(results, member) for member in members)


def brief(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of lm-eval's record of one item that is worth keeping."""
    metrics = {key: sample[key] for key in sample.get("metrics", []) if key in sample}
    return {
        "doc_id": sample["doc_id"],
        "doc": sample["doc"],
        "target": sample["target"],
        "responses": sample["filtered_resps"],
        **metrics,
    }


def benchmark_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of results.json by the names that gates and manifests use, e.g. cloze_accuracy_low.

    cloze_score is the accuracy that is to be read first: see `headline_metric`.
    """
    figures: dict[str, float] = {}
    for task, metrics in results["tasks"].items():
        floors = results.get("untrained", {}).get(task, {})
        named = {FIGURE_NAMES.get(metric, metric): metric for metric in metrics}
        if "acc" in metrics:
            named["score"] = headline_metric(results, task)
        for label, metric in named.items():
            name = snake_case(f"{task}_{label}")
            for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high"), ("_chance", "chance")):
                if field in metrics[metric]:
                    figures[name + suffix] = metrics[metric][field]
            if metric in floors:
                figures[f"{name}_untrained"] = floors[metric]["value"]
    for task, parts in results.get("domains", {}).items():
        for domain, entry in parts.items():
            figures[snake_case(f"{task}_{domain}_bits_per_byte")] = entry["value"]
    for name, failure_class in results.get("failure_classes", {}).get("classes", {}).items():
        for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high")):
            figures[f"{name}_failure_rate{suffix}"] = failure_class[field]
    return figures


def _headline(results: Mapping[str, Any]) -> str:
    parts = []
    for task, metrics in results["tasks"].items():
        if "acc" in metrics:
            metric = headline_metric(results, task)
            floor = results.get("untrained", {}).get(task, {}).get(metric)
            chance = f" (chance {100 * metrics[metric]['chance']:.0f})" if "chance" in metrics[metric] else ""
            chance = f" (untrained {100 * floor['value']:.0f})" if floor else chance
            parts.append(f"{task} {100 * metrics[metric]['value']:.1f} %{chance}")
        elif "bits_per_byte" in metrics:
            parts.append(f"{task} {metrics['bits_per_byte']['value']:.3f} bits per byte")
    return ", ".join(parts) or f"{len(results['tasks'])} tasks"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n"


if __name__ == "__main__":
    from infra.alone import main

    main(benchmarks, BenchmarksConfig)
