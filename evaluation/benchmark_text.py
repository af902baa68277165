"""The benchmark_text stage: the text of every test item, so that training text can be cleared of it.

python -m evaluation.benchmark_text --out OUT
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corpus.decontaminate.items import Item
from evaluation.config import BenchmarkTask, BenchmarkTextConfig, BiasConfig, ToxicityConfig
from evaluation.harness.item_texts import plain_item, question_item
from evaluation.harness.task_file import as_file_task, check_rows
from evaluation.harness.task_rows import task_rows
from evaluation.safety.probes import read_pairs, read_prompts
from infra.errors import stage_error
from infra.run import Result, Run


def benchmark_text(config: BenchmarkTextConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write items.jsonl, a line for each item: {"task", "item", "texts", "parts", "answers"}, see
    `corpus.decontaminate.items.Item`.

    All items of a file are written, even if a run is limited to a few of them.
    Raises StageError: `bad_task`, `bad_prompts` or `bad_pairs` for a file that does not fit its kind;
    `no_benchmarks` if there is nothing to write.
    """
    counts: Counter[str] = Counter()
    with (out_dir / "items.jsonl").open("w", encoding="utf8") as file:
        for item in _items(config, run):
            file.write(item.as_line())
            counts[item.task] += 1
    if not counts:
        raise stage_error("no_benchmarks", "benchmark_text", "expected a benchmark or probe, but the config has none")
    figures = {"items": counts.total(), "tasks": len(counts)}
    return Result(figures, f"{counts.total():,} items of {len(counts)} tasks")


def _items(config: BenchmarkTextConfig, run: Run) -> Iterator[Item]:
    mirror = Path(config.tasks_mirror) if config.tasks_mirror else None
    for index, task in enumerate(config.tasks or ()):
        if task.kind == "lm_eval":
            from evaluation.harness.tasks import task_items

            yield from task_items(index, task, run, mirror)
        else:
            yield from _task_items(task)
    prompts = (row for path in config.prompt_files for row in read_prompts(ToxicityConfig(prompts=str(path))))
    for number, row in enumerate(prompts):
        yield plain_item("toxicity", number, [row["prompt"]])
    pairs = (pair for path in config.pair_files for pair in read_pairs(BiasConfig(pairs=str(path))))
    for number, pair in enumerate(pairs):
        yield plain_item("bias", number, [pair["sent_more"], pair["sent_less"]])


def _task_items(task: BenchmarkTask) -> Iterator[Item]:
    file_task = as_file_task(task)
    check_rows(file_task)
    for number, (_, row) in enumerate(task_rows(file_task)):
        yield row_item(file_task, number, row)


def row_item(task: BenchmarkTask, number: int, row: Mapping[str, Any]) -> Item:
    """Return the item of a row of a file task."""
    if task.kind == "multiple_choice":
        choices = row[task.choices]
        return question_item(task.name, number, row[task.query], [choices[row[task.gold]]], choices)
    if task.kind == "minimal_pairs":
        return plain_item(task.name, number, [row[task.good], row[task.bad]])
    if task.context in row:
        return question_item(task.name, number, row[task.context], [row[task.continuation]])
    return plain_item(task.name, number, [row[task.text]])


if __name__ == "__main__":
    from infra.alone import main

    main(benchmark_text, BenchmarkTextConfig)
