"""Config of distillation; every default names its source."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from corpus.generation.config import EndpointConfig, GenerationLimits, SamplingConfig
from infra.config import measured_only, outside_identity
from infra.errors import Problem
from training.config.alignment.chat_trainer import ChatTrainerConfig, no_room
from training.config.duration import Distance, Length
from training.config.trainer import OptimizerConfig, ScheduleConfig


class DistillConfig(ChatTrainerConfig):
    """A student learns a teacher's next-token distributions, on given answers or on its own (Hinton et al. 2015;
    Agarwal et al. 2024, "GKD"); or the answers that an endpoint writes, by their text alone (Kim & Rush 2016)."""

    endpoint: EndpointConfig | None = None
    """Teacher behind OpenAI's protocol, in place of the input `teacher`: it answers the prompts of the instructions,
    and the student learns its answers as in `sft`. It may have any tokenizer. Answers are cached by request: none is
    paid for twice, and a stopped stage continues with the cached ones."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Sampling of the endpoint's answers. Its most likely answer to each prompt is what Kim & Rush 2016 learn."""
    answer_limits: GenerationLimits = outside_identity(GenerationLimits())
    """Shares of the endpoint's answers that may be failed, truncated or empty; those are left out and counted."""

    duration: Length = "1 epoch"
    """Length of training over the prompts of the instructions."""
    beta: float = Field(0.0, ge=0.0, le=1.0)
    """Divergence of student and teacher, the generalised Jensen-Shannon divergence. 0: KL(teacher ‖ student), which is
    mass-covering (Hinton et al. 2015). 1: KL(student ‖ teacher), which is mode-seeking (Gu et al. 2024, "MiniLLM").
    Between: of both from their mixture with this share of the teacher (Agarwal et al. 2024, "GKD", equation 1). The
    name is trl's (GKDConfig)."""
    on_policy_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the batches in which the student answers the prompts itself, and learns from the teacher's distributions
    along these answers. 0: only given answers. 1: only its own, the best in Agarwal et al. 2024, "GKD", section 4,
    where it is λ; trl's `lmbda`. A step with the student's answers takes several times as long."""
    top_k: int = Field(0, ge=0)
    """The teacher's likeliest tokens that are learnt at each position, with their probabilities scaled to a sum of 1.
    Only with beta: 0. 0: all tokens."""
    loss_temperature: float = Field(1.0, gt=0)
    """Divides the logits of both models in the loss. Above 1 unlikely tokens weigh more; 1 to 20 in Hinton et al. 2015,
    whose factor of its square is not applied, as in trl."""
    global_batch_examples: int = Field(32, ge=1)
    """Conversations of one optimizer step; 32 in Agarwal et al. 2024, appendix A."""
    group_by_length: bool = False
    """Batch examples of similar length together (sorted within every 16 batches), to reduce padding. The name and the
    default are transformers' (TrainingArguments)."""
    max_length: int = Field(1024, ge=8)
    """Maximum length of a conversation in tokens. Given answers are never cut."""
    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """Treatment of a conversation that is longer than `max_length`. cut_prompt: it loses its oldest exchanges, then the
    beginning of its question; if no question would remain, it is dropped. drop: it is dropped. Both are counted, as
    prompts_cut and pairs_dropped."""
    answer_max_tokens: int = Field(64, ge=1)
    """Longest answer that the student samples."""
    temperature: float = Field(1.0, ge=0.01)
    """Temperature at which the student samples; 1 in Agarwal et al. 2024, section 4."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """As in `sft`; small models need higher learning rates."""
    schedule: ScheduleConfig = ScheduleConfig(warmup="3 %", final_share=0.1)
    """As in `sft`."""
    heldout_limit: int = measured_only(500, ge=2)
    """Maximum number of held-out pairs to measure, from the beginning of the file."""
    heldout_prompts: int = measured_only(64, ge=2)
    """Held-out prompts that the student answers before and after, from the beginning of the file."""
    evaluate_every: Distance = outside_identity("10 %")
    """Interval between measurements of the divergence on held-out pairs during training; the weights do not depend on
    it."""
    evaluate_pairs: int = outside_identity(64, ge=2)
    """Held-out pairs per measurement, from the beginning of the file."""

    def problems(self, positions: int | None = None) -> list[Problem]:
        """Problems that leave no room for a prompt.

        Args:
            positions: of the model, if known.
        """
        longest = min(self.max_length, positions or self.max_length)
        fix = "raise max_length" if longest == self.max_length else "use a model with more positions"
        return no_room("distill", self.answer_max_tokens, longest, fix)

    @model_validator(mode="after")
    def _text_alone(self) -> Self:
        if self.endpoint is None:
            if self.sampling != type(self).model_fields["sampling"].default:
                raise ValueError("sampling: expected an endpoint as well: a teacher from a step writes no text")
            return self
        for key in ("beta", "on_policy_share", "top_k", "loss_temperature"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: expected none with an endpoint, which gives text and no distributions")
        return self

    @model_validator(mode="after")
    def _one_divergence(self) -> Self:
        if self.top_k and self.beta:
            raise ValueError(
                f"top_k: expected beta: 0 together with it, not {self.beta:g}: KL from the student needs all tokens"
            )
        return self
