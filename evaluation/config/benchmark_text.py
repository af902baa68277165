"""What a person may set for the test items that the training text is cleared of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.config.benchmarks import BenchmarksConfig, TaskByName
from evaluation.config.safety import SafetyConfig
from evaluation.config.task_sources import DATA_DIR
from infra.config import StageConfig
from infra.sources import Source, SourcePath


class BenchmarkTextConfig(StageConfig):
    """Which test items the training text is cleared of."""

    tasks: tuple[TaskByName, ...] | None = None
    """Benchmarks; by default those of the section benchmarks."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks; by default that of the section benchmarks."""
    prompts: SourcePath | None = None
    """A file of prompts as in safety.toxicity; by default the one that the section safety uses."""
    pairs: SourcePath | None = None
    """A file of sentence pairs as in safety.bias; by default the one that the section safety uses."""

    def sources(self) -> list[Source]:
        """The files of every task and probe."""
        found = [
            replace(source, key=source.key.replace("benchmarks.", "benchmark_text.", 1))
            for source in (self._of_tasks().sources() if self.tasks else [])
        ]
        found += [Source("benchmark_text.prompts", (Path(self.prompts),))] if self.prompts else []
        found += [Source("benchmark_text.pairs", (Path(self.pairs),))] if self.pairs else []
        return found

    def _of_tasks(self) -> BenchmarksConfig:
        # Validated once the mirror of the benchmarks is known.
        return BenchmarksConfig.model_construct(tasks=self.tasks or (), tasks_mirror=self.tasks_mirror)

    def filled(self, benchmarks: Sequence[BenchmarksConfig], safety: Sequence[SafetyConfig]) -> BenchmarkTextConfig:
        """With what the pipeline's benchmarks and safety stages will ask in place of what is not set."""
        asked = dict.fromkeys(task for one in benchmarks for task in one.tasks)
        toxicity = [one.toxicity for one in safety if one.toxicity]
        bias = [one.bias for one in safety if one.bias]
        prompts = (toxicity[0].prompts or str(DATA_DIR / "toxicity_prompts.jsonl")) if toxicity else None
        pairs = (bias[0].pairs or str(DATA_DIR / "bias_pairs.csv")) if bias else None
        return self.model_copy(
            update={
                "tasks": self.tasks or tuple(asked) or None,
                "tasks_mirror": self.tasks_mirror or next((one.tasks_mirror for one in benchmarks), None),
                "prompts": self.prompts or prompts,
                "pairs": self.pairs or pairs,
            }
        )

    def missed(self, safety: Sequence[SafetyConfig]) -> list[str]:
        """The keys of which the safety stages name several files: one alone can be cleared of."""
        prompts = {one.toxicity.prompts for one in safety if one.toxicity}
        pairs = {one.bias.pairs for one in safety if one.bias}
        several = {"prompts": not self.prompts and len(prompts) > 1, "pairs": not self.pairs and len(pairs) > 1}
        return [key for key, more in several.items() if more]
