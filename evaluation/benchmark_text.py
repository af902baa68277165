"""The benchmark_text stage: the text of every test item, so that training text can be cleared of it.

python -m evaluation.benchmark_text --out OUT
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.config import BenchmarkTask, BenchmarkTextConfig, BiasConfig, ToxicityConfig
from evaluation.probes import read_pairs, read_prompts
from evaluation.task_file import as_file_task, check_rows
from infra.bounded import file_lines
from infra.errors import stage_error
from infra.json import parse_json
from infra.run import Result, Run


class Item(NamedTuple):
    """One test item. `texts`: what would give it away, each by itself, if it stood in the training text."""

    task: str
    item: str
    texts: list[str]


def benchmark_text(config: BenchmarkTextConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes items.jsonl, a line an item: {"task", "item", "texts"}.

    All items of a file are written, however few of them a run is limited to.
    Raises StageError: `bad_task`, `bad_prompts` or `bad_pairs` for a file that is not as its kind should be;
    `no_benchmarks` if there is nothing to write.
    """
    counts: Counter[str] = Counter()
    with (out_dir / "items.jsonl").open("w", encoding="utf8") as file:
        for item in _items(config, run):
            file.write(json.dumps(item._asdict(), ensure_ascii=False) + "\n")
            counts[item.task] += 1
    if not counts:
        raise stage_error("no_benchmarks", "benchmark_text", "expected a benchmark or a probe, the config names none")
    figures = {"items": counts.total(), "tasks": len(counts)}
    return Result(figures, f"{counts.total():,} items of {len(counts)} tasks")


def _items(config: BenchmarkTextConfig, run: Run) -> Iterator[Item]:
    mirror = Path(config.tasks_mirror) if config.tasks_mirror else None
    for index, task in enumerate(config.tasks or ()):
        if task.kind == "lm_eval":
            from evaluation.harness import task_texts

            yield from (Item(name, item, texts) for name, item, texts in task_texts(index, task, run, mirror))
        else:
            yield from _task_items(task)
    if config.prompts:
        for number, row in enumerate(read_prompts(ToxicityConfig(prompts=config.prompts))):
            yield Item("toxicity", str(number), [row["prompt"]])
    if config.pairs:
        for number, pair in enumerate(read_pairs(BiasConfig(pairs=config.pairs))):
            yield Item("bias", str(number), [pair["sent_more"], pair["sent_less"]])


def _task_items(task: BenchmarkTask) -> Iterator[Item]:
    named = as_file_task(task)
    check_rows(named)
    rows = [parse_json(line) for _, line in file_lines(Path(str(named.path))) if line.strip()]
    for number, row in enumerate(rows):
        yield Item(task.name, str(number), item_texts(named, row))


def item_texts(task: BenchmarkTask, row: Mapping[str, Any]) -> list[str]:
    """The texts of one row: question with its right answer, the passage, or both sentences of a pair."""
    if task.kind == "multiple_choice":
        return [f"{row[task.query]} {row[task.choices][row[task.gold]]}"]
    if task.kind == "minimal_pairs":
        return [row[task.good], row[task.bad]]
    if task.context in row:
        return [f"{row[task.context]} {row[task.continuation]}"]
    return [row[task.text]]


if __name__ == "__main__":
    from infra.alone import main

    main(benchmark_text, BenchmarkTextConfig)
