"""Rows that text does not train: far positions, chat tokens, padding of the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.run import Run
from training.chat.base import Chat
from training.config import ModelConfig, PretrainConfig, SftConfig
from training.core.hardware import Hardware
from training.generation.sampling import sample
from training.model.models import build, hf_config
from training.model.new_tokens import name_untrained, unused_ids
from training.objectives.causal import next_token_batch
from training.pretrain import pretrain
from training.sft import sft
from training.train_modules.language_model import LanguageModel

CPU = Hardware(torch.device("cpu"), bf16=False)
LENGTH, TOKENS, ROWS = 32, 319, 384


def _pretrain(inputs: dict[str, Path], out: Path, run: Run, **changes: Any) -> Any:
    """A small GPT-2 after a few batches, as transformers loads it."""
    model = {"family": "gpt2", "layers": 1, "width": 32, "heads": 2, "positions": LENGTH, "vocab_multiple": 128}
    settings = {
        "model": model,
        "duration": "12 batches",
        "global_batch_tokens": 8 * LENGTH,
        "optimizer": {"learning_rate": 1.0e-2},
        "guard": {"enabled": False},
        "evaluate_every": "1000 batches",
    }
    pretrain(PretrainConfig.model_validate(settings | changes), inputs, out, run)
    return AutoModelForCausalLM.from_pretrained(out, local_files_only=True)


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def test_all_of_gpt2_s_positions_are_trained(inputs: dict[str, Path], tmp_path: Path, run: Run) -> None:
    """Within documents those beyond the longest one never are, and far ones hardly."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = ModelConfig(family="gpt2", layers=1, width=32, heads=2, positions=LENGTH)
    fresh = build(hf_config(config, ROWS, special), 17).transformer.wpe.weight.detach()
    trained = {}
    for name, changes in (("default", {}), ("document", {"attention": "document"})):
        network = _pretrain(inputs, tmp_path / name, Run(tmp_path / f"{name}.work", run.launch), **changes)
        trained[name] = (network.transformer.wpe.weight.detach() - fresh).abs().sum(1) > 0
    # Nothing follows the last token of a sequence, so its position predicts nothing.
    assert bool(trained["default"][:-1].all())
    assert float(trained["document"].float().mean()) < 0.6
    assert PretrainConfig(model=ModelConfig(preset="llama-4m")).within_documents()
    assert not PretrainConfig(model=ModelConfig(preset="gpt-125m")).within_documents()


def test_a_padded_vocabulary_is_never_written_and_loads_in_transformers(
    inputs: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    network = _pretrain(inputs, tmp_path, run).eval()
    assert network.config.vocab_size == ROWS
    assert len(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)) == TOKENS
    assert unused_ids(network) == list(range(TOKENS, ROWS))
    with torch.no_grad():
        # So likely that any draw would take them.
        network.transformer.wte.weight[TOKENS:] = 3 * network.transformer.wte.weight[10]
        network.transformer.wte.weight[10] *= 0
    prompts = [[10, 20, 30]] * 50
    draw = {"max_new_tokens": 4, "temperature": 3.0, "stops": {0}, "hardware": CPU}
    ours = sample(network, prompts, **draw)
    theirs = network.generate(torch.tensor(prompts), max_new_tokens=4, do_sample=True, temperature=3.0, pad_token_id=1)
    assert max(map(max, ours)) < TOKENS and int(theirs.max()) < TOKENS


def test_padding_costs_the_loss_nothing_after_a_few_batches(inputs: dict[str, Path], tmp_path: Path, run: Run) -> None:
    """Its rows are told by no label, so training makes them unlikely: what they take of the probability."""
    network = _pretrain(inputs, tmp_path, run, duration="60 batches").eval()
    text = "<|endoftext|>Sort the list.<|endoftext|>Return the sum of the array."
    tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path).encode(text)])
    with torch.no_grad():
        shares = network(tokens).logits.softmax(-1)[..., TOKENS:].sum(-1)
        losses = LanguageModel(network, CPU).losses(next_token_batch(tokens.numpy()))
    assert bool(torch.isfinite(losses).all())
    assert float(shares.mean()) < 0.05, "64 of 384 rows, a sixth of the probability at first"


def test_sft_begins_chat_tokens_that_were_never_trained_at_the_mean_of_the_others(
    inputs: dict[str, Path], instructions_dir: Path, tmp_path: Path, run: Run
) -> None:
    network = _pretrain(inputs, tmp_path / "base", run)
    chat = Chat.load(tmp_path / "base")
    ids = sorted([chat.user, chat.assistant, chat.end])
    assert network.config.untrained_tokens == ids
    config = SftConfig.model_validate(
        {"duration": "1 batches", "max_length": LENGTH, "answer_max_tokens": 2, "answers_limit": 2, "heldout_limit": 2,
         "optimizer": {"learning_rate": 1.0e-8, "weight_decay": 0.0}}
    )  # fmt: skip
    given = {"model": tmp_path / "base", "instructions": instructions_dir}
    sft(config, given, tmp_path / "sft", Run(tmp_path / "sft.work", run.launch))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "sft", local_files_only=True)
    before, after = (one.transformer.wte.weight.detach() for one in (network, tuned))
    known = torch.ones(ROWS, dtype=torch.bool)
    known[ids] = False
    torch.testing.assert_close(after[known], before[known], rtol=0, atol=1e-6)
    known[TOKENS:] = False
    mean, spread = before[known].mean(0), before[known].std()
    assert float((after[ids] - mean).std() / spread) == pytest.approx(0.1, rel=0.4)
    assert float((before[ids] - mean).std() / spread) > 0.25, "each batch of pretraining moves them a little"
    assert not hasattr(tuned.config, "untrained_tokens") and unused_ids(tuned) == list(range(TOKENS, ROWS))


def test_a_model_from_elsewhere_keeps_its_rows() -> None:
    from training.model.new_tokens import begin_untrained

    network = build(hf_config(ModelConfig(preset="llama-nano"), TOKENS, {}), 1)
    before = network.get_input_embeddings().weight.clone()
    assert begin_untrained(network, 1) == 0
    assert torch.equal(before, network.get_input_embeddings().weight)
    name_untrained(network, [3], TOKENS)
    assert begin_untrained(network, 1) == 1 and begin_untrained(network, 1) == 0
