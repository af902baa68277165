"""What a person may set for the training stages; every default names its source."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Config, StageConfig, outside_identity
from infra.errors import Problem
from infra.sources import Source, SourcePath, expand
from training.duration import Length, LengthOrShare, parse_duration
from training.presets import PRESETS, Family, Preset

_SIZES = ("layers", "width", "heads")


class ModelConfig(Config):
    """A decoder-only model: a preset by name, a family with sizes, or any transformers config.

    Sizes next to a preset replace the preset's.
    """

    preset: str | None = None
    """A size by name: gpt-125m, gpt-350m, gpt-760m, gpt-1.3b (GPT-3, table 2.1), or llama-4m, llama-nano (ours)."""
    family: Family | None = None
    """Architecture: gpt2 (learned positions, LayerNorm, GELU) or llama (rotary positions, RMSNorm, SwiGLU)."""
    layers: int | None = Field(None, ge=1)
    """Transformer blocks."""
    width: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    heads: int | None = Field(None, ge=1)
    """Attention heads; must divide the width."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention, llama only); by default as many as heads."""
    mlp_width: int | None = Field(None, ge=1)
    """Inner width of the MLP; by default 4 times the width for gpt2, 8/3 times for llama (Shazeer 2020)."""
    positions: int | None = Field(None, ge=1)
    """Longest sequence the model takes; 2,048 in GPT-3 (section 2.1)."""
    tie_embeddings: bool = True
    """Whether the output layer shares the input embedding (Press & Wolf 2017; GPT-2)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on attention, residuals and embeddings (gpt2), on attention (llama); 0 for one pass over the data."""
    transformers: dict[str, Any] | None = None
    """Any transformers config as a mapping with `model_type`, e.g. {model_type: mistral, hidden_size: 512, …}."""

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
        if shape.family == "llama" and shape.width // shape.heads % 2:
            raise ValueError(f"expected an even width a head for rotary positions, not {shape.width // shape.heads}")
        return self

    def shape(self) -> Preset:
        """The sizes with the preset filled in; raises ValueError for a free transformers config."""
        if self.transformers is not None:
            raise ValueError("a free transformers config has no shape of ours")
        base = PRESETS.get(self.preset or "")
        # A preset's MLP width belongs to its own width.
        same_width = base is not None and self.width in (None, base.width)
        return Preset(
            family=self.family or (base.family if base else "llama"),
            layers=self.layers or (base.layers if base else 0),
            width=self.width or (base.width if base else 0),
            heads=self.heads or (base.heads if base else 0),
            positions=self.positions or (base.positions if base else 2048),
            parameters=base.parameters if base else 0,
            mlp_width=self.mlp_width or (base.mlp_width if base and same_width else None),
        )

    def longest_sequence(self) -> int | None:
        """Positions the model has, where the config alone can tell."""
        if self.transformers is None:
            return self.shape().positions
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
    """Decay of matrices; norms, biases and embeddings have none. 0.1 in GPT-3, appendix B."""
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

    decay: Literal["cosine", "linear", "constant", "inverse_sqrt"] = "cosine"
    """What follows the warm-up; cosine in GPT-3, appendix B."""
    warmup: LengthOrShare = "1 %"
    """Length of the linear warm-up, or its percentage of training; 1 % in Mosaic LLMs (Part 1)."""
    final_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end as a share of the peak; 0.1 in GPT-3, appendix B."""


class TrainerConfig(StageConfig):
    """What all training stages share."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    seed: int = 17
    """Seeds initial weights, data order, dropout and sampling."""
    checkpoint_every: Length = outside_identity("200 batches")
    """How often a checkpoint is written to the work folder, from which a killed run continues."""


class PretrainConfig(TrainerConfig):
    """Next-token pretraining on packed shards."""

    model: ModelConfig = ModelConfig(preset="gpt-125m")
    """The model to train from scratch."""
    duration: Length = "2_500_000_000 tokens"
    """Length of training; 20 tokens a parameter (Chinchilla, section 3), here for 125M parameters."""
    global_batch_tokens: int = Field(524_288, ge=1)
    """Tokens of one optimizer step over all devices; 0.5M for GPT-3 up to 760M parameters (table 2.1)."""
    evaluate_every: Length = outside_identity("200 batches")
    """How often the validation loss is measured during training; the weights do not depend on it."""
    evaluate_tokens: int = outside_identity(65_536, ge=1)
    """Validation tokens of each such measurement; the figure at the end uses all of them."""

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
    heldout_prompts: int = Field(256, ge=2)
    """Held-out prompts that both policies answer at the end, the first of the file."""
    checkpoint_every: Length = outside_identity("50 batches")
    """How often a checkpoint is written to the work folder, from which a killed run continues."""

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Self:
        if self.rollout_prompts % self.minibatch_answers:
            raise ValueError(
                f"expected minibatch_answers to divide rollout_prompts: {self.minibatch_answers} does not divide "
                f"{self.rollout_prompts}"
            )
        return self


def batches(length: str, *, batch_tokens: int = 1, epoch_batches: int = 1, whole: int = 0) -> int:
    """A length from a config in batches, at least one."""
    duration = parse_duration(length)
    return max(1, duration.batches(batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=whole))
