"""What bench_train.py and bench_gpu.py train on: random tokens as packed shards and as an array; two small Llamas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 4096
LEARNING_RATE = 1e-3
_BATCHES = 64


@dataclass(frozen=True)
class Setting:
    """A model and its batch. window: steps between two looks at the clock."""

    name: str
    width: int
    layers: int
    length: int
    batch: int
    mlp_width: int
    window: int


SETTINGS = {
    "A": Setting("A", width=256, layers=4, length=256, batch=16, mlp_width=688, window=10),
    "B": Setting("B", width=512, layers=8, length=512, batch=8, mlp_width=1376, window=3),
}


def llama_values(setting: Setting) -> dict[str, Any]:
    return {
        "hidden_size": setting.width,
        "intermediate_size": setting.mlp_width,
        "num_hidden_layers": setting.layers,
        "num_attention_heads": setting.width // 64,
        "num_key_value_heads": setting.width // 64,
        "max_position_embeddings": setting.length,
        "tie_word_embeddings": True,
    }


def write(setting: Setting, folder: Path, vocabulary: int = VOCABULARY, document: int = 100) -> None:
    """Tokens as FOLDER/A.npy and as shards in FOLDER/A. document: tokens of one, about."""
    from streaming import MDSWriter

    random = np.random.default_rng(0)
    tokens = random.integers(1, vocabulary, (_BATCHES * setting.batch, setting.length))
    tokens[random.random(tokens.shape) < 1 / document] = 0
    np.save(folder / f"{setting.name}.npy", tokens)
    columns = {"tokens": f"ndarray:uint16:{setting.length}", "starts": "ndarray:uint32"}
    for split, rows in (("train", tokens), ("validation", tokens[:16])):
        with MDSWriter(out=str(folder / setting.name / split), columns=columns) as writer:
            for row in rows:
                starts = np.array([0, *(np.flatnonzero(row[:-1] == 0) + 1)], np.uint32)
                writer.write({"tokens": row.astype(np.uint16), "starts": starts})
    meta = {
        "vocab_size": vocabulary,
        "sequence_length": setting.length,
        "validation_tokens": 16 * setting.length,
        "validation_bytes": 64 * setting.length,
    }
    (folder / setting.name / "meta.json").write_text(json.dumps(meta))


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
