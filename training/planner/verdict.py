"""Recommend an API, tuning, continued pretraining or training from scratch, based on figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.pages.words import compact
from training.planner.laws.scaling_laws import Law

READINGS = 4
"""Number of epochs up to which repeated text is about as good as new text (Muennighoff et al. 2023)."""
OPEN_PARAMETERS, OPEN_TOKENS = 8e9, 15e12
"""A model with open weights as a possible starting point: Llama 3.1 8B (Dubey et al. 2024)."""
TUNE, CONTINUE = 1e6, 1e9
"""Minimum number of the user's own tokens for tuning and for continued pretraining: LIMA had 1,000 answers of some 750
tokens (Zhou et al. 2023), Code Llama and Minerva 500 and 38.5 billion tokens."""
API_USD = (0.1, 1.0, 15.0)
"""USD per million tokens of an API: small open models, middle, the largest (public lists, 2025)."""


def verdict(found: Mapping[str, Any], law: Law, own: float | None, used: float | None) -> dict[str, Any]:
    """{"choice", "because", "figures"} of a plan. choice: api, tune, continue or scratch.

    own: tokens of the user's own text, if known. used: tokens per month that the model will read and write, if known.
    """
    size, tokens = found["parameters_of_a_token"], found["tokens"]
    a_flop = found["cost_usd"] / found["flops"]
    text = own if own is not None else tokens
    ours, theirs = law.loss(size, tokens), law.loss(OPEN_PARAMETERS, OPEN_TOKENS)
    figures = {
        "scratch_usd": found["cost_usd"],
        "continue_usd": 6 * size * text * a_flop,
        "tune_usd": 6 * OPEN_PARAMETERS * min(text, 1e8) * a_flop,
        "api_usd_a_year": None if used is None else 12 * used * API_USD[1] / 1e6,
        "api_usd_a_year_low": None if used is None else 12 * used * API_USD[0] / 1e6,
        "api_usd_a_year_high": None if used is None else 12 * used * API_USD[2] / 1e6,
        "tokens_needed": tokens,
        "tokens_of_your_own": own,
        "loss_scratch": ours,
        "loss_of_open_model": theirs,
    }
    because = []
    if ours is not None and theirs is not None and ours > theirs:
        because.append(
            f"by {law.name}'s law it ends at {ours:.2f} nats a token of general text, where an open model of 8B that "
            f"read 15T tokens is at {theirs:.2f}: from scratch pays for text, a language or a licence of your own"
        )
    if own is None:
        choice = "scratch"
        because.append(
            f"it reads {compact(tokens)} tokens; tell --own-tokens: with less than a quarter of them that are yours, "
            "beginning with an open model comes to more"
        )
    elif own * READINGS >= tokens:
        choice = "scratch"
        because.append(
            f"your {compact(own)} tokens, read up to {READINGS} times, are the {compact(tokens)} that a model of this "
            "size wants"
        )
    else:
        choice = "continue" if own >= CONTINUE else "tune" if own >= TUNE else "api"
        because.append(
            f"your {compact(own)} tokens, read {READINGS} times, are {own * READINGS / tokens:.1%} of the "
            f"{compact(tokens)} that a model of this size wants"
        )
        said = {
            "continue": "they are enough to continue the pretraining of an open model (base_model:)",
            "tune": "they are enough to tune an open model (base_model: and sft:)",
            "api": "they are too few to tune on: put them into the prompt",
        }
        because.append(said[choice])
    year = figures["api_usd_a_year"]
    if year is not None:
        if year < found["cost_usd"] and choice != "api" and own is not None and own < CONTINUE:
            choice = "api"
        because.append(
            f"an API for {compact(used or 0)} tokens a month is about {year:,.0f} USD a year, the training "
            f"{found['cost_usd']:,.0f} once, before anyone serves it"
        )
    return {"choice": choice, "because": because, "figures": figures}
