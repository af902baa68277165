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
    2016; 0.1 is usual); held-out losses are without. transformers' `label_smoothing_factor`."""
    max_length: int = Field(1024, ge=8)
    """Longest conversation in tokens. Answers are never cut."""
    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """Treatment of a conversation that is longer than `max_length`. cut_prompt: it loses its oldest exchanges, then the
    beginning of its question; if no question would remain, it is dropped. drop: it is dropped. Both are counted, as
    prompts_cut and pairs_dropped."""
    packing: bool = False
    """Pack several conversations into one sequence of `max_length` tokens, to reduce padding; none attends to another.
    A batch then counts these sequences. The name is trl's (SFTConfig)."""
    lora: LoraConfig | None = None
    """Adapters in place of all weights, merged into them at the end, so that what is made is a model like any other;
    null: all weights learn. Adapters want a learning rate of about ten times that of all weights. Embeddings stay as
    they are, but for tokens that no text has trained (`trainable_tokens`)."""
    text_share: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of pretraining text (the input `shards`) in each batch's examples, to whole ones, so that less of what was
    learnt before is lost: 0.1 in InstructGPT, appendix C.3. Each is the beginning of a document, as long as the longest
    conversation of its batch."""
    text_sources: tuple[str, ...] = ()
    """The sources of the shards whose text that is, by the names that `ingest.read` gives them; [] takes all. What
    shall be unlearnt is better not read again: tuning on clean text alone lowers toxicity by much (Gururangan et al.
    2020; Gehman et al. 2020, section 5, "DAPT")."""
    start_share: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the weights that training began with in those of the finished model, the rest is what it learnt: gives
    back much of what was forgotten for less of what was gained (Wortsman et al. 2022, "WiSE-FT", where 0.5 is best
    without choosing; Lin et al. 2024, "Mitigating the Alignment Tax of RLHF")."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """Learning rate 9.65e-6 for 1.3B in InstructGPT, appendix C.1; small models want more."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """Cosine to 10 % of the peak as in InstructGPT, appendix C.1; warm-up 3 % as in Alpaca."""
    answer_max_tokens: int = measured_only(64, ge=1)
    """Longest greedy answer when held-out prompts are answered."""
    heldout_limit: int = measured_only(500, ge=2)
    """Held-out pairs that are measured, the first of the file."""
    answers_limit: int = measured_only(128, ge=2)
    """Held-out prompts that are answered, for the share of finished answers and the samples."""
    evaluate_every: Distance = outside_identity("10 %")
    """Interval between measurements of the loss on held-out pairs during training; the weights do not depend on it."""
    evaluate_pairs: int = outside_identity(64, ge=2)
    """Held-out pairs of each such measurement, the first of the file."""
    watched_prompts: int = outside_identity(3, ge=0)
    """Held-out prompts, the first of the file, whose answers the report shows before training, after 10 % and 30 % of
    the batches, and at the end; 0: none. The weights do not depend on it."""

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
            fix = "take a share that leaves at least one of text and one of instructions, or raise the batch"
            problems.append(Problem("contradiction", "sft.text_share", message, fix))
        if self.start_share and self.lora and self.lora.quantize:
            message = "a share of the weights before is not measured beside weights in 4 bits"
            problems.append(Problem("contradiction", "sft.start_share", message, "leave it out, or sft.lora.quantize"))
        return problems

    @property
    def text_per_batch(self) -> int:
        """Examples of text in a batch."""
        return round(self.text_share * self.global_batch_examples)
