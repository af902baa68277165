"""Every stage: its name, version, config class, function, inputs, and the kind of its artifact; and the usual pipeline.

A stage is declared here, or in an installed package (`tasks.installed`), and nowhere else: the DAG, its checks, the
forms and the schema are derived from these declarations. docs/stages.md describes the rest. A function is imported when
it is called, since it may pull in torch.
"""

from __future__ import annotations

from corpus.classification.config import ClassifyConfig
from corpus.cleaning.config import CleanConfig
from corpus.config import (
    IngestConfig,
    InstructionsConfig,
    PreferencesConfig,
    RemoteShardsConfig,
    ShardConfig,
    TokenizerConfig,
    ValidateConfig,
)
from corpus.decontaminate.config import DecontaminateConfig
from corpus.dedupe.config import DedupeConfig
from corpus.generation.config import GenerateConfig, GenerateInstructionsConfig
from corpus.mix.config import MixConfig
from corpus.semantic.config import SemanticDedupeConfig
from evaluation.config import (
    BenchmarksConfig,
    BenchmarkTextConfig,
    CorpusReportConfig,
    RegisterConfig,
    ReportConfig,
    SafetyConfig,
)
from evaluation.config.mitigations import MitigationsConfig
from evaluation.config.needle import NeedleConfig
from infra.store.measurements import TRAINED
from tasks.installed import installed_stages
from tasks.stage import KINDS, STATE, Kind, Stage, UsualStep, may_have, needs
from training.config import (
    AverageConfig,
    BaseModelConfig,
    DistillConfig,
    PreferenceTuningConfig,
    PretrainConfig,
    RewardModelConfig,
    RlhfConfig,
    SftConfig,
)

PROFILE = ("aux/profile.json", "aux/profile_operators.txt", "aux/profile_trace.json.gz")
"""Files written by `launch.profile`."""

CORPUS_STEPS: dict[str, Kind] = {
    "ingest": "documents",
    "validate": "verdict",
    "clean": "documents",
    "dedupe": "documents",
    "semantic_dedupe": "documents",
    "classify": "documents",
    "generate": "documents",
    "decontaminate": "documents",
    "mix": "documents",
    "validate_clean": "verdict",
    "tokenizer": "tokenizer",
    "shard": "shards",
    "validate_shards": "verdict",
}
"""Steps that the corpus report covers if the pipeline has them, and the kind of each one's artifact."""

OUR_STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "ingest",
            about="Read text from outside as documents.",
            version=9,
            config=IngestConfig,
            function="corpus.ingest:ingest",
            makes="documents",
        ),
        Stage(
            "validate",
            about="A Great Expectations suite that stops the pipeline if the data violates it.",
            version=5,
            config=ValidateConfig,
            function="corpus.validate:validate",
            inputs=(needs("data", "documents", "shards", "instructions", "preferences"),),
            makes="verdict",
            shows=("aux/validation.html", "aux/failing_rows.jsonl"),
            compares=True,
            imports_later=(
                "pandas",
                "great_expectations",
                "great_expectations.expectations",
            ),
        ),
        Stage(
            "clean",
            about="Documents that are worth training on.",
            version=9,
            config=CleanConfig,
            function="corpus.clean:clean",
            inputs=(needs("documents"),),
            makes="documents",
            imports_later=("corpus.cleaning.quality",),
        ),
        Stage(
            "dedupe",
            about="Documents without duplicates.",
            version=6,
            config=DedupeConfig,
            function="corpus.dedupe.stage:dedupe",
            inputs=(needs("documents"),),
            makes="documents",
        ),
        Stage(
            "semantic_dedupe",
            about="Documents without semantic duplicates.",
            version=1,
            config=SemanticDedupeConfig,
            function="corpus.semantic.stage:semantic_dedupe",
            inputs=(needs("documents"),),
            makes="documents",
            imports_later=(
                "torch",
                "transformers",
            ),
            uses_gpu=True,
        ),
        Stage(
            "classify",
            about="Documents that a classifier scores high.",
            version=1,
            config=ClassifyConfig,
            function="corpus.classification.stage:classify",
            inputs=(needs("documents"),),
            makes="documents",
            imports_later=(
                "torch",
                "transformers",
            ),
            uses_gpu=True,
        ),
        Stage(
            "generate",
            about="Documents written by a language model from existing documents.",
            version=1,
            config=GenerateConfig,
            function="corpus.generation.stage:generate",
            inputs=(needs("documents"),),
            makes="documents",
        ),
        Stage(
            "benchmark_text",
            about="Text of every test item of the evaluations, used to decontaminate data.",
            version=5,
            config=BenchmarkTextConfig,
            function="evaluation.benchmark_text:benchmark_text",
            makes="test_items",
        ),
        Stage(
            "decontaminate",
            about="Documents that contain no test item of the benchmarks.",
            version=6,
            config=DecontaminateConfig,
            function="corpus.decontaminate.stage:decontaminate",
            inputs=(needs("documents"), needs("benchmark_text", "test_items")),
            makes="documents",
        ),
        Stage(
            "mix",
            about="Documents mixed in the proportions for training.",
            version=2,
            config=MixConfig,
            function="corpus.mix.stage:mix",
            inputs=(needs("documents"),),
            makes="documents",
        ),
        Stage(
            "tokenizer",
            about="A tokenizer, trained on the documents or imported.",
            version=4,
            config=TokenizerConfig,
            function="corpus.tokenizer:tokenizer",
            inputs=(needs("documents"),),
            makes="tokenizer",
            imports_later=(
                "tokenizers",
                "corpus.tokens.chunks",
            ),
        ),
        Stage(
            "shard",
            about="Tokenised, packed MDS shards, split into training and validation.",
            version=2,
            config=ShardConfig,
            function="corpus.shard:shard",
            inputs=(needs("documents"), needs("tokenizer", "tokenizer", "model")),
            makes="shards",
            imports_later=(
                "corpus.tokens.chunks",
                "streaming",
            ),
        ),
        Stage(
            "remote_shards",
            about="Shards on S3, fetched while training reads them.",
            version=1,
            config=RemoteShardsConfig,
            function="corpus.tokens.remote:remote_shards",
            makes="shards",
        ),
        Stage(
            "corpus_report",
            about="One page about the corpus.",
            version=2,
            config=CorpusReportConfig,
            function="evaluation.corpus_report:corpus_report",
            inputs=tuple(may_have(name, kind) for name, kind in CORPUS_STEPS.items()),
            makes="page",
            shows=("aux/corpus_report.html",),
            compares=True,
        ),
        Stage(
            "pretrain",
            about="The base model, trained from scratch.",
            version=7,
            config=PretrainConfig,
            function="training.pretrain:train",
            measured_by="measure_pretrain",
            inputs=(
                needs("shards"),
                needs("tokenizer", "tokenizer", "model"),
                may_have("model"),
                may_have(STATE, "model"),
            ),
            makes="model",
            shows=("aux/corrections.json", *PROFILE),
            trains=True,
        ),
        Stage(
            "base_model",
            about="The base model, taken from a Hugging Face folder instead of pretraining.",
            version=3,
            config=BaseModelConfig,
            function="training.adopt:import_model",
            makes="model",
        ),
        Stage(
            "average",
            about="The mean of several models, or of several checkpoints of one training.",
            version=1,
            config=AverageConfig,
            function="training.average:average",
            inputs=(needs("model"), may_have("shards")),
            more=("model",),
            makes="model",
            continues_text=True,
            uses_gpu=True,
        ),
        Stage(
            "instructions",
            about="Prompts with their responses, for instruction tuning.",
            version=10,
            config=InstructionsConfig,
            function="corpus.instructions:instructions",
            inputs=(may_have("benchmark_text", "test_items"),),
            makes="instructions",
        ),
        Stage(
            "generate_instructions",
            about="Prompts with their responses, written by a language model from documents.",
            version=1,
            config=GenerateInstructionsConfig,
            function="corpus.generation.instructions:generate_instructions",
            inputs=(needs("documents"), may_have("benchmark_text", "test_items")),
            makes="instructions",
        ),
        Stage(
            "preferences",
            about="Prompts with a better and a worse response, for a reward model or preference tuning.",
            version=12,
            config=PreferencesConfig,
            function="corpus.preferences:preferences",
            inputs=(may_have("benchmark_text", "test_items"),),
            makes="preferences",
        ),
        Stage(
            "sft",
            about="The base model, tuned to follow instructions.",
            version=6,
            config=SftConfig,
            function="training.sft:train",
            measured_by="measure_sft",
            inputs=(needs("model"), needs("instructions"), may_have("shards"), may_have(STATE, "model")),
            makes="model",
            trains=True,
            shows=("aux/corrections.json", *PROFILE),
            continues_text=True,
        ),
        Stage(
            "reward_model",
            about="A model that scores answers, from preference pairs.",
            version=6,
            config=RewardModelConfig,
            function="training.reward_model:train",
            measured_by="measure_reward_model",
            inputs=(needs("model"), needs("preferences"), may_have(STATE, "reward_model")),
            makes="reward_model",
            shows=("aux/corrections.json", *PROFILE),
            trains=True,
            continues_text=True,
        ),
        Stage(
            "preference_tuning",
            about="A model, aligned on preference pairs themselves by DPO, IPO, KTO or ORPO.",
            version=4,
            config=PreferenceTuningConfig,
            function="training.preference_tuning:train",
            measured_by="measure_preference_tuning",
            inputs=(
                needs("model"),
                needs("preferences"),
                may_have("judge", "reward_model"),
                may_have(STATE, "model"),
            ),
            makes="model",
            shows=("aux/corrections.json", *PROFILE),
            trains=True,
            continues_text=True,
        ),
        Stage(
            "distill",
            about="A student that learns a teacher's next-token distributions, or the answers of an endpoint.",
            version=1,
            config=DistillConfig,
            function="training.distill:train",
            measured_by="measure_distill",
            inputs=(
                needs("model"),
                may_have("teacher", "model"),
                needs("instructions"),
                may_have(STATE, "model"),
            ),
            makes="model",
            shows=("aux/corrections.json", *PROFILE),
            trains=True,
            continues_text=True,
        ),
        Stage(
            "rlhf",
            about="The instruction-tuned model, aligned by PPO, RLOO, GRPO, REINFORCE++ or RAFT against rewards.",
            version=7,
            config=RlhfConfig,
            function="training.rlhf:train",
            measured_by="measure_rlhf",
            inputs=(
                needs("model"),
                may_have("reward_model"),
                needs("prompts", "instructions"),
                may_have("judge", "reward_model"),
                may_have("rubric_judge", "model"),
                may_have("shards"),
                may_have("documents"),
                may_have(STATE, "model"),
            ),
            more=("reward_model",),
            makes="model",
            shows=PROFILE,
            trains=True,
            continues_text=True,
        ),
        Stage(
            "measure_pretrain",
            about="Loss, perplexity and bits per byte of a pretrained model on the validation text.",
            version=1,
            config=PretrainConfig,
            function="training.pretrain:measure_trained",
            inputs=(
                needs(TRAINED, "model"),
                needs("shards"),
                needs("tokenizer", "tokenizer", "model"),
                may_have("model"),
            ),
            makes="measurement",
            trains=True,
        ),
        Stage(
            "measure_sft",
            about="Held-out loss and answers of an instruction-tuned model and of the one that it was made from.",
            version=1,
            config=SftConfig,
            function="training.sft:measure_trained",
            inputs=(needs(TRAINED, "model"), needs("model"), needs("instructions")),
            makes="measurement",
            shows=("aux/samples.jsonl",),
            trains=True,
        ),
        Stage(
            "measure_reward_model",
            about="Accuracy and calibration of a reward model on held-out pairs.",
            version=1,
            config=RewardModelConfig,
            function="training.reward_model:measure_trained",
            inputs=(needs(TRAINED, "reward_model"), needs("model"), needs("preferences")),
            makes="measurement",
            trains=True,
        ),
        Stage(
            "measure_preference_tuning",
            about="Win rate, KL and answers of a model that was aligned on preference pairs.",
            version=1,
            config=PreferenceTuningConfig,
            function="training.preference_tuning:measure_trained",
            inputs=(
                needs(TRAINED, "model"),
                needs("model"),
                needs("preferences"),
                may_have("judge", "reward_model"),
            ),
            makes="measurement",
            shows=("aux/samples.jsonl",),
            trains=True,
        ),
        Stage(
            "measure_distill",
            about="Divergence of a distilled student and of the one that it was made from, from their teacher.",
            version=1,
            config=DistillConfig,
            function="training.distill:measure_trained",
            inputs=(needs(TRAINED, "model"), needs("model"), may_have("teacher", "model"), needs("instructions")),
            makes="measurement",
            shows=("aux/samples.jsonl",),
            trains=True,
        ),
        Stage(
            "measure_rlhf",
            about="Held-out rewards, KL and answers of an aligned model and of the one that it was made from.",
            version=1,
            config=RlhfConfig,
            function="training.rlhf:measure_trained",
            inputs=(
                needs(TRAINED, "model"),
                needs("model"),
                may_have("reward_model"),
                needs("prompts", "instructions"),
                may_have("judge", "reward_model"),
                may_have("rubric_judge", "model"),
                may_have("documents"),
            ),
            more=("reward_model",),
            makes="measurement",
            shows=("aux/samples.jsonl", "aux/episodes.html"),
            trains=True,
        ),
        Stage(
            "benchmarks",
            about="Scores of one model on lm-eval tasks.",
            version=9,
            config=BenchmarksConfig,
            function="evaluation.benchmarks:benchmarks",
            inputs=(needs("model"),),
            makes="scores",
            shows=("results.json",),
            continues_text=True,
            imports_later=("evaluation.harness.tasks",),
        ),
        Stage(
            "needle",
            about="Retrieval of numbers from long texts (needle in a haystack), by length and position.",
            version=1,
            config=NeedleConfig,
            function="evaluation.needle:needle",
            inputs=(needs("model"),),
            makes="scores",
            shows=("results.json",),
            continues_text=True,
        ),
        Stage(
            "safety",
            about="Toxicity, bias and memorisation of one model.",
            version=8,
            config=SafetyConfig,
            function="evaluation.safety.stage:safety",
            inputs=(needs("model"), may_have("shards")),
            makes="scores",
            shows=("results.json",),
            continues_text=True,
            imports_later=(
                "evaluation.safety.bias.pairs",
                "evaluation.safety.memorisation",
                "evaluation.safety.toxicity",
                "profanity_check",
            ),
        ),
        Stage(
            "mitigations",
            about="Effect and cost of mitigations of a model's toxicity.",
            version=4,
            config=MitigationsConfig,
            function="evaluation.mitigations:mitigations",
            inputs=(needs("model"), may_have("tuned", "model")),
            more=("model",),
            makes="scores",
            shows=("results.json", "aux/continuations.jsonl"),
            continues_text=True,
            imports_later=(
                "evaluation.harness.tasks",
                "evaluation.safety.toxicity",
                "profanity_check",
            ),
        ),
        Stage(
            "register",
            about="Gates, model card and registration of the final model.",
            version=9,
            config=RegisterConfig,
            function="evaluation.register:register",
            inputs=(needs("model"),),
            more=("model", "reward_model", "scores", "measurement"),
            makes="registration",
            registers="model",
            shows=("MODEL_CARD.md",),
            imports_later=(
                "evaluation.release.card",
                "evaluation.release.gates",
            ),
        ),
        Stage(
            "report",
            about="One page about the whole pipeline.",
            version=10,
            config=ReportConfig,
            function="evaluation.report:report",
            more=KINDS,
            makes="page",
            shows=("report.html",),
        ),
    )
}


INSTALLED = installed_stages(OUR_STAGES)

STAGES: dict[str, Stage] = {**OUR_STAGES, **INSTALLED.stages}


def usable_stages() -> dict[str, Stage]:
    """Stages that a step can use: all but measurements, which come with the steps that train."""
    return {name: stage for name, stage in STAGES.items() if stage.makes != "measurement"}


_TO_CLASSIFY = ("semantic_dedupe", "dedupe", "clean", "ingest")
_TO_MIX = ("generate", "classify", *_TO_CLASSIFY)
_DOCUMENTS = ("mix", "decontaminate", *_TO_MIX)
"""Steps that make documents, the last of the usual pipeline first."""
_BASE = ("pretrain", "base_model")
_TUNED = ("sft", *_BASE)
_EVALUATIONS = tuple(f"{stage}_{model}" for model in ("base", "sft", "rlhf") for stage in ("benchmarks", "safety"))

USUAL_STEPS: dict[str, UsualStep] = {
    step.id: step
    for step in (
        UsualStep("ingest"),
        UsualStep("validate", inputs={"data": ("ingest",)}, checks="documents"),
        UsualStep("clean", inputs={"documents": ("ingest",)}, requires=("validate",)),
        UsualStep("dedupe", inputs={"documents": ("clean", "ingest")}, requires=("validate",)),
        UsualStep("semantic_dedupe", inputs={"documents": _TO_CLASSIFY[1:]}, requires=("validate",)),
        UsualStep("classify", inputs={"documents": _TO_CLASSIFY}, requires=("validate",)),
        UsualStep("generate", inputs={"documents": _TO_MIX[1:]}, requires=("validate",)),
        UsualStep("benchmark_text"),
        UsualStep(
            "decontaminate",
            inputs={"documents": _TO_MIX, "benchmark_text": ("benchmark_text",)},
            requires=("validate",),
            adds="benchmark_text",
        ),
        UsualStep("mix", inputs={"documents": ("decontaminate", *_TO_MIX)}, requires=("validate",)),
        UsualStep("validate_clean", "validate", inputs={"data": _DOCUMENTS[:-1]}, checks="clean"),
        UsualStep("tokenizer", inputs={"documents": _DOCUMENTS}, requires=("validate_clean", "validate")),
        UsualStep(
            "shard",
            inputs={"documents": _DOCUMENTS, "tokenizer": ("tokenizer",)},
            requires=("validate_clean", "validate"),
        ),
        UsualStep("validate_shards", "validate", inputs={"data": ("shard",)}, checks="shards"),
        UsualStep("corpus_report", inputs={name: (name,) for name in CORPUS_STEPS}, needs=("ingest",)),
        UsualStep(
            "pretrain", inputs={"shards": ("shard",), "tokenizer": ("tokenizer",)}, requires=("validate_shards",)
        ),
        UsualStep("base_model", instead_of="pretrain"),
        UsualStep(
            "instructions",
            inputs={"benchmark_text": ("benchmark_text",)},
            only_if={"benchmark_text": "decontaminate"},
        ),
        UsualStep("validate_instructions", "validate", inputs={"data": ("instructions",)}, checks="instructions"),
        UsualStep(
            "sft",
            inputs={"model": _BASE, "instructions": ("instructions",), "shards": ("shard",)},
            only_if={"shards": "text_share"},
            requires=("validate_instructions",),
        ),
        UsualStep(
            "preferences",
            inputs={"benchmark_text": ("benchmark_text",)},
            only_if={"benchmark_text": "decontaminate"},
        ),
        UsualStep("validate_preferences", "validate", inputs={"data": ("preferences",)}, checks="preferences"),
        UsualStep(
            "reward_model",
            inputs={"model": ("sft",), "preferences": ("preferences",)},
            requires=("validate_preferences",),
        ),
        UsualStep(
            "rlhf",
            inputs={
                "model": ("sft",),
                "reward_model": ("reward_model",),
                "prompts": ("instructions",),
                "shards": ("shard",),
            },
            only_if={"shards": "text_coef"},
            needs=("reward_model",),
            from_step={"judge": "reward_model"},
        ),
        UsualStep("benchmarks_base", "benchmarks", inputs={"model": _BASE}),
        UsualStep("safety_base", "safety", inputs={"model": _BASE, "shards": ("shard",)}),
        UsualStep("benchmarks_sft", "benchmarks", inputs={"model": ("sft",)}),
        UsualStep("safety_sft", "safety", inputs={"model": ("sft",), "shards": ("shard",)}),
        UsualStep("benchmarks_rlhf", "benchmarks", inputs={"model": ("rlhf",)}),
        UsualStep("safety_rlhf", "safety", inputs={"model": ("rlhf",), "shards": ("shard",)}),
        UsualStep(
            "register",
            inputs={"model": ("rlhf", *_TUNED)},
            further=(*_BASE, "sft", "reward_model", *_EVALUATIONS),
        ),
        UsualStep("report", reads_all=True),
    )
}
"""The usual pipeline: the steps that the sections of a config add, in the order in which the text flows."""

SECTIONS: dict[str, Stage] = {
    name: stage for name, stage in OUR_STAGES.items() if any(step.section == name for step in USUAL_STEPS.values())
}
"""Stages with a section in the config, in the order of their declarations."""
