"""What a person may set for the training stages; every default names its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from evaluation.config import TaskByName
from infra.config import Config, StageConfig, outside_identity
from infra.errors import Problem
from infra.sources import Source, SourcePath, absolute, expand
from training.batch_size import Growth
from training.duration import Length, LengthOrShare, parse_duration
from training.guard.config import GuardConfig
from training.presets import PRESETS, Family, Preset

_SIZES = ("layers", "width", "heads")
# What a config.json says of its tokenizer, its weights and its writer, and not of the architecture.
_NOT_OF_THE_ARCHITECTURE = {
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "architectures", "torch_dtype", "dtype",
    "transformers_version", "_name_or_path", "auto_map",
}  # fmt: skip


def _read_config(value: Any, info: ValidationInfo) -> Any:
    """The mapping itself, or what stands in the config.json that a path leads to."""
    if not isinstance(value, str):
        return value
    path = Path(absolute(value, info))
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a mapping, or a folder with config.json; {path}: {error}") from None
    return {key: item for key, item in found.items() if key not in _NOT_OF_THE_ARCHITECTURE}


TransformersConfig = Annotated[
    dict[str, Any] | None, BeforeValidator(_read_config, json_schema_input_type=dict[str, Any] | str | None)
]


class ModelConfig(Config):
    """A model: a preset by name, a family with sizes, or any transformers config.

    Sizes next to a preset replace the preset's.
    """

    preset: str | None = None
    """A size by name: gpt-125m, gpt-350m, gpt-760m, gpt-1.3b (GPT-3, table 2.1), gpt2, gpt2-medium, gpt2-large, gpt2-xl
    (GPT-2, table 2), smollm-135m, smollm-360m, tinyllama-1.1b, llama-3.2-1b, llama-2-7b (as released), or llama-4m,
    llama-nano (ours); for the objective masked bert-base, bert-large (BERT, section 3) or bert-nano, for
    span_corruption t5-small, t5-base (T5, section 3.7) or t5-nano."""
    family: Family | None = None
    """Architecture: gpt2 (learned positions, LayerNorm, GELU), llama (rotary positions, RMSNorm, SwiGLU), bert (an
    encoder, norms after the residuals) or t5 (encoder and decoder, relative positions)."""
    layers: int | None = Field(None, ge=1)
    """Transformer blocks; of t5 on each side."""
    width: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    heads: int | None = Field(None, ge=1)
    """Attention heads; must divide the width."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention, llama only); by default the preset's, or as many as heads."""
    mlp_width: int | None = Field(None, ge=1)
    """Inner width of the MLP; by default 4 times the width, for llama 8/3 times (Shazeer 2020)."""
    positions: int | None = Field(None, ge=1)
    """Longest sequence the model takes; 2,048 in GPT-3 (section 2.1)."""
    tie_embeddings: bool | None = None
    """Whether the output layer shares the input embedding (Press & Wolf 2017; GPT-2); by default as in the preset, and
    shared without one."""
    init: Literal["gpt2", "plain", "small", "fan_in"] = "gpt2"
    """Fresh weights. gpt2: N(0, init_std²), residual projections divided by sqrt(2 × layers) (GPT-2, section 2.3).
    plain: N(0, init_std²) throughout (BERT). small: N(0, 2/(5 × width)) (Nguyen & Salazar 2019, section 2.2), residual
    projections N(0, (2/(layers × sqrt(width)))²) (Wang & Komatsuzaki 2021), as in GPT-NeoX-20B. fan_in: N(0, 1/fan-in),
    residual projections divided by sqrt(2 × layers), an untied output layer zero (Yang et al. 2022, appendix D.2). A t5
    has T5's own and takes no other."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of gpt2 and plain; 0.02 in GPT-2 and BERT, 0.006 in OPT (section 2.1)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on attention, residuals and embeddings (gpt2, bert, t5), on attention (llama); 0 for one pass over the
    data."""
    transformers: TransformersConfig = None
    """Any transformers config: a mapping with `model_type`, e.g. {model_type: mistral, hidden_size: 512, …}, or a
    folder with config.json, whose text and not its place bears on identity; token ids come from the tokenizer."""

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"expected one of {', '.join(PRESETS)}")
        return name

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if self.transformers is not None:
            if (
                self.preset
                or self.family
                or any(getattr(self, size) for size in (*_SIZES, "kv_heads", "mlp_width", "positions"))
            ):
                raise ValueError("expected `transformers` alone, or a preset or family with sizes, not both")
            if not isinstance(self.transformers.get("model_type"), str):
                raise ValueError("expected `model_type` in `transformers`, such as llama or gpt2")
            return self
        if self.preset is None:
            missing = [name for name in ("family", *_SIZES) if getattr(self, name) is None]
            if missing:
                raise ValueError(
                    f"expected a preset, or family with layers, width and heads ({', '.join(missing)} missing)"
                )
        shape = self.shape()
        if shape.width % shape.heads:
            raise ValueError(f"expected heads to divide width: {shape.heads} heads do not divide {shape.width}")
        if self.kv_heads and shape.family != "llama":
            raise ValueError("expected kv_heads only with the llama family")
        if self.kv_heads and shape.heads % self.kv_heads:
            raise ValueError(f"expected kv_heads to divide heads: {self.kv_heads} do not divide {shape.heads}")
        if shape.family == "t5" and self.init != "gpt2":
            raise ValueError("expected init left out: a t5 has its own")
        if shape.family == "llama" and shape.width // shape.heads % 2:
            raise ValueError(f"expected an even width a head for rotary positions, not {shape.width // shape.heads}")
        return self

    def shape(self) -> Preset:
        """The sizes with the preset filled in; raises ValueError for a free transformers config."""
        if self.transformers is not None:
            raise ValueError("a free transformers config has no shape of ours")
        base = PRESETS.get(self.preset or "")
        # A preset's inner sizes belong to its own width and heads.
        same_width = base is not None and self.width in (None, base.width)
        same_heads = base is not None and self.heads in (None, base.heads)
        return Preset(
            family=self.family or (base.family if base else "llama"),
            layers=self.layers or (base.layers if base else 0),
            width=self.width or (base.width if base else 0),
            heads=self.heads or (base.heads if base else 0),
            positions=self.positions or (base.positions if base else 2048),
            parameters=base.parameters if base else 0,
            mlp_width=self.mlp_width or (base.mlp_width if base and same_width else None),
            kv_heads=self.kv_heads or (base.kv_heads if base and same_heads else None),
            tied=(base is None or base.tied) if self.tie_embeddings is None else self.tie_embeddings,
        )

    def architecture(self) -> str:
        """The model type, as transformers names it."""
        return str(self.transformers["model_type"]) if self.transformers is not None else self.shape().family

    def longest_sequence(self) -> int | None:
        """Positions the model has, where the config alone can tell; T5's relative ones have no end."""
        if self.transformers is None:
            shape = self.shape()
            return None if shape.family == "t5" else shape.positions
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(self.transformers.get(key), int):
                return int(self.transformers[key])
        return None


class OptimizerConfig(Config):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019)."""

    learning_rate: float = Field(6.0e-4, gt=0)
    """Peak learning rate; 6.0e-4 for GPT-3 125M (table 2.1)."""
    embedding_scale: float = Field(1.0, gt=0)
    """Learning rate of embeddings and output layer as a multiple of the others'; 1 in GPT-3. The rate of matrices falls
    with width, that of embeddings need not (Yang et al. 2022, table 3)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments; GPT-3, appendix B."""
    eps: float = Field(1.0e-8, gt=0)
    """Added to the denominator; GPT-3, appendix B."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of what `decayed` names. 0.1 in GPT-3, appendix B."""
    decayed: tuple[Literal["matrices", "embeddings", "norms", "biases"], ...] = ("matrices",)
    """What decays: matrices between layers, embeddings (with the output layer), weights of norms, biases. Decayed norms
    and biases only lose what they learnt; embeddings decay in GPT-2 and GPT-NeoX, not in OLMo 2 (section 3.3)."""
    gradient_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm; GPT-3, appendix B."""

    @field_validator("betas")
    @classmethod
    def _betas_are_shares(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("expected two numbers of at least 0 and below 1")
        return betas


class ScheduleConfig(Config):
    """The learning rate over training: linear warm-up, then a decay."""

    decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    """What follows the warm-up; cosine in GPT-3, appendix B. wsd (warm-up, stable, decay) stays at the peak and falls
    at the very end, so that a longer training can branch off (Hu et al. 2024, section 4)."""
    warmup: LengthOrShare = "1 %"
    """Length of the linear warm-up, or its percentage of training; 1 % in Mosaic LLMs (Part 1)."""
    final_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end as a share of the peak; 0.1 in GPT-3, appendix B."""
    decay_length: LengthOrShare = "10 %"
    """Length of wsd's fall at the end; 10 % in MiniCPM (Hu et al. 2024, section 4.2)."""


class TrainerConfig(StageConfig):
    """What all training stages share."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    guard: GuardConfig = GuardConfig()
    """Watches for spikes and divergence, and answers them."""
    seed: int = 17
    """Seeds initial weights, data order, dropout and sampling."""
    checkpoint_every: Length = outside_identity("200 batches")
    """How often a checkpoint is written to the work folder, from which a killed run continues."""
    keep_checkpoints: int = outside_identity(2, ge=1)
    """The newest so many checkpoints stay."""
    keep_checkpoints_hours: float = outside_identity(0.0, ge=0)
    """Older checkpoints stay too until they are so many hours old."""


class BatchWarmup(Config):
    """Batches that grow in equal steps to `global_batch_tokens` (GPT-3, section 2.3; Smith et al. 2018)."""

    first_tokens: int = Field(32_768, ge=1)
    """Tokens of the first batch, and of each step; 32k in GPT-3, section 2.3."""
    over_tokens: int = Field(4_000_000_000, ge=1)
    """Tokens over which batches grow, in the first epoch; 4 to 12 billion in GPT-3, section 2.3."""


class PretrainConfig(TrainerConfig):
    """Pretraining on packed shards."""

    objective: Literal["causal", "masked", "prefix", "span_corruption"] = "causal"
    """What is learnt. causal: the next token (GPT-3). masked: 15 % of the tokens, hidden, from both sides (Devlin et
    al. 2018, section 3.1), with a bert model. prefix: each document's rest from a beginning that is seen in both
    directions (Raffel et al. 2020, section 3.2; Wang et al. 2022), with any causal model. span_corruption: 15 % of the
    tokens in spans of 3 on average, written by a decoder (Raffel et al. 2020, section 3.1.4), with a t5 model."""
    model: ModelConfig = ModelConfig(preset="gpt-125m")
    """The model to train from scratch."""
    duration: Length = "2_500_000_000 tokens"
    """Length of training; 20 tokens a parameter (Chinchilla, section 3), here for 125M parameters."""
    global_batch_tokens: int = Field(524_288, ge=1)
    """Tokens of one optimizer step over all devices; 0.5M for GPT-3 up to 760M parameters (table 2.1)."""
    batch_warmup: BatchWarmup | None = None
    """Smaller batches at first; none by default, as in OPT and Llama."""
    attention: Literal["document", "sequence"] = "document"
    """How far a token looks back in a packed sequence: to its document's beginning, with positions counted from there
    (as Llama 3, section 3.2), or to the sequence's (GPT-3, section 2.2)."""
    evaluate_every: Length = outside_identity("200 batches")
    """How often the validation loss is measured during training; the weights do not depend on it."""
    evaluate_tokens: int = outside_identity(65_536, ge=1)
    """Validation tokens of each such measurement; the figure at the end uses all of them."""

    evaluate_tasks: tuple[TaskByName, ...] = outside_identity(())
    """Benchmarks that are taken during training as well, as in `benchmarks.tasks`; only with one process."""
    evaluate_limit: int = outside_identity(50, ge=1)
    """Items of each of these benchmarks, the first of the file."""
    sample_prompts: tuple[str, ...] = outside_identity(("", "The "))
    """Prompts that the model continues at each evaluation; "" asks for a text from nothing."""
    sample_tokens: int = outside_identity(32, ge=1)
    """Longest such continuation."""

    @model_validator(mode="after")
    def _model_fits_the_objective(self) -> Self:
        wanted = {"masked": "bert", "span_corruption": "t5"}.get(self.objective)
        found = self.model.architecture()
        if wanted and found != wanted:
            raise ValueError(
                f"expected a {wanted} model for the objective {self.objective}, such as {wanted}-nano, not {found}"
            )
        if not wanted and found in ("bert", "t5"):
            objective = "masked" if found == "bert" else "span_corruption"
            raise ValueError(f"expected objective: {objective} with a {found} model, not {self.objective}")
        if wanted and self.evaluate_tasks:
            raise ValueError(f"expected no evaluate_tasks with the objective {self.objective}: they need causal models")
        if self.objective == "span_corruption" and self.attention == "document":
            raise ValueError(
                "expected attention: sequence with the objective span_corruption: T5's encoder sees all of a sequence"
            )
        return self

    def continues_text(self) -> bool:
        """Whether later stages can use the model as a causal one."""
        return self.objective in ("causal", "prefix")

    def problems(self, sequence_length: int, vocab_size: int | None = None) -> list[Problem]:
        """What does not fit sequences of this length or token ids below `vocab_size`; empty if all does."""
        found = []
        if self.global_batch_tokens % sequence_length:
            lower = max(1, self.global_batch_tokens // sequence_length) * sequence_length
            found.append(
                Problem(
                    "not_divisible",
                    "pretrain.global_batch_tokens",
                    f"expected a multiple of the sequence length {sequence_length}, not {self.global_batch_tokens}",
                    f"the nearest below is {lower}",
                )
            )
        if self.batch_warmup is not None:
            first = self.batch_warmup.first_tokens
            if first % sequence_length or self.global_batch_tokens % first:
                found.append(
                    Problem(
                        "not_divisible",
                        "pretrain.batch_warmup.first_tokens",
                        f"expected a multiple of the sequence length {sequence_length} that divides "
                        f"global_batch_tokens {self.global_batch_tokens}, not {first}",
                        "such as a half, a quarter, an eighth of global_batch_tokens",
                    )
                )
        positions = self.model.longest_sequence()
        if positions is not None and positions < sequence_length:
            found.append(
                Problem(
                    "too_few_positions",
                    "pretrain.model.positions",
                    f"expected at least the sequence length {sequence_length}, not {positions}",
                    "raise positions, or shorten shard.sequence_length",
                )
            )
        given = (self.model.transformers or {}).get("vocab_size")
        if vocab_size is not None and isinstance(given, int) and given < vocab_size:
            found.append(
                Problem(
                    "vocabulary_too_small",
                    "pretrain.model.transformers.vocab_size",
                    f"expected at least the tokenizer's {vocab_size} ids, not {given}",
                    "leave vocab_size out, and it is taken from the tokenizer",
                )
            )
        return found


class BaseModelConfig(StageConfig):
    """An existing Hugging Face model folder to start from instead of pretraining."""

    path: SourcePath = outside_identity()
    """Folder with config.json, *.safetensors and the tokenizer files; pickled weights are refused."""
    seed: int = 17
    """Seeds the embeddings of chat tokens that the model does not have yet."""

    def sources(self) -> list[Source]:
        return [Source("base_model.path", expand([self.path]))]


class SftConfig(TrainerConfig):
    """Supervised fine-tuning on instruction and response pairs; the loss is on the response alone."""

    duration: Length = "3 epochs"
    """Length of training; 2 to 4 epochs are usual (LIMA and Alpaca: 15 and 3; InstructGPT, section 3.5: 16, overfitting
    after the first)."""
    global_batch_examples: int = Field(32, ge=1)
    """Pairs of one optimizer step; 32 in InstructGPT, appendix C.1."""
    max_length: int = Field(1024, ge=8)
    """Longest conversation in tokens; longer prompts are cut at the front, longer responses at the end."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """Learning rate 9.65e-6 for 1.3B in InstructGPT, appendix C.1; small models want more."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """Cosine to 10 % of the peak as in InstructGPT, appendix C.1; warm-up 3 % as in Alpaca."""
    answer_max_tokens: int = Field(64, ge=1)
    """Longest greedy answer when held-out prompts are answered."""
    heldout_limit: int = Field(500, ge=2)
    """Held-out pairs that are measured, the first of the file."""
    answers_limit: int = Field(128, ge=2)
    """Held-out prompts that are answered, for the share of finished answers and the samples."""


class RewardModelConfig(TrainerConfig):
    """A reward model from pairs of a chosen and a rejected answer (Bradley & Terry 1952; InstructGPT, section 3.5)."""

    duration: Length = "1 epoch"
    """Length of training; one epoch in InstructGPT, appendix C.2: more overfits."""
    global_batch_pairs: int = Field(64, ge=1)
    """Pairs of one optimizer step; 64 prompts in InstructGPT, appendix C.2."""
    max_length: int = Field(1024, ge=8)
    """Longest conversation in tokens."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=9.0e-6, weight_decay=0.0)
    """Learning rate 9e-6 in InstructGPT, appendix C.2, for 6B; small models want more."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """Cosine to 10 % of the peak, InstructGPT, appendix C.2."""
    heldout_limit: int = Field(1000, ge=2)
    """Held-out pairs that are measured, the first of the file."""


class RlhfConfig(TrainerConfig):
    """PPO against a reward model with a KL penalty to the SFT model (Ziegler et al. 2019; InstructGPT, section 3.5)."""

    rollouts: int = Field(100, ge=1)
    """Rounds of sampling answers and learning from them."""
    rollout_prompts: int = Field(512, ge=1)
    """Answers sampled in each round; batch size 512 in InstructGPT, appendix C.4."""
    minibatch_answers: int = Field(64, ge=1)
    """Answers of one optimizer step; 64 in InstructGPT, appendix C.4."""
    epochs: int = Field(1, ge=1)
    """Passes over each round's answers; 1 in InstructGPT, appendix C.4, 4 in Ziegler et al. 2019."""
    max_prompt_tokens: int = Field(512, ge=4)
    """Prompts with more tokens are left out."""
    answer_max_tokens: int = Field(64, ge=1)
    """Longest sampled answer."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of policy and reference; 1 in InstructGPT, appendix C.4."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL penalty; 0.02 in InstructGPT, section 3.5, 0.05 in Stiennon et al. 2020."""
    kl_target: float | None = Field(None, gt=0)
    """KL an answer (nats) that an adaptive kl_coef aims at (Ziegler et al. 2019, section 2.2); None: fixed."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount; none in InstructGPT, appendix C.4."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation (Schulman et al. 2016); 0.95 in Ziegler et al. 2019."""
    clip_ratio: float = Field(0.2, gt=0)
    """Clipping of the probability ratio (Schulman et al. 2017); 0.2 in InstructGPT, appendix C.4."""
    clip_value: float = Field(0.2, gt=0)
    """Clipping of the value estimate; 0.2 in Ziegler et al. 2019's code."""
    value_coef: float = Field(0.1, ge=0)
    """Weight of the value loss; 0.1 in Ziegler et al. 2019's code."""
    unfinished_penalty: float = Field(1.0, ge=0)
    """Taken from the reward of an answer without an end ("N implementation details of RLHF", section 4.3)."""
    normalise_reward: bool = True
    """Whether rewards are shifted and scaled by the SFT model's mean and spread ("N implementation details", 4.4)."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """Learning rate 9.65e-6 for 1.3B in InstructGPT, appendix C.4; small models want more."""
    schedule: ScheduleConfig = ScheduleConfig(decay="constant", warmup="3 %")
    """Constant after a short warm-up, InstructGPT, appendix C.4."""
    guard: GuardConfig = GuardConfig(enabled=False)
    """Not for PPO, whose loss is no measure of its success: the KL penalty holds it."""
    heldout_prompts: int = Field(256, ge=2)
    """Held-out prompts that both policies answer at the end, the first of the file."""
    checkpoint_every: Length = outside_identity("50 batches")
    """How often a checkpoint is written to the work folder, from which a killed run continues."""

    @field_validator("guard")
    @classmethod
    def _no_guard(cls, guard: GuardConfig) -> GuardConfig:
        if guard.enabled:
            raise ValueError("expected enabled: false: the guard watches losses, and PPO's says nothing")
        return guard

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Self:
        if self.rollout_prompts % self.minibatch_answers:
            raise ValueError(
                f"expected minibatch_answers to divide rollout_prompts: {self.minibatch_answers} does not divide "
                f"{self.rollout_prompts}"
            )
        return self


def batches(
    length: str, *, batch_tokens: int = 1, epoch_batches: int = 1, whole: int = 0, growth: Growth | None = None
) -> int:
    """A length from a config in batches, at least one. growth: counts from the first batch on while batches grow."""
    duration = parse_duration(length)
    if growth is not None and duration.unit in ("tokens", "epochs"):
        return max(1, growth.length(duration, batch_tokens))
    return max(1, duration.batches(batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=whole))
