"""Rows of an embedding that no text has trained: chat tokens before SFT, tokens that a model is given, padding.

A pretraining records in config.json the chat tokens that its text did not contain (`untrained_tokens`), as an imported
model does for those that it was given, and in generation_config.json the rows that belong to no token
(`suppress_tokens`, by which transformers never writes them).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from corpus.tokens.chat_template import ASSISTANT, END, USER

CHAT_TOKENS = (USER, ASSISTANT, END)
_KEY = "untrained_tokens"


def name_untrained(model: PreTrainedModel, chat_ids: Iterable[int], tokens: int) -> None:
    """Record in a fresh model the rows that its pretraining will not train: packed text spells chat tokens out.

    Args:
        tokens: ids that the tokenizer has; rows from there on are padding.
    """
    setattr(model.config, _KEY, sorted(chat_ids))
    unused = list(range(tokens, model.config.vocab_size))
    if (writes := _generation_config(model)) is not None:
        writes.suppress_tokens = unused or None


def unused_ids(model: PreTrainedModel) -> list[int]:
    """Rows of the output layer that belong to no token."""
    return list(getattr(_generation_config(model), "suppress_tokens", None) or [])


def _generation_config(model: PreTrainedModel) -> GenerationConfig | None:
    """Return the generation config; None for a model that writes no text, which in transformers 5 has no such
    attribute.
    """
    return getattr(model, "generation_config", None)


def untrained_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that no text has trained: those that config.json names, and special tokens whose rows are all zeros or
    equal to another's, as the reserved tokens of published base models are."""
    table = model.get_input_embeddings().weight.detach()
    special = [number for number in tokenizer.added_tokens_decoder if number < len(table)]
    rows = table[torch.tensor(special, dtype=torch.long, device=table.device)]
    _, kind, count = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    alike = (count[kind] > 1) | (rows == 0).all(1)
    new_ids = {number for number, untrained in zip(special, alike.tolist(), strict=True) if untrained}
    return sorted({*new_ids, *(getattr(model.config, _KEY, None) or [])} - {tokenizer.pad_token_id, *unused_ids(model)})


def add_untrained(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Add tokens to the untrained ones in config.json."""
    if named := sorted({*(getattr(model.config, _KEY, None) or []), *ids}):
        setattr(model.config, _KEY, named)


def forget_untrained(model: PreTrainedModel) -> None:
    """Remove the list of untrained tokens from config.json, once a training includes them."""
    if hasattr(model.config, _KEY):
        delattr(model.config, _KEY)


def begin_untrained(model: PreTrainedModel, seed: int) -> int:
    """Set the rows of the tokens from `name_untrained` to the mean of the others, once; return their number."""
    ids = list(getattr(model.config, _KEY, None) or [])
    forget_untrained(model)
    draw_from_mean(model, ids, seed)
    return len(ids)


def draw_from_mean(model: PreTrainedModel, ids: Iterable[int], seed: int) -> None:
    """Rows `ids` of input and output embedding become the mean of all others with a little noise, so that a new token
    begins as likely as any and moves the other probabilities hardly at all (Hewitt 2021)."""
    new = torch.tensor(sorted(ids), dtype=torch.long)
    if not len(new):
        return
    generator = torch.Generator().manual_seed(seed)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    # One and the same memory where input and output embedding are tied.
    tables = {layer.weight.data_ptr(): layer.weight.detach() for layer in layers if layer is not None}
    for table in tables.values():
        old = torch.ones(len(table), dtype=torch.bool)
        old[new] = False
        old[unused_ids(model)] = False
        known = table[old.to(table.device)]
        noise = torch.randn(len(new), table.shape[1], generator=generator) * known.std().cpu() * 0.1
        table[new.to(table.device)] = known.mean(0) + noise.to(table)
