"""Brings an existing Hugging Face model folder in, in place of pretraining.

python -m training.adopt --config base_model.yaml --out DIR
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from corpus.model_folders.folder import folder_problems
from corpus.model_folders.licence import keep_licence
from corpus.model_folders.pretrained import load_pretrained_tokenizer
from corpus.tokens.chat_template import CHAT_TEMPLATE, EARLIER_TEMPLATES, PAD
from corpus.tokens.trained import FILE as TRAINED
from infra.errors import StageError, stage_error
from infra.io.foreign import check_model
from infra.run import Result, Run
from training.chat.base import chat_of
from training.chat.shown import shown_template
from training.checkpoint.export import export
from training.config import BaseModelConfig
from training.model.models import load
from training.model.new_tokens import CHAT_TOKENS, add_untrained, draw_from_mean


def import_model(config: BaseModelConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Copy the model to `out_dir` with a chat template: its own, unchanged, else this project's with its tokens.

    New tokens get the mean embedding with a little noise drawn by the seed, so that they start as likely as any.
    Figures: parameters, added_tokens, vocab_size. Raises StageError as `load_pretrained_model` and `folder_problems`
    do: for pickled weights, which can run code when they are read, quantized ones, and those that do not fit
    config.json or are not finite; for a folder without a tokenizer, that brings code along or leads out of itself.
    """
    # Read the model; refuse what cannot be loaded safely and completely.
    folder = Path(config.path)
    check_model(folder, "base_model.path")
    if problems := folder_problems(folder, "base_model.path", tokenizer=True):
        raise StageError(*problems)
    try:
        model = load(folder, "base_model.path", say=lambda message: run.event("weights_converted", message))
        tokenizer = load_pretrained_tokenizer(folder, "base_model.path")
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise stage_error("bad_model", "base_model.path", f"transformers cannot read {folder}: {reason}") from error
    # Chat template: the model's own, or this project's with its tokens.
    known = tokenizer.get_vocab()
    keeps = bool(tokenizer.chat_template) and config.chat_template == "model"
    keeps = keeps and tokenizer.chat_template not in (CHAT_TEMPLATE, *EARLIER_TEMPLATES)
    missing = [] if keeps else [token for token in CHAT_TOKENS if token not in known]
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.add_tokens(missing, special_tokens=True)
    if keeps:
        chat = chat_of(tokenizer, folder)  # refuses a template that shows no answer
        run.event("chat_template", f"the model keeps its chat template: {shown_template(chat)}")
    else:
        tokenizer.chat_template = CHAT_TEMPLATE
    before = model.config.vocab_size
    if len(tokenizer) > before:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # A model may have had rows to spare (151,936 of Qwen's 151,669 tokens), which nothing has trained.
    added = {number for token, number in tokenizer.get_vocab().items() if token not in known}
    draw_from_mean(model, {*added, *range(before, len(tokenizer))}, config.seed)
    add_untrained(model, tokenizer.convert_tokens_to_ids(missing))
    model.config.pad_token_id = tokenizer.pad_token_id
    # The artifact: tokenizer, weights, licence, and the record of the trained text if there is one.
    tokenizer.save_pretrained(out_dir)
    export(model, None, out_dir, chat.stops if keeps else ())
    if kept := keep_licence(folder, out_dir):
        run.event("licence", f"the model's licence applies to everything derived from it: {', '.join(kept)}")
    if (folder / TRAINED).is_file():
        shutil.copyfile(folder / TRAINED, out_dir / TRAINED)
    parameters = sum(weight.numel() for weight in model.parameters())
    figures = {
        "parameters": float(parameters),
        "added_tokens": float(len(missing)),
        "vocab_size": float(model.config.vocab_size),
    }
    return Result(figures, f"{model.config.model_type} with {parameters / 1e6:,.1f}M parameters")


if __name__ == "__main__":
    from infra.alone import main

    main(import_model, BaseModelConfig)
