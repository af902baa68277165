"""Bringing in an existing model: chat tokens are added, pickled weights refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from infra.errors import StageError
from infra.run import Run
from training.adopt import import_model
from training.config import BaseModelConfig


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A GPT-2 of somebody else's, whose tokenizer knows nothing of chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path / "foreign"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = GPT2Config(
        vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=256, bos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_chat_tokens_are_added_and_the_old_logits_stay(foreign: Path, tmp_path: Path, run: Run) -> None:
    result = import_model(BaseModelConfig(path=str(foreign)), {}, tmp_path / "out", run)
    assert result.figures["added_tokens"] == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [tokenizer.convert_ids_to_tokens(ids)[place] for place in (0, -2, -1)] == [
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]
    before = AutoModelForCausalLM.from_pretrained(foreign).eval()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert after.config.vocab_size == len(tokenizer) == 261
    text = torch.tensor([[10, 20, 30]])
    with torch.no_grad():
        torch.testing.assert_close(after(text).logits[..., :257], before(text).logits)
        torch.testing.assert_close(after(torch.tensor([ids])).logits.isfinite().all(), torch.tensor(True))


def test_tokens_that_are_given_rows_to_spare_begin_at_the_mean_of_the_others(
    foreign: Path, tmp_path: Path, run: Run
) -> None:
    """As Qwen's models have them: rows beyond their tokens, up to a multiple of 128."""
    config = GPT2Config(
        vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=256, bos_token_id=256
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight[:257] += 1
        model.transformer.wte.weight[257:] = 0
    model.save_pretrained(foreign)
    import_model(BaseModelConfig(path=str(foreign)), {}, tmp_path / "out", run)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").transformer.wte.weight
    torch.testing.assert_close(after[:257], model.transformer.wte.weight[:257])
    assert after.shape == (384, 16) and (after[257:261] > 0.5).all() and (after[261:] == 0).all()


def test_the_same_seed_gives_the_same_bytes(foreign: Path, tmp_path: Path, run: Run) -> None:
    for name in ("one", "two"):
        import_model(BaseModelConfig(path=str(foreign)), {}, tmp_path / name, run)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


def test_pickled_weights_are_refused(foreign: Path, tmp_path: Path, run: Run) -> None:
    (foreign / "model.safetensors").unlink()
    torch.save({}, foreign / "pytorch_model.bin")
    with pytest.raises(StageError, match=r"pickled weights \(pytorch_model\.bin\), which can run code"):
        import_model(BaseModelConfig(path=str(foreign)), {}, tmp_path / "out", run)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(StageError, match=r"config\.json"):
        import_model(BaseModelConfig(path=str(tmp_path)), {}, tmp_path / "out", run)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(StageError, match="found no weights"):
        import_model(BaseModelConfig(path=str(tmp_path)), {}, tmp_path / "out", run)
