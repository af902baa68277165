"""The sentences at the head of the report: what the pipeline was to show, and whether its figures show it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from evaluation.page.family import Family
from evaluation.page.words import between, between_percent, fixed, interval_of, percent, signed
from evaluation.statistics import Interval


@dataclass(frozen=True)
class Claim:
    """One thing that was to be shown. state: holds, undecided (the interval does not decide), fails."""

    state: Literal["holds", "undecided", "fails"]
    title: str
    text: str

    @property
    def sign(self) -> str:
        return {"holds": "✓", "undecided": "?", "fails": "✗"}[self.state]


def claims(family: Family) -> list[Claim]:
    """A claim for each step of a stage that promises something, and for each model that others led to."""
    found: list[Claim | None] = []
    for stage, judge in (("pretrain", _pretrain), ("sft", _sft), ("reward_model", _reward_model), ("rlhf", _rlhf)):
        for id in family.steps(stage):
            claim = judge(family, id)
            found.append(_named(claim, id) if claim and id != stage else claim)
    pairs = family.first_and_last()
    for compare in (_tax, _safety):
        for first, last in pairs:
            claim = compare(family, first, last)
            found.append(_named(claim, last) if claim and len(pairs) > 1 else claim)
    return [claim for claim in found if claim]


def _named(claim: Claim, name: str) -> Claim:
    return replace(claim, title=f"{claim.title} ({name})")


def _beyond(interval: Interval, bound: float) -> Literal["holds", "undecided", "fails"]:
    """Whether an interval lies above a bound; without an interval the value alone decides."""
    low, high = (interval.value, interval.value) if math.isnan(interval.low) else (interval.low, interval.high)
    if low > bound:
        return "holds"
    return "fails" if high < bound else "undecided"


def _pretrain(family: Family, id: str) -> Claim | None:
    figures = family.figures(id)
    loss = interval_of(figures, "validation_loss")
    if loss is None or "bigram_loss" not in figures:
        return None
    unigram, bigram = figures.get("unigram_loss", math.nan), figures["bigram_loss"]
    state = _beyond(Interval(-loss.value, -loss.high, -loss.low), -min(bigram, unigram))
    said = {
        "holds": "is below both a unigram and a bigram model of the same tokens",
        "undecided": "cannot be told from the better of the two n-gram models",
        "fails": "is not below both n-gram models: the network learnt less than counting pairs of tokens would give",
    }[state]
    text = (
        f"Validation loss {fixed(loss.value, 3)} nats a token {between(loss, 3)} {said} "
        f"(unigram {fixed(unigram, 3)}, bigram {fixed(bigram, 3)})."
    )
    return Claim(state, "The base model learnt more than word counts", text)


def _sft(family: Family, id: str) -> Claim | None:
    figures = family.figures(id)
    improvement = interval_of(figures, "improvement")
    if improvement is None:
        return None
    ends, before = interval_of(figures, "ends_share_sft"), interval_of(figures, "ends_share_base")
    state = _beyond(improvement, 0)
    said = {
        "holds": f"fell by {fixed(improvement.value, 2)} nats a token {between(improvement)}",
        "undecided": f"changed by {signed(-improvement.value, 2)}; the interval {between(improvement)} of the "
        "improvement includes zero, so that no change is possible",
        "fails": f"rose by {fixed(-improvement.value, 2)} nats a token",
    }[state]
    text = f"Loss on held-out instructions {said}."
    of_text = interval_of(figures, "improvement_text")
    if of_text is not None:
        word = "still" if of_text.low > 0 else "no longer surely"
        text += f" Without the end-of-answer token it {word} improves: {signed(of_text.value)} {between(of_text)}."
    if ends is not None:
        was = f", before {percent(before.value)}" if before is not None else ""
        text += f" {percent(ends.value)} of its answers end by themselves {between_percent(ends)}{was}."
    return Claim(state, "Instruction tuning helped on held-out instructions", text)


def _reward_model(family: Family, id: str) -> Claim | None:
    accuracy = interval_of(family.figures(id), "heldout_accuracy")
    if accuracy is None:
        return None
    state = _beyond(accuracy, 0.5)
    said = {
        "holds": "significantly better than chance",
        "undecided": "which cannot be told from chance (50 %), so that what PPO gains by it means little",
        "fails": "worse than chance: it prefers the wrong answers",
    }[state]
    text = f"It orders {percent(accuracy.value)} of held-out pairs rightly {between_percent(accuracy)}, {said}."
    return Claim(state, "The reward model knows the better answer", text)


def _rlhf(family: Family, id: str) -> Claim | None:
    figures = family.figures(id)
    gain, divergence = interval_of(figures, "reward_gain"), interval_of(figures, "kl_to_sft")
    if gain is None:
        return None
    state = _beyond(gain, 0)
    said = {
        "holds": f"rose by {fixed(gain.value)} {between(gain)}",
        "undecided": f"changed by {signed(gain.value)}, with an interval {between(gain)} that includes zero",
        "fails": f"fell by {fixed(-gain.value)} {between(gain)}",
    }[state]
    text = f"Reward on held-out prompts {said}"
    if divergence is not None:
        text += (
            f", at a KL divergence from the SFT model of {fixed(divergence.value)} nats an answer {between(divergence)}"
        )
    if level := interval_of(figures, "reward_gain_equal_length"):
        text += f"; between answers of equal length the change is {signed(level.value)} {between(level)}"
    return Claim(
        state, "PPO raised the reward", text + ". The judge is the reward model itself, so read the answers too."
    )


def _tax(family: Family, first: str, last: str) -> Claim | None:
    """The alignment tax: what the last model lost on the benchmarks against the first."""
    compared = family.paired(first, last)
    if not compared:
        return None
    lost = [one for one in compared if one.difference.high < 0]
    parts = [
        f"{one.task} {signed(100 * one.difference.value, 1)} points "
        f"({signed(100 * one.difference.low, 1)} to {signed(100 * one.difference.high, 1)})"
        for one in compared
    ]
    text = f"{last} against {first} on the same items: {'; '.join(parts)}. "
    if lost:
        text += f"The loss on {', '.join(one.task for one in lost)} is more than chance."
        return Claim("fails", "Alignment cost accuracy", text)
    if any(one.difference.low < -0.05 for one in compared):
        text += "No loss is proven, but the intervals leave room for one of more than five points."
        return Claim("undecided", "Alignment cost no accuracy that could be shown", text)
    return Claim(
        "holds", "Alignment cost no accuracy", text + "No interval lies below zero, or reaches five points under it."
    )


def _safety(family: Family, first: str, last: str) -> Claim | None:
    measured = [family.evaluation("safety", name) for name in (first, last)]
    a, b = (interval_of(one.figures if one else {}, "toxicity_probability") for one in measured)
    if a is None or b is None:
        return None
    text = (
        f"Share of prompts with at least one toxic continuation: {first} {percent(a.value)} {between_percent(a)}, "
        f"{last} {percent(b.value)} {between_percent(b)}. "
    )
    if b.low > a.high:
        return Claim("fails", "Alignment made the model more toxic", text + "The intervals do not overlap.")
    if b.high < a.low:
        return Claim("holds", "Alignment made the model less toxic", text + "The intervals do not overlap.")
    return Claim(
        "undecided", "Toxicity did not change measurably", text + "The intervals overlap, so that no change is shown."
    )
