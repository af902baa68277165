"""Distils a teacher into a student: the student learns the teacher's next-token distributions along answers.

python -m training.distill --config distill.yaml --input model=DIR --input teacher=DIR
    --input instructions=DIR --out DIR
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from evaluation.statistics.clustered import clustered_mean, clustered_ratio, clustered_share
from infra.errors import StageError, stage_error
from infra.io.json import write_json_lines
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.chat.base import Chat, Conversation, read_rows
from training.checkpoint.export import export
from training.config import DistillConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware, prepare
from training.core.measuring import measuring
from training.core.plan import plan_of
from training.core.train_state import Trainable
from training.data.conversations import fitted_conversations
from training.data.examples import example_loader
from training.data.rows import Fitted, by_weight, prompt_clusters
from training.distributed.parallel import whole_weights
from training.generation.completions import Completions, generate, kl_of
from training.generation.teacher_answers import teacher_answers
from training.guard.finite import check_measured
from training.model.attention import choose_attention
from training.model.models import limit_length, load, report_unbalanced_experts
from training.model.new_tokens import begin_untrained
from training.planner.measured import planned
from training.rl.own_answers import OwnAnswers
from training.train_modules.distillation import Distilled
from training.train_modules.language_model import LanguageModel
from training.trainer.fit import Fit, fit
from training.validation.evaluate import InLoopEvaluation

_BATCH = 32


def distill(config: DistillConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: DistillConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train the student `model` on prompts of `instructions/train.jsonl`, with their answers or its own, towards the
    frozen `teacher`. Of a conversation of several turns the last answer is learnt. With `endpoint` the teacher is asked
    for the answers, and the student learns their text.

    Figures: prompts_cut, pairs_dropped (training conversations that had no room), batches, tokens, tokens_per_s and the
    guard's. During training, the divergence on some held-out pairs is recorded as validation/sample_loss. Raises
    StageError `other_vocabulary` where the teacher's token ids mean other text, and where lengths leave no room for a
    prompt.
    """
    hardware = prepare(run.launch, say=run.event)
    if config.endpoint is not None:
        return _train_on_text(config, inputs, out_dir, run, hardware)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "distill")
    network = load(inputs["model"])
    report_unbalanced_experts("distill", network, run)
    teacher, max_length = _teacher(config, inputs, network, chat)
    begin_untrained(network, config.seed)
    model = _model(network, teacher, config, hardware, max_length)

    # Conversations that fit the context of both models.
    rows = by_weight(read_rows(inputs["instructions"] / "train.jsonl", ("prompt", "response")))
    fitting = fitted_conversations(chat, rows, max_length, config.too_long).report(
        "distill", "training", max_length, run
    )
    heldout = _heldout(config, inputs, chat, max_length, run)
    before = _measure(model, heldout, chat, config, hardware, max_length, run, "student")

    def sample_loss() -> float:
        sample = _divergences(model, heldout.examples[: config.evaluate_pairs], chat, hardware)
        return float(sample.divergence.sum() / sample.tokens.sum())

    # The student's own answers are sampled by the weights that learn; where ranks shard them, by a whole copy.
    own_answers = []
    if config.on_policy_share:
        sampler, refresh = _acting(network, run)
        own_answers.append(OwnAnswers(sampler, refresh, chat, config, max_length, hardware, run))
    done, figures = _learnt(
        network, model, fitting, chat, config, hardware, inputs, out_dir, run, sample_loss, own_answers
    )

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        after = _measure(model, heldout, chat, config, hardware, max_length, its_run, "distilled student")
        result = _compared(heldout, before, after, chat, measured_dir)
        return replace(result, headline=done.headline(result.headline))

    return Result(
        figures, done.headline(f"{len(fitting.examples):,} conversations, {done.batches:,} batches"), measure_now
    )


def measure_trained(config: DistillConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the model `trained` and the student that it was trained from, `model`, against `teacher`, on
    `instructions/heldout.jsonl`.

    Figures, where the student is before and distilled after: heldout_divergence_student, heldout_divergence_distilled
    (that of the config, nats per token of the given answers), divergence_fall (their difference, with a paired
    interval, clustered by prompt), agreement_student, agreement_distilled (share of tokens where the likeliest one is
    the teacher's), heldout_loss_student, _distilled, _teacher (nats per token of the given answers). Of sampled
    answers: answers_kl_student, answers_kl_distilled (KL from the teacher, nats per answer, from whole next-token
    distributions), ends_share_student, ends_share_distilled. Answers go to aux/samples.jsonl.

    With `endpoint`: heldout_loss_student, heldout_loss_distilled (nats per token of the teacher's answers to held-out
    prompts), loss_fall (their difference, with a paired interval) and ends_share_student, ends_share_distilled.
    """
    hardware = prepare(run.launch, say=run.event)
    if config.endpoint is not None:
        return _measure_on_text(config, inputs, out_dir, run, hardware)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "distill")
    network = load(inputs["model"])
    teacher, max_length = _teacher(config, inputs, network, chat)
    begin_untrained(network, config.seed)
    heldout = _heldout(config, inputs, chat, max_length, run)

    def measured(student: PreTrainedModel, name: str) -> _Side:
        model = _model(student, teacher, config, hardware, max_length)
        return _measure(model, heldout, chat, config, hardware, max_length, run, name)

    before = measured(network, "student")
    return _compared(heldout, before, measured(load(inputs[TRAINED]), "distilled student"), chat, out_dir)


def _teacher(
    config: DistillConfig, inputs: Mapping[str, Path], student: PreTrainedModel, chat: Chat
) -> tuple[PreTrainedModel, int]:
    """Return the teacher, and the tokens of the longest conversation that both models read.

    Raises StageError where its vocabulary is another one, or no room is left for a prompt.
    """
    if "teacher" not in inputs:
        fix = "give the input teacher, or an endpoint for a teacher that writes text"
        raise stage_error("no_teacher", "distill.inputs.teacher", "expected a teacher, but there is none", fix)
    teacher = load(inputs["teacher"])
    rows = teacher.config.vocab_size, student.config.vocab_size
    differ = f"a vocabulary of {rows[1]:,}, that of the student, not {rows[0]:,}" if rows[0] != rows[1] else ""
    if not differ and (inputs["teacher"] / "tokenizer_config.json").exists():
        vocabulary = load_pretrained_tokenizer(inputs["teacher"]).get_vocab()
        if entries := len(vocabulary.items() ^ chat.tokenizer.get_vocab().items()):
            differ = f"the tokenizer of the student; {entries:,} entries of them differ"
    if differ:
        fix = "use a teacher with the same tokenizer; any teacher can write answers for sft (generate_instructions)"
        raise stage_error("other_vocabulary", "teacher", f"expected {differ}", fix)
    max_length = min(limit_length(model, config.max_length) for model in (student, teacher))
    if problems := config.problems(max_length):
        raise StageError(*problems)
    return teacher, max_length


def _model(
    student: PreTrainedModel, teacher: PreTrainedModel, config: DistillConfig, hardware: Hardware, max_length: int
) -> Distilled:
    for network in (student, teacher):
        choose_attention(network, hardware, max_length)
    known = LanguageModel(teacher, hardware).to(hardware.device)
    return Distilled(LanguageModel(student, hardware), known, config).to(hardware.device)


def _acting(network: PreTrainedModel, run: Run) -> tuple[PreTrainedModel, Callable[[], None]]:
    """Return the network that samples, whole on this rank, and a function that updates it to the trained weights."""
    if not run.launch.shards_weights or (ranks.world_size() == 1 and not run.launch.offload):
        return network, lambda: None
    copied = copy.deepcopy(network).eval().requires_grad_(False)

    def refresh() -> None:
        copied.load_state_dict(whole_weights(network))

    return copied, refresh


def _heldout(
    config: DistillConfig, inputs: Mapping[str, Path], chat: Chat, max_length: int, run: Run
) -> Fitted[Conversation]:
    rows = read_rows(inputs["instructions"] / "heldout.jsonl", ("prompt", "response"), config.heldout_limit)
    fitting = fitted_conversations(chat, rows, max_length, config.too_long)
    return fitting.report("distill", "held-out", max_length, run)


class _Divergences(NamedTuple):
    """Sums over each answer's tokens (pairs,): divergence, tokens, tokens whose likeliest one is the teacher's, losses
    of student and teacher in nats."""

    divergence: NDArray[np.float64]
    tokens: NDArray[np.float64]
    agreeing: NDArray[np.float64]
    loss: NDArray[np.float64]
    teacher_loss: NDArray[np.float64]


@dataclass(frozen=True)
class _Side:
    """One student: its divergences on the held-out pairs, its sampled answers, and their KL (answers,)."""

    pairs: _Divergences
    answers: Completions
    answers_kl: NDArray[np.float64]


def _divergences(
    model: Distilled, conversations: Sequence[Conversation], chat: Chat, hardware: Hardware
) -> _Divergences:
    columns: list[list[NDArray[np.float64]]] = [[] for _ in range(5)]
    with measuring(model):
        for start in range(0, len(conversations), _BATCH):
            some = chat.response_batch(conversations[start : start + _BATCH])
            batch = {name: value.to(hardware.device) for name, value in some.items()}
            outputs = model(batch)
            sums, counts = model.example_losses(outputs, batch)
            agreeing, losses, teacher_losses = model.compared(outputs, batch)
            for column, values in zip(columns, (sums, counts, agreeing, losses, teacher_losses), strict=True):
                column.append(values.double().cpu().numpy())
    return _Divergences(*map(np.concatenate, columns))


def _measure(
    model: Distilled,
    heldout: Fitted[Conversation],
    chat: Chat,
    config: DistillConfig,
    hardware: Hardware,
    max_length: int,
    run: Run,
    name: str,
) -> _Side:
    """Every rank must call."""
    run.stop_if_cancelled()
    run.progress(0, len(heldout.examples), "pairs", f"measuring the {name}")
    pairs = _divergences(model, heldout.examples, chat, hardware)
    run.progress(len(heldout.examples), len(heldout.examples), "pairs", f"measuring the {name}")
    run.stop_if_cancelled()
    room = max_length - config.answer_max_tokens
    prompts = [chat.shortened(talk.prompt, room) for talk in heldout.examples[: config.heldout_prompts]]
    student, teacher = model.language.model, model.teacher.model
    answers = generate(student, prompts, chat, config, hardware, config.seed)
    kl, _ = kl_of(student, teacher, answers, chat, hardware, config.temperature)
    return _Side(pairs, answers, kl.double().numpy())


def _compared(heldout: Fitted[Conversation], before: _Side, after: _Side, chat: Chat, out_dir: Path) -> Result:
    """Return the figures of `measure_trained`; the answers go to aux/samples.jsonl."""
    clusters, tokens = prompt_clusters(heldout.rows), after.pairs.tokens
    figures = {
        **clustered_ratio(before.pairs.divergence - after.pairs.divergence, tokens, clusters).as_figures(
            "divergence_fall"
        ),
        "heldout_loss_teacher": float(after.pairs.teacher_loss.sum() / tokens.sum()),
        "heldout_pairs": float(len(tokens)),
        **heldout.figures("heldout_"),
    }
    for name, side in (("student", before), ("distilled", after)):
        answered = clusters[: len(side.answers.ids)]
        figures |= {
            **clustered_ratio(side.pairs.divergence, tokens, clusters).as_figures(f"heldout_divergence_{name}"),
            **clustered_ratio(side.pairs.agreeing, tokens, clusters).as_figures(f"agreement_{name}"),
            f"heldout_loss_{name}": float(side.pairs.loss.sum() / tokens.sum()),
            **clustered_mean(side.answers_kl, answered).as_figures(f"answers_kl_{name}"),
            **clustered_share(side.answers.finished.numpy(), answered).as_figures(f"ends_share_{name}"),
        }
    check_measured("distill", figures)
    _write_samples(heldout, before.answers, after.answers, chat, out_dir)
    headline = (
        f"held-out divergence {figures['heldout_divergence_student']:.3f} → "
        f"{figures['heldout_divergence_distilled']:.3f}, {figures['agreement_distilled']:.0%} of tokens agree"
    )
    return Result(figures, headline)


def _learnt(
    network: PreTrainedModel,
    model: Trainable,
    fitting: Fitted[Conversation],
    chat: Chat,
    config: DistillConfig,
    hardware: Hardware,
    inputs: Mapping[str, Path],
    out_dir: Path,
    run: Run,
    sample_loss: Callable[[], float],
    callbacks: Sequence[Callback] = (),
) -> tuple[Fit, dict[str, float]]:
    """Train the student on conversations and write it; return the outcome and its figures.

    Args:
        sample_loss: measures the student during the training.
    """
    # The batches, and the length of the training.
    lengths = [len(conversation.ids) for conversation in fitting.examples]
    loader, epoch_batches = example_loader(
        fitting.examples,
        config.global_batch_examples,
        config.seed,
        chat.response_batch,
        lengths=lengths if config.group_by_length else None,
    )
    plan, every = plan_of(config, config.global_batch_examples, lengths, epoch_batches)

    # The training, and the model.
    look = InLoopEvaluation(lambda: {"validation/sample_loss": sample_loss()}, every, plan.batches, run)
    estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
    done = fit("distill", model, loader, plan, config, hardware, run, [*callbacks, look], inputs=inputs)
    export(network, inputs["model"], out_dir, chat.stops)
    done.leave(out_dir, estimate)
    return done, fitting.figures() | done.figures()


# A teacher that writes text: the student learns its answers.


def _train_on_text(
    config: DistillConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run, hardware: Hardware
) -> Result:
    """`train` with an endpoint as the teacher. Figures are those of `train`, teacher_failed, teacher_truncated and
    teacher_empty (answers that are left out) and teacher_tokens. The answers are in aux/teacher_answers.jsonl."""
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "distill")
    network = load(inputs["model"])
    max_length = limit_length(network, config.max_length)
    if problems := config.problems(max_length):
        raise StageError(*problems)
    # The teacher answers, or has answered before.
    rows = by_weight(read_rows(inputs["instructions"] / "train.jsonl", ("prompt", "response")))
    answered = teacher_answers(rows, config, run)
    fitting = fitted_conversations(chat, answered.rows, max_length, config.too_long).report(
        "distill", "training", max_length, run
    )
    heldout = _heldout_on_text(config, inputs, chat, max_length, run)
    choose_attention(network, hardware, max_length)
    begin_untrained(network, config.seed)
    model = LanguageModel(network, hardware).to(hardware.device)
    before = _text_side(model, heldout, chat, config, hardware, max_length)

    def sample_loss() -> float:
        sums, tokens = _text_losses(model, heldout.examples[: config.evaluate_pairs], chat, hardware)
        return float(sums.sum() / tokens.sum())

    done, figures = _learnt(network, model, fitting, chat, config, hardware, inputs, out_dir, run, sample_loss)
    if ranks.is_first():
        write_json_lines(out_dir / "aux" / "teacher_answers.jsonl", answered.rows)
    figures |= {f"teacher_{fault}": float(count) for fault, count in answered.left_out.items()}
    figures["teacher_tokens"] = float(answered.completion_tokens)

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        after = _text_side(model, heldout, chat, config, hardware, max_length)
        result = _compared_on_text(heldout, before, after, chat, measured_dir)
        return replace(result, headline=done.headline(result.headline))

    return Result(figures, done.headline(f"{len(fitting.examples):,} answers, {done.batches:,} batches"), measure_now)


def _measure_on_text(
    config: DistillConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run, hardware: Hardware
) -> Result:
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "distill")
    networks = [load(inputs["model"]), load(inputs[TRAINED])]
    max_length = limit_length(networks[0], config.max_length)
    begin_untrained(networks[0], config.seed)
    heldout = _heldout_on_text(config, inputs, chat, max_length, run)
    sides = []
    for network in networks:
        choose_attention(network, hardware, max_length)
        model = LanguageModel(network, hardware).to(hardware.device)
        sides.append(_text_side(model, heldout, chat, config, hardware, max_length))
    before, after = sides
    return _compared_on_text(heldout, before, after, chat, out_dir)


def _heldout_on_text(
    config: DistillConfig, inputs: Mapping[str, Path], chat: Chat, max_length: int, run: Run
) -> Fitted[Conversation]:
    rows = read_rows(inputs["instructions"] / "heldout.jsonl", ("prompt", "response"), config.heldout_limit)
    fitting = fitted_conversations(chat, teacher_answers(rows, config, run).rows, max_length, config.too_long)
    return fitting.report("distill", "held-out", max_length, run)


class _TextSide(NamedTuple):
    """One student: summed nats and tokens of the teacher's answers (pairs,), and its own sampled answers."""

    losses: NDArray[np.float64]
    tokens: NDArray[np.float64]
    answers: Completions


def _text_side(
    model: LanguageModel,
    heldout: Fitted[Conversation],
    chat: Chat,
    config: DistillConfig,
    hardware: Hardware,
    max_length: int,
) -> _TextSide:
    losses, tokens = _text_losses(model, heldout.examples, chat, hardware)
    room = max_length - config.answer_max_tokens
    prompts = [chat.shortened(talk.prompt, room) for talk in heldout.examples[: config.heldout_prompts]]
    return _TextSide(losses, tokens, generate(model.model, prompts, chat, config, hardware, config.seed))


def _text_losses(
    model: LanguageModel, conversations: Sequence[Conversation], chat: Chat, hardware: Hardware
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sums = []
    with measuring(model):
        for start in range(0, len(conversations), _BATCH):
            some = chat.response_batch(conversations[start : start + _BATCH])
            batch = {name: value.to(hardware.device) for name, value in some.items()}
            sums.append(model.losses(batch).double().cpu().sum(1).numpy())
    return np.concatenate(sums), np.array([float(len(conversation.response)) for conversation in conversations])


def _compared_on_text(
    heldout: Fitted[Conversation], before: _TextSide, after: _TextSide, chat: Chat, out_dir: Path
) -> Result:
    clusters = prompt_clusters(heldout.rows)
    figures = {
        **clustered_ratio(before.losses - after.losses, after.tokens, clusters).as_figures("loss_fall"),
        "heldout_pairs": float(len(after.tokens)),
        **heldout.figures("heldout_"),
    }
    for name, side in (("student", before), ("distilled", after)):
        answered = clusters[: len(side.answers.ids)]
        figures[f"heldout_loss_{name}"] = float(side.losses.sum() / side.tokens.sum())
        figures |= clustered_share(side.answers.finished.numpy(), answered).as_figures(f"ends_share_{name}")
    check_measured("distill", figures)
    _write_samples(heldout, before.answers, after.answers, chat, out_dir)
    losses = f"{figures['heldout_loss_student']:.3f} → {figures['heldout_loss_distilled']:.3f}"
    return Result(figures, f"held-out loss of the teacher's answers {losses}")


def _write_samples(
    heldout: Fitted[Conversation], before: Completions, after: Completions, chat: Chat, out_dir: Path
) -> None:
    if not ranks.is_first():
        return
    lines = []
    for row, *ids in zip(heldout.rows, before.ids, after.ids, strict=False):
        texts = dict(zip(("student", "distilled"), map(chat.decode, ids), strict=True))
        line: dict[str, Any] = {"prompt": row["prompt"], "reference": row["response"], "answers": texts}
        lines.append(line | ({"history": row["history"]} if row.get("history") else {}))
    write_json_lines(out_dir / "aux" / "samples.jsonl", lines)


if __name__ == "__main__":
    from infra.alone import main

    main(distill, DistillConfig)
