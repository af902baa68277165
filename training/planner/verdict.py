"""Recommend an API, tuning, continued pretraining or training from scratch, based on figures."""

from __future__ import annotations

import math
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


def expected_loss(law: Law, parameters: float, tokens: float, vocabulary: int) -> float | None:
    """Return the loss by the law in nats per token; None if the law has none, or does not hold for so little compute:
    the loss would be worse than that of equal probabilities for all tokens."""
    loss = law.loss(parameters, tokens)
    return None if loss is None or loss > math.log(vocabulary) else loss


def verdict(planned: Mapping[str, Any], law: Law, own_tokens: float | None, used: float | None) -> dict[str, Any]:
    """{"choice", "because", "figures"} of a plan. choice: api, tune, continue or scratch; unknown without
    `own_tokens`.

    Args:
        own_tokens: tokens of the user's own text, if known.
        used: tokens per month that the model will read and write, if known.
    """
    size, tokens = planned["parameters_of_a_token"], planned["tokens"]
    a_flop = planned["cost_usd"] / planned["flops"]
    text = own_tokens if own_tokens is not None else tokens
    own_loss, open_loss = planned["loss"], law.loss(OPEN_PARAMETERS, OPEN_TOKENS)
    figures = {
        "scratch_usd": planned["cost_usd"],
        "continue_usd": 6 * size * text * a_flop,
        "tune_usd": 6 * OPEN_PARAMETERS * min(text, 1e8) * a_flop,
        "api_usd_a_year": None if used is None else 12 * used * API_USD[1] / 1e6,
        "api_usd_a_year_low": None if used is None else 12 * used * API_USD[0] / 1e6,
        "api_usd_a_year_high": None if used is None else 12 * used * API_USD[2] / 1e6,
        "tokens_needed": tokens,
        "tokens_of_your_own": own_tokens,
        "loss_scratch": own_loss,
        "loss_of_open_model": open_loss,
    }
    because = []
    if own_loss is not None and open_loss is not None and own_loss > open_loss:
        because.append(
            f"by {law.name}'s law it ends at {own_loss:.2f} nats per token of general text, where an open model of 8B "
            f"that read 15T tokens is at {open_loss:.2f}: training from scratch pays if the text, the language or the "
            "licence has to be yours"
        )
    if own_tokens is None:
        choice = "unknown"
        because.append(
            f"that depends on how much text you have: give --own-tokens. It reads {compact(tokens)} tokens; with less "
            "than a quarter of them your own, starting from an open model gives more"
        )
    elif own_tokens * READINGS >= tokens:
        choice = "scratch"
        because.append(
            f"your {compact(own_tokens)} tokens, read up to {READINGS} times, are the {compact(tokens)} that a model "
            "of this size needs"
        )
    else:
        choice = "continue" if own_tokens >= CONTINUE else "tune" if own_tokens >= TUNE else "api"
        because.append(
            f"your {compact(own_tokens)} tokens, read {READINGS} times, are {own_tokens * READINGS / tokens:.1%} of "
            f"the {compact(tokens)} that a model of this size needs"
        )
        reasons = {
            "continue": "they are enough to continue the pretraining of an open model (base_model:)",
            "tune": "they are enough to tune an open model (base_model: and sft:)",
            "api": "they are too few to tune on: put them into the prompt",
        }
        because.append(reasons[choice])
    year = figures["api_usd_a_year"]
    if year is not None:
        if year < planned["cost_usd"] and choice != "api" and own_tokens is not None and own_tokens < CONTINUE:
            choice = "api"
        because.append(
            f"an API for {compact(used or 0)} tokens per month is about {year:,.0f} USD per year, the training "
            f"{planned['cost_usd']:,.0f} once, before serving"
        )
    return {"choice": choice, "because": because, "figures": figures}
