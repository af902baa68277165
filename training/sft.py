"""Teaches a base model to answer: supervised fine-tuning on instruction and response pairs.

python -m training.sft --config sft.yaml --input model=DIR --input instructions=DIR --out DIR [--input shards=DIR]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from corpus.model_folders.adapters import keep_adapters
from evaluation.statistics.clustered import clustered_ratio, clustered_share
from infra.errors import StageError
from infra.io.json import write_json_lines
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.chat.base import Chat, Conversation, read_rows
from training.checkpoint.export import export, renew_template
from training.config import SftConfig
from training.config.families import documents_problem
from training.core import ranks
from training.core.hardware import Hardware, prepare
from training.core.measuring import measuring
from training.core.plan import plan_of
from training.core.train_state import Loader
from training.data.conversations import Pack, fitted_conversations, packed_batch, packs
from training.data.examples import example_loader
from training.data.rows import by_weight, prompt_clusters
from training.generation.sampling import sample
from training.guard.finite import check_measured
from training.model.attention import choose_attention
from training.model.models import limit_length, report_unbalanced_experts
from training.model.new_tokens import begin_untrained
from training.planner.measured import planned
from training.rl.grading import Graders
from training.rl.verify import Rule, announce_sandbox, right_answers, rules_of
from training.train_modules.adapting import Adapting
from training.train_modules.language_model import LanguageModel
from training.train_modules.mixed_text import TextExample, as_long_as_the_others, text_examples
from training.trainer.fit import fit
from training.validation.evaluate import InLoopEvaluation
from training.validation.in_loop import SAMPLES, InLoopAnswers, kept_answers

_BATCH = 32
_WATCHED_AT = (0.1, 0.3)
"""Shares of the batches after which the watched prompts are answered: answers change early."""


def sft(config: SftConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: SftConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train on `instructions/train.jsonl`, the loss on the assistant's tokens and their `<|end|>` alone, and with
    text_share on text of `shards/train` too. Of a conversation of several turns every answer is learnt.

    Figures: prompts_cut, pairs_dropped (training conversations that had no room), batches, tokens, tokens_per_s and the
    guard's. During training, the loss of some held-out pairs is recorded as validation/sample_loss. The answers to the
    first held-out prompts, from before training to its end, are in aux/training_samples.jsonl. Raises StageError where
    lengths leave no room for a prompt, no sandbox is available for unit tests, or the model's family does not follow
    the mask that packing needs.
    """
    # Model, chat format and device. Faults of their combination are reported before the data is read.
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "sft")
    adapting = _adapting(config)
    network = adapting.load(inputs["model"], run)
    if config.packing and (problem := documents_problem(network.config.model_type)):
        raise StageError(problem)
    report_unbalanced_experts("sft", network, run)
    max_length = limit_length(network, config.max_length)
    if problems := config.problems(max_length):
        raise StageError(*problems)
    choose_attention(network, hardware, max_length, documents=config.packing)
    model = LanguageModel(network, hardware).to(hardware.device)

    # Conversations that fit the context; the model answers the held-out ones before training, to compare with.
    rows = by_weight(read_rows(inputs["instructions"] / "train.jsonl", ("prompt", "response")))
    fitting = fitted_conversations(chat, rows, max_length, config.too_long).report("sft", "training", max_length, run)
    heldout = _Heldout.read(config, inputs["instructions"], chat, max_length, run)
    graders = Graders(sandbox=run.launch.sandbox)
    announce_sandbox(heldout.rules, graders, run)
    before = heldout.measure(model, chat, config, hardware, max_length, run, "base model")
    # Rows of new tokens, and adapters: what the optimizer updates.
    ids = adapting.adapt(network, chat.tokenizer, run)
    # Batches: conversations, packed or one each, mixed with pretraining text if the config asks for it.
    training_packs = (
        packs(fitting.examples, max_length)
        if config.packing
        else [(conversation,) for conversation in fitting.examples]
    )
    lengths = [sum(len(conversation.ids) for conversation in pack) for pack in training_packs]
    mixed_in: list[TextExample] = []
    if config.text_per_batch:
        batches_of_text = max(1, len(training_packs) // (config.global_batch_examples - config.text_per_batch))
        count = batches_of_text * config.text_per_batch
        key, sources = "sft.text_sources", config.text_sources
        of_text = {"sources": sources, "key": key, "tokenizer": chat.tokenizer}
        mixed_in = text_examples(inputs["shards"], count, max_length, config.seed, run, **of_text)
    loader, epoch_batches = _loader(config, chat, training_packs, lengths, mixed_in)
    plan, every = plan_of(config, config.global_batch_examples, lengths, epoch_batches)

    # What is measured during training: the loss of held-out answers, and answers to watched prompts.
    def look() -> dict[str, float]:
        watched = heldout.conversations[: config.evaluate_pairs]
        losses = np.concatenate([loss for loss, _ in _losses(model, chat, watched, hardware)])
        return {
            "validation/sample_loss": float(losses.sum() / sum(len(conversation.response) for conversation in watched))
        }

    watched = heldout.first(config.watched_prompts)

    def watch(side: _ModelOnPairs) -> list[dict[str, Any]]:
        return side.rows_of(chat, watched.rows, watched.rules, graders)

    def measure_watched(model: LanguageModel, name: str) -> list[dict[str, Any]]:
        quiet = Run(run.work_dir, run.launch)
        return watch(watched.measure(model, chat, config, hardware, max_length, quiet, name))

    # Training.
    model.label_smoothing = config.label_smoothing
    noise = [model.add_noise(config.neftune_alpha)] if config.neftune_alpha else []
    at = {round(share * plan.batches) for share in _WATCHED_AT} - {0, plan.batches} if watched.rows else set()
    estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
    done = fit(
        "sft",
        model,
        loader,
        plan,
        config,
        hardware,
        run,
        [
            InLoopEvaluation(look, every, plan.batches, run),
            InLoopAnswers(network, lambda: measure_watched(model, "model so far"), at, run),
        ],
        inputs=inputs,
    )
    for handle in noise:
        handle.remove()
    # The model that is left: adapters merged, and weights averaged with those at the start, if configured.
    tuned, adapters = model, None
    if config.lora or config.start_share:
        network, adapters = adapting.merge(network, inputs["model"], ids, config.start_share)
        choose_attention(network, hardware, max_length)
        if not adapting.quantizes:  # the unquantized model may not fit on the device
            tuned = LanguageModel(network, hardware).to(hardware.device)
    export(network, inputs["model"], out_dir, chat.stops)
    renew_template(out_dir)
    if adapters and ranks.is_first():
        keep_adapters(out_dir, *adapters)
    done.leave(out_dir, estimate)
    # Answers to the watched prompts before, during and after training, in one file.
    if watched.rows:
        first, last = watch(before), measure_watched(tuned, "tuned model")
        stamped = [{"batch": batch, **row} for batch, rows in ((0, first), (done.batches, last)) for row in rows]
        count = len(first)
        write_json_lines(out_dir / "aux" / SAMPLES, [*stamped[:count], *kept_answers(run.work_dir), *stamped[count:]])
    figures = fitting.figures() | done.figures()
    headline = f"{len(fitting.examples):,} conversations, {done.batches:,} batches"

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        after = heldout.measure(tuned, chat, config, hardware, max_length, its_run, "tuned model")
        result = _compared(heldout, before, after, chat, graders, measured_dir)
        return replace(result, headline=done.headline(result.headline))

    return Result(figures, done.headline(headline), measure_now)


def measure_trained(config: SftConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the model `trained` and the one that it was trained from, `model`, in the same chat format, on
    `instructions/heldout.jsonl`. Of a conversation of several turns the last answer is measured.

    Figures: heldout_loss_base, heldout_loss_sft (nats per response token), improvement (their difference, with a paired
    interval, clustered by prompt), improvement_text (the same without `<|end|>`, which a base model cannot know),
    ends_share_base, ends_share_sft (greedy answers that end before the limit, Wilson interval), heldout_pairs,
    heldout_prompts_cut, heldout_pairs_dropped, verified_base, verified_sft (greedy answers that are right, Wilson;
    where a rule can check any). Answers go to aux/samples.jsonl.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "sft")

    adapting = _adapting(config)

    def placed(network: PreTrainedModel) -> tuple[LanguageModel, int]:
        length = limit_length(network, config.max_length)
        choose_attention(network, hardware, length, documents=config.packing)
        return LanguageModel(network, hardware).to(hardware.device), length

    model, max_length = placed(adapting.load(inputs["model"], run))
    if problems := config.problems(max_length):
        raise StageError(*problems)
    heldout = _Heldout.read(config, inputs["instructions"], chat, max_length, run)
    graders = Graders(sandbox=run.launch.sandbox)
    announce_sandbox(heldout.rules, graders, run)
    before = heldout.measure(model, chat, config, hardware, max_length, run, "base model")
    del model  # one of the two is in memory
    tuned, _ = placed(adapting.load_trained(inputs["model"], inputs[TRAINED], run))
    after = heldout.measure(tuned, chat, config, hardware, max_length, run, "tuned model")
    return _compared(heldout, before, after, chat, graders, out_dir)


def _adapting(config: SftConfig) -> Adapting:
    return Adapting("sft", config.lora, config.seed, lambda network: begin_untrained(network, config.seed))


def _loader(
    config: SftConfig, chat: Chat, train: Sequence[Pack], lengths: Sequence[int], text: Sequence[TextExample]
) -> tuple[Loader, int]:
    """Batches of conversations, or of sequences that several share, and how many make an epoch."""
    by_length = lengths if config.group_by_length else None
    if config.packing:
        return example_loader(
            train,
            config.global_batch_examples,
            config.seed,
            lambda sequences: packed_batch(chat, sequences),
            lengths=by_length,
            text=[(conversation,) for conversation in text],
            text_per_batch=config.text_per_batch,
        )
    return example_loader(
        [conversation for pack in train for conversation in pack],
        config.global_batch_examples,
        config.seed,
        lambda examples: chat.response_batch(as_long_as_the_others(examples), every_answer=True),
        lengths=by_length,
        text=text,
        text_per_batch=config.text_per_batch,
    )


@dataclass(frozen=True)
class _ModelOnPairs:
    """One model on the held-out pairs: summed loss and tokens of each response (pairs,), and its greedy answers."""

    losses: NDArray[np.float64]
    text_losses: NDArray[np.float64]
    tokens: NDArray[np.int64]
    answers: list[list[int]]

    def ended(self, chat: Chat) -> NDArray[np.bool_]:
        return np.array([chat.has_ended(answer) for answer in self.answers])

    def rows_of(
        self, chat: Chat, rows: Sequence[Mapping[str, Any]], rules: Sequence[Rule | None], graders: Graders
    ) -> list[dict[str, Any]]:
        """The answers to the first prompts, which `rows` hold, with the loss of the reference in nats per token."""
        lines = []
        for number, (row, answer) in enumerate(zip(rows, self.answers, strict=False)):
            text, rule = chat.decode(answer), rules[number]
            loss = round(float(self.losses[number] / self.tokens[number]), 4)
            line: dict[str, Any] = {"prompt": row["prompt"], "text": text, "loss": loss}
            line |= {"history": row["history"]} if row.get("history") else {}
            if rule is not None:
                line["verified"] = bool(right_answers([text], [rule], graders)[0])
            lines.append(line)
        return lines

    def right(self, chat: Chat, rules: Sequence[Rule | None], graders: Graders) -> NDArray[np.float64]:
        return right_answers([chat.decode(answer) for answer in self.answers], rules, graders)


@dataclass(frozen=True)
class _Heldout:
    """The held-out conversations, and the rules that check the answers to some of them."""

    conversations: Sequence[Conversation]
    rows: Sequence[Mapping[str, Any]]
    rules: Sequence[Rule | None]
    cut: int = 0
    dropped: int = 0

    @classmethod
    def read(cls, config: SftConfig, folder: Path, chat: Chat, longest: int, run: Run) -> _Heldout:
        path = folder / "heldout.jsonl"
        rows = read_rows(path, ("prompt", "response"), config.heldout_limit)
        fitting = fitted_conversations(chat, rows, longest, config.too_long).report("sft", "held-out", longest, run)
        rules = rules_of(fitting.rows, str(path))[: config.answers_limit]
        return cls(fitting.examples, fitting.rows, rules, fitting.cut, fitting.dropped)

    def first(self, count: int) -> _Heldout:
        return _Heldout(self.conversations[:count], self.rows[:count], self.rules[:count])

    def measure(
        self,
        model: LanguageModel,
        chat: Chat,
        config: SftConfig,
        hardware: Hardware,
        longest: int,
        run: Run,
        name: str,
    ) -> _ModelOnPairs:
        """The losses of a model, and its greedy answers to as many prompts as there are rules."""
        losses, text_losses, done = [], [], 0
        for loss, text_loss in _losses(model, chat, self.conversations, hardware):
            run.stop_if_cancelled()
            losses.append(loss)
            text_losses.append(text_loss)
            done += len(loss)
            run.progress(done, len(self.conversations), "pairs", f"measuring the {name}")
        room = longest - config.answer_max_tokens
        prompts = [chat.shortened(conversation.prompt, room) for conversation in self.conversations[: len(self.rules)]]
        answers = sample(
            model.model,
            prompts,
            max_new_tokens=config.answer_max_tokens,
            temperature=0,
            stops=chat.stops,
            hardware=hardware,
            batch_size=_BATCH,
            on_batch=lambda done: run.progress(done, len(prompts), "answers", f"the {name} answers"),
        )
        tokens = np.array([len(conversation.response) for conversation in self.conversations])
        return _ModelOnPairs(np.concatenate(losses), np.concatenate(text_losses), tokens, answers)


def _compared(
    heldout: _Heldout,
    before: _ModelOnPairs,
    after: _ModelOnPairs,
    chat: Chat,
    graders: Graders,
    out_dir: Path,
) -> Result:
    """Return the losses of both models in nats per token, their reduction by tuning, with `<|end|>` and without, and
    the shares of answers that end and are right. Answers go to aux/samples.jsonl."""
    right = {name: side.right(chat, heldout.rules, graders) for name, side in (("base", before), ("sft", after))}
    _write_samples(out_dir / "aux" / "samples.jsonl", heldout.rows, chat, before, after, right)
    conversations = prompt_clusters(heldout.rows)
    improvement = clustered_ratio(before.losses - after.losses, after.tokens, conversations)
    has_text = after.tokens > 1
    text = clustered_ratio(
        (before.text_losses - after.text_losses)[has_text], after.tokens[has_text] - 1, conversations[has_text]
    )
    figures = {
        "heldout_loss_base": float(before.losses.sum() / before.tokens.sum()),
        "heldout_loss_sft": float(after.losses.sum() / after.tokens.sum()),
        **improvement.as_figures("improvement"),
        **text.as_figures("improvement_text"),
        **clustered_share(before.ended(chat), conversations[: len(before.answers)]).as_figures("ends_share_base"),
        **clustered_share(after.ended(chat), conversations[: len(after.answers)]).as_figures("ends_share_sft"),
        **{
            key: value
            for name, each in right.items()
            for key, value in _verified_figures(name, each, conversations).items()
        },
        "heldout_pairs": float(len(heldout.conversations)),
        "heldout_prompts_cut": float(heldout.cut),
        "heldout_pairs_dropped": float(heldout.dropped),
    }
    check_measured("sft", figures)
    headline = (
        f"held-out loss {figures['heldout_loss_base']:.2f} → {figures['heldout_loss_sft']:.2f}, "
        f"{figures['ends_share_sft']:.0%} of answers end"
    )
    return Result(figures, headline)


def _verified_figures(name: str, right: NDArray[np.float64], conversations: NDArray[np.int64]) -> dict[str, float]:
    """Return the share of right answers where a rule can check them; nothing where it can check none."""
    known = ~np.isnan(right)
    if not known.any():
        return {}
    return clustered_share(right[known], conversations[: len(right)][known]).as_figures(f"verified_{name}")


def _losses(
    model: LanguageModel, chat: Chat, pairs: Sequence[Conversation], hardware: Hardware
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Summed nats of each response (batch,), with its `<|end|>` and without, a batch at a time."""
    with measuring(model):
        for start in range(0, len(pairs), _BATCH):
            part = pairs[start : start + _BATCH]
            batch = {name: value.to(hardware.device) for name, value in chat.response_batch(part).items()}
            each = model.losses(batch).double().cpu()
            sums = each.sum(1).numpy()
            yield sums, sums - np.array([each[row, len(conversation.ids) - 2] for row, conversation in enumerate(part)])


def _write_samples(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    chat: Chat,
    before: _ModelOnPairs,
    after: _ModelOnPairs,
    right: Mapping[str, NDArray[np.float64]],
) -> None:
    lines = []
    for number, (row, base, tuned) in enumerate(zip(rows, before.answers, after.answers, strict=False)):
        answers = {"base": chat.decode(base), "sft": chat.decode(tuned)}
        line: dict[str, Any] = {"prompt": row["prompt"], "reference": row["response"], "answers": answers}
        if row.get("history"):
            line["history"] = row["history"]
        if row.get("verify"):
            line["verified"] = {name: bool(each[number]) for name, each in right.items()}
        lines.append(line)
    write_json_lines(path, lines)


if __name__ == "__main__":
    from infra.alone import main

    main(sft, SftConfig)
