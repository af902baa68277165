"""Config of pretraining, or of a model to start from; every default names its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from evaluation.config import TaskByName
from infra.config import Config, Seed, StageConfig, is_group, measured_only, outside_identity
from infra.errors import Problem
from infra.io.sources import Source, SourcePath, expand
from training.config.duration import Length, parse_duration
from training.config.families import LEARNED_POSITIONS, documents_problem
from training.config.mixture import MixtureConfig, phase_problem
from training.config.model import ModelConfig
from training.config.recipes import RECIPES, with_recipe
from training.config.rope import RopeConfig
from training.config.trainer import TrainerConfig, batches

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal[tuple(RECIPES)]


class BatchWarmup(Config):
    """Batches that grow in equal steps to `global_batch_tokens` (GPT-3, section 2.3; Smith et al. 2018)."""

    first_tokens: int = Field(32_768, ge=1)
    """Tokens of the first batch, and of each step; 32k in GPT-3, section 2.3."""
    over_tokens: int = Field(4_000_000_000, ge=1)
    """Tokens over which batches grow, in the first epoch; 4 to 12 billion in GPT-3, section 2.3."""


class PretrainConfig(TrainerConfig):
    """Pretraining on packed shards."""

    recipe: RecipeName | None = outside_identity(None)
    """A published recipe that sets the keys which this config does not: model, duration, batch, optimizer and schedule
    of GPT-3 (gpt3-125m to gpt3-175b; Brown et al. 2020, table 2.1 and appendix B), MosaicML's first (mosaic-350m),
    GPT-NeoX-20B and OPT-175B. Its settings are part of the identity, its name is not."""

    objective: Literal["causal", "masked", "prefix", "span_corruption"] = "causal"
    """Training objective. causal: the next token (GPT-3). masked: 15 % of the tokens, hidden, from both sides (Devlin
    et al. 2018, section 3.1), with a bert model. prefix: the rest of each document, after a beginning that is attended
    to in both directions (Raffel et al. 2020, section 3.2; Wang et al. 2022), with any causal model. span_corruption:
    15 % of the tokens in spans of 3 on average, written by a decoder (Raffel et al. 2020, section 3.1.4), with a t5
    model."""
    model: ModelConfig = ModelConfig(preset="gpt-125m")
    """The model to train from scratch. Leave it out in a step that continues from another step's model (its input
    `model`)."""
    rope: RopeConfig | None = None
    """Context extension: longer rotary positions for the input `model`, before training continues. Its shards are
    packed to the new length. null: keep the model's positions."""
    duration: Length = "2_500_000_000 tokens"
    """Length of training; 20 tokens per parameter (Chinchilla, section 3), here for 125M parameters."""
    global_batch_tokens: int = Field(524_288, ge=1)
    """Tokens of one optimizer step over all devices; 0.5M for GPT-3 up to 760M parameters (table 2.1)."""
    batch_warmup: BatchWarmup | None = None
    """Batch size ramp-up; none by default, as in OPT and Llama."""
    mixture: MixtureConfig | None = None
    """Amount to read of each source of the shards, and when, with shards that are packed `by_source`. By default all
    training text once per epoch, in the shards' order. Another mixture needs no new shards."""
    shuffle_block: int = Field(4_000_000, ge=1)
    """Sequences (of each source) over which they are shuffled; the default is streaming's. Remote shards in a bounded
    cache need a smaller value: 1.25 times this number of sequences are in use at once."""
    attention: Literal["document", "sequence"] | None = None
    """Range of attention in a packed sequence: document, to the beginning of the token's document, with positions
    counted from there (as Llama 3, section 3.2), or sequence, to the beginning of the sequence (GPT-3, section 2.2). By
    default sequence in causal families with learned positions (gpt2, opt), whose far positions would otherwise be
    trained by long documents alone, and document in all others."""
    evaluate_every: Length = outside_identity("200 batches")
    """Interval between measurements of the validation loss during training; the weights do not depend on it."""
    evaluate_tokens: int = outside_identity(65_536, ge=1)
    """Validation tokens per measurement, spread over the validation side."""
    validation_tokens: int = measured_only(8_000_000, ge=1)
    """Validation tokens of the figures at the end, spread over the validation side and shared by the ranks; and
    training tokens that unigram and bigram baselines are counted on. The weights do not depend on it."""

    evaluate_tasks: tuple[TaskByName, ...] = outside_identity(())
    """Benchmarks to run during training as well, as in `benchmarks.tasks`. With several ranks, the first runs them
    while the others wait, for less than `launch.hang_s`; with sharded weights, layers or sequences, on a copy of the
    full model on its device."""
    evaluate_limit: int = outside_identity(50, ge=1)
    """Maximum number of items of each of these benchmarks, from the beginning of the file."""
    sample_prompts: tuple[str, ...] = outside_identity(("", "The "))
    """Prompts that the model continues at each evaluation; "" samples unconditionally."""
    sample_tokens: int = outside_identity(32, ge=1)
    """Maximum length of such a continuation in tokens."""

    @model_validator(mode="before")
    @classmethod
    def _fill_recipe(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("recipe"), str):
            return given
        # An empty group sets nothing, where null for a key that may be none takes the recipe's away.
        groups = {name for name, field in cls.model_fields.items() if is_group(field.annotation)}
        return with_recipe({key: value for key, value in given.items() if value is not None or key not in groups})

    @model_validator(mode="after")
    def _model_fits_the_objective(self) -> Self:
        required = {"masked": "bert", "span_corruption": "t5"}.get(self.objective)
        architecture = self.model.architecture()
        if required and architecture != required:
            raise ValueError(
                f"expected a {required} model for the objective {self.objective}, such as {required}-nano, "
                f"not {architecture}"
            )
        if not required and architecture in ("bert", "t5"):
            objective = "masked" if architecture == "bert" else "span_corruption"
            raise ValueError(f"expected objective: {objective} with a {architecture} model, not {self.objective}")
        if required and self.evaluate_tasks:
            raise ValueError(f"expected no evaluate_tasks with the objective {self.objective}: they need causal models")
        return self

    @model_validator(mode="after")
    def _model_fits_mup(self) -> Self:
        if self.optimizer.mup_base_width is None:
            return self
        if self.model.init == "small":
            raise ValueError(
                "optimizer.mup_base_width: expected model.init gpt2, plain or fan_in, whose spread µP knows"
            )
        if self.model.transformers is None and self.model.shape().tied:
            raise ValueError(
                "optimizer.mup_base_width: expected model.tie_embeddings: false; embedding and output layer have "
                "separate learning rates in µP"
            )
        return self

    def within_documents(self, architecture: str = "") -> bool:
        """Return True if attention stays within documents.

        Args:
            architecture: of the model at hand, if it is another's.
        """
        if self.attention is None:
            return (architecture or self.model.architecture()) not in LEARNED_POSITIONS
        return self.attention == "document"

    def continues_text(self) -> bool:
        """Return True if later stages can use the model as a causal one."""
        return self.objective in ("causal", "prefix")

    def problems_of_continuing(self) -> list[Problem]:
        """Return the settings that a pretraining cannot have if it continues from another step's model."""
        problems = []
        if not self.continues_text():
            message = f"a pretraining that continues a model has causal or prefix, not {self.objective}"
            problems.append(Problem("contradiction", "pretrain.objective", message, "leave the input model out"))
        if self.model != type(self).model_fields["model"].default:
            message = "the model comes from the input model, and cannot be described here as well"
            problems.append(Problem("contradiction", "pretrain.model", message, "leave model or the input out"))
        return problems

    def problems(
        self, sequence_length: int, vocab_size: int | None = None, *, continues: bool = False
    ) -> list[Problem]:
        """Return what does not fit sequences of this length or token ids below `vocab_size`; empty if all does.

        Args:
            continues: the model is that of another step, of which nothing is known here.
        """
        problems = []
        if self.global_batch_tokens % sequence_length:
            lower = max(1, self.global_batch_tokens // sequence_length) * sequence_length
            problems.append(
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
                problems.append(
                    Problem(
                        "not_divisible",
                        "pretrain.batch_warmup.first_tokens",
                        f"expected a multiple of the sequence length {sequence_length} that divides "
                        f"global_batch_tokens {self.global_batch_tokens}, not {first}",
                        "such as a half, a quarter, an eighth of global_batch_tokens",
                    )
                )
        problems += self._phases_out_of_order()
        if continues:
            return problems
        if self.rope:
            message = "extends the positions of an input model, and there is none"
            fix = "give the input model, or set model.positions for a fresh one"
            problems.append(Problem("contradiction", "pretrain.rope", message, fix))
        positions = self.model.longest_sequence()
        if positions is not None and positions < sequence_length:
            problems.append(
                Problem(
                    "too_few_positions",
                    "pretrain.model.positions",
                    f"expected at least the sequence length {sequence_length}, not {positions}",
                    "raise positions, or shorten shard.sequence_length",
                )
            )
        if self.objective == "prefix" or (self.objective == "causal" and self.within_documents()):
            problems += [problem] if (problem := documents_problem(self.model.architecture())) else []
        given = (self.model.transformers or {}).get("vocab_size")
        if vocab_size is not None and isinstance(given, int) and given < vocab_size:
            problems.append(
                Problem(
                    "vocabulary_too_small",
                    "pretrain.model.transformers.vocab_size",
                    f"expected at least the tokenizer's {vocab_size} ids, not {given}",
                    "leave vocab_size out, and it is taken from the tokenizer",
                )
            )
        return problems

    def _phases_out_of_order(self) -> list[Problem]:
        """Checked only if no length is in epochs and no batch is smaller than the others: otherwise it depends on the
        data."""
        begins = [phase.begins for phase in self.mixture.phases] if self.mixture else []
        lengths = [self.duration, *begins]
        if self.batch_warmup or "epochs" in [parse_duration(length).unit for length in lengths]:
            return []
        last = batches(self.duration, batch_tokens=self.global_batch_tokens)
        starts = [batches(begin, batch_tokens=self.global_batch_tokens, whole=last) for begin in begins]
        return [problem] if (problem := phase_problem(starts, last)) else []


class BaseModelConfig(StageConfig):
    """An existing Hugging Face model folder to start from instead of pretraining."""

    path: SourcePath = outside_identity(examples=["models/base"])
    """Folder with config.json, *.safetensors and the tokenizer files; pickled weights are refused."""
    seed: Seed = 17
    """Seeds the embeddings of chat tokens that the model does not have yet."""
    chat_template: Literal["model", "stemma"] = "model"
    """Chat template for tuning, chat, serve and export. model: the model's own, byte for byte, or this project's if it
    has none. stemma: this project's, whose tokens are added to the model."""

    def sources(self) -> list[Source]:
        return [Source("base_model.path", expand([self.path]))]
