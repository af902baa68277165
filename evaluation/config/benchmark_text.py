"""Config of the test items that the training text is decontaminated against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.config.benchmarks import BenchmarksConfig, TaskByName
from evaluation.config.safety import SafetyConfig
from evaluation.config.task_sources import DATA_DIR
from infra.config import StageConfig
from infra.io.sources import Source, SourcePath

_PROMPTS, _PAIRS = str(DATA_DIR / "toxicity_prompts.jsonl"), str(DATA_DIR / "bias_pairs.csv")


class BenchmarkTextConfig(StageConfig):
    """Selection of the test items that the training text is decontaminated against."""

    tasks: tuple[TaskByName, ...] | None = None
    """Benchmarks; by default those of the section benchmarks."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks; by default that of the section benchmarks."""
    prompts: SourcePath | tuple[SourcePath, ...] | None = None
    """Files of prompts as in safety.toxicity; by default those that the sections and steps of safety use."""
    pairs: SourcePath | tuple[SourcePath, ...] | None = None
    """Files of sentence pairs as in safety.bias; by default those that the sections and steps of safety use."""

    def sources(self) -> list[Source]:
        """The files of every task and probe."""
        sources = [
            replace(source, key=source.key.replace("benchmarks.", "benchmark_text.", 1))
            for source in (self._of_tasks().sources() if self.tasks else [])
        ]
        for key, files in (("prompts", self.prompt_files), ("pairs", self.pair_files)):
            sources += [Source(f"benchmark_text.{key}", files)] if files else []
        return sources

    @property
    def prompt_files(self) -> tuple[Path, ...]:
        return _files(self.prompts)

    @property
    def pair_files(self) -> tuple[Path, ...]:
        return _files(self.pairs)

    def _of_tasks(self) -> BenchmarksConfig:
        # Validated once the mirror of the benchmarks is known.
        return BenchmarksConfig.model_construct(tasks=self.tasks or (), tasks_mirror=self.tasks_mirror)

    def filled(self, benchmarks: Sequence[BenchmarksConfig], safety: Sequence[SafetyConfig]) -> BenchmarkTextConfig:
        """Return the config with unset keys taken from the pipeline's benchmarks and safety stages."""
        tasks = dict.fromkeys(task for benchmark in benchmarks for task in benchmark.tasks)
        toxicity = [stage.toxicity.prompts or _PROMPTS for stage in safety if stage.toxicity]
        bias = [stage.bias.pairs or _PAIRS for stage in safety if stage.bias]
        return self.model_copy(
            update={
                "tasks": self.tasks or tuple(tasks) or None,
                "tasks_mirror": self.tasks_mirror or next((benchmark.tasks_mirror for benchmark in benchmarks), None),
                "prompts": self.prompts or _single_or_list(toxicity),
                "pairs": self.pairs or _single_or_list(bias),
            }
        )


def _single_or_list(files: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the value as a person would write it."""
    different = tuple(dict.fromkeys(files))
    return different if len(different) > 1 else next(iter(different), None)


def _files(paths: str | tuple[str, ...] | None) -> tuple[Path, ...]:
    return tuple(map(Path, [paths] if isinstance(paths, str) else paths or ()))
