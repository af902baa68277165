"""Trains a byte-level tokenizer with the chat format's special tokens, or takes over a finished one.

python -m corpus.tokenizer --config tokenizer.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus.config import TokenizerConfig
from corpus.model_folders.folder import TOKENIZER_FILES
from corpus.model_folders.pretrained import load_pretrained_tokenizer
from corpus.tokens.chat_template import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
from corpus.tokens.compression import heldout_sample, report
from corpus.tokens.encode import load_tokenizer
from corpus.tokens.training import UNKNOWN, special_tokens, train
from infra.errors import stage_error
from infra.run import Result, Run

THIS_TOKENIZER = "this tokenizer"
GPT2_STYLE = "GPT-2-style BPE"


def tokenizer(config: TokenizerConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, as transformers reads them, and
    aux/compression.json: bytes per token, fertility and share of unknowns by source, next to those of the baselines.

    Training sees no held-out document, and the measurement nothing else. Ids 0 to 4 of a tokenizer that is trained here
    are the special tokens, in the order of SPECIAL_TOKENS.
    Raises StageError: `no_training_text`; `vocab_too_large` if the text is too small for that many entries;
    `bad_tokenizer` if `pretrained` or a baseline is not a folder that transformers can load; `foreign_code` or
    `unsafe_file` if it brings code along or leads out of itself.
    """
    documents = inputs["documents"]
    labels = _labels([Path(folder) for folder in config.baselines])
    compared = {label: _adopted(folder).backend_tokenizer for folder, label in labels.items()}
    if config.pretrained is not None:
        size, message = _take_over(Path(config.pretrained), out_dir), "taken over"
    else:
        trained = train(config.kind, config, documents, run)
        trained.save(str(out_dir / "tokenizer.json"))
        settings = _settings(config.kind)
        _write_json(out_dir / "tokenizer_config.json", settings)
        _write_json(out_dir / "special_tokens_map.json", {key: settings[key] for key in settings if key in _ROLE_KEYS})
        size, message = trained.get_vocab_size(), config.kind
    if config.compare and (config.kind != "bpe" or config.pretrained is not None):
        resized = config.model_copy(update={"vocab_size": size})
        compared[GPT2_STYLE] = train("bpe", resized, documents, run, or_fewer=True)
    sample = heldout_sample(documents, config.heldout_share)
    compression = report({THIS_TOKENIZER: load_tokenizer(out_dir), **compared}, sample)
    _write_json(out_dir / "aux" / "compression.json", compression)
    totals = compression[THIS_TOKENIZER]["all"]
    if not totals["tokens"]:
        return Result({"vocab_size": size}, f"{size:,} entries, {message}; not measured: no held-out documents")
    figures = {"vocab_size": size, **{name: totals[name] for name in _FIGURES}}
    return Result(figures, f"{size:,} entries, {message}, {figures['bytes_per_token']:.2f} bytes per token")


def _labels(folders: Sequence[Path]) -> dict[Path, str]:
    """Return a distinct label for each folder: its name, with as many parent folders as needed."""
    labels = {}
    for folder in folders:
        others = [other for other in folders if other != folder]
        tails = (folder.parts[-count:] for count in range(1, len(folder.parts) + 1))
        tail = next(
            (tail for tail in tails if all(other.parts[-len(tail) :] != tail for other in others)), folder.parts
        )
        labels[folder] = str(Path(*tail))
    return labels


_FIGURES = ("bytes_per_token", "fertility", "unknown_share")
_ROLE_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _settings(kind: str) -> dict[str, Any]:
    tokens = special_tokens(kind)
    unknown = UNKNOWN if UNKNOWN in tokens else END_OF_TEXT
    roles = dict(zip(_ROLE_KEYS, (END_OF_TEXT, END_OF_TEXT, unknown, PAD), strict=True))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(tokens)},
        "additional_special_tokens": [token for token in tokens if token not in roles.values()],
        **roles,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        # The tokenizer does not know for how long a sequence the model will be made.
        "model_max_length": int(1e30),
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _adopted(folder: Path) -> Any:
    """The tokenizer in a folder. Raises StageError `bad_tokenizer`."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise stage_error(
            "bad_tokenizer",
            str(folder),
            f"expected a Hugging Face tokenizer folder, with one of {', '.join(TOKENIZER_FILES)}",
        )
    try:
        adopted = load_pretrained_tokenizer(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise stage_error("bad_tokenizer", str(folder), f"transformers cannot load it: {reason}") from None
    if not adopted.is_fast:
        raise stage_error("bad_tokenizer", str(folder), "transformers has no fast version of it", "convert it first")
    return adopted


def _take_over(folder: Path, out_dir: Path) -> int:
    adopted = _adopted(folder)
    more = [token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)]
    adopted.add_special_tokens({"extra_special_tokens": more}, replace_extra_special_tokens=False)
    adopted.add_special_tokens({"pad_token": PAD, "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})
    adopted.chat_template = CHAT_TEMPLATE
    adopted.save_pretrained(out_dir, save_jinja_files=False)
    return len(adopted)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    from infra.alone import main

    main(tokenizer, TokenizerConfig)
