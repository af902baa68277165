"""Settings that every training on conversations shares: adapters, template variables, room for answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from infra.config import Config, in_identity
from infra.errors import Problem
from training.config.trainer import TrainerConfig

# A prompt's roles and one token of its text.
_LEAST_PROMPT = 4
MORE_POSITIONS = "use a model with more positions"
"""Remedy of a problem of `no_room`."""


def no_room(stage: str, answer: int, longest: int, fix: str) -> list[Problem]:
    """Return a problem if prompt and answer do not share `longest` tokens."""
    if answer <= longest - _LEAST_PROMPT:
        return []
    return [
        Problem(
            "no_room",
            f"{stage}.answer_max_tokens",
            f"expected at most {max(0, longest - _LEAST_PROMPT)}, not {answer}: prompt and answer share {longest} "
            f"tokens, of which a prompt takes at least {_LEAST_PROMPT}",
            f"shorten answers, or {fix}",
        )
    ]


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2022): gradients and optimizer state exist only for the adapters, next to frozen
    weights."""

    rank: int = Field(16, ge=1)
    """The rank of each adapter; 16 in trl's ModelConfig, 1 to 64 in Hu et al. 2022, section 7.2."""
    alpha: float = Field(32.0, gt=0)
    """Scale of an adapter, divided by its rank; 32 in trl's ModelConfig."""
    targets: tuple[str, ...] = ()
    """Layers that get adapters, by the last part of their names, e.g. q_proj, v_proj; by default all linear layers but
    the output layer (Dettmers et al. 2023, "QLoRA", section 4: these are needed to match full tuning)."""
    trainable_tokens: Literal["untrained"] | tuple[str, ...] = in_identity("untrained")
    """Tokens whose rows in the embedding and the output layer are trained too, as peft's `trainable_token_indices`.
    untrained: those that no text has trained, which are the chat tokens that a base model was given, and special tokens
    whose rows are zeros or equal; frozen, a model never learns to end its answers. A list names tokens; [] is none."""
    quantize: Literal["nf4"] | None = None
    """Frozen weights of linear layers but the output layer in 4 bits while adapters learn (Dettmers et al. 2023,
    "QLoRA"), on any device: less memory for a slower step. The adapters are merged into the unquantized weights at the
    end; held-out losses and answers are of the quantized model with and without them. Not with `start_share` or sharded
    weights."""


class ChatTrainerConfig(TrainerConfig):
    """Settings shared by trainings on conversations."""

    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of variables of the model's own chat template, for every conversation, such as `enable_thinking: false` of
    Qwen3 and SmolLM3. One that the template does not read is refused. The name is trl's and vLLM's."""
