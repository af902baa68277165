"""One YAML file, one pipeline: its sections, and everything that is wrong with it said at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from corpus.cleaning.config import CleanConfig
from corpus.config import (
    DATA_KINDS,
    IngestConfig,
    InstructionsConfig,
    PreferencesConfig,
    ShardConfig,
    TokenizerConfig,
    ValidateConfig,
)
from corpus.decontaminate.config import DecontaminateConfig
from corpus.dedupe.config import DedupeConfig
from corpus.mix.config import MixConfig
from evaluation.config import (
    BenchmarksConfig,
    BenchmarkTextConfig,
    CorpusReportConfig,
    RegisterConfig,
    ReportConfig,
    SafetyConfig,
)
from flows.problems import problems_of
from flows.yaml import read_yaml, set_value
from infra.config import Config, StageConfig
from infra.errors import ConfigError, Problem, StageError
from infra.launch.config import LaunchConfig
from infra.secrets import recognised
from infra.sources import FOLDER
from tasks.payloads import PAYLOADS
from training.config import BaseModelConfig, PretrainConfig, RewardModelConfig, RlhfConfig, SftConfig


class PipelineConfig(Config):
    """A whole pipeline. A section that is left out leaves its stage out; an empty one takes all defaults."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=60)
    """Names the pipeline in the pages, its deployments, and the registered model."""
    description: str = ""
    """One sentence on what this pipeline is for."""
    seed: int = Field(17, ge=0)
    """The seed of every stage that does not set its own."""
    ingest: IngestConfig | None = None
    validate_: ValidateConfig | None = Field(None, alias="validate")
    clean: CleanConfig | None = None
    dedupe: DedupeConfig | None = None
    benchmark_text: BenchmarkTextConfig | None = None
    """What `decontaminate` clears the text of; there by itself where `decontaminate` is."""
    decontaminate: DecontaminateConfig | None = None
    mix: MixConfig | None = None
    tokenizer: TokenizerConfig | None = None
    shard: ShardConfig | None = None
    corpus_report: CorpusReportConfig | None = None
    pretrain: PretrainConfig | None = None
    base_model: BaseModelConfig | None = None
    """Start from an existing Hugging Face model folder instead of `pretrain`."""
    instructions: InstructionsConfig | None = None
    preferences: PreferencesConfig | None = None
    sft: SftConfig | None = None
    reward_model: RewardModelConfig | None = None
    rlhf: RlhfConfig | None = None
    benchmarks: BenchmarksConfig | None = None
    safety: SafetyConfig | None = None
    register_: RegisterConfig | None = Field(None, alias="register")
    report: ReportConfig | None = None
    adopted: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = Field(default_factory=dict)
    """Stage id → fingerprint of an artifact to take as it is, e.g. one that `stemma adopt` brought in. Such a stage is
    never built, and what only it needed does not run."""
    launch: LaunchConfig = LaunchConfig()
    """Where and how to run: the only section that speaks of machines."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, data: Any) -> Any:
        """An empty section means its defaults; the pipeline's seed goes to every stage that has one."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        if "decontaminate" in filled and "decontaminate" not in (filled.get("adopted") or {}):
            filled.setdefault("benchmark_text", {})
        for key, field in section_classes().items():
            section = filled.get(key)
            if key in filled and section is None:
                filled[key] = section = {}
            takes_seed = "seed" in field.model_fields and "seed" in filled
            if takes_seed and isinstance(section, Mapping) and "seed" not in section:
                filled[key] = {**section, "seed": filled["seed"]}
        return filled

    def section(self, name: str) -> StageConfig | None:
        """The config of a stage by its section's name in the file."""
        section = getattr(self, _ATTRIBUTES.get(name, name))
        assert section is None or isinstance(section, StageConfig)
        return section


# `validate` and `register` are names of pydantic's own.
_ATTRIBUTES = {"validate": "validate_", "register": "register_"}


def section_classes() -> dict[str, type[StageConfig]]:
    """Section name → config class, for every stage."""
    found = {}
    for name, field in PipelineConfig.model_fields.items():
        for option in getattr(field.annotation, "__args__", ()):
            if isinstance(option, type) and issubclass(option, StageConfig):
                found[field.alias or name] = option
    return found


def load(path: Path, settings: Mapping[str, str] | None = None) -> PipelineConfig:
    """The pipeline in a YAML file, with `--set` values (YAML text by dotted key) in place.

    Raises ConfigError with everything that is wrong in all sections.
    """
    data = read_yaml(path)
    problems: list[Problem] = []
    for key, text in (settings or {}).items():
        problems += set_value(data, key, text)
    if problems:
        raise ConfigError(*problems)
    return parse(data, path.absolute().parent)


def parse(data: Any, folder: Path | None = None) -> PipelineConfig:
    """The pipeline in plain data; relative paths in it are relative to `folder`. Raises ConfigError."""
    try:
        config = PipelineConfig.model_validate(data, context={FOLDER: folder} if folder else None)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, PipelineConfig)) from None
    if found := list(_contradictions(config)):
        raise ConfigError(*found)
    return config


def dump(config: PipelineConfig) -> dict[str, Any]:
    """Plain data that `parse` reads back; sections that are left out stay out."""
    data = config.model_dump(mode="json", by_alias=True)
    return {key: value for key, value in data.items() if value is not None}


_NEEDS = {
    "validate": ("ingest",),
    "clean": ("ingest",),
    "dedupe": ("ingest",),
    "decontaminate": ("ingest",),
    "mix": ("ingest",),
    "tokenizer": ("ingest",),
    "shard": ("ingest", "tokenizer"),
    "corpus_report": ("ingest",),
    "pretrain": ("shard", "tokenizer"),
    "sft": ("base model", "instructions"),
    "reward_model": ("sft", "preferences"),
    "rlhf": ("sft", "reward_model", "instructions"),
    "benchmarks": ("base model",),
    "safety": ("base model",),
    "register": ("base model",),
}


DOCUMENT_STAGES = {"clean", "dedupe", "decontaminate", "mix"}
"""They read documents and give documents."""


def _contradictions(config: PipelineConfig) -> Iterator[Problem]:
    """What is wrong between sections that are each right."""
    for path, message in recognised(dump(config)):
        yield Problem(
            "secret_in_config", path, f"{message} was found; configs are kept and shown", "use the environment"
        )
    present = {name for name in section_classes() if config.section(name) is not None} | set(config.adopted)
    if DOCUMENT_STAGES & set(config.adopted):
        present.add("ingest")  # what reads documents has them
    for name in config.adopted:
        if name not in PAYLOADS:
            nearest = difflib.get_close_matches(name, PAYLOADS, n=1, cutoff=0.4)
            fix = f"did you mean {nearest[0]}?" if nearest else f"these can be: {', '.join(PAYLOADS)}"
            yield Problem("unknown_stage", f"adopted.{name}", "no artifact of this stage can be adopted", fix)
    for name, needs in _NEEDS.items():
        if config.section(name) is None or name in config.adopted:
            continue
        for need in needs:
            if need == "base model" and not present & {"pretrain", "base_model"}:
                yield Problem("missing_section", name, "needs a model: a pretrain or a base_model section was expected")
            elif need != "base model" and need not in present:
                yield Problem("missing_section", name, f"needs the section {need}, which is not there", f"add {need}:")
    if {"pretrain", "base_model"} <= present:
        yield Problem("contradiction", "base_model", "either pretrain or base_model was expected, not both")
    if not any(config.section(name) for name in section_classes()):
        yield Problem("empty_config", "", "no stage: at least one section such as ingest was expected")
    if config.pretrain and config.shard and not {"pretrain", "shard"} & set(config.adopted):
        vocabulary = config.tokenizer.vocab_size if config.tokenizer and not config.tokenizer.pretrained else None
        yield from config.pretrain.problems(config.shard.sequence_length, vocabulary)
    positions = config.pretrain.model.longest_sequence() if config.pretrain else None
    for name, section in (("sft", config.sft), ("rlhf", config.rlhf)):
        if section is not None and name not in config.adopted:
            yield from section.problems(None if "pretrain" in config.adopted else positions)
    yield from _not_causal(config)
    yield from _unequal_heldout(config)
    yield from _bad_suites(config)
    if (asked := config.benchmark_text) and "benchmark_text" not in config.adopted:
        filled = asked.filled(config.benchmarks, config.safety)
        if not (filled.tasks or filled.prompts or filled.pairs):
            yield Problem(
                "missing_section",
                "decontaminate",
                "needs to know the test items: a benchmarks or safety section, or benchmark_text.tasks was expected",
            )


def _not_causal(config: PipelineConfig) -> Iterator[Problem]:
    """Stages that need a model that continues text, after an objective that gives none."""
    if config.pretrain is None or "pretrain" in config.adopted or config.pretrain.continues_text():
        return
    for name in ("sft", "reward_model", "rlhf", "benchmarks", "safety"):
        if config.section(name) is not None and name not in config.adopted:
            yield Problem(
                "not_causal",
                name,
                "needs a model that continues text, which pretraining with "
                f"pretrain.objective: {config.pretrain.objective} does not give",
                f"leave {name} out, or set pretrain.objective to causal or prefix",
            )


def _bad_suites(config: PipelineConfig) -> Iterator[Problem]:
    """Suites are small files: what is wrong with them is said before anything runs."""
    if config.validate_ is None:
        return
    for kind in DATA_KINDS:
        try:
            config.validate_.read(kind)
        except StageError as error:
            yield from error.problems


def _unequal_heldout(config: PipelineConfig) -> Iterator[Problem]:
    """Held-out pairs must come from text that the base model never saw."""
    names = [
        name for name in ("mix", "tokenizer", "shard", "instructions", "preferences") if name not in config.adopted
    ]
    shares = {name: section.heldout_share for name in names if (section := config.section(name))}  # type: ignore[attr-defined]
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        yield Problem(
            "contradiction",
            f"{next(iter(shares))}.heldout_share",
            f"one share for all of {', '.join(shares)} was expected, or held-out pairs leak into training: {listed}",
        )
