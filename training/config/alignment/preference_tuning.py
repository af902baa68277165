"""Config of preference tuning; every default names its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import measured_only, outside_identity
from infra.errors import Problem
from training.config.alignment.chat_trainer import MORE_POSITIONS, ChatTrainerConfig, LoraConfig, no_room
from training.config.duration import Distance, Length
from training.config.trainer import OptimizerConfig, ScheduleConfig


class PreferenceTuningConfig(ChatTrainerConfig):
    """Learns directly from preference pairs, without sampling or a reward model: DPO, IPO, KTO or ORPO."""

    loss: Literal["dpo", "ipo", "kto", "orpo"] = "dpo"
    """dpo: raises the chosen answer's probability relative to the rejected one's (Rafailov et al. 2023). ipo: by a
    fixed margin only (Azar et al. 2023). kto: scores each answer independently (Ethayarajh et al. 2024). orpo:
    instruction tuning and preference at once, from a base model too, without a reference model (Hong et al. 2024)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the reference model: β of DPO (0.1 in Rafailov et al. 2023, appendix B) and of KTO (0.1 in Ethayarajh
    et al. 2024), τ of IPO; a larger value stays closer to it. In ORPO λ, the weight of the preference (0.1 in Hong et
    al. 2024); a larger value moves further."""
    desirable_weight: float = Field(1.0, ge=0)
    """KTO's weight of chosen answers; 1 in Ethayarajh et al. 2024, where there are as many of each."""
    undesirable_weight: float = Field(1.0, ge=0)
    """KTO's weight of rejected answers; 1 in Ethayarajh et al. 2024."""
    duration: Length = "1 epoch"
    """Length of training; one to three epochs are usual (Tunstall et al. 2023, "Zephyr", section 4.2)."""
    global_batch_pairs: int = Field(64, ge=1)
    """Pairs of one optimizer step; 64 in Rafailov et al. 2023, appendix B."""
    group_by_length: bool = False
    """Batch examples of similar length together (sorted within every 16 batches), to reduce padding. The name and the
    default are transformers' (TrainingArguments)."""
    max_length: int = Field(1024, ge=8)
    """Maximum length of a conversation in tokens. Answers are never cut."""
    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """Treatment of a pair that is longer than `max_length`. cut_prompt: its prompt is truncated at the beginning; if no
    prompt would remain, the pair is dropped. drop: the pair is dropped. Both are counted, as prompts_cut and
    pairs_dropped."""
    lora: LoraConfig | None = None
    """Adapters in place of all weights, as `sft.lora`; the reference is the base without them. null: all weights
    learn."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-6, weight_decay=0.0)
    """Learning rate 1e-6 in Rafailov et al. 2023, appendix B; small models need more, as does ORPO (8e-6 in Hong et al.
    2024)."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="10 %", final_share=0.1)
    """Warm-up of 10 % as in Zephyr (Tunstall et al. 2023, section 4.2)."""
    heldout_limit: int = measured_only(1000, ge=2)
    """Maximum number of held-out pairs to measure, from the beginning of the file."""
    heldout_prompts: int = measured_only(128, ge=2)
    """Held-out prompts that both models answer at the end, from the beginning of the file."""
    answer_max_tokens: int = measured_only(64, ge=1)
    """Maximum length of a sampled answer in tokens."""
    temperature: float = measured_only(1.0, ge=0.01)
    """Sampling temperature of these answers."""
    evaluate_every: Distance = outside_identity("10 %")
    """Interval between measurements of loss, margin and win rate on held-out pairs during training; the weights do not
    depend on it."""
    evaluate_pairs: int = outside_identity(64, ge=2)
    """Held-out pairs per measurement, from the beginning of the file."""

    def problems(self, positions: int | None = None) -> list[Problem]:
        """Problems that leave no room for a prompt;

        Args:
            positions: of the model, if known.
        """
        longest = min(self.max_length, positions or self.max_length)
        fix = "raise max_length" if longest == self.max_length else MORE_POSITIONS
        return no_room("preference_tuning", self.answer_max_tokens, longest, fix)
