"""A language model that learns from preference pairs: its batches, its loss, and KTO's reference point.

Shapes: B pairs, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy import float64
from numpy.typing import NDArray
from torch import Tensor, nn

from training.chat.base import Chat, Conversation
from training.config import PreferenceTuningConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.measuring import measuring
from training.core.train_state import Batch, TokenCount, Trainable, TrainState
from training.data.preferences import PreferencePair
from training.train_modules.language_model import LanguageModel
from training.train_modules.preference_losses import dpo, ipo, kto, kto_kl, orpo

_BATCH = 32


@dataclass(frozen=True)
class Example:
    """A pair by its number in the file, and for KTO its prompt with the two answers of a pair of another prompt."""

    number: int
    pair: PreferencePair
    mismatched: PreferencePair | None = None

    def conversations(self) -> list[Conversation]:
        """The chosen and the rejected one, then the mismatched ones."""
        pairs = [self.pair, *([self.mismatched] if self.mismatched else [])]
        return [one for pair in pairs for one in (pair.chosen, pair.rejected)]


class Logprobs(NamedTuple):
    """Log-probabilities (B, 2) of chosen and rejected answers in nats, and their tokens (B, 2)."""

    sums: Tensor
    tokens: Tensor


class PreferenceTuned(Trainable):
    """A language model with one of the losses of `training.train_modules.preference_losses`.

    A batch has `input_ids` and `labels (B, 2, T)` (chosen, rejected), `reference (B, 2)`, the answers'
    log-probabilities under the model that training began from, and `kl (B,)`, which `Mismatched` fills in for KTO.
    """

    def __init__(self, language: LanguageModel, config: PreferenceTuningConfig) -> None:
        super().__init__()
        self.language = language
        self._config = config
        start = {"dpo": math.log(2), "ipo": 1 / (2 * config.beta) ** 2, "kto": 0.5, "orpo": 0.0}
        self.chance_loss = start[config.loss]
        """Loss of the model that training began from; unknown for ORPO."""

    def train(self, mode: bool = True) -> PreferenceTuned:
        """Stay in evaluation mode: with dropout the ratio to the reference model would be random (as in trl's
        DPOTrainer)."""
        return super().train(False)

    def learnt_from(self, batch: Batch) -> Batch:
        """Return a batch without the mismatched answers, which `Mismatched` evaluates before any gradient."""
        return {name: value if name == "kl" else value[:, :2] for name, value in batch.items()}

    def last_stack(self) -> nn.Module | None:
        """The module that gives the last hidden state."""
        return self.language.last_stack()

    def forward(self, batch: Mapping[str, Tensor]) -> Logprobs:
        """Of each answer, with its `<|end|>`; also of answers (B, R, T) of another number R."""
        ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
        outputs = self.language({"input_ids": ids, "labels": labels})
        sums = self.language.sequence_logprobs(outputs, labels)
        shape = batch["input_ids"].shape[:2]
        return Logprobs(sums.view(shape), (labels >= 0).sum(1).view(shape))

    def loss(self, outputs: Logprobs, batch: Any) -> dict[str, Tensor]:
        """The loss, and how far both answers' log-probabilities rose (chosen, rejected), in nats."""
        risen = (outputs.sums - batch["reference"]).detach()
        chosen, rejected = risen.mean(0)
        return {"chosen": chosen, "rejected": rejected, "total": self.pair_losses(outputs, batch).mean()}

    def pair_losses(self, outputs: Logprobs, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of each pair (B,)."""
        config = self._config
        values = outputs.sums if config.loss == "orpo" else outputs.sums - batch["reference"]
        if config.loss in ("ipo", "orpo"):
            values = values / outputs.tokens
        chosen, rejected = values.unbind(1)
        match config.loss:
            case "dpo":
                return dpo(chosen, rejected, config.beta)
            case "ipo":
                return ipo(chosen, rejected, config.beta)
            case "kto":
                weights = config.desirable_weight, config.undesirable_weight
                return kto(chosen, rejected, batch["kl"], config.beta, *weights)
            case "orpo":
                return orpo(chosen, rejected, config.beta)

    def example_losses(self, outputs: Logprobs, batch: Any) -> tuple[Tensor, Tensor]:
        """Each pair's loss (B,), and its weight (B,) in the batch's mean, 1."""
        each = self.pair_losses(outputs, batch).detach()
        return each, torch.ones_like(each)


class Mismatched(Callback):
    """Computes KTO's reference point for a batch's answers, over the whole batch and all ranks, so that the loss
    depends neither on microbatches nor on ranks; the mismatched answers are then removed from the batch."""

    def __init__(self, model: PreferenceTuned) -> None:
        self._model = model

    def batch_start(self, state: TrainState) -> None:
        batch = state.batch
        ratios = torch.cat([part.cpu() for part in self._ratios(batch, state.device)])
        total = ranks.all_reduce(torch.tensor([float(ratios.sum()), float(ratios.numel())], dtype=torch.float64))
        kl = torch.full_like(batch["kl"], float(kto_kl(total[:1] / total[1])))
        state.batch = {**self._model.learnt_from(batch), "kl": kl}

    def _ratios(self, batch: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
        """log π/π_ref (B, 2) of the mismatched answers, in parts."""
        found = []
        with measuring(self._model):
            for start in range(0, len(batch["kl"]), _BATCH):
                part = {name: value[start : start + _BATCH].to(device) for name, value in batch.items()}
                outputs = self._model({name: part[name][:, 2:] for name in ("input_ids", "labels")})
                found.append(outputs.sums - part["reference"][:, 2:])
        return found


def preference_batch(examples: Sequence[Example], reference: NDArray[float64], chat: Chat) -> dict[str, Tensor]:
    """Return a batch for `PreferenceTuned`; for KTO each tensor has the two mismatched answers after the two of the
    pair.

    reference (pairs, 2 or 4): log-probabilities under the reference model, by the pairs' numbers.
    """
    flat = chat.response_batch([one for example in examples for one in example.conversations()])
    shape = len(examples), len(examples[0].conversations()), -1
    known = reference[[example.number for example in examples]]
    return {
        **{name: value.view(shape) for name, value in flat.items()},
        "reference": torch.from_numpy(known).float(),
        "kl": torch.zeros(len(examples)),
    }


def count_pairs(batch: Mapping[str, Tensor]) -> TokenCount:
    """Tokens of a batch that are computed with gradients, and its pairs, which its loss is the mean over."""
    return TokenCount(batch["input_ids"][:, :2].numel(), len(batch["input_ids"]))
