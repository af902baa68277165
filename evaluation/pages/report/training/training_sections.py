"""Pretraining, instruction tuning and reward model: their curves and the findings from them."""

from __future__ import annotations

import math
from typing import Any

from evaluation.pages.charts import Level, Line, line_chart
from evaluation.pages.parts import Figure, Section, Table, loss_lines
from evaluation.pages.words import (
    between_percent,
    compact,
    fixed,
    interval_of,
    on_the_way,
    p_value,
    percent,
    signed,
)
from evaluation.results.pipeline import PipelineResults


def titled(anchor: str, title: str, id: str, usual: str) -> tuple[str, str]:
    """Return the anchor and title of a section about one step; those of the usual step omit its name."""
    return (anchor, title) if id == usual else (f"{anchor}-{id}", f"{title}: {id}")


def pretraining(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on the pretraining of one step."""
    figures = pipeline.figures(id)
    train, validation = pipeline.curve(id, "train/loss"), pipeline.sampled(id)
    drawn = []
    levels = [Level(name, figures[f"{name}_loss"]) for name in ("unigram", "bigram") if f"{name}_loss" in figures]
    chart = line_chart(
        "loss over batches",
        [*loss_lines(train), Line("validation, sampled", validation, "validation")],
        x_label="batch",
        y_label="loss (nats per token)",
        levels=levels,
    )
    if chart:
        drawn.append(
            Figure(
                "Loss",
                chart,
                _loss_sentence(train, validation, figures),
                "One seed: another would give slightly other figures, and the interval covers the choice of validation "
                "text only.",
                [
                    ("training, smoothed", "train"),
                    ("validation, sampled", "validation"),
                    ("n-gram baselines", "level"),
                ],
            )
        )
    rate = pipeline.curve(id, "train/lr")
    corrections = pipeline.corrections(id)
    chart = line_chart(
        "learning rate",
        [Line("learning rate", rate, "train")],
        x_label="batch",
        y_label="learning rate",
        from_zero=True,
        marks=[(correction["back_to"], _described(correction)) for correction in corrections],
    )
    if chart:
        peak = max(value for _, value in rate)
        peak_step = next(step for step, value in rate if value == peak)
        drawn.append(
            Figure(
                "Learning rate",
                chart,
                (
                    f"It rises to {peak:.2g} by batch {compact(peak_step)}"
                    if peak_step > rate[0][0]
                    else f"It starts at {peak:.2g}"
                )
                + f" and ends at {rate[-1][1]:.2g}."
                + (f" The guard lowered it {_times(len(corrections))}, at the vertical lines." if corrections else ""),
                "The peak was set in the config; how it was chosen, this page cannot know.",
                [("learning rate as trained", "train"), ("correction", "happened")] if corrections else (),
            )
        )
    lead = []
    if "parameters" in figures:
        tokens = figures.get("tokens", math.nan)
        per_parameter = tokens / figures["parameters"]
        lead.append(
            f"{compact(figures['parameters'])} parameters saw {compact(tokens)} tokens, {per_parameter:.2g} each."
        )
        lead += _length_of_training(pipeline, id, tokens, per_parameter)
    if "bits_per_byte" in figures:
        perplexity = figures.get("validation_perplexity", math.nan)
        text = (
            f" of {compact(figures['validation_tokens'])} validation tokens" if "validation_tokens" in figures else ""
        )
        bits = fixed(figures["bits_per_byte"], 3)
        lead.append(f"After training, {bits} bits per byte and perplexity {fixed(perplexity, 1)}{text}.")
    if "tokens_per_s" in figures:
        lead.append(f"{compact(figures['tokens_per_s'])} tokens per second.")
    tables = [*_corrections(corrections), *_early_samples(pipeline, id)]
    return Section(*titled("pretraining", "Pretraining", id, "pretrain"), " ".join(lead), drawn, tables)


def averaging(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step's mean of models or checkpoints."""
    figures, tables, lead = pipeline.figures(id), [], []
    if "members" in figures:
        lead.append(f"The mean of {figures['averaged']:,.0f} of {figures['members']:,.0f} models or checkpoints.")
    for key, column in (("validation_loss", "validation loss, nats per token"), ("score", "score")):
        best = figures.get(f"{key}_best")
        if best is None:
            continue
        members = {name.removeprefix(f"{key}_"): value for name, value in figures.items() if name.startswith(f"{key}_")}
        rows = [[name, fixed(value, 4)] for name, value in members.items() if name != "best"]
        rows.append(["the mean", fixed(figures[key], 4)])
        difference = figures[key] - best
        lead.append(f"It differs from the best one by {signed(difference, 4)}.")
        note = "A greedy mean is measured on what chose it: only a benchmark of other items is an independent test."
        tables.append(Table("Averaged models", ["model", column], rows, note, numeric=(1,)))
    return Section(*titled("averaging", "Weight averaging", id, "average"), " ".join(lead), [], tables)


def _length_of_training(pipeline: PipelineResults, id: str, tokens: float, per_parameter: float) -> list[str]:
    """State how many times the text was read, and how to improve a model that saw little text for its size."""
    artifact = pipeline.get(id)
    reference = artifact.manifest.inputs.get("shards") if artifact and artifact.manifest else None
    shards = pipeline.by_address(reference.stage, reference.fingerprint) if reference else None
    ready = ((shards.read_json("meta.json") if shards else None) or {}).get("train_tokens")
    sentences = [f"It read {_read(tokens / ready)} of the {compact(ready)} tokens that were ready."] if ready else []
    if per_parameter >= 15:
        return sentences
    sentences.append("Chinchilla's rule is about 20 tokens per parameter: this model is undertrained for its size.")
    if ready and tokens < 0.95 * ready:
        sentences.append("A longer training would improve it, without more text.")
    elif ready and tokens < 4 * ready:
        sentences.append("Reading the text again would improve it, up to about four times (Muennighoff et al. 2023).")
    else:
        sentences.append("More text would improve it." if ready else "More tokens would improve it.")
    return sentences


def _read(times: float) -> str:
    return percent(times, 0) if times < 0.995 else f"all, {times:.1f} times," if times >= 1.05 else "all"


def _early_samples(pipeline: PipelineResults, id: str) -> list[Table]:
    """Return samples that the model wrote during training: up to six moments from first to last, all prompts."""
    artifact = pipeline.get(id)
    lines = artifact.read_lines("aux/training_samples.jsonl") if artifact else []
    texts = {(line["batch"], line["prompt"]): line["text"] for line in lines}
    moments = sorted({batch for batch, _ in texts})
    chosen = {moments[round(index * (len(moments) - 1) / 5)] for index in range(6)} if moments else set()
    rows = [[compact(batch), prompt or "(nothing)", text] for (batch, prompt), text in texts.items() if batch in chosen]
    note = "Drawn with the same random numbers each time: what differs is the model."
    return [Table("Samples while training", ["batch", "prompt", "goes on"], rows, note, folded=True)] if rows else []


def _described(correction: dict[str, Any]) -> str:
    alarm = correction["alarm"]
    return (
        f"{alarm['cause']} {float(alarm['value']):.3g} at batch {alarm['batch']:,}: back to {correction['back_to']:,}, "
        f"learning rate × {correction['factor']:.3g}"
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _corrections(corrections: list[dict[str, Any]]) -> list[Table]:
    """Return the guard's actions, one row per correction."""
    rows = [
        [
            compact(correction["alarm"]["batch"]),
            correction["alarm"]["cause"],
            f"{float(correction['alarm']['value']):.3g}",
            f"{float(correction['alarm']['usual']):.3g}",
            compact(correction["back_to"]),
            f"× {correction['factor']:.3g}" + (", for good" if correction.get("recover") == 0 else ""),
            f"{correction['skip_first']:,} to {correction['skip_end'] - 1:,}"
            if correction["skip_end"] > correction["skip_first"]
            else "none",
        ]
        for correction in corrections
    ]
    columns = ["batch", "alarm by", "value", "usual", "back to", "learning rate", "batches left out"]
    note = "Made automatically by the guard; they depend only on config, data and seed."
    return [Table("Corrections in flight", columns, rows, note, numeric=(0, 2, 3, 4, 5))] if rows else []


def _loss_sentence(
    train: list[tuple[float, float]], validation: list[tuple[float, float]], figures: dict[str, float]
) -> str:
    sentences = []
    if len(validation) > 1:
        best = min(validation, key=lambda point: point[1])
        last = validation[-1]
        if best[0] == last[0]:
            sentences.append(f"Loss of the validation sample still falls at the end ({fixed(last[1], 3)}).")
        else:
            sentences.append(
                f"Loss of the sample was lowest at batch {compact(best[0])} ({fixed(best[1], 3)}) and ends at "
                f"{fixed(last[1], 3)}."
            )
    if train and validation:
        tail = [value for _, value in train[-max(1, len(train) // 20) :]]
        gap = validation[-1][1] - sum(tail) / len(tail)
        word = "overfitting is small" if gap < 0.3 else "the model fits its training text markedly better"
        sentences.append(f"Its distance from the training loss at the end is {signed(gap)}: {word}.")
    if "bigram_loss" in figures and validation:
        sentences.append(_below_bigrams(validation, figures["bigram_loss"]))
    return " ".join(sentences) or "Training loss only; no validation text was measured."


def _below_bigrams(validation: list[tuple[float, float]], bigram: float) -> str:
    """State the batch from which the loss of the sample stays below that of a bigram model."""
    last_above = next((index for index in range(len(validation), 0, -1) if validation[index - 1][1] >= bigram), 0)
    if last_above < len(validation):
        return f"It is below the bigram model from batch {compact(validation[last_above][0])} on."
    below = [step for step, value in validation if value < bigram]
    if below:
        return f"It was below the bigram model at batch {compact(below[-1])}, and is not at the end."
    return "It never gets below the bigram model."


def tuning(pipeline: PipelineResults, id: str, reward_model: str = "") -> Section:
    """Return the section on the instruction tuning of one step, with its reward model in the usual pipeline."""
    figures = pipeline.figures(id)
    drawn = []
    chart = line_chart(
        "SFT loss",
        [
            *loss_lines(pipeline.curve(id, "train/loss")),
            Line("held-out", pipeline.sampled(id), "validation"),
        ],
        x_label="batch",
        y_label="loss of the answers (nats per token)",
    )
    if chart:
        caption = "The loss on all held-out instructions was not measured."
        if "heldout_loss_base" in figures and "heldout_loss_sft" in figures:
            before, after = figures["heldout_loss_base"], figures["heldout_loss_sft"]
            caption = f"On held-out instructions the loss went from {fixed(before)} to {fixed(after)} nats per token."
        drawn.append(
            Figure(
                "SFT loss",
                chart,
                caption + on_the_way(pipeline.sampled(id)),
                "A lower loss on the reference answers is not the same as better answers; read the samples.",
                LEGEND[: 2 if pipeline.sampled(id) else 1],
            )
        )
    if reward_model:
        drawn += _reward_model(pipeline, reward_model)
    rows = []
    for name, model in (pipeline.roles(id) if pipeline.get(id) else {}).items():
        label = pipeline.long_name(model)
        ends = interval_of(figures, f"ends_share_{name}")
        if ends:
            loss = figures.get(f"heldout_loss_{name}", math.nan)
            rows.append([label, fixed(loss, 3), f"{percent(ends.value)} {between_percent(ends)}"])
    tables = []
    if rows:
        pairs = figures.get("heldout_pairs")
        note = f"{pairs:,.0f} held-out pairs; no text of theirs was trained on." if pairs else ""
        columns = ["model", "loss, nats per token", "answers that end by themselves"]
        tables.append(Table("Held-out instructions", columns, rows, note, numeric=(1, 2)))
    title = "Instruction tuning and reward model" if reward_model else "Instruction tuning"
    return Section(*titled("tuning", title, id, "sft"), "", drawn, tables)


LEGEND = [("training, smoothed", "train"), ("held-out sample", "validation")]


def reward_model(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on the reward model of a named step."""
    return Section(*titled("reward-model", "Reward model", id, "reward_model"), "", _reward_model(pipeline, id))


def _reward_model(pipeline: PipelineResults, id: str) -> list[Figure]:
    chart = line_chart(
        "reward model loss",
        [*loss_lines(pipeline.curve(id, "train/loss")), Line("held-out", pipeline.sampled(id), "validation")],
        x_label="batch",
        y_label="loss (nats per pair)",
        levels=[Level("guessing", math.log(2))],
    )
    accuracy = interval_of(pipeline.figures(id), "heldout_accuracy")
    if chart:
        caption = "Guessing gives log 2 = 0.69 nats per pair."
        if accuracy:
            p = pipeline.figures(id).get("p_value")
            caption += f" Held-out pairs ordered rightly: {percent(accuracy.value)} {between_percent(accuracy)}"
            caption += f", {p_value(p)} against 50 %." if p is not None else "."
        caption += _length_and_confidence(pipeline.figures(id))
        return [
            Figure(
                "Reward model loss",
                chart,
                caption + on_the_way(pipeline.sampled(id)),
                "The wrong answers are made by rule, so that it may have learnt the rule's traces instead of quality.",
                [*LEGEND[: 2 if pipeline.sampled(id) else 1], ("guessing", "level")],
            )
        ]
    return []


def _length_and_confidence(figures: dict[str, float]) -> str:
    """State whether a reward model goes by length, and compare its confidence with its accuracy."""
    sentence = ""
    longer, shorter = (interval_of(figures, f"heldout_accuracy_chosen_{name}") for name in ("longer", "shorter"))
    if longer and shorter:
        sentence += (
            f" Where the better answer is the longer one it is right in {percent(longer.value)} "
            f"{between_percent(longer)}, where it is the shorter in {percent(shorter.value)} {between_percent(shorter)}"
        )
        sentence += ": it goes by length." if longer.low > shorter.high else "."
    if (error := figures.get("calibration_error")) is not None:
        sentence += (
            f" It claims to be right in {percent(figures['mean_confidence'])} of pairs (calibration error "
            f"{percent(error)})."
        )
    return sentence
