"""Output of the tokenizer of a model folder: the inputs that its model takes, in every version of transformers, and its
padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.io.json import read_json

_FAST = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names that transformers 5 gives to classes of transformers 4, by which both find them."""
_SEGMENTS = "token_type_ids"
CHARACTERS_PER_TOKEN = 40
"""A text is cut to this many characters per token before it is encoded: no token of prose is longer on average."""


def prepare_batches(tokenizer: Any, model: Any, max_tokens: int, batch: int) -> tuple[int, int]:
    """Give a tokenizer and a model a padding token where they have none.

    Args:
        max_tokens: tokens of a text that are asked for.
        batch: texts that are to be computed at once.

    Returns:
        How many tokens of a text the model can read of those, and how many texts at once: one without a padding token.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    positions = getattr(model.config, "max_position_embeddings", None) or max_tokens
    # RoBERTa's positions begin behind the padding token's: two of them are no text's.
    positions -= 2 if "roberta" in model.config.model_type else 0
    tokens: int = min(max_tokens, positions, tokenizer.model_max_length)
    return tokens, 1 if tokenizer.pad_token_id is None else batch


def name_model_inputs(folder: Path) -> None:
    """Name the model's inputs in `tokenizer_config.json`, where the file lacks them or names one too many.

    Without `model_input_names` transformers 4 returns `token_type_ids` as well: `generate` of most causal models
    rejects them, and GPT-2 adds the embedding of token 0 at every position. Models with embeddings of segments
    (`type_vocab_size`) keep theirs. A file that needs no change is not written.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    settings, config = read_json(path, nan=True), read_json(folder / "config.json", nan=True)
    if not isinstance(settings, dict) or not isinstance(config, dict):
        return  # transformers reports them
    named = dict(settings)
    if not config.get("type_vocab_size"):
        names = settings.get("model_input_names") or ("input_ids", "attention_mask")
        named["model_input_names"] = [name for name in names if name != _SEGMENTS]
    if (kind := settings.get("tokenizer_class")) in _FAST:
        named["tokenizer_class"] = _FAST[kind]
    if named != settings:
        path.write_text(json.dumps(named, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def name_padding(folder: Path, token: str) -> None:
    """Make `token`, one of the vocabulary, the padding token of the tokenizer in a model folder."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            settings = {**read_json(path, nan=True), "pad_token": token}
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
