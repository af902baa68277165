"""Modules that RLHF trains: a policy with, for PPO, a value function; forward pass and loss of a minibatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from training.core.hardware import Hardware
from training.core.train_state import Trainable
from training.guard.norms import last_stack
from training.rl.algorithms import Algorithm
from training.rl.rewards import RewardScale
from training.train_modules.answer_logprobs import answer_logprobs, answered
from training.train_modules.language_model import LanguageModel
from training.train_modules.mixed_text import loss_of_text
from training.train_modules.scorer import Scorer


class PolicyAndValue(Trainable):
    """A policy and, where the algorithm has one, its own value function, initialised from the reward model
    (InstructGPT, section 3.5).

    A batch is a minibatch of `training.rl.round.Rollouts`. The trainer calls `forward` and `loss` for each, and steps
    the optimizer.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        value: Scorer | None,
        scale: RewardScale,
        algorithm: Algorithm,
        temperature: float,
        hardware: Hardware,
        text_coef: float = 0.0,
    ):
        super().__init__()
        self.policy = policy
        self.value = value
        self.scale = scale
        self.algorithm = algorithm
        self._temperature = temperature
        self._hardware = hardware
        # In a tuple, so that torch does not count the policy a second time as a part of this network.
        self._reading = (LanguageModel(policy, hardware),) if text_coef else ()
        self._text_coef = text_coef

    def train(self, mode: bool = True) -> PolicyAndValue:
        """Stay in evaluation mode: dropout would make the ratio to the sampling policy random ("N implementation
        details of RLHF", section 2.5)."""
        return super().train(False)

    def last_stack(self) -> nn.Module:
        """The module that gives the policy's last hidden state."""
        return last_stack(self.policy)

    def networks(self) -> dict[str, nn.Module]:
        """Return the policy and the value function, which share no weights."""
        return {"policy": self.policy, **({"value": self.value} if self.value is not None else {})}

    def values(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the expected normalised reward (B, T) at the places (B, T) of ids; arbitrary where `mask (B, T)` is
        0."""
        assert self.value is not None
        return self.scale.of_first(self.value.at(ids, positions, answered(positions, mask)))

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities and values (B, T) of the answers' tokens, probabilities at the sampling temperature;
        and the loss of the pretraining text (`training.train_modules.mixed_text`)."""
        ids, positions, mask = batch["ids"], batch["places"], batch["mask"]
        logprobs = answer_logprobs(
            self.policy, ids, positions, batch["tokens"], mask, self._hardware, self._temperature
        )
        values = self.values(ids, positions, mask) if self.value is not None else None
        weight = self.algorithm.weight(batch)
        text = loss_of_text(self._reading[0], batch, weight) if self._reading else None
        return logprobs, values, text

    def loss(self, outputs: tuple[Tensor, Tensor | None, Tensor | None], batch: Any) -> dict[str, Tensor]:
        logprobs, values, text = outputs
        losses = self.algorithm.loss(logprobs, values, batch)
        if text is None:
            return losses
        return {**losses, "text": text, "total": losses["total"] + self._text_coef * text}
