"""Words to keep a model from writing: their token sequences, and a bias on each token that completes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Bias = Mapping[tuple[int, ...], float]
"""Sequences of ids, each with the value added to the logit of its last id where the other ids precede it."""


def bias_of(words: Sequence[str], tokenizer: PreTrainedTokenizerBase, bias: float) -> Bias:
    """Return a bias for each word unchanged, capitalized and in capitals, at a text's beginning and after a space."""
    spelt = {form for word in words for form in (word, word.capitalize(), word.upper())}
    biases = {}
    for text in sorted(f"{space}{form}" for form in spelt for space in ("", " ")):
        if ids := tuple(tokenizer.encode(text, add_special_tokens=False)):
            biases[ids] = bias
    return biases


def biased(ids: Tensor, logits: Tensor, bias: Bias) -> Tensor:
    """Return logits (B, T, V) with the bias at every place of ids (B, T). transformers' SequenceBiasLogitsProcessor
    biases only the next token."""
    adjusted = logits.clone()
    for sequence, value in bias.items():
        *before, last = sequence
        if len(before) > ids.shape[1]:
            continue
        if not before:
            adjusted[..., last] += value
            continue
        windows = ids.unfold(1, len(before), 1)  # (B, T - len + 1, len)
        is_match = (windows == torch.tensor(before, device=ids.device)).all(-1)
        adjusted[:, len(before) - 1 :, last] += value * is_match.to(adjusted.dtype)
    return adjusted


@contextmanager
def scoring_with(model: PreTrainedModel, bias: Bias) -> Iterator[None]:
    """Make the model's forward pass over whole sequences return biased logits."""

    def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        output.logits = biased(ids, output.logits, bias)
        return output

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
