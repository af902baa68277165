"""Trains a reward model from pairs of a chosen and a rejected answer, and from rankings of several.

python -m training.reward_model --config reward_model.yaml --input model=DIR --input preferences=DIR --out DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from corpus.model_folders.inputs import name_padding
from evaluation.statistics.clustered import clustered_mean, clustered_share, clustered_sign_test
from infra.errors import stage_error
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.chat.base import Chat, read_rows
from training.checkpoint.export import export
from training.config import RewardModelConfig
from training.core import ranks
from training.core.hardware import prepare
from training.core.plan import plan_of
from training.data.examples import example_loader
from training.data.preferences import (
    Ranking,
    balanced,
    each_pair,
    fitted_rankings,
    ranking_batch,
)
from training.data.rows import Fitted, prompt_clusters
from training.guard.finite import check_measured
from training.model.attention import choose_attention
from training.model.models import limit_length
from training.planner.measured import planned
from training.train_modules.scorer import RewardModel, count_pairs, load_scorer, score_pairs
from training.trainer.fit import fit
from training.validation.evaluate import InLoopEvaluation
from training.validation.reward_figures import calibration_figures, length_figures

MOST_SOURCES = 10


def reward_model(config: RewardModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: RewardModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train on `preferences/train.jsonl` from the SFT model; the reward is read at the answer's last token.

    Figures: prompts_cut, pairs_dropped (training pairs that had no room), pairs_unbalanced with `balance_lengths`,
    batches and the guard's. During training, loss and accuracy on some held-out pairs are recorded as
    validation/sample_loss and validation/sample_accuracy.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "reward_model")
    scorer = load_scorer(inputs["model"], hardware, config.seed)
    max_length = limit_length(scorer.model, config.max_length)
    choose_attention(scorer.model, hardware, max_length)
    model = RewardModel(scorer, config.margin_coef).to(hardware.device)
    fitting = _fitted("train", config, inputs, chat, max_length, run)
    measured = _fitted("heldout", config, inputs, chat, max_length, run)
    rankings, heldout = fitting.examples, measured.examples
    unweighted = 0
    if config.balance_lengths:
        rankings, unweighted = balanced(rankings)
        _check_balance(rankings, unweighted, run)

    def collate(some: Sequence[Ranking]) -> dict[str, Tensor]:
        return ranking_batch(some, chat.pad)

    lengths = [max(len(answer.ids) for answer in ranking.answers) for ranking in rankings]
    loader, epoch_batches = example_loader(
        rankings,
        config.global_batch_pairs,
        config.seed,
        collate,
        count_pairs,
        lengths if config.group_by_length else None,
    )
    tokens = [sum(len(answer.ids) for answer in ranking.answers) for ranking in rankings]
    plan, every = plan_of(config, config.global_batch_pairs, tokens, epoch_batches)

    def look() -> dict[str, float]:
        watched = heldout[: config.evaluate_pairs]
        scores = score_pairs(model, watched, chat.pad)
        margins, decided = scores[:, 0] - scores[:, 1], _decided(watched)
        figures = {"validation/sample_loss": _loss(margins, watched)}
        if decided.any():
            figures["validation/sample_accuracy"] = float((margins[decided] > 0).mean())
        return figures

    estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
    done = fit(
        "reward_model",
        model,
        loader,
        plan,
        config,
        hardware,
        run,
        [InLoopEvaluation(look, every, plan.batches, run)],
        inputs=inputs,
    )
    padding = _padding_besides_ends(chat, run)
    if padding is not None:
        scorer.model.config.pad_token_id = chat.tokenizer.convert_tokens_to_ids(padding)
    export(scorer.model, inputs["model"], out_dir)
    if padding is not None and ranks.is_first():
        name_padding(out_dir, padding)
    done.leave(out_dir, estimate)
    figures = {
        **fitting.figures(),
        **({"pairs_unbalanced": float(unweighted)} if config.balance_lengths else {}),
        "batches": float(done.batches),
        **done.guard_figures(),
    }
    pairs = sum(len(ranking.pairs) for ranking in rankings)

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        result = _measured(model, measured, chat, measured_dir)
        return replace(result, headline=done.headline(result.headline))

    return Result(figures, done.headline(f"{pairs:,} pairs, {done.batches:,} batches"), measure_now)


def _padding_besides_ends(chat: Chat, run: Run) -> str | None:
    """The token that a reward model's sequences are padded with in place of its tokenizer's; None where that is kept.

    transformers' classifiers read a score at the last token that is no padding. Where a model pads with the token that
    ends its answers (DeepSeek, many tunings of Llama and Mistral), that is one token before the end, at which the
    reward is learnt.
    """
    if chat.pad not in chat.stops:
        return None
    tokenizer = chat.tokenizer
    known = sorted(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    others = [tokenizer.unk_token_id, tokenizer.bos_token_id, *known]
    padding = next((number for number in others if number is not None and number not in chat.stops), None)
    if padding is not None:
        return str(tokenizer.convert_ids_to_tokens(padding))
    name = tokenizer.convert_ids_to_tokens(chat.pad)
    run.event(
        "padding_ends_answers",
        f"the model pads with {name}, which ends its answers, and has no other special token: transformers reads the "
        "score of an answer one token before its end, where this project reads it at the end",
    )
    return None


def measure_trained(config: RewardModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the reward model `trained` on `preferences/heldout.jsonl`.

    Figures: heldout_accuracy (pairs put in the right order), the same for each source where there are two to ten
    (heldout_accuracy_of_docstrings), heldout_pairs, heldout_prompts, p_value (one-sided, exact, against chance), margin
    (mean chosen minus rejected score), heldout_loss (chance is 0.693), and what had no room: heldout_prompts_cut,
    heldout_pairs_dropped. All intervals and the p-value are clustered by prompt (`evaluation.statistics.clustered`):
    of pairs with a prompt each they are Wilson's and the binomial test's. Ties, heldout_ties of them, are in
    heldout_loss alone.

    What length has to do with it, and whether σ(margin) is how often it is right: see
    `training.validation.reward_figures`.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "reward_model")
    scorer = load_scorer(inputs[TRAINED], hardware)
    max_length = limit_length(scorer.model, config.max_length)
    choose_attention(scorer.model, hardware, max_length)
    model = RewardModel(scorer, config.margin_coef).to(hardware.device)
    return _measured(model, _fitted("heldout", config, inputs, chat, max_length, run), chat, out_dir)


def _fitted(
    side: str, config: RewardModelConfig, inputs: Mapping[str, Path], chat: Chat, max_length: int, run: Run
) -> Fitted[Ranking]:
    """The pairs and rankings of one side, `train` or `heldout`, that have room."""
    limit = None if side == "train" else config.heldout_limit
    rows = read_rows(inputs["preferences"] / f"{side}.jsonl", ("prompt", "chosen", "rejected"), limit)
    name = "training" if side == "train" else "held-out"
    return fitted_rankings(chat, rows, max_length, config.too_long).report("reward_model", name, max_length, run)


def _measured(model: RewardModel, heldout: Fitted[Ranking], chat: Chat, out_dir: Path) -> Result:
    """The figures of `measure_trained`."""
    scores = score_pairs(model, heldout.examples, chat.pad)
    figures = {
        **_figures(scores, heldout, out_dir),
        **heldout.figures("heldout_"),
    }
    check_measured("reward_model", figures)
    right, low, high = (figures[f"heldout_accuracy{part}"] for part in ("", "_low", "_high"))
    return Result(figures, f"held-out pairs right {right:.1%} ({low:.1%} to {high:.1%})")


def _figures(scores: NDArray[np.float64], measured: Fitted[Ranking], out_dir: Path) -> dict[str, float]:
    """Return the figures of the scores (pairs, 2) of held-out pairs; the calibration is written to
    aux/calibration.json.

    Raises StageError `no_order` where no pair has a better answer.
    """
    heldout = measured.examples
    apart, decided = scores[:, 0] - scores[:, 1], _decided(heldout)
    if not decided.any():
        raise stage_error(
            "no_order",
            "preferences",
            f"expected held-out pairs with a better answer, but all {len(apart):,} are ties",
            "provide more pairs",
        )
    margins = apart[decided]
    right, prompts = margins > 0, prompt_clusters(measured.rows)[decided]
    longer = np.array([ranking.longer(pair) for ranking, pair in each_pair(heldout)], float)[decided]
    return {
        **clustered_share(right, prompts).as_figures("heldout_accuracy"),
        **_by_source(
            [row for row, is_decided in zip(measured.rows, decided, strict=True) if is_decided], right, prompts
        ),
        "heldout_pairs": float(len(margins)),
        "heldout_prompts": float(len(np.unique(prompts))),
        **({"heldout_ties": float((~decided).sum())} if not decided.all() else {}),
        **({"heldout_rankings": float(len(heldout))} if any(len(ranking.pairs) > 1 for ranking in heldout) else {}),
        "p_value": clustered_sign_test(2 * right - 1, prompts, "greater"),
        **clustered_mean(margins, prompts).as_figures("margin"),
        "heldout_loss": _loss(apart, heldout),
        **length_figures(margins, longer, prompts),
        **calibration_figures(margins, out_dir / "aux" / "calibration.json", prompts),
    }


def _check_balance(train: Sequence[Ranking], unweighted: int, run: Run) -> None:
    """Raise StageError `no_balance` where no pair is left that weighs something."""
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
            f"reward_model: {unweighted:,} pairs have no weight, since none of the other direction has such a "
            "difference in length",
        )


def _decided(rankings: Sequence[Ranking]) -> NDArray[np.bool_]:
    """Return a mask of the pairs that have a better answer."""
    return np.array([not pair.is_tie for _, pair in each_pair(rankings)])


def _loss(margins: NDArray[np.float64], rankings: Sequence[Ranking]) -> float:
    """The mean loss of the pairs, without margins or weights."""
    share = np.array([pair.share for _, pair in each_pair(rankings)])
    return float((share * np.logaddexp(0, -margins) + (1 - share) * np.logaddexp(0, margins)).mean())


def _by_source(
    rows: Sequence[Mapping[str, str]], right: NDArray[np.bool_], prompts: NDArray[np.int64]
) -> dict[str, float]:
    """Return the accuracy of each source's pairs, by the first part of their `source`: some sources' pairs are easier
    than others'. Nothing where there is one source, or more than MOST_SOURCES, whose intervals would be too wide.
    """
    sources = np.array([row.get("source", "").split("/")[0] for row in rows])
    names = sorted(set(sources) - {""})
    figures: dict[str, float] = {}
    for name in names if 2 <= len(names) <= MOST_SOURCES else ():
        of = sources == name
        figures |= clustered_share(right[of], prompts[of]).as_figures(f"heldout_accuracy_of_{name}")
    return figures


if __name__ == "__main__":
    from infra.alone import main

    main(reward_model, RewardModelConfig)
