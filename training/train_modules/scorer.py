"""Scores of answers: a sequence classifier read as a reward, its loss over pairs and rankings, and their batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from infra.errors import stage_error
from training.chat.base import Chat
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.core.train_state import TokenCount, Trainable
from training.data.preferences import Ranking, ranking_batch
from training.guard.norms import last_stack
from training.model.models import limit_length
from training.train_modules.shared_prompts import hidden_states

_BATCH = 32


class Scorer(nn.Module):
    """A sequence classifier with one label, read as a reward.

    model: has a `base_model` and an output layer `score (D → 1)`, as transformers' classifiers of causal models do.
    """

    def __init__(self, model: PreTrainedModel, hardware: Hardware) -> None:
        super().__init__()
        self.model = model
        self._hardware = hardware

    def at(self, ids: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """Return scores (B, P) read at `places (B, P)` of ids (B, T) padded on the right; lengths: tokens (B,) of each
        that matter; at later places the scores are arbitrary."""
        hidden = hidden_states(self.model, ids, lengths, places, self._hardware)
        # The score itself stays in fp32: differences of rewards are small.
        return linear(hidden.float(), self.model.get_parameter("score.weight"))[..., 0]

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        """Scores (B,) read at the last token, at `last (B,)`, of ids (B, T) padded on the right."""
        return self.at(ids, last[:, None], last + 1)[:, 0]


class RewardModel(Trainable):
    """A scorer with the Bradley–Terry loss; a batch is `training.data.preferences.ranking_batch`'s.

    The loss of a prompt is the mean over its pairs, K choose 2 in a ranking, so that a prompt with many answers counts
    as much as any other and no answer is computed twice (InstructGPT, section 3.5).
    """

    chance_loss = math.log(2)
    """Loss of guessing."""

    def __init__(self, scorer: Scorer, margin_coef: float = 0.0) -> None:
        super().__init__()
        self.scorer = scorer
        self._margin_coef = margin_coef

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores (B, K) of the answers, chosen and rejected where there are two; 0 where there is no answer."""
        ids, last = batch["input_ids"], batch["last"]
        if "weight" not in batch:
            return self.scorer(ids.flatten(0, 1), last.flatten()).view(-1, 2)
        real = last >= 0
        scores = self.scorer(ids[real], last[real])
        return torch.zeros(last.shape, dtype=scores.dtype, device=scores.device).masked_scatter(real, scores)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if "weight" not in batch:
            return bradley_terry(outputs[:, 0], outputs[:, 1])
        return self._losses(outputs, batch).mean()

    def last_stack(self) -> nn.Module:
        """The module that gives the last hidden state."""
        return last_stack(self.scorer.model)

    def example_losses(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Each prompt's loss (B,), and its weight (B,) in the batch's mean, 1."""
        each = self._losses(outputs, batch).detach()
        return each, torch.ones_like(each)

    def _losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Each prompt's loss (B,)."""
        if "weight" not in batch:
            return -logsigmoid(outputs[:, 0] - outputs[:, 1])
        margins = outputs.gather(1, batch["better"]) - outputs.gather(1, batch["worse"])
        return (preference_losses(margins, batch["share"], self._margin_coef * batch["margin"]) * batch["weight"]).sum(
            1
        )


def preference_losses(margins: Tensor, share: Tensor, wanted: Tensor) -> Tensor:
    """−p log σ(d − m) − (1 − p) log σ(−d − m) of pairs whose scores differ by d = `margins`: p is the share of votes
    for the better answer, one half in a tie, and m the margin `wanted` in its favour (Touvron et al. 2023, "Llama 2",
    equation 2)."""
    return -share * logsigmoid(margins - wanted) - (1 - share) * logsigmoid(-margins - wanted)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean negative log-likelihood that `chosen (B,)` beats `rejected (B,)` (InstructGPT, equation 1)."""
    return -logsigmoid(chosen - rejected).mean()


def load_scorer(folder: Path, hardware: Hardware, seed: int | None = None) -> Scorer:
    """Load a reward model's folder, or a causal model's with a fresh output layer from N(0, 1/(D + 1)) drawn by `seed`
    ("N implementation details of RLHF", section 2.2). Raises StageError `bad_model` for a family without a linear score
    layer."""
    model = load_pretrained_model(
        AutoModelForSequenceClassification,
        folder,
        fresh_head="" if seed is None else "score",
        num_labels=1,
        dtype=torch.float32,
    )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise stage_error(
            "bad_model",
            str(folder),
            f"expected a model family with a linear score layer, not {model.config.model_type}",
        )
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        spread = 1 / math.sqrt(model.config.hidden_size + 1)
        model.score.weight.data.normal_(0.0, spread, generator=generator)
    return Scorer(model.train(), hardware)


def load_other_scorer(
    name: str, folder: Path, model: PreTrainedModel, chat: Chat, hardware: Hardware, tokens: int
) -> Scorer:
    """Load the reward model of the input `name`, to score prompts with answers of `model`, at most `tokens` together;
    the model's tokenizer is that of `chat`.

    Raises StageError `other_vocabulary` where its token ids mean other text, `too_few_positions` where it reads fewer
    tokens.
    """
    scorer = load_scorer(folder, hardware)
    if (positions := limit_length(scorer.model, tokens)) < tokens:
        raise stage_error(
            "too_few_positions",
            name,
            f"expected a model that reads {tokens:,} tokens, a prompt with its answer, not {positions:,}",
            "shorten prompts or answers, or take a reward model with more positions",
        )
    rows = scorer.model.config.vocab_size, model.config.vocab_size
    differ = f"a vocabulary of {rows[1]}, not {rows[0]}" if rows[0] != rows[1] else ""
    if not differ and (folder / "tokenizer_config.json").exists():
        theirs, ours = load_pretrained_tokenizer(folder).get_vocab(), chat.tokenizer.get_vocab()
        if entries := len(theirs.items() ^ ours.items()):
            differ = f"the tokenizer of the model whose answers it scores; {entries:,} entries of them differ"
    if differ:
        fix = f"train the {name.replace('_', ' ')} from the same model"
        raise stage_error("other_vocabulary", name, f"expected {differ}", fix)
    return scorer


def count_pairs(batch: Mapping[str, Tensor]) -> TokenCount:
    """Tokens of a batch, and its prompts, which its loss is the mean over."""
    return TokenCount(batch["input_ids"].numel(), len(batch["input_ids"]))


def score_pairs(model: RewardModel, rankings: Sequence[Ranking], fill: int) -> NDArray[np.float64]:
    """Scores (pairs, 2) of the better and the worse answer of each pair."""
    device = next(model.parameters()).device
    found: list[list[float]] = []
    with measuring(model):
        for start in range(0, len(rankings), _BATCH):
            some = rankings[start : start + _BATCH]
            batch = {name: value.to(device) for name, value in ranking_batch(some, fill).items()}
            scores = model(batch).double().cpu().numpy()
            found += [
                [row[pair.better], row[pair.worse]] for row, one in zip(scores, some, strict=True) for pair in one.pairs
            ]
    return np.array(found)
