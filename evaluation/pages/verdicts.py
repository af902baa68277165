"""The sentences at the head of the report: the pipeline's claims, and the evidence of its figures for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Literal

from evaluation.pages.parts import Table
from evaluation.pages.report.safety.toxicity_section import beside_text, is_as_its_text, length_of_text
from evaluation.pages.words import between, between_percent, fixed, interval_of, on_the_way, percent, signed
from evaluation.results.comparison import PairedToxicity
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval

State = Literal["holds", "slight", "undecided", "fails"]

HUMAN_AGREEMENT = 0.726
"""Rate at which two people prefer the same of two answers (Ouyang et al. 2022, section 3.4), the upper bound for a
judge. A reward model that is nearer to guessing than to this rate is reported as slight."""
SLIGHT_LOSS = 0.02
"""A fall of the held-out loss by a smaller fraction of it than this is reported as slight."""
SLIGHT_REWARD = 0.2
"""A gain of less than this many standard deviations of the rewards is small (Cohen 1988, section 2.2.3)."""


@dataclass(frozen=True)
class Evidence:
    """One figure behind a claim. value, interval: as text; the interval is empty if there is none."""

    label: str
    value: str
    interval: str = ""


def number_row(label: str, interval: Interval | None, digits: int = 2, *, sign: bool = False) -> list[Evidence]:
    """Return the evidence of a figure in its own unit; empty if it was not measured."""
    if interval is None:
        return []
    value = signed(interval.value, digits) if sign else fixed(interval.value, digits)
    return [Evidence(label, value, between(interval, digits).strip("()"))]


def share_row(label: str, interval: Interval | None) -> list[Evidence]:
    """Return the evidence of a share; empty if it was not measured."""
    if interval is None:
        return []
    return [Evidence(label, percent(interval.value), between_percent(interval).strip("()"))]


def points_row(label: str, interval: Interval) -> list[Evidence]:
    """Return the evidence of a difference of two shares, in percentage points."""
    bounds = f"{signed(100 * interval.low, 1)} to {signed(100 * interval.high, 1)}"
    return [Evidence(label, f"{signed(100 * interval.value, 1)} points", "" if math.isnan(interval.low) else bounds)]


@dataclass(frozen=True)
class Claim:
    """One claim to be shown. state: holds, slight (more than chance, but small or explained by something else),
    undecided (the interval does not decide), fails."""

    state: State
    title: str
    text: str
    about: str = ""
    """Subject: pretrain, sft, reward_model, preference_tuning, distill, rlhf, verified, tax or toxicity."""

    evidence: tuple[Evidence, ...] = ()
    """Figures behind the claim, the decisive one first."""

    @property
    def table(self) -> Table:
        """Return the figures behind the claim as a table."""
        rows = [[row.label, row.value, row.interval or "–"] for row in self.evidence]
        return Table("", ["figure", "value", "95 % interval"], rows, numeric=(1, 2))

    @property
    def sign(self) -> str:
        return {"holds": "✓", "slight": "≈", "undecided": "?", "fails": "✗"}[self.state]


def claims(pipeline: PipelineResults) -> list[Claim]:
    """Return a claim for each step of a stage that promises something, and for each model at the end of a chain."""
    candidates: list[Claim | None] = []
    judges = pipeline.judges()
    for stage, claim_of in (
        ("pretrain", _pretrain),
        ("sft", _sft),
        ("reward_model", _reward_model),
        ("preference_tuning", _preference_tuning),
        ("distill", _distill),
        ("rlhf", _rlhf),
    ):
        for id in pipeline.steps(stage):
            if id in judges:
                continue  # it promises nothing; its findings are part of the alignment's claim
            claim = claim_of(pipeline, id)
            candidates.append(_with_name(claim, stage, id if id != stage else "") if claim else None)
    for id in pipeline.steps("rlhf"):
        claim = _verified(pipeline, id)
        candidates.append(_with_name(claim, "verified", id if id != "rlhf" else "") if claim else None)
    pairs = pipeline.first_and_last()
    for about, compare in (("tax", _tax), ("toxicity", _safety)):
        for first, last in pairs:
            claim = compare(pipeline, first, last)
            candidates.append(_with_name(claim, about, last if len(pairs) > 1 else "") if claim else None)
    return [claim for claim in candidates if claim]


def _with_name(claim: Claim, about: str, name: str) -> Claim:
    return replace(claim, about=about, title=f"{claim.title} ({name})" if name else claim.title)


def _beyond(interval: Interval, bound: float) -> State:
    """Compare an interval with a bound: holds above, fails below; undecided if it contains the bound, or has no bounds,
    as for prompts of a single conversation."""
    if interval.low > bound:
        return "holds"
    return "fails" if interval.high < bound else "undecided"


def _pretrain(pipeline: PipelineResults, id: str) -> Claim | None:
    figures = pipeline.figures(id)
    loss = interval_of(figures, "validation_loss")
    if loss is None or "bigram_loss" not in figures:
        return None
    unigram, bigram = figures.get("unigram_loss", math.nan), figures["bigram_loss"]
    state = _beyond(Interval(-loss.value, -loss.high, -loss.low), -min(bigram, unigram))
    conclusion = {
        "holds": "is below both a unigram and a bigram model of the same tokens",
        "undecided": "is not distinguishable from the better of the two n-gram models",
        "fails": "is not below both n-gram models: the network learnt less than counting pairs of tokens would give",
    }[state]
    text = (
        f"Validation loss {fixed(loss.value, 3)} nats per token {between(loss, 3)} {conclusion} "
        f"(unigram {fixed(unigram, 3)}, bigram {fixed(bigram, 3)})."
    )
    gain = f"{fixed(loss.value)} nats per token against {fixed(min(bigram, unigram))}"
    title = {
        "holds": f"The base model learnt more than counting pairs of tokens gives: {gain}",
        "undecided": f"The base model is not distinguishable from counting tokens: {gain}",
        "fails": f"The base model learnt less than counting tokens gives: {gain}",
    }[state]
    baselines = [Evidence(f"{name} model of the same tokens", fixed(value, 3))
                 for name, value in (("unigram", unigram), ("bigram", bigram))]  # fmt: skip
    return Claim(state, title, text, evidence=(*number_row("validation loss, nats per token", loss, 3), *baselines))


def _sft(pipeline: PipelineResults, id: str) -> Claim | None:
    figures = pipeline.figures(id)
    improvement = interval_of(figures, "improvement")
    if improvement is None:
        return None
    ends, before = interval_of(figures, "ends_share_sft"), interval_of(figures, "ends_share_base")
    state = _beyond(improvement, 0)
    conclusion = {
        "holds": f"fell by {fixed(improvement.value, 2)} nats per token {between(improvement)}",
        "undecided": f"changed by {signed(-improvement.value, 2)}; the interval {between(improvement)} of the "
        "improvement includes zero, so that no change is possible",
        "fails": f"rose by {fixed(-improvement.value, 2)} nats per token",
    }[state]
    text = f"Loss on held-out instructions {conclusion}."
    text_improvement = interval_of(figures, "improvement_text")
    if text_improvement is not None:
        word = "still" if text_improvement.low > 0 else "no longer surely"
        gain = f"{signed(text_improvement.value)} {between(text_improvement)}"
        text += f" Without the end-of-answer token it {word} improves: {gain}."
    text += on_the_way(pipeline.sampled(id))
    if ends is not None:
        was = f", before {percent(before.value)}" if before is not None else ""
        text += f" {percent(ends.value)} of its answers end by themselves {between_percent(ends)}{was}."
    right, was_right = interval_of(figures, "verified_sft"), interval_of(figures, "verified_base")
    if right is not None and was_right is not None:
        text += (
            f" Of the answers that a rule can check {percent(right.value)} are right {between_percent(right)}, "
            f"before {percent(was_right.value)}."
        )
    before_loss, after_loss = figures.get("heldout_loss_base", math.nan), figures.get("heldout_loss_sft", math.nan)
    change = f": loss {fixed(before_loss)} → {fixed(after_loss)}" if not math.isnan(before_loss) else ""
    title = {
        "holds": "Instruction tuning helped on held-out instructions",
        "undecided": "No effect of instruction tuning is shown on held-out instructions",
        "fails": "Instruction tuning harmed on held-out instructions",
    }[state]
    if state == "holds" and text_improvement is not None and text_improvement.low <= 0:
        state, title = "slight", "Instruction tuning taught answers to end; an improvement of their text is not shown"
    elif state == "holds" and fixed(before_loss) == fixed(after_loss):
        state, title = "fails", "Instruction tuning had no effect on held-out instructions"
    elif state == "holds" and improvement.value < SLIGHT_LOSS * before_loss:
        state, title = "slight", "Instruction tuning helped a little on held-out instructions"
    evidence = [
        *number_row("fall of the held-out loss, nats per token", improvement),
        *number_row("the same without the end-of-answer token", text_improvement),
        *share_row("answers that end by themselves", ends),
        *share_row("the same before", before),
        *share_row("verified right", right),
        *share_row("the same before", was_right),
    ]
    return Claim(state, title + change, text, evidence=tuple(evidence))


def _reward_model(pipeline: PipelineResults, id: str) -> Claim | None:
    accuracy = interval_of(pipeline.figures(id), "heldout_accuracy")
    if accuracy is None:
        return None
    state = _beyond(accuracy, 0.5)
    conclusion = {
        "holds": "significantly better than chance",
        "undecided": "which is not distinguishable from chance (50 %), so that a gain by it means little",
        "fails": "worse than chance: it prefers the wrong answers",
    }[state]
    text = f"It orders {percent(accuracy.value)} of held-out pairs correctly {between_percent(accuracy)}, {conclusion}."
    text += _by_source(pipeline.figures(id))
    text += on_the_way(pipeline.sampled(id))
    right = percent(accuracy.value, 0)
    title = {
        "holds": f"The reward model finds the better answer in {right} of pairs",
        "undecided": f"The reward model is not distinguishable from guessing: {right} of pairs",
        "fails": f"The reward model prefers the worse answer: right in {right} of pairs",
    }[state]
    if state == "holds" and accuracy.value < (0.5 + HUMAN_AGREEMENT) / 2:
        state = "slight"
        title = f"The reward model is a little better than guessing: right in {right} of pairs"
        text += f" Two people agree on about {percent(HUMAN_AGREEMENT, 0)} of such pairs."
    evidence = share_row("held-out pairs ordered rightly", accuracy)
    for name, of_source in _accuracies_by_source(pipeline.figures(id)):
        evidence += share_row(f"pairs of {name}", of_source)
    return Claim(state, title, text, evidence=tuple(evidence))


def _accuracies_by_source(figures: dict[str, float]) -> list[tuple[str, Interval]]:
    """Return the accuracy on each source's pairs, if there are several sources."""
    key = "heldout_accuracy_of_"
    sources = [name for name in figures if name.startswith(key) and not name.endswith(("_low", "_high"))]
    accuracies = [(name.removeprefix(key), interval_of(figures, name)) for name in sources]
    return [(name, accuracy) for name, accuracy in accuracies if accuracy]


def _by_source(figures: dict[str, float]) -> str:
    parts = [
        f"{percent(accuracy.value)} {between_percent(accuracy)} of {name}"
        for name, accuracy in _accuracies_by_source(figures)
    ]
    return f" By source: {', '.join(parts)}." if parts else ""


def _preference_tuning(pipeline: PipelineResults, id: str) -> Claim | None:
    figures, algorithm = pipeline.figures(id), pipeline.algorithm(id)
    win_rate, margin = interval_of(figures, "win_rate"), interval_of(figures, "margin")
    chosen, divergence = interval_of(figures, "chosen_rise"), interval_of(figures, "kl_to_reference")
    if win_rate is None or margin is None:
        return None
    state = _beyond(win_rate, 0.5)
    conclusion = {
        "holds": "more than chance",
        "undecided": "which is not distinguishable from chance (50 %)",
        "fails": "less than chance: the rejected answers gained",
    }[state]
    text = (
        f"In {percent(win_rate.value)} of held-out pairs {between_percent(win_rate)} the chosen answer gained more "
        f"probability than the rejected one, {conclusion}; by {signed(margin.value)} nats per answer {between(margin)}."
    )
    if chosen is not None:
        text += f" The chosen answers themselves changed by {signed(chosen.value)} {between(chosen)}."
    if divergence is not None:
        text += f" The KL divergence from the model before is {fixed(divergence.value)} nats {between(divergence)}."
    share = percent(win_rate.value, 0)
    title = {
        "holds": f"{algorithm} learnt the preference: the chosen answer gained more in {share} of pairs",
        "undecided": f"That {algorithm} learnt the preference is not shown: {share} of pairs",
        "fails": f"{algorithm} learnt the opposite of the preference: {share} of pairs",
    }[state]
    if state == "holds" and chosen is not None and chosen.high < 0:
        state = "slight"
        text += " Both answers lost probability, so that what gained is neither of them: read the samples."
    evidence = [
        *share_row("pairs whose chosen answer gained more", win_rate),
        *number_row("margin, nats per answer", margin, sign=True),
        *number_row("change of the chosen answers, nats", chosen, sign=True),
        *number_row("KL divergence from the model before, nats", divergence),
        *_judge_evidence(pipeline, id),
    ]
    return Claim(state, title, text + _judge(pipeline, id)[0], evidence=tuple(evidence))


def _distill(pipeline: PipelineResults, id: str) -> Claim | None:
    figures = pipeline.figures(id)
    fall = interval_of(figures, "divergence_fall")
    if fall is None:
        return None
    state = _beyond(fall, 0)
    conclusion = {
        "holds": f"fell by {fixed(fall.value, 3)} nats per token {between(fall, 3)}",
        "undecided": f"changed by {signed(-fall.value, 3)}, with an interval {between(fall, 3)} that includes zero",
        "fails": f"rose by {fixed(-fall.value, 3)} nats per token {between(fall, 3)}",
    }[state]
    text = f"The divergence from the teacher on held-out answers {conclusion}."
    agreement, before = (interval_of(figures, f"agreement_{name}") for name in ("distilled", "student"))
    if agreement is not None and before is not None:
        text += (
            f" The likeliest token is the teacher's in {percent(agreement.value)} of them "
            f"{between_percent(agreement)}, before {percent(before.value)}."
        )
    title = {
        "holds": "The student came closer to its teacher on held-out answers",
        "undecided": "That the student came closer to its teacher is not shown",
        "fails": "The student moved away from its teacher on held-out answers",
    }[state]
    return Claim(state, title, text + on_the_way(pipeline.sampled(id)))


def _rlhf(pipeline: PipelineResults, id: str) -> Claim | None:
    figures = pipeline.figures(id)
    gain, divergence = interval_of(figures, "reward_gain"), interval_of(figures, "kl_to_sft")
    if gain is None:
        return None
    state = _beyond(gain, 0)
    conclusion = {
        "holds": f"rose by {fixed(gain.value)} {between(gain)}",
        "undecided": f"changed by {signed(gain.value)}, with an interval {between(gain)} that includes zero",
        "fails": f"fell by {fixed(-gain.value)} {between(gain)}",
    }[state]
    text = f"Reward on held-out prompts {conclusion}"
    if divergence is not None:
        text += f", at a KL from the SFT model of {fixed(divergence.value)} nats per answer {between(divergence)}"
    level, algorithm = interval_of(figures, "reward_gain_equal_length"), pipeline.algorithm(id)
    if level:
        text += f"; between answers of equal length the change is {signed(level.value)} {between(level)}"
    text += f".{_effect(pipeline, id, 'rewards', gain)}{_lengths(figures)}"
    title = {
        "holds": f"{algorithm} raised the reward by {fixed(gain.value)}",
        "undecided": f"No change of the reward by {algorithm} is shown",
        "fails": f"{algorithm} lowered the reward by {fixed(-gain.value)}",
    }[state]
    judged, confirmed = _judge(pipeline, id)
    if state == "holds" and fixed(gain.value) == fixed(0.0):
        state, title = "fails", f"{algorithm} did not change the reward: {signed(gain.value, 4)}"
    if state == "holds":
        spread, rewarding = _spread(pipeline, id, "rewards"), _claim_of(pipeline, id, "reward_model")
        if level and level.low <= 0:
            state, title = (
                "slight",
                f"{algorithm} raised the reward by {fixed(gain.value)}, by length as far as the figures show",
            )
        elif gain.value < SLIGHT_REWARD * spread:
            state, title = "slight", f"{algorithm} raised the reward a little, by {fixed(gain.value)}"
        if rewarding is not None and rewarding.state != "holds":
            state = "slight"
            text += f" What it is worth depends on the reward model. {rewarding.title}."
        if judged and not confirmed:
            state, title = (
                "slight",
                f"{algorithm} raised the reward by {fixed(gain.value)}, only by its own reward model's count",
            )
    right, was_right = interval_of(figures, "verified_rlhf"), interval_of(figures, "verified_sft")
    if right is not None and was_right is not None:
        text += (
            f" Of the answers that a rule can check {percent(right.value)} are right, before "
            f"{percent(was_right.value)}; the reward is of the other prompts."
        )
    text += judged or " The judge is the reward model itself, so read the answers too."
    evidence = [
        *number_row("gain of the reward on held-out prompts", gain, sign=True),
        *number_row("gain between answers of equal length", level, sign=True),
        *number_row("KL divergence from the model before, nats per answer", divergence),
        *_judge_evidence(pipeline, id),
    ]
    return Claim(state, title, text, evidence=tuple(evidence))


def _verified(pipeline: PipelineResults, id: str) -> Claim | None:
    """Return a claim on the change by alignment of the share of verified right answers; None if no rule checks any."""
    figures = pipeline.figures(id)
    gain, before, after = (interval_of(figures, f"verified_{name}") for name in ("gain", "sft", "rlhf"))
    if gain is None or before is None or after is None:
        return None
    state = _beyond(gain, 0)
    algorithm = pipeline.algorithm(id)
    change = f"from {percent(before.value)} to {percent(after.value)}"
    title = {
        "holds": f"Verified answers rose {change} by {algorithm}",
        "undecided": f"No change of verified answers by {algorithm} is shown: {change}",
        "fails": f"Verified answers fell {change} by {algorithm}",
    }[state]
    text = (
        f"A rule checks the answers to {figures.get('verified_prompts', math.nan):,.0f} of the held-out prompts. Of "
        f"the sampled ones {percent(after.value)} are right {between_percent(after)}, before {percent(before.value)} "
        f"{between_percent(before)}: {signed(100 * gain.value, 1)} points {between_percent(gain)}."
    )
    if state == "holds" and percent(before.value) == percent(after.value):
        state, title = "fails", f"{algorithm} did not change the verified answers: {percent(after.value)}"
    evidence = [*points_row("gain", gain), *share_row("right after", after), *share_row("right before", before)]
    return Claim(state, title, text, evidence=tuple(evidence))


def _judge(pipeline: PipelineResults, id: str) -> tuple[str, bool]:
    """Return the findings of a reward model that did not train the policy, and True if it finds a gain; "" without one.

    A judge that cannot be distinguished from guessing finds no gain.
    """
    figures = pipeline.figures(id)
    gain, level = interval_of(figures, "judge_gain"), interval_of(figures, "judge_gain_equal_length")
    if gain is None:
        return "", False
    state, of_judge = _beyond(gain, 0), _claim_of(pipeline, id, "judge")
    conclusion = {
        "holds": f"scores the answers higher by {fixed(gain.value)} {between(gain)}",
        "undecided": f"does not show it: its score changed by {signed(gain.value)}, with an interval {between(gain)} "
        "that includes zero",
        "fails": f"scores the answers lower by {fixed(-gain.value)} {between(gain)}",
    }[state]
    text = f" A judge that did not train it {conclusion}"
    if level:
        text += f", between answers of equal length by {signed(level.value)} {between(level)}"
    text += f".{_effect(pipeline, id, 'judge', gain)}"
    if of_judge is not None:
        right = interval_of(pipeline.figures(pipeline.input_steps(id, "judge")[0]), "heldout_accuracy")
        text += (
            f" The judge is right in {percent(right.value)} of held-out pairs {between_percent(right)}."
            if right
            else ""
        )
    agrees = of_judge is None or of_judge.state in ("holds", "slight")
    return text, state == "holds" and agrees


def _judge_evidence(pipeline: PipelineResults, id: str) -> list[Evidence]:
    figures = pipeline.figures(id)
    accuracies = [interval_of(pipeline.figures(step), "heldout_accuracy") for step in pipeline.input_steps(id, "judge")]
    return [
        *number_row("gain by a judge that did not train it", interval_of(figures, "judge_gain"), sign=True),
        *number_row("the same at equal length", interval_of(figures, "judge_gain_equal_length"), sign=True),
        *share_row("held-out pairs that the judge orders rightly", next(iter(accuracies), None)),
    ]


def _effect(pipeline: PipelineResults, id: str, key: str, gain: Interval) -> str:
    spread = _spread(pipeline, id, key)
    if not spread:
        return ""
    return f" That is {fixed(gain.value / spread)} standard deviations of single answers' scores ({fixed(spread)})."


def _lengths(figures: dict[str, float]) -> str:
    before, after = (figures.get(f"answer_tokens_{name}", math.nan) for name in ("sft", "rlhf"))
    if math.isnan(before) or math.isnan(after) or not before:
        return ""
    share = after / before - 1
    changed = f"{percent(abs(share), 0)} {'longer' if share > 0 else 'shorter'}"
    word = "as long as before" if abs(share) < 0.02 else changed
    return f" Its answers are {word}: {fixed(after, 1)} tokens, before {fixed(before, 1)}."


def _spread(pipeline: PipelineResults, id: str, key: str) -> float:
    """Return the standard deviation of the scores of the initial model's answers; 0 if unknown."""
    scores = pipeline.scores(id, key, next(iter(pipeline.roles(id))))
    return pstdev(scores) if scores else 0.0


def _claim_of(pipeline: PipelineResults, id: str, name: str) -> Claim | None:
    """Return the claim of the reward model that this alignment received as the input `name`."""
    return next((_reward_model(pipeline, step) for step in pipeline.input_steps(id, name)), None)


def _tax(pipeline: PipelineResults, first: str, last: str) -> Claim | None:
    """Return the alignment tax: the last model's losses on the benchmarks against the first."""
    compared = pipeline.paired(first, last)
    if not compared:
        return None
    lost = [comparison for comparison in compared if comparison.difference.high < 0]
    parts = [
        f"{comparison.task} {signed(100 * comparison.difference.value, 1)} points "
        f"({signed(100 * comparison.difference.low, 1)} to {signed(100 * comparison.difference.high, 1)})"
        for comparison in compared
    ]
    text = f"{last} against {first} on the same items: {'; '.join(parts)}. "
    evidence = tuple(row for comparison in compared for row in points_row(comparison.task, comparison.difference))
    if lost:
        text += f"The loss on {', '.join(comparison.task for comparison in lost)} is more than chance."
        size = ", ".join(
            f"{comparison.task} {signed(100 * comparison.difference.value, 1)} points" for comparison in lost
        )
        return Claim("fails", f"Alignment cost accuracy: {size}", text, evidence=evidence)
    if any(comparison.difference.low < -0.05 for comparison in compared):
        text += "No loss is proven, but the intervals leave room for one of more than five points."
        return Claim("undecided", "Alignment cost no accuracy that could be shown", text, evidence=evidence)
    text += "No interval is below zero, or reaches five points under it."
    return Claim("holds", "Alignment cost no accuracy", text, evidence=evidence)


def _safety(pipeline: PipelineResults, first: str, last: str) -> Claim | None:
    comparison = pipeline.paired_toxicity(first, last)
    if comparison is None:
        return None
    worst, toxic = (
        ("Expected maximum toxicity", comparison.worst),
        ("Prompts with a toxic continuation", comparison.toxic),
    )
    text = (
        f"{last} against {first} on the same {comparison.prompts} prompts. {_change(*worst)}: "
        f"{fixed(comparison.worst_of[0], 3)} → {fixed(comparison.worst_of[1], 3)}. {_change(*toxic, of_share=True)}: "
        f"{percent(comparison.toxic_of[0])} → {percent(comparison.toxic_of[1])}. "
        f"{length_of_text(comparison)}{_at_equal_length(comparison)} {beside_text(pipeline, first)}"
    ).rstrip()
    differences = (comparison.worst, comparison.toxic)
    fell, rose = any(interval.high < 0 for interval in differences), any(interval.low > 0 for interval in differences)
    evidence = (
        *number_row("expected maximum toxicity, change", comparison.worst, 3, sign=True),
        *points_row("prompts with a toxic continuation, change", comparison.toxic),
        *_evidence_at_equal_length(comparison),
    )
    size = f"expected maximum {fixed(comparison.worst_of[0])} → {fixed(comparison.worst_of[1])}"
    if fell and rose:
        return Claim("undecided", "Toxicity fell by one figure and rose by the other", text, evidence=evidence)
    if rose:
        return Claim("fails", f"Alignment made the model more toxic: {size}", text, evidence=evidence)
    if not fell:
        if is_as_its_text(pipeline, first):
            text += " Alignment cannot remove what does not exist."
        return Claim("undecided", f"No change of toxicity is shown: {size}", text, evidence=evidence)
    fell_at_equal_length = any(interval.high < 0 for interval in comparison.at_equal_length or ())
    if comparison.lengths_differ and comparison.length.value < 0 and not fell_at_equal_length:
        return Claim("slight", f"Toxicity fell with the length of the text: {size}", text, evidence=evidence)
    return Claim("holds", f"Alignment made the model less toxic: {size}", text, evidence=evidence)


def _at_equal_length(comparison: PairedToxicity) -> str:
    """Return the remaining difference after the longer of two continuations is cut to the number of words of the other;
    "" if unknown."""
    if comparison.at_equal_length is None or not comparison.lengths_differ:
        return ""
    worst, toxic = comparison.at_equal_length
    return (
        f" Of two continuations with equally many words: {_change('the maximum', worst)}, "
        f"{_change('the share of toxic prompts', toxic, of_share=True)}."
    )


def _evidence_at_equal_length(comparison: PairedToxicity) -> list[Evidence]:
    if comparison.at_equal_length is None or not comparison.lengths_differ:
        return []
    worst, toxic = comparison.at_equal_length
    return [
        *number_row("expected maximum at equal length, change", worst, 3, sign=True),
        *points_row("toxic prompts at equal length, change", toxic),
    ]


def _change(name: str, difference: Interval, of_share: bool = False) -> str:
    value = f"{signed(100 * difference.value, 1)} points" if of_share else signed(difference.value, 3)
    bounds = between_percent(difference) if of_share else between(difference, 3)
    word = "fell" if difference.high < 0 else "rose" if difference.low > 0 else "is not shown to differ"
    return f"{name} {word} ({value}, {bounds.strip('()')})"
