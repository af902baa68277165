"""The config of the mitigations stage. Importing this module loads nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from evaluation.config import (
    DATA_DIR,
    IDENTIFIER,
    BenchmarksConfig,
    BenchmarkTask,
    TaskByName,
    ToxicityConfig,
    ToxicityScorer,
)
from infra.config import Config, Seed, StageConfig
from infra.errors import Problem
from infra.io.sources import Source, SourcePath


class Mitigation(Config):
    """A mitigation at inference time, without training."""

    kind: Literal["prefix", "logit_bias", "rerank"]
    """prefix: a text before every prompt (prompt engineering). logit_bias: lowers the probability of words, given as
    sequences of tokens. rerank: keeps the least toxic of several continuations by a scorer (rejection sampling; Gehman
    et al. 2020, section 6, filter word lists and rank in the same way)."""
    name: str | None = Field(None, pattern=IDENTIFIER)
    """Name in figures and the report; by default the kind."""
    text: str = ""
    """prefix: the text, including the space or line end before the prompt."""
    words: SourcePath | None = None
    """logit_bias: a file of words, one per line, or CSV with the column `text`."""
    bias: float = Field(-10.0, ge=-100, lt=0)
    """logit_bias: added to the logit that would complete one of the words; -10 divides its odds by 22,000."""
    candidates: int = Field(4, ge=2)
    """rerank: number of continuations drawn for each one that is kept."""
    scorer: ToxicityScorer = ToxicityScorer()
    """rerank: the scorer that chooses. If the same scorer also judges, the model looks better than it is to people."""

    @property
    def label(self) -> str:
        return self.name or self.kind

    @model_validator(mode="after")
    def _has_required_fields(self) -> Mitigation:
        if (self.kind == "prefix") is not bool(self.text):
            raise ValueError("a prefix needs `text`, the others have none")
        if (self.kind == "logit_bias") is not (self.words is not None):
            raise ValueError("a logit_bias needs `words`, the others have none")
        return self


class MitigationsConfig(StageConfig):
    """Effect of toxicity mitigations and their cost in capability, each compared with the plain model."""

    tried: tuple[Mitigation, ...] = (
        Mitigation(kind="prefix", text="The following text is kind, friendly and respectful.\n"),
        Mitigation(kind="rerank"),
    )
    """Mitigations to try. Each input but `model` adds a row for a model that was trained to be less toxic: on filtered,
    counterfactual or neutrally written text, by fine-tuning or by alignment."""
    toxicity: ToxicityConfig = ToxicityConfig(samples_per_prompt=8)
    """Prompts, sampling and scorers, as in `safety`; 8 continuations of each prompt."""
    tasks: tuple[TaskByName, ...] = (BenchmarkTask(name="cloze"), BenchmarkTask(name="minimal_pairs"))
    """Benchmarks that measure the cost in capability."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks, as in `benchmarks`."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of items per task; null: all."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals."""
    seed: Seed = 17
    """Seed for samples and bootstrap."""

    @field_validator("tried")
    @classmethod
    def _names_differ(cls, tried: tuple[Mitigation, ...]) -> tuple[Mitigation, ...]:
        names = ["plain", "tuned", *(mitigation.label for mitigation in tried)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"give each a unique `name`; given twice: {', '.join(repeated)} (plain and tuned are taken)"
            )
        return tried

    def benchmarks(self) -> BenchmarksConfig:
        """The benchmarks that every mitigation is asked."""
        return BenchmarksConfig(tasks=self.tasks, tasks_mirror=self.tasks_mirror, limit=self.limit, seed=self.seed)

    def same_names(self, inputs: Iterable[str]) -> list[Problem]:
        """Inputs that are called like another row of the table, in which each input but `model` has a row."""
        rows = {"plain", *(mitigation.label for mitigation in self.tried)}
        message, fix = "another row of the table has this name too", "rename the input"
        return [Problem("name_taken", f"mitigations.inputs.{name}", message, fix) for name in inputs if name in rows]

    def sources(self) -> list[Source]:
        """The files of prompts, words and tasks."""
        prompts = self.toxicity.prompts or str(DATA_DIR / "toxicity_prompts.jsonl")
        sources = [Source("mitigations.toxicity.prompts", (Path(prompts),))]
        for n, mitigation in enumerate(self.tried):
            if mitigation.words:
                sources.append(Source(f"mitigations.tried.{n}.words", (Path(mitigation.words),)))
            sources += mitigation.scorer.sources(f"mitigations.tried.{n}.scorer")
        for n, scorer in enumerate(self.toxicity.scorers):
            sources += scorer.sources(f"mitigations.toxicity.scorers.{n}")
        benchmark_sources = self.benchmarks().sources()
        return sources + [
            replace(source, key=source.key.replace("benchmarks.", "mitigations.", 1)) for source in benchmark_sources
        ]
