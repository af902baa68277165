"""Config of the reward model; every default names its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import measured_only, outside_identity
from training.config.alignment.chat_trainer import ChatTrainerConfig
from training.config.duration import Distance, Length
from training.config.trainer import OptimizerConfig, ScheduleConfig


class RewardModelConfig(ChatTrainerConfig):
    """A reward model from pairs of a chosen and a rejected answer and rankings of several (Bradley & Terry 1952;
    InstructGPT, section 3.5)."""

    duration: Length = "1 epoch"
    """Length of training; one epoch in InstructGPT, appendix C.2: more overfits."""
    global_batch_pairs: int = Field(64, ge=1)
    """Pairs of one optimizer step, of rankings prompts with all their pairs; 64 prompts in InstructGPT, appendix
    C.2."""
    margin_coef: float = Field(0.0, ge=0)
    """Target distance between the scores of a pair's answers, times the pair's `margin` (preferences.read.margin_field;
    for scored rankings the difference of the scores). 0: no margin; 1 with margins of 1/3 to 3 in Touvron et al. 2023,
    "Llama 2", section 3.2.2."""
    balance_lengths: bool = False
    """Weight pairs so that the better answer is equally often the longer and the shorter one, by the same number of
    tokens: length alone then carries no signal (Singhal et al. 2023, "A Long Way to Go", section 4.1). Pairs without a
    counterpart are lost, counted as pairs_unbalanced."""
    group_by_length: bool = False
    """Batch examples of similar length together (sorted within every 16 batches), to reduce padding. The name and the
    default are transformers' (TrainingArguments)."""
    max_length: int = Field(1024, ge=8)
    """Maximum length of a conversation in tokens. Answers are never cut."""
    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """Treatment of a pair that is longer than `max_length`. cut_prompt: its prompt is truncated at the beginning; if no
    prompt would remain, the pair is dropped. drop: the pair is dropped. Both are counted, as prompts_cut and
    pairs_dropped."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=9.0e-6, weight_decay=0.0)
    """Learning rate 9e-6 in InstructGPT, appendix C.2, for 6B; small models need more."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """Cosine to 10 % of the peak, InstructGPT, appendix C.2."""
    heldout_limit: int = measured_only(1000, ge=2)
    """Maximum number of held-out pairs to measure, from the beginning of the file."""
    evaluate_every: Distance = outside_identity("10 %")
    """Interval between measurements of loss and accuracy on held-out pairs during training; the weights do not depend
    on it."""
    evaluate_pairs: int = outside_identity(64, ge=2)
    """Held-out pairs per measurement, from the beginning of the file."""
