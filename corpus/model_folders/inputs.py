"""Output of the tokenizer of a model folder: the inputs that its model takes, in every version of transformers, and its
padding."""

from __future__ import annotations

import json
from pathlib import Path

from infra.io.json import read_json

_FAST = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names that transformers 5 gives to classes of transformers 4, by which both find them."""
_SEGMENTS = "token_type_ids"


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
