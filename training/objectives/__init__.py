"""Training objectives on packed text: one file per kind, and the choice by a config."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from training.config import PretrainConfig
from training.objectives.base import Objective
from training.objectives.causal import Causal, Prefix
from training.objectives.masked import Masked
from training.objectives.span_corruption import SpanCorruption


def objective_of(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, length: int, within: bool | None = None
) -> Objective:
    """Create the objective of `config` on sequences of `length` tokens; add the special tokens it needs to `tokenizer`.

    Args:
        within: True if attention stays within documents; by default as in the config's model.
    """
    within = config.within_documents() if within is None else within
    match config.objective:
        case "causal":
            return Causal(config.seed, within_documents=within)
        case "prefix":
            return Prefix(config.seed, within_documents=within)
        case "masked":
            return Masked(tokenizer, config.seed, within_documents=within)
        case "span_corruption":
            return SpanCorruption(tokenizer, config.seed, length, within_documents=within)
