"""A student that learns a teacher's next-token distributions: the divergence and its loss.

Shapes: B sequences, T tokens, N labelled tokens, D width of a model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from training.config.alignment.distillation import DistillConfig
from training.core.train_state import Trainable
from training.model.loss import IGNORE, chunk_size
from training.train_modules.language_model import LanguageModel


def divergences(student: Tensor, teacher: Tensor, beta: float, top_k: int = 0) -> Tensor:
    """Return the divergence (N,) in nats of next-token distributions, from logits (N, V).

    Args:
        student: has gradients.
        teacher: of the same tokens.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher), between for the generalised Jensen-Shannon
            divergence (Agarwal et al. 2024, equation 1).
        top_k: number of the teacher's likeliest tokens that its distribution is restricted to, with beta 0; 0: all.
    """
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if 0 < top_k < teacher.shape[-1]:
        likeliest, tokens = teacher.topk(top_k)
        student, teacher = student.gather(-1, tokens), likeliest.log_softmax(-1)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(of: Tensor, to: Tensor) -> Tensor:
    """KL divergence (N,) of distributions given by log-probabilities (N, V)."""
    return (of.exp() * (of - to)).sum(-1)


class Predicting(NamedTuple):
    """Last hidden states (N, D), or logits (N, V), of both models at the labelled tokens."""

    student: Tensor
    teacher: Tensor


class Distilled(Trainable):
    """A student whose loss is its divergence from a teacher, the mean over labelled tokens.

    A batch has `input_ids (B, T)` and `labels (B, T)`, as for `LanguageModel`; of the labels their positions alone
    matter.
    """

    chance_loss = 0.0
    """The loss of guessing depends on the teacher."""

    def __init__(self, student: LanguageModel, teacher: LanguageModel, config: DistillConfig) -> None:
        super().__init__()
        self.language = student
        # In a tuple, so that torch does not count the teacher as a part of what learns.
        self._teacher = (teacher.eval().requires_grad_(False),)
        self._config = config

    def last_stack(self) -> nn.Module | None:
        """The module that gives the student's last hidden state."""
        return self.language.last_stack()

    def forward(self, batch: Mapping[str, Tensor]) -> Predicting:
        labelled = batch["labels"] != IGNORE
        with torch.no_grad():
            teacher = self.teacher.states(batch)[labelled]
        return Predicting(self.language.states(batch)[labelled], teacher)

    def loss(self, outputs: Predicting, batch: Any) -> Tensor:
        return self.token_divergences(outputs).sum() / max(1, len(outputs.student))

    @property
    def teacher(self) -> LanguageModel:
        return self._teacher[0]

    def token_divergences(self, outputs: Predicting) -> Tensor:
        """Divergences (N,) of the labelled tokens. If these are many, logits exist for a part of them at a time, and
        are computed again in the backward pass."""
        config, weights = self._config, self._head_weights()

        def of_part(student: Tensor, teacher: Tensor) -> Tensor:
            student, teacher = (
                _logits(states, weight) / config.loss_temperature
                for states, weight in zip((student, teacher), weights, strict=True)
            )
            return divergences(student, teacher, config.beta, config.top_k)

        parts = self._parts(outputs)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return torch.cat([of_part(*part) for part in parts])
        return torch.cat([checkpoint(of_part, *part, use_reentrant=False) for part in parts])

    def _head_weights(self) -> tuple[Tensor | None, Tensor | None]:
        return self.language.head_weight(), self.teacher.head_weight()

    def _parts(self, outputs: Predicting) -> list[tuple[Tensor, Tensor]]:
        """Split the tokens into parts whose logits are held at once."""
        weight, count = self.language.head_weight(), len(outputs.student)
        size = max(1, count) if weight is None else chunk_size(weight)
        return list(zip(outputs.student.split(size), outputs.teacher.split(size), strict=True))

    @torch.no_grad()
    def example_losses(self, outputs: Predicting, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each sequence's summed divergence (B,) and labelled tokens (B,)."""
        labelled = batch["labels"] != IGNORE
        return _summed(self.token_divergences(outputs), labelled), labelled.sum(1)

    @torch.no_grad()
    def compared(self, outputs: Predicting, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each sequence (B,) the tokens whose likeliest one is the teacher's, and the summed cross-entropy of
        the labels by student and teacher, in nats."""
        labelled = batch["labels"] != IGNORE
        parts = self._parts(outputs)
        labels = batch["labels"][labelled].split([len(student) for student, _ in parts])
        columns = []
        for part, target in zip(parts, labels, strict=True):
            both = [_logits(states, weight) for states, weight in zip(part, self._head_weights(), strict=True)]
            agreeing = (both[0].argmax(-1) == both[1].argmax(-1)).float()
            columns.append((agreeing, *(cross_entropy(logits, target, reduction="none") for logits in both)))
        agreeing, *losses = (_summed(torch.cat(column), labelled) for column in zip(*columns, strict=True))
        return agreeing, losses[0], losses[1]


def _logits(states: Tensor, weight: Tensor | None) -> Tensor:
    """Logits (N, V) in fp32 of hidden states (N, D) through an output layer's weight (V, D); of logits themselves."""
    return (states if weight is None else states @ weight.to(states.dtype).T).float()


def _summed(values: Tensor, labelled: Tensor) -> Tensor:
    """Values (N,) of the labelled tokens (B, T), summed over each sequence (B,)."""
    return values.new_zeros(len(labelled)).index_add(0, labelled.nonzero()[:, 0], values)
