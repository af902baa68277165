"""Models as plain Hugging Face folders: safetensors, config, tokenizer files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from corpus.model_folders.inputs import name_model_inputs
from corpus.model_folders.licence import carry_licence
from corpus.tokens.chat_template import CHAT_TEMPLATE, EARLIER_TEMPLATES
from corpus.tokens.trained import FILE as TRAINED
from training.core import ranks
from training.distributed.parallel import whole_weights
from training.model.new_tokens import unused_ids

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

_MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates besides the usual one."""


def export(model: PreTrainedModel, source: Path | None, out_dir: Path, end_ids: Iterable[int] = ()) -> None:
    """Write fp32 weights, config.json, generation_config.json and the tokenizer's files to `out_dir`, on rank 0.

    Every rank must call.

    source: the folder of the tokenizer, or of the model that this one was made from: its tokenizer's files and its
        trained_sequences.json are copied, and the tokenizer's settings name the inputs that the model takes. None if
        the files are already in `out_dir`.
    end_ids: ids that end an answer, in addition to the model's end of text.
    """
    config = model.config
    ends = sorted(
        {*end_ids, *([config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or [])}
    )
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends or None,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        suppress_tokens=unused_ids(model) or None,
    )
    weights = whole_weights(model)
    if not ranks.is_first():
        return
    model.save_pretrained(out_dir, state_dict=weights, safe_serialization=True)
    if source is not None:
        copy_beside(source, out_dir)
    name_model_inputs(out_dir)


def copy_beside(source: Path, out_dir: Path) -> None:
    """Copy the files that belong to weights byte for byte: the tokenizer's, the record of pretraining data, and the
    licence."""
    for name in (*TOKENIZER_FILES, TRAINED):
        if (source / name).exists():
            shutil.copyfile(source / name, out_dir / name)
    carry_licence(source, out_dir)
    for template in sorted(source.glob(f"{_MORE_TEMPLATES}/*.jinja")):
        (out_dir / _MORE_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, out_dir / _MORE_TEMPLATES / template.name)


def renew_template(out_dir: Path) -> None:
    """Replace an earlier version's chat template, if the tokenizer has one, with today's, which supports a system."""
    path = out_dir / "chat_template.jinja"
    if ranks.is_first() and path.exists() and path.read_text(encoding="utf8") in EARLIER_TEMPLATES:
        path.write_text(CHAT_TEMPLATE, encoding="utf8")
