"""Tiny real models: a tokenizer trained in the test and a Llama of a few thousand parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.run import Run

os.environ["HF_HUB_OFFLINE"] = "1"

TEXT = [
    "Return the number of items in the list.",
    "The function returns a string or None if the file does not exist.",
    "Open the file for reading and return a new file object.",
    "Raises ValueError if the argument is not a valid integer.",
    "She opened the door and walked into the room with her old friend.",
    "These values are rounded to two digits after the keys are sorted.",
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a byte-level BPE of 400 entries, saved as a stage would."""
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def new_model() -> Callable[..., Path]:
    """Makes such a model in a folder: `new_model(folder, seed=0)`."""
    return make_model


def make_model(folder: Path, seed: int, width: int = 32) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    fast.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(fast),
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
            initializer_range=0.2,  # far from uniform, so that scores differ
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "work")
