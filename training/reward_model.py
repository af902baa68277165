"""Trains a reward model from pairs of a chosen and a rejected answer.

python -m training.reward_model --config reward_model.yaml --input model=DIR --input preferences=DIR --out DIR
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from corpus.pretrained import load_pretrained_model
from evaluation.statistics import binomial_p_value, bootstrap, wilson
from infra.errors import stage_error
from infra.run import Result, Run
from training.attention import choose_attention
from training.chat import Chat, pad, read_rows
from training.config import RewardModelConfig, batches
from training.evaluate import Watch, measuring
from training.export import export
from training.fit import Plan, fit
from training.hardware import Hardware, prepare
from training.loaders import example_loader
from training.models import limit_length
from training.norms import last_stack
from training.preference_pairs import Pair, fitted_pairs
from training.shared_prompts import hidden_states
from training.train_state import TokenCount, Trainable

_BATCH = 32
MOST_SOURCES = 10


class Scorer(nn.Module):
    """A sequence classifier with one label, read as a reward.

    model: has a `base_model` and an output layer `score (D → 1)`, as transformers' classifiers of causal models do.
    """

    def __init__(self, model: PreTrainedModel, hardware: Hardware) -> None:
        super().__init__()
        self.model = model
        self._hardware = hardware

    def every_token(self, ids: Tensor) -> Tensor:
        """Scores (B, T) read at each token of ids (B, T)."""
        with self._hardware.autocast():
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return self._read(hidden)

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        """Scores (B,) read at the last token, at `last (B,)`, of ids (B, T) padded on the right."""
        hidden = hidden_states(self.model, ids, last + 1, last[:, None], self._hardware)
        return self._read(hidden)[:, 0]

    def _read(self, hidden: Tensor) -> Tensor:
        """Scores (…) of hidden states (…, D), in fp32: differences of rewards are small."""
        return linear(hidden.float(), self.model.get_parameter("score.weight"))[..., 0]


class RewardModel(Trainable):
    """A scorer with the Bradley–Terry loss; a batch has `input_ids (B, 2, T)` (chosen, rejected) and `last (B, 2)`."""

    chance_loss = math.log(2)
    """That of guessing."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores (B, 2) of chosen and rejected."""
        ids, last = batch["input_ids"], batch["last"]
        return self.scorer(ids.flatten(0, 1), last.flatten()).view(-1, 2)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return bradley_terry(outputs[:, 0], outputs[:, 1])

    def last_stack(self) -> nn.Module:
        """The module that gives the last hidden state."""
        return last_stack(self.scorer.model)

    def example_losses(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Each pair's loss (B,), and its weight (B,) in the batch's mean, 1."""
        each = -logsigmoid(outputs[:, 0] - outputs[:, 1]).detach()
        return each, torch.ones_like(each)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean negative log-likelihood that `chosen (B,)` beats `rejected (B,)` (InstructGPT, equation 1)."""
    return -logsigmoid(chosen - rejected).mean()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers warns that the output layer is new and asks for training, which is what happens here."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def load_scorer(folder: Path, hardware: Hardware, seed: int | None = None) -> Scorer:
    """A reward model's folder, or a causal model's with a fresh output layer from N(0, 1/(D + 1)) drawn by `seed`
    ("N implementation details of RLHF", section 2.2)."""
    with _without_warnings():
        model = load_pretrained_model(AutoModelForSequenceClassification, folder, num_labels=1, dtype=torch.float32)
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


def reward_model(config: RewardModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Trains on `preferences/train.jsonl` from the SFT model; the reward is read at the answer's last token.

    Figures on `preferences/heldout.jsonl`: heldout_accuracy (pairs put in the right order, Wilson interval), the same
    for each source where there are two to ten (heldout_accuracy_of_docstrings), heldout_pairs, p_value (one-sided exact
    binomial against chance), margin (mean chosen minus rejected score, bootstrap interval), heldout_loss (chance is
    0.693), and what had no room, of training and held-out pairs together: prompts_cut, pairs_dropped. On the way loss
    and accuracy on some held-out pairs are told as validation/sample_loss and validation/sample_accuracy.
    """
    hardware = prepare(run.launch)
    chat = Chat.load(inputs["model"])
    scorer = load_scorer(inputs["model"], hardware, config.seed)
    max_length = limit_length(scorer.model, config.max_length)
    choose_attention(scorer.model, hardware, max_length)
    model = RewardModel(scorer).to(hardware.device)
    keys = ("prompt", "chosen", "rejected")
    fitted, measured = (
        fitted_pairs(
            chat, read_rows(inputs["preferences"] / f"{side}.jsonl", keys, limit), max_length, config.too_long
        ).told("reward_model", name, max_length, run)
        for side, name, limit in (("train", "training", None), ("heldout", "held-out", config.heldout_limit))
    )
    train, heldout = fitted.pairs, measured.pairs

    def collate(pairs: Sequence[Pair]) -> dict[str, Tensor]:
        return pair_batch(pairs, chat.pad)

    lengths = [max(len(pair.chosen.ids), len(pair.rejected.ids)) for pair in train]
    loader, epoch_batches = example_loader(
        train, config.global_batch_pairs, config.seed, collate, count_pairs, lengths if config.group_by_length else None
    )
    pair_tokens = float(np.mean([len(pair.chosen.ids) + len(pair.rejected.ids) for pair in train]))
    batch_tokens = round(config.global_batch_pairs * pair_tokens)
    length = batches(config.duration, batch_tokens=batch_tokens, epoch_batches=epoch_batches)
    every = batches(config.evaluate_every, batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=length)

    def look() -> dict[str, float]:
        scores = score_pairs(model, heldout[: config.evaluate_pairs], chat.pad)
        margins = scores[:, 0] - scores[:, 1]
        loss = float(np.logaddexp(0, -margins).mean())
        return {"validation/sample_loss": loss, "validation/sample_accuracy": float((margins > 0).mean())}

    done = fit(
        "reward_model",
        model,
        loader,
        Plan(length, config.global_batch_pairs, batch_tokens, epoch_batches),
        config,
        hardware,
        run,
        [Watch(look, every, length, run)],
        inputs=inputs,
    )
    export(scorer.model, inputs["model"], out_dir)
    done.leave(out_dir)

    scores = score_pairs(model, heldout, chat.pad)
    margins = scores[:, 0] - scores[:, 1]
    right = int((margins > 0).sum())
    accuracy = wilson(right, len(margins))
    p_value = binomial_p_value(right, len(margins), alternative="greater")
    figures = {
        **accuracy.as_figures("heldout_accuracy"),
        **_by_source(measured.rows, margins),
        "heldout_pairs": float(len(margins)),
        "p_value": p_value,
        **bootstrap(margins, seed=config.seed).as_figures("margin"),
        "heldout_loss": float(np.logaddexp(0, -margins).mean()),
        "prompts_cut": float(fitted.cut + measured.cut),
        "pairs_dropped": float(fitted.dropped + measured.dropped),
        "batches": float(done.batches),
        **done.guard_figures(),
    }
    headline = f"held-out pairs right {accuracy.value:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%})"
    return Result(figures, done.headline(headline))


def _by_source(rows: Sequence[Mapping[str, str]], margins: NDArray[np.float64]) -> dict[str, float]:
    """The accuracy of each source's pairs, by the first part of their `source`: those of one are easier than another's.

    Nothing where there is one source, or so many that their intervals would say little.
    """
    sources = np.array([row.get("source", "").split("/")[0] for row in rows])
    names = sorted(set(sources) - {""})
    figures: dict[str, float] = {}
    for name in names if 2 <= len(names) <= MOST_SOURCES else ():
        right = margins[sources == name] > 0
        figures |= wilson(int(right.sum()), len(right)).as_figures(f"heldout_accuracy_of_{name}")
    return figures


def pair_batch(pairs: Sequence[Pair], fill: int) -> dict[str, Tensor]:
    """Pairs as `input_ids (B, 2, T)`, padded on the right, and `last (B, 2)`."""
    rows = [one.ids for pair in pairs for one in (pair.chosen, pair.rejected)]
    ids = pad(rows, fill)
    last = torch.tensor([len(row) - 1 for row in rows])
    return {"input_ids": ids.view(len(pairs), 2, -1), "last": last.view(-1, 2)}


def count_pairs(batch: Mapping[str, Tensor]) -> TokenCount:
    """Tokens of a batch, and its pairs, which its loss is the mean over."""
    return TokenCount(batch["input_ids"].numel(), len(batch["input_ids"]))


def score_pairs(model: RewardModel, pairs: Sequence[Pair], fill: int) -> NDArray[np.float64]:
    """Scores (pairs, 2) of chosen and rejected."""
    device = next(model.parameters()).device
    scores = []
    with measuring(model):
        for start in range(0, len(pairs), _BATCH):
            batch = {name: value.to(device) for name, value in pair_batch(pairs[start : start + _BATCH], fill).items()}
            scores.append(model(batch).double().cpu().numpy())
    return np.concatenate(scores)


if __name__ == "__main__":
    from infra.alone import main

    main(reward_model, RewardModelConfig)
