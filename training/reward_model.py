"""Trains a reward model from pairs of a chosen and a rejected answer, and from rankings of several.

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
from evaluation.statistics import Interval, binomial_p_value, bootstrap, bootstrap_ratio, wilson
from infra.errors import stage_error
from infra.run import Result, Run
from training.attention import choose_attention
from training.chat import Chat, read_rows
from training.config import RewardModelConfig, batches
from training.evaluate import Watch, measuring
from training.export import export
from training.fit import Plan, fit
from training.hardware import Hardware, prepare
from training.loaders import example_loader
from training.models import limit_length
from training.norms import last_stack
from training.preference_pairs import Pair
from training.rankings import (
    Preferred,
    Ranking,
    balanced,
    clusters,
    each_pair,
    fitted_rankings,
    ranking_batch,
)
from training.reward_figures import calibration_figures, length_figures
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

    def at(self, ids: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """Scores (B, P) read at `places (B, P)` of ids (B, T) padded on the right; lengths: tokens (B,) of each that
        matter, and at later places anything is read."""
        hidden = hidden_states(self.model, ids, lengths, places, self._hardware)
        # The score itself stays in fp32: differences of rewards are small.
        return linear(hidden.float(), self.model.get_parameter("score.weight"))[..., 0]

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        """Scores (B,) read at the last token, at `last (B,)`, of ids (B, T) padded on the right."""
        return self.at(ids, last[:, None], last + 1)[:, 0]


class RewardModel(Trainable):
    """A scorer with the Bradley–Terry loss; a batch is `training.rankings.ranking_batch`'s.

    The loss of a prompt is the mean over its pairs, K choose 2 in a ranking, so that a prompt with many answers counts
    as much as any other and no answer is computed twice (InstructGPT, section 3.5).
    """

    chance_loss = math.log(2)
    """That of guessing."""

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
    for the better answer, one half in a tie, and m by how much it is `wanted` to lie ahead (Touvron et al. 2023,
    "Llama 2", equation 2)."""
    return -share * logsigmoid(margins - wanted) - (1 - share) * logsigmoid(-margins - wanted)


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

    Figures on `preferences/heldout.jsonl`: heldout_accuracy (pairs put in the right order, Wilson interval; where there
    are rankings, whose pairs hang together, by bootstrap over prompts), the same for each source where there are two to
    ten (heldout_accuracy_of_docstrings), heldout_pairs, p_value (one-sided exact binomial against chance; of rankings
    by whether most of their pairs are right), margin (mean chosen minus rejected score, bootstrap interval),
    heldout_loss (chance is 0.693), and what had no room, of training and held-out pairs together: prompts_cut,
    pairs_dropped. Ties, heldout_ties of them, are in heldout_loss alone. On the way loss and accuracy on some held-out
    pairs are told as validation/sample_loss and validation/sample_accuracy.

    What length has to do with it, and whether σ(margin) is how often it is right: see `training.reward_figures`.
    """
    hardware = prepare(run.launch)
    chat = Chat.load(inputs["model"])
    scorer = load_scorer(inputs["model"], hardware, config.seed)
    max_length = limit_length(scorer.model, config.max_length)
    choose_attention(scorer.model, hardware, max_length)
    model = RewardModel(scorer, config.margin_coef).to(hardware.device)
    keys = ("prompt", "chosen", "rejected")
    fitted, measured = (
        fitted_rankings(
            chat, read_rows(inputs["preferences"] / f"{side}.jsonl", keys, limit), max_length, config.too_long
        ).told("reward_model", name, max_length, run)
        for side, name, limit in (("train", "training", None), ("heldout", "held-out", config.heldout_limit))
    )
    train, heldout = fitted.rankings, measured.rankings
    unweighted = 0
    if config.balance_lengths:
        train, unweighted = balanced(train)
        _check_balance(train, unweighted, run)

    def collate(rankings: Sequence[Ranking]) -> dict[str, Tensor]:
        return ranking_batch(rankings, chat.pad)

    lengths = [max(len(answer.ids) for answer in ranking.answers) for ranking in train]
    loader, epoch_batches = example_loader(
        train, config.global_batch_pairs, config.seed, collate, count_pairs, lengths if config.group_by_length else None
    )
    pair_tokens = float(np.mean([sum(len(answer.ids) for answer in ranking.answers) for ranking in train]))
    batch_tokens = round(config.global_batch_pairs * pair_tokens)
    length = batches(config.duration, batch_tokens=batch_tokens, epoch_batches=epoch_batches)
    every = batches(config.evaluate_every, batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=length)

    def look() -> dict[str, float]:
        watched = heldout[: config.evaluate_pairs]
        scores = score_pairs(model, watched, chat.pad)
        margins, decided = scores[:, 0] - scores[:, 1], _decided(watched)
        found = {"validation/sample_loss": _loss(margins, watched)}
        if decided.any():
            found["validation/sample_accuracy"] = float((margins[decided] > 0).mean())
        return found

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
    apart, decided = scores[:, 0] - scores[:, 1], _decided(heldout)
    if not decided.any():
        raise stage_error(
            "no_order",
            "preferences",
            f"expected held-out pairs of which one answer is better, all {len(apart):,} are ties",
            "give more pairs",
        )
    margins = apart[decided]
    accuracy, p_value = _accuracy(margins > 0, clusters(heldout)[decided], config.seed)
    longer = np.array([one.longer(pair) for one, pair in each_pair(heldout)], float)[decided]
    figures = {
        **accuracy.as_figures("heldout_accuracy"),
        **_by_source([row for row, is_decided in zip(measured.rows, decided, strict=True) if is_decided], margins),
        "heldout_pairs": float(len(margins)),
        **({"heldout_ties": float((~decided).sum())} if not decided.all() else {}),
        **({"heldout_rankings": float(len(heldout))} if _has_rankings(heldout) else {}),
        "p_value": p_value,
        **bootstrap(margins, seed=config.seed).as_figures("margin"),
        "heldout_loss": _loss(apart, heldout),
        **length_figures(margins, longer, config.seed),
        **calibration_figures(margins, out_dir / "aux" / "calibration.json", config.seed),
        "prompts_cut": float(fitted.cut + measured.cut),
        "pairs_dropped": float(fitted.dropped + measured.dropped),
        **({"pairs_unbalanced": float(unweighted)} if config.balance_lengths else {}),
        "batches": float(done.batches),
        **done.guard_figures(),
    }
    headline = f"held-out pairs right {accuracy.value:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%})"
    return Result(figures, done.headline(headline))


def _check_balance(train: Sequence[Ranking], unweighted: int, run: Run) -> None:
    """Raises StageError `no_balance` where no pair is left that weighs something."""
    if not train:
        raise stage_error(
            "no_balance",
            "reward_model.balance_lengths",
            f"expected pairs of both kinds, whose better answer is longer and shorter: of {unweighted:,} pairs the "
            "better one is always the longer or always the shorter",
            "set it to false, or give pairs of the other kind",
        )
    if unweighted:
        run.event(
            "pairs_unbalanced",
            f"reward_model: {unweighted:,} pairs weigh nothing, since none of the other direction has such a "
            "difference in length",
        )


def _decided(rankings: Sequence[Ranking]) -> NDArray[np.bool_]:
    """Which pairs have a better answer."""
    return np.array([not pair.is_tie for _, pair in each_pair(rankings)])


def _has_rankings(rankings: Sequence[Ranking]) -> bool:
    return any(len(one.pairs) > 1 for one in rankings)


def _loss(margins: NDArray[np.float64], rankings: Sequence[Ranking]) -> float:
    """The mean loss of the pairs, without margins or weights."""
    share = np.array([pair.share for _, pair in each_pair(rankings)])
    return float((share * np.logaddexp(0, -margins) + (1 - share) * np.logaddexp(0, margins)).mean())


def _accuracy(right: NDArray[np.bool_], ranking: NDArray[np.int64], seed: int) -> tuple[Interval, float]:
    """The share of right pairs with its interval, and its p-value; ranking: the number of each pair's."""
    _, of, counts = np.unique(ranking, return_inverse=True, return_counts=True)
    if len(counts) == len(right):
        count = int(right.sum())
        return wilson(count, len(right)), binomial_p_value(count, len(right), alternative="greater")
    rights = np.bincount(of, right)
    most, least = int((2 * rights > counts).sum()), int((2 * rights < counts).sum())
    return bootstrap_ratio(rights, counts, seed), binomial_p_value(most, most + least, alternative="greater")


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
    return ranking_batch([Ranking([pair.chosen, pair.rejected], [Preferred(0, 1)]) for pair in pairs], fill)


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


if __name__ == "__main__":
    from infra.alone import main

    main(reward_model, RewardModelConfig)
