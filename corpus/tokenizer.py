"""Trains a byte-level BPE tokenizer with the chat format's special tokens, or takes over a finished one.

python -m corpus.tokenizer --config tokenizer.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.chat_template import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
from corpus.config import TokenizerConfig
from corpus.documents import count_documents, read_documents
from corpus.split import is_heldout
from infra.errors import stage_error
from infra.run import Result, Run

PROGRESS_EVERY = 1000
SAMPLE_DOCUMENTS = 2000


def tokenizer(config: TokenizerConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json, as transformers reads them.

    Training sees no held-out document. Ids 0 to 4 are the special tokens, in the order of SPECIAL_TOKENS.
    Raises StageError: `no_training_text`; `vocab_too_large` if the text is too small for that many entries;
    `bad_tokenizer` if `pretrained` is not a folder that transformers can load.
    """
    if config.pretrained is not None:
        size = _take_over(Path(config.pretrained), out_dir)
        return Result({"vocab_size": size}, f"{size:,} entries, taken over")
    trained = _train(config, inputs["documents"], run)
    trained.save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _settings())
    _write_json(out_dir / "special_tokens_map.json", {f"{name}_token": token for name, token in _ROLES.items()})
    bytes_per_token = _bytes_per_token(trained, config, inputs["documents"])
    size = trained.get_vocab_size()
    figures = {"vocab_size": size, "bytes_per_token": bytes_per_token}
    return Result(figures, f"{size:,} entries, {bytes_per_token:.2f} bytes a token")


_ROLES = {"bos": END_OF_TEXT, "eos": END_OF_TEXT, "unk": END_OF_TEXT, "pad": PAD}


def _settings() -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)},
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in _ROLES.values()],
        **{f"{name}_token": token for name, token in _ROLES.items()},
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        # The tokenizer does not know for how long a sequence the model will be made.
        "model_max_length": int(1e30),
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _train(config: TokenizerConfig, documents: Path, run: Run) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for text in _training_texts(config, documents, run):
            taken += len(text)
            yield text

    model.train_from_iterator(texts(), trainer)
    if not taken:
        raise stage_error("no_training_text", "tokenizer", "expected documents that are not held out, found none")
    if model.get_vocab_size() < config.vocab_size:
        raise stage_error(
            "vocab_too_large",
            "tokenizer.vocab_size",
            f"the text of {taken:,} characters gives {model.get_vocab_size():,} entries, asked were "
            f"{config.vocab_size:,}",
            "lower it, lower tokenizer.min_frequency, or give it more text",
        )
    return model


def _training_texts(config: TokenizerConfig, documents: Path, run: Run) -> Iterator[str]:
    limit = float("inf") if config.train_mb is None else config.train_mb * 1e6
    total = count_documents(documents)
    taken = 0
    for number, document in enumerate(read_documents(documents), 1):
        if number % PROGRESS_EVERY == 0:
            run.stop_if_cancelled()
            run.progress(number, total, "documents")
        if is_heldout(document.group, config.heldout_share):
            continue
        yield document.text
        taken += len(document.text.encode())
        if taken >= limit:
            return


def _bytes_per_token(model: Any, config: TokenizerConfig, documents: Path) -> float:
    """UTF-8 bytes a token on held-out documents, so that memorised words do not flatter it; 0 without any."""
    heldout = (d.text for d in read_documents(documents) if is_heldout(d.group, config.heldout_share))
    texts = list(islice(heldout, SAMPLE_DOCUMENTS))
    tokens = sum(len(encoding.ids) for encoding in model.encode_batch_fast(texts))
    return sum(len(text.encode()) for text in texts) / max(1, tokens)


def _take_over(folder: Path, out_dir: Path) -> int:
    if not (folder / "tokenizer.json").is_file():
        raise stage_error(
            "bad_tokenizer", str(folder), "expected a Hugging Face tokenizer folder with a tokenizer.json"
        )
    from transformers import AutoTokenizer

    try:
        adopted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise stage_error("bad_tokenizer", str(folder), f"transformers cannot load it: {reason}") from None
    adopted.add_special_tokens(
        {"additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)]},
        replace_additional_special_tokens=False,
    )
    adopted.add_special_tokens({"pad_token": PAD, "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})
    adopted.chat_template = CHAT_TEMPLATE
    adopted.save_pretrained(out_dir, save_jinja_files=False)
    return len(adopted)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    from infra.alone import main

    main(tokenizer, TokenizerConfig)
