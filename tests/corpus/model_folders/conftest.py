"""Folders of a small model, whole and to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.corpus.model_folders.damage import config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with an output layer of its own, and its tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(5)
    LlamaForCausalLM(config(tie_word_embeddings=False)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))
