"""Aligns a model on preference pairs themselves: DPO, IPO, KTO or ORPO, without sampling and without a reward model.

python -m training.preference_tuning --config dpo.yaml --input model=DIR --input preferences=DIR --out DIR
    [--input judge=DIR]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from corpus.model_folders.adapters import keep_adapters
from evaluation.statistics.clustered import clustered_mean, clustered_ratio, clustered_share, clustered_sign_test
from evaluation.statistics.intervals import Interval
from infra.errors import StageError
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.chat.base import Chat, Conversation, read_rows
from training.checkpoint.export import export
from training.config import PreferenceTuningConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware, prepare
from training.core.measuring import measuring
from training.core.plan import plan_of
from training.core.train_state import TrainState
from training.data.examples import example_loader
from training.data.preferences import PreferencePair, fitted_pairs
from training.data.rows import Fitted, is_tie, prompt_clusters, prompts_of
from training.generation.completions import Completions, generate, kl_of
from training.guard.finite import check_measured
from training.model.attention import choose_attention
from training.model.models import limit_length, report_unbalanced_experts
from training.model.new_tokens import begin_untrained
from training.planner.measured import planned
from training.train_modules.adapting import Adapting
from training.train_modules.language_model import LanguageModel
from training.train_modules.preference_losses import kto_kl
from training.train_modules.preference_model import (
    Example,
    Logprobs,
    Mismatched,
    PreferenceTuned,
    count_pairs,
    preference_batch,
)
from training.train_modules.scorer import load_other_scorer
from training.trainer.fit import fit
from training.validation.answer_figures import answer_figures, lengthening, raw_scores, score_figures
from training.validation.evaluate import InLoopEvaluation

_BATCH = 32


class _Rises(Callback):
    """Records the rise of both answers' log-probabilities in each batch, and the difference of the two."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        chosen, rejected = state.losses["chosen"], state.losses["rejected"]
        figures = {"chosen_rise": chosen, "rejected_rise": rejected, "margin": chosen - rejected}
        self._run.metrics({f"preference/{name}": value for name, value in figures.items()}, state.clock.batch)


def preference_tuning(config: PreferenceTuningConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: PreferenceTuningConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train on `preferences/train.jsonl`; the reference model is the one that it begins from, frozen.

    Figures: prompts_cut, pairs_dropped (training pairs that had no room), ties_left_out, batches, tokens_per_s and the
    guard's. Raises StageError where lengths leave no room for a prompt, or the judge has another tokenizer.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "preference_tuning")
    adapting = _adapting(config)
    network = adapting.load(inputs["model"], run)
    report_unbalanced_experts("preference_tuning", network, run)
    max_length = limit_length(network, config.max_length)
    if problems := config.problems(max_length):
        raise StageError(*problems)
    choose_attention(network, hardware, max_length)
    # Adapters begin at 0: the log-probabilities before training are those of the reference.
    ids = adapting.adapt(network, chat.tokenizer, run)
    if "judge" in inputs:
        # Raises at once for a judge that cannot score these answers.
        load_other_scorer("judge", inputs["judge"], network, chat, hardware, max_length)
    model = PreferenceTuned(LanguageModel(network, hardware), config).to(hardware.device)

    pairs, ties = _pairs("train", config, inputs, chat, max_length, run)
    heldout, _ = _pairs("heldout", config, inputs, chat, max_length, run)
    measured = _examples(heldout, config, chat, max_length)
    examples = _examples(pairs, config, chat, max_length)
    reference = _logprobs(model, examples, chat, run, "reference model")[0]
    before = _logprobs(model, measured, chat, run, "reference model")

    def collate(some: Sequence[Example]) -> dict[str, Tensor]:
        return preference_batch(some, reference, chat)

    lengths = [max(len(side.ids) for side in (example.pair.chosen, example.pair.rejected)) for example in examples]
    loader, epoch_batches = example_loader(
        examples,
        config.global_batch_pairs,
        config.seed,
        collate,
        count_pairs,
        lengths if config.group_by_length else None,
    )
    tokens = [len(pair.chosen.ids) + len(pair.rejected.ids) for pair in pairs.examples]
    plan, every = plan_of(config, config.global_batch_pairs, tokens, epoch_batches)

    def look() -> dict[str, float]:
        watched = measured[: config.evaluate_pairs]
        side = _side(model, watched, before, _logprobs(model, watched, chat, Run(run.work_dir), ""))
        return {
            "validation/sample_loss": side.loss,
            "validation/sample_margin": float(side.margins.mean()),
            "validation/sample_accuracy": float((side.margins > 0).mean()),
        }

    estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
    done = fit(
        "preference_tuning",
        model,
        loader,
        plan,
        config,
        hardware,
        run,
        [
            *([Mismatched(model)] if config.loss == "kto" else []),
            _Rises(run),
            InLoopEvaluation(look, every, plan.batches, run),
        ],
        inputs=inputs,
    )
    # The model that is left: adapters merged, if there are any.
    tuned, adapters = model, None
    if config.lora:
        network, adapters = adapting.merge(network, inputs["model"], ids)
        if not adapting.quantizes:  # the unquantized model may not fit on the device
            choose_attention(network, hardware, max_length)
            tuned = PreferenceTuned(LanguageModel(network, hardware), config).to(hardware.device)
    export(network, inputs["model"], out_dir, chat.stops)
    if adapters and ranks.is_first():
        keep_adapters(out_dir, *adapters)
    done.leave(out_dir, estimate)
    figures = {
        **pairs.figures(),
        **({"ties_left_out": float(ties)} if ties else {}),
        "batches": float(done.batches),
        "tokens_per_s": done.tokens_per_s,
        **done.guard_figures(),
    }

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        result = _measured(tuned, heldout, before, inputs, chat, config, hardware, max_length, measured_dir, its_run)
        return replace(result, headline=done.headline(result.headline))

    return Result(figures, done.headline(f"{len(examples):,} pairs, {done.batches:,} batches"), measure_now)


def measure_trained(config: PreferenceTuningConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the model `trained` against `model`, its reference, on `preferences/heldout.jsonl`.

    Figures, where an answer's rise is log π/π_ref in nats, so that all four losses
    compare: margin (mean rise of the chosen less that of the rejected answer; times β the margin of DPO's implicit
    reward), chosen_rise, rejected_rise, win_rate (pairs whose chosen answer rose more), p_value (exact, against chance,
    one-sided), prefers_chosen_reference, prefers_chosen_policy (pairs whose chosen answer has the higher mean
    log-probability per token), heldout_loss, heldout_pairs, and what had no room: heldout_prompts_cut,
    heldout_pairs_dropped. All intervals and the p-value are clustered by prompt (`evaluation.statistics.clustered`).

    Both models answer held-out prompts, sampled: kl_to_reference (nats an answer, from whole next-token distributions,
    with its interval), kl_per_token, answer_tokens_reference, answer_tokens_policy, ends_share_reference,
    ends_share_policy.
    With the input `judge`, a reward model that trains nothing here, the same answers give heldout_judge_reference,
    heldout_judge_policy, judge_gain and judge_gain_equal_length, as in `training.rlhf`. Answers go to
    aux/samples.jsonl.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "preference_tuning")
    adapting = _adapting(config)
    reference = adapting.load(inputs["model"], run)
    max_length = limit_length(reference, config.max_length)
    if problems := config.problems(max_length):
        raise StageError(*problems)
    begin_untrained(reference, config.seed)
    heldout, _ = _pairs("heldout", config, inputs, chat, max_length, run)
    measured = _examples(heldout, config, chat, max_length)

    def placed(network: PreTrainedModel) -> PreferenceTuned:
        choose_attention(network, hardware, max_length)
        return PreferenceTuned(LanguageModel(network, hardware), config).to(hardware.device)

    before = _logprobs(placed(reference), measured, chat, run, "reference model")
    del reference  # answers are compared with one that is loaded again
    tuned = placed(adapting.load_trained(inputs["model"], inputs[TRAINED], run))
    return _measured(tuned, heldout, before, inputs, chat, config, hardware, max_length, out_dir, run)


def _adapting(config: PreferenceTuningConfig) -> Adapting:
    return Adapting(
        "preference_tuning", config.lora, config.seed, lambda network: begin_untrained(network, config.seed)
    )


def _pairs(
    side: str, config: PreferenceTuningConfig, inputs: Mapping[str, Path], chat: Chat, max_length: int, run: Run
) -> tuple[Fitted[PreferencePair], int]:
    """The pairs of one side, `train` or `heldout`, that have room and a better answer, and how many are ties."""
    rows = read_rows(inputs["preferences"] / f"{side}.jsonl", ("prompt", "chosen", "rejected"))
    decided = [row for row in rows if not is_tie(row)]
    name, limit = ("training", None) if side == "train" else ("held-out", config.heldout_limit)
    ties = len(rows) - len(decided)
    if ties:
        message = f"{ties:,} {name} pairs are ties, which are not used here, and are left out"
        run.event("ties_left_out", f"preference_tuning: {message}")
    fitting = fitted_pairs(chat, decided[:limit], max_length, config.too_long)
    return fitting.report("preference_tuning", name, max_length, run), ties


def _measured(
    model: PreferenceTuned,
    heldout: Fitted[PreferencePair],
    before: tuple[NDArray[np.float64], NDArray[np.float64]],
    inputs: Mapping[str, Path],
    chat: Chat,
    config: PreferenceTuningConfig,
    hardware: Hardware,
    max_length: int,
    out_dir: Path,
    run: Run,
) -> Result:
    """The figures of `measure_trained`. Every rank must call.

    Args:
        before: log-probabilities (pairs, 2 or 4) of the reference model in nats, and the answers' tokens.
    """
    measured = _examples(heldout, config, chat, max_length)
    after = _side(model, measured, before, _logprobs(model, measured, chat, run, "tuned model"))
    policy = model.language.model
    figures = {
        **after.figures(before, prompt_clusters(heldout.rows)),
        "heldout_pairs": float(len(measured)),
        **heldout.figures("heldout_"),
    }
    check_measured("preference_tuning", figures)
    figures |= _answers(policy, inputs, heldout.rows, chat, config, hardware, max_length, out_dir, run)
    headline = (
        f"held-out win rate {figures['win_rate']:.1%} ({figures['win_rate_low']:.1%} to "
        f"{figures['win_rate_high']:.1%}), margin {figures['margin']:+.2f}, KL {figures['kl_to_reference']:.1f}"
    )
    return Result(figures, headline)


def _examples(
    fitted: Fitted[PreferencePair], config: PreferenceTuningConfig, chat: Chat, max_length: int
) -> list[Example]:
    """The pairs by number; for KTO with the answers of a pair of another prompt, whose reference log-probabilities are
    then known before training."""
    pairs = fitted.examples
    if config.loss != "kto":
        return [Example(number, pair) for number, pair in enumerate(pairs)]

    def with_prompt(prompt: Sequence[int], answer: Conversation) -> Conversation:
        return Conversation(chat.shortened(prompt, max_length - len(answer.response)), answer.response)

    others = [pairs[number] for number in _of_other_prompts([row["prompt"] for row in fitted.rows])]
    return [
        Example(
            number,
            pair,
            PreferencePair(*(with_prompt(pair.chosen.prompt, answer) for answer in (other.chosen, other.rejected))),
        )
        for number, (pair, other) in enumerate(zip(pairs, others, strict=True))
    ]


def _of_other_prompts(prompts: Sequence[str]) -> list[int]:
    """Return for each pair in the file the number of one of another prompt: the pair that follows; where a prompt has
    several, as the pairs of a ranking, its first has the first of the next prompt, its second the second, and so on,
    in turn. Where there is one prompt alone, the pair that follows.
    """
    groups = [
        (prompt, [number for number, _ in group]) for prompt, group in groupby(enumerate(prompts), lambda item: item[1])
    ]
    if len({prompt for prompt, _ in groups}) < 2:
        return [*range(1, len(prompts)), 0]
    assigned = []
    for index, (prompt, numbers) in enumerate(groups):
        # The first may be of the last one's prompt.
        other = next(those for text, those in (groups[(index + far) % len(groups)] for far in (1, 2)) if text != prompt)
        assigned += [other[turn % len(other)] for turn in range(len(numbers))]
    return assigned


def _logprobs(
    model: PreferenceTuned, examples: Sequence[Example], chat: Chat, run: Run, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probabilities (examples, 2 or 4) of the answers in nats, and their tokens; every rank must call."""
    device = next(model.parameters()).device
    # The ranks' rounds are of equal number: where weights are sharded, all gather them for each.
    each = -(-len(examples) // ranks.world_size())
    first = ranks.rank() * each
    own_examples = [examples[min(number, len(examples) - 1)] for number in range(first, first + each)]
    sums, tokens = [], []
    with measuring(model):
        for start in range(0, each, _BATCH):
            run.stop_if_cancelled()
            some = own_examples[start : start + _BATCH]
            flat = chat.response_batch([conversation for example in some for conversation in example.conversations()])
            rows = {key: value.view(len(some), -1, value.shape[1]).to(device) for key, value in flat.items()}
            outputs = model(rows)
            sums.append(outputs.sums.double().cpu().numpy())
            tokens.append(outputs.tokens.double().cpu().numpy())
            if name:
                run.progress(start + len(some), each, "pairs", f"measuring the {name}")
    parts = ranks.gather((np.concatenate(sums), np.concatenate(tokens)))
    log_likelihoods, counted = (np.concatenate(column)[: len(examples)] for column in zip(*parts, strict=True))
    return log_likelihoods, counted


class _TunedOnPairs(NamedTuple):
    """The tuned model on held-out pairs: loss, and the rise of the log-probabilities of both answers (pairs, 2)."""

    loss: float
    risen: NDArray[np.float64]

    @property
    def margins(self) -> NDArray[np.float64]:
        """Margins (pairs,)."""
        margins: NDArray[np.float64] = self.risen[:, 0] - self.risen[:, 1]
        return margins

    def figures(
        self, before: tuple[NDArray[np.float64], NDArray[np.float64]], prompts: NDArray[np.int64]
    ) -> dict[str, float]:
        """Return the figures of a model on held-out pairs.

        Args:
            before: log-probabilities (pairs, 2 or 4) of the reference model in nats, and the answers' tokens.
            prompts: number of each pair's prompt (pairs,).
        """
        right = self.margins > 0
        return {
            **clustered_mean(self.margins, prompts).as_figures("margin"),
            **clustered_mean(self.risen[:, 0], prompts).as_figures("chosen_rise"),
            **clustered_mean(self.risen[:, 1], prompts).as_figures("rejected_rise"),
            **clustered_share(right, prompts).as_figures("win_rate"),
            "p_value": clustered_sign_test(2 * right - 1, prompts, "greater"),
            **_prefers(before[0][:, :2], before[1], prompts).as_figures("prefers_chosen_reference"),
            **_prefers(before[0][:, :2] + self.risen, before[1], prompts).as_figures("prefers_chosen_policy"),
            "heldout_loss": self.loss,
        }


def _side(
    model: PreferenceTuned,
    examples: Sequence[Example],
    before: tuple[NDArray[np.float64], NDArray[np.float64]],
    now: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> _TunedOnPairs:
    reference = before[0][: len(examples)]
    risen = now[0] - reference
    outputs = Logprobs(*(torch.from_numpy(part[:, :2]) for part in now))
    kl = kto_kl(torch.from_numpy(risen[:, 2:])) if risen.shape[1] > 2 else torch.zeros(())
    losses = model.pair_losses(outputs, {"reference": torch.from_numpy(reference[:, :2]), "kl": kl})
    return _TunedOnPairs(float(losses.mean()), risen[:, :2])


def _prefers(sums: NDArray[np.float64], tokens: NDArray[np.float64], prompts: NDArray[np.int64]) -> Interval:
    """Return the share of pairs whose chosen answer has the higher mean log-probability per token."""
    each = sums / tokens[:, :2]
    return clustered_share(each[:, 0] > each[:, 1], prompts)


def _answers(
    policy: PreTrainedModel,
    inputs: Mapping[str, Path],
    rows: Sequence[Mapping[str, str]],
    chat: Chat,
    config: PreferenceTuningConfig,
    hardware: Hardware,
    max_length: int,
    out_dir: Path,
    run: Run,
) -> dict[str, float]:
    """Figures of both models' sampled answers to held-out prompts, each prompt once; the answers go to the samples."""
    # Other calls and results before an answer make another prompt.
    questions = list(
        {(row["prompt"], json.dumps([row.get("history"), row.get("steps")])): row for row in rows}.values()
    )
    questions = questions[: config.heldout_prompts]
    dialogues = prompt_clusters(questions)
    reference = _adapting(config).load(inputs["model"], run).to(hardware.device).eval().requires_grad_(False)
    begin_untrained(reference, config.seed)
    choose_attention(reference, hardware, max_length)
    room = max_length - config.answer_max_tokens
    prompts = [
        chat.shortened(prompts_of(chat, [row])[0], room)
        if "chosen_message" in row
        else chat.prompts([row["prompt"]], room)[0]
        for row in questions
    ]
    answers: dict[str, Completions] = {}
    for name, model in (("reference", reference), ("policy", policy)):
        run.stop_if_cancelled()
        answers[name] = generate(model, prompts, chat, config, hardware, config.seed)
    apart_by = kl_of(policy, reference, answers["policy"], chat, hardware, config.temperature)
    kl, tokens = (column.double().numpy() for column in apart_by)
    figures = {
        **clustered_mean(kl, dialogues).as_figures("kl_to_reference"),
        "kl_per_token": clustered_ratio(kl, tokens, dialogues).value,
        "heldout_prompts": float(len(questions)),
        **answer_figures(answers, 1, dialogues),
    }
    judged: dict[str, NDArray[np.float64]] = {}
    if "judge" in inputs:
        judge = load_other_scorer("judge", inputs["judge"], policy, chat, hardware, max_length)
        judge = judge.to(hardware.device).eval().requires_grad_(False)
        choose_attention(judge.model, hardware, max_length)
        judged = raw_scores(judge, answers, chat, hardware)
        longer = lengthening(answers["reference"], answers["policy"])
        figures |= score_figures("judge", judged, longer, np.ones(len(questions), bool), dialogues)
    if ranks.is_first():
        _write_samples(out_dir / "aux" / "samples.jsonl", questions, chat, answers, judged)
    return figures


def _write_samples(
    path: Path,
    rows: Sequence[Mapping[str, str]],
    chat: Chat,
    answers: Mapping[str, Completions],
    judged: Mapping[str, NDArray[np.float64]],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf8") as file:
        for number, row in enumerate(rows):
            texts = {name: chat.decode(side.ids[number]) for name, side in answers.items()}
            line: dict[str, Any] = {"prompt": row["prompt"], "reference": row["chosen"], "answers": texts}
            if judged:
                line["judge"] = {name: round(float(values[number]), 4) for name, values in judged.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    from infra.alone import main

    main(preference_tuning, PreferenceTuningConfig)
