"""Config of SFT; every default names its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import measured_only, outside_identity
from infra.errors import Problem
from training.config.alignment.chat_trainer import MORE_POSITIONS, ChatTrainerConfig, LoraConfig, no_room
from training.config.duration import Distance, Length
from training.config.trainer import OptimizerConfig, ScheduleConfig


class SftConfig(ChatTrainerConfig):
    """Supervised fine-tuning on instructions with responses, in one turn or several; the loss is on the assistant's
    turns alone."""

    duration: Length = "3 epochs"
    """Length of training; 2 to 4 epochs are usual (LIMA and Alpaca: 15 and 3; InstructGPT, section 3.5: 16, overfitting
    after the first)."""
    global_batch_examples: int = Field(32, ge=1)
    """Conversations of one optimizer step, with `packing` sequences of them; 32 in InstructGPT, appendix C.1."""
    group_by_length: bool = False
    """Batch examples of similar length together (sorted within every 16 batches), to reduce padding. The name and the
    default are transformers' (TrainingArguments)."""
    neftune_alpha: float = Field(0.0, ge=0.0)
    """Noise on the embeddings in training, against overfitting to the wording of few answers: uniform in
    ±alpha / √(T·D) for T tokens of width D (Jain et al. 2023, "NEFTune", where 5 is best for most data). 0: none. trl's
    `neftune_noise_alpha`."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of each label's probability that is spread over the whole vocabulary in the training loss (Szegedy et al.
    2016; 0.1 is usual); not applied to held-out losses. transformers' `label_smoothing_factor`."""
    max_length: int = Field(1024, ge=8)
    """Maximum length of a conversation in tokens. Answers are never cut."""
    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """Treatment of a conversation that is longer than `max_length`. cut_prompt: it loses its oldest exchanges, then the
    beginning of its question; if no question would remain, it is dropped. drop: it is dropped. Both are counted, as
    prompts_cut and pairs_dropped."""
    packing: bool = False
    """Pack several conversations into one sequence of `max_length` tokens, to reduce padding; none attends to another.
    A batch then counts these sequences. The name is trl's (SFTConfig)."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights, and merge them at the end, so that the result is an ordinary model; null:
    train all weights. Adapters need about ten times the learning rate. Embeddings are frozen, except for untrained
    tokens (`trainable_tokens`)."""
    text_share: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of pretraining text (the input `shards`) among each batch's examples, rounded to whole examples, to reduce
    forgetting: 0.1 in InstructGPT, appendix C.3. Each is the beginning of a document, as long as the longest
    conversation of its batch."""
    text_sources: tuple[str, ...] = ()
    """Sources of the shards that provide the text, by their names in `ingest.read`; [] uses all. Leave out sources with
    behaviour that should be unlearnt: tuning on clean text alone lowers toxicity by much (Gururangan et al. 2020;
    Gehman et al. 2020, section 5, "DAPT")."""
    start_share: float = Field(0.0, ge=0.0, lt=1.0)
    """Interpolation weight of the initial model in the finished weights: recovers much of what was forgotten at a
    smaller loss of what was learnt (Wortsman et al. 2022, "WiSE-FT", where 0.5 is best without choosing; Lin et al.
    2024, "Mitigating the Alignment Tax of RLHF")."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """Learning rate 9.65e-6 for 1.3B in InstructGPT, appendix C.1; small models need more."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """Cosine to 10 % of the peak as in InstructGPT, appendix C.1; warm-up 3 % as in Alpaca."""
    answer_max_tokens: int = measured_only(64, ge=1)
    """Maximum length of a greedy answer to a held-out prompt, in tokens."""
    heldout_limit: int = measured_only(500, ge=2)
    """Maximum number of held-out pairs to measure, from the beginning of the file."""
    answers_limit: int = measured_only(128, ge=2)
    """Number of held-out prompts to answer, for the share of finished answers and the samples."""
    evaluate_every: Distance = outside_identity("10 %")
    """Interval between measurements of the loss on held-out pairs during training; the weights do not depend on it."""
    evaluate_pairs: int = outside_identity(64, ge=2)
    """Held-out pairs per measurement, from the beginning of the file."""
    watched_prompts: int = outside_identity(3, ge=0)
    """Number of held-out prompts, from the beginning of the file, whose answers the report shows before training, after
    10 % and 30 % of the batches, and at the end; 0: none. The weights do not depend on it."""

    def problems(self, positions: int | None = None) -> list[Problem]:
        """Problems that leave no room for a prompt;

        Args:
            positions: of the model, if known.
        """
        longest = min(self.max_length, positions or self.max_length)
        fix = "raise max_length" if longest == self.max_length else MORE_POSITIONS
        problems = no_room("sft", self.answer_max_tokens, longest, fix)
        if self.text_share and not 0 < self.text_per_batch < self.global_batch_examples:
            message = f"of {self.global_batch_examples} examples this is {self.text_per_batch}"
            fix = "set a share that leaves at least one of text and one of instructions, or raise the batch"
            problems.append(Problem("contradiction", "sft.text_share", message, fix))
        if self.start_share and self.lora and self.lora.quantize:
            message = "a share of the weights before is not measured beside weights in 4 bits"
            problems.append(Problem("contradiction", "sft.start_share", message, "leave it out, or sft.lora.quantize"))
        return problems

    @property
    def text_per_batch(self) -> int:
        """Examples of text in a batch."""
        return round(self.text_share * self.global_batch_examples)
