"""Every stage there is: its name, version, config class, function, inputs, and what it makes.

A stage is added here and nowhere else in tasks/; docs/stages.md tells the rest. A function is imported when it is
called, since it may pull in torch.
"""

from __future__ import annotations

from corpus.cleaning.config import CleanConfig
from corpus.config import (
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
from tasks.stage import Stage
from training.config import BaseModelConfig, PretrainConfig, RewardModelConfig, RlhfConfig, SftConfig

CORPUS_STEPS = (
    "ingest",
    "validate",
    "clean",
    "dedupe",
    "decontaminate",
    "mix",
    "validate_clean",
    "tokenizer",
    "shard",
    "validate_shards",
)
"""The nodes that it tells of, as far as the pipeline has them."""

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        # Text from outside becomes documents.
        Stage(
            "ingest",
            version=2,
            config=IngestConfig,
            function="corpus.ingest:ingest",
        ),
        # A Great Expectations suite that stops the flow when the data is not what it should be.
        Stage(
            "validate",
            version=2,
            config=ValidateConfig,
            function="corpus.validate:validate",
            inputs=("data",),
            shows=("aux/validation.html", "aux/failing_rows.jsonl"),
            compares=True,
        ),
        # Documents that are worth training on.
        Stage(
            "clean",
            version=3,
            config=CleanConfig,
            function="corpus.clean:clean",
            inputs=("documents",),
        ),
        # Documents, each there once.
        Stage(
            "dedupe",
            version=1,
            config=DedupeConfig,
            function="corpus.dedupe.stage:dedupe",
            inputs=("documents",),
        ),
        # The text of every test item that a pipeline's models will be asked.
        Stage(
            "benchmark_text",
            version=1,
            config=BenchmarkTextConfig,
            function="evaluation.benchmark_text:benchmark_text",
        ),
        # Documents that hold no test item of the benchmarks.
        Stage(
            "decontaminate",
            version=1,
            config=DecontaminateConfig,
            function="corpus.decontaminate.stage:decontaminate",
            inputs=("documents", "benchmark_text"),
        ),
        # Documents in the proportions that a model is to read them in.
        Stage(
            "mix",
            version=1,
            config=MixConfig,
            function="corpus.mix.stage:mix",
            inputs=("documents",),
        ),
        # A tokenizer, trained on the documents or taken over.
        Stage(
            "tokenizer",
            version=2,
            config=TokenizerConfig,
            function="corpus.tokenizer:tokenizer",
            inputs=("documents",),
        ),
        # Tokenised, packed MDS shards, split into training and validation.
        Stage(
            "shard",
            version=2,
            config=ShardConfig,
            function="corpus.shard:shard",
            inputs=("documents", "tokenizer"),
        ),
        # One page about the corpus.
        Stage(
            "corpus_report",
            version=1,
            config=CorpusReportConfig,
            function="evaluation.corpus_report:corpus_report",
            inputs=CORPUS_STEPS,
            makes="report",
            shows=("aux/corpus_report.html",),
            compares=True,
        ),
        # The base model, trained from scratch.
        Stage(
            "pretrain",
            version=6,
            config=PretrainConfig,
            function="training.pretrain:pretrain",
            inputs=("shards", "tokenizer"),
            makes="model",
            shows=("aux/corrections.json",),
            trains=True,
        ),
        # The base model, taken from a Hugging Face folder.
        Stage(
            "base_model",
            version=1,
            config=BaseModelConfig,
            function="training.adopt:import_model",
            makes="model",
        ),
        # Prompts with their responses, for instruction tuning.
        Stage(
            "instructions",
            version=1,
            config=InstructionsConfig,
            function="corpus.instructions:instructions",
        ),
        # Prompts with a better and a worse response, for the reward model.
        Stage(
            "preferences",
            version=1,
            config=PreferencesConfig,
            function="corpus.preferences:preferences",
        ),
        # The base model, tuned to follow instructions.
        Stage(
            "sft",
            version=5,
            config=SftConfig,
            function="training.sft:sft",
            inputs=("model", "instructions"),
            makes="model",
            trains=True,
            shows=("aux/samples.jsonl", "aux/corrections.json"),
        ),
        # A model that scores answers, from preference pairs.
        Stage(
            "reward_model",
            version=4,
            config=RewardModelConfig,
            function="training.reward_model:reward_model",
            inputs=("model", "preferences"),
            makes="model",
            shows=("aux/corrections.json",),
            trains=True,
        ),
        # The instruction-tuned model, aligned by PPO against the reward model.
        Stage(
            "rlhf",
            version=4,
            config=RlhfConfig,
            function="training.rlhf:rlhf",
            inputs=("model", "reward_model", "prompts"),
            makes="model",
            shows=("aux/samples.jsonl",),
        ),
        # Scores of one model on lm-eval tasks.
        Stage(
            "benchmarks",
            version=1,
            config=BenchmarksConfig,
            function="evaluation.benchmarks:benchmarks",
            inputs=("model",),
            shows=("results.json",),
        ),
        # Toxicity, bias and memorisation of one model.
        Stage(
            "safety",
            version=2,
            config=SafetyConfig,
            function="evaluation.safety:safety",
            inputs=("model", "shards"),
            shows=("results.json",),
        ),
        # Gates, model card and registration of the final model.
        Stage(
            "register",
            version=1,
            config=RegisterConfig,
            function="evaluation.register:register",
            inputs=("model",),
            makes="report",
            registers="model",
            shows=("MODEL_CARD.md",),
        ),
        # One page about the whole pipeline.
        Stage(
            "report",
            version=1,
            config=ReportConfig,
            function="evaluation.report:report",
            makes="report",
            shows=("report.html",),
        ),
    )
}
