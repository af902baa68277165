"""Low-rank adapters and rows of new tokens: those of peft on the same batch, merged as there; an SFT that leaves all
other weights alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import train_in_ranks
from training.adopt import import_model
from training.chat.base import Chat
from training.checkpoint.export import export
from training.config import BaseModelConfig, LoraConfig, ModelConfig, OptimizerConfig, SftConfig
from training.core.hardware import Hardware
from training.distributed.parallel import whole_weights
from training.model.lora import add_adapters, learn_rows, learning_ids, merged
from training.model.models import build, hf_config, load
from training.model.new_tokens import CHAT_TOKENS, add_untrained
from training.planner.architecture import of_transformers
from training.planner.stages import adapter_weights
from training.sft import sft
from training.train_modules.language_model import LanguageModel
from training.trainer.optimizers import optimizer_of

CPU = Hardware(torch.device("cpu"), bf16=False)
SETTINGS: dict[str, Any] = {
    "duration": "6 batches",
    "global_batch_examples": 8,
    "max_length": 64,
    "optimizer": {"learning_rate": 1.0e-2, "weight_decay": 0.0},
    "answer_max_tokens": 4,
    "answers_limit": 4,
    "heldout_limit": 8,
    "lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]},
}


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ()], ids=["some layers", "all"])
def test_loss_gradients_and_merged_weights_are_peft_s(base_dir: Path, targets: tuple[str, ...]) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = LoraConfig(rank=3, alpha=6.0, targets=targets)
    ours = load(base_dir)
    learning = add_adapters(ours, config, seed=5)
    theirs = get_peft_model(
        load(base_dir), PeftConfig(r=3, lora_alpha=6.0, target_modules=list(targets) or "all-linear", lora_dropout=0.0)
    )
    named = {name.replace(".default.weight", ""): one for name, one in theirs.named_parameters() if one.requires_grad}
    mine = {name: one for name, one in ours.named_parameters() if one.requires_grad}
    assert learning == sum(one.numel() for one in mine.values()) == sum(one.numel() for one in named.values())
    planned = of_transformers(ours.config.to_dict(), None)
    assert planned and (targets or adapter_weights(planned, 3) == learning)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, one in mine.items():
            one.normal_(0, 0.1, generator=generator)
            named[f"base_model.model.{name.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}"].copy_(one)
    chat = Chat.load(base_dir)
    batch = chat.response_batch(chat.conversations(["What?", "Sort it."], ["Load the file.", "No."]))
    model = LanguageModel(ours, CPU)
    loss = model.loss(model(batch), batch)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    logits = theirs(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, one in mine.items():
        other = named[f"base_model.model.{name.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}"]
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    whole, wanted = merged(whole_weights(ours), config), theirs.merge_and_unload().state_dict()
    assert whole.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-5, atol=1e-6)


def test_sft_with_adapters_makes_a_model_like_any_other(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, weights: Any
) -> None:
    """On two ranks that share the weights, the same."""
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    inputs = {"model": base_dir, "instructions": instructions_dir}
    result = sft(SftConfig.model_validate(SETTINGS), inputs, tmp_path / "out", run)
    assert result.figures["improvement_low"] > 0
    before, after = weights(base_dir), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.split(".")[-2] in SETTINGS["lora"]["targets"]}
    train_in_ranks("sft", 2, SETTINGS, inputs, tmp_path / "two", launch={"sharding": "fsdp"})
    two = load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in after.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_layer_that_is_not_there_is_named_with_those_that_are(base_dir: Path) -> None:
    with pytest.raises(StageError, match=r"sft\.lora\.targets.*no linear layer called wq") as caught:
        add_adapters(load(base_dir), LoraConfig(targets=("wq", "q_proj")), seed=1)
    assert "k_proj" in caught.value.problems[0].fix


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "output layer of its own"])
def test_rows_of_new_tokens_learn_as_peft_s(
    tokenizer_dir: Path, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from peft.tuners.lora import torchao

    monkeypatch.setattr(torchao, "is_torchao_available", lambda: False)
    shape = ModelConfig(family="llama", layers=1, width=32, heads=2, positions=64)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    form = hf_config(shape, 320, special)
    form.tie_word_embeddings = tied
    export(build(form, seed=3), tokenizer_dir, tmp_path)
    ids, config = [2, 3, 4], LoraConfig(rank=2, alpha=4.0)
    ours = load(tmp_path)
    add_adapters(ours, config, seed=5)
    assert learn_rows(ours, ids) == 3 * 32 * (1 if tied else 2)
    tables = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    theirs = get_peft_model(
        load(tmp_path),
        PeftConfig(
            r=2, lora_alpha=4.0, target_modules="all-linear", trainable_token_indices=dict.fromkeys(tables, ids)
        ),
    )
    chat = Chat.load(tmp_path)
    batch = chat.response_batch(chat.conversations(["What?", "Sort it."], ["Load the file.", "No."]))
    model = LanguageModel(ours, CPU)
    optimizer = optimizer_of(model, OptimizerConfig(learning_rate=0.05, weight_decay=0.1), torch.float32, None)
    model.loss(model(batch), batch).backward()
    mine = [one for name, one in ours.named_parameters() if name.endswith("rows")]
    logits = theirs(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100).backward()
    named = [one for name, one in theirs.named_parameters() if "trainable_tokens_delta" in name and one.requires_grad]
    assert len(mine) == len(named) == len(tables)
    for one, other in zip(mine, named, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    optimizer.step()
    before, after = load(tmp_path).state_dict(), merged(whole_weights(ours), config, ids)
    assert after.keys() == before.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        changed = (after[name] != before[name]).any(1).nonzero()[:, 0].tolist()
        assert changed == ids, name


def test_adapters_teach_a_base_model_without_chat_tokens_to_end(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, weights: Any, run: Run, journal: Any
) -> None:
    """Its three chat tokens begin alike; frozen, each is as likely as the others after a whole answer. One rank and two
    that share the weights learn the same."""
    plain = tmp_path / "plain"
    shutil.copytree(base_dir, plain)
    path = plain / "tokenizer.json"
    known = json.loads(path.read_text())
    known["added_tokens"] = [token for token in known["added_tokens"] if token["id"] < 2]
    vocab = known["model"]["vocab"]
    for number, token in enumerate(("<|user|>", "<|assistant|>", "<|end|>")):
        vocab[f"unused{number}"] = vocab.pop(token)
    path.write_text(json.dumps(known))
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    for key in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        settings.pop(key, None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    (plain / "special_tokens_map.json").unlink(missing_ok=True)
    import_model(BaseModelConfig(path=str(plain)), {}, tmp_path / "base", run)
    new = sorted(Chat.load(tmp_path / "base").tokenizer.convert_tokens_to_ids(list(CHAT_TOKENS)))
    assert new == [319, 320, 321], "behind all that the base model had"

    inputs = {"model": tmp_path / "base", "instructions": instructions_dir}
    config = SETTINGS | {"lora": {"rank": 4}, "duration": "60 batches", "answer_max_tokens": 16}
    result = sft(SftConfig.model_validate(config), inputs, tmp_path / "out", run)
    assert any("rows of 3 tokens (<|user|>" in line for line in journal.events())
    assert result.figures["ends_share_sft"] > 0.9
    before, after = weights(tmp_path / "base"), weights(tmp_path / "out")
    rows = (before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]).any(1).nonzero()[:, 0]
    assert rows.tolist() == new
    assert not hasattr(load(tmp_path / "out").config, "untrained_tokens")

    short = config | {"duration": "4 batches", "lora": {"rank": 4, "trainable_tokens": ["<|end|>", "<|user|>"]}}
    one = Run(tmp_path / "one.work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    sft(SftConfig.model_validate(short), inputs, tmp_path / "one", one)
    train_in_ranks("sft", 2, short, inputs, tmp_path / "two", launch={"sharding": "fsdp"})
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=1e-3, atol=1e-4)
    frozen = short | {"lora": {"rank": 4, "trainable_tokens": []}}
    sft(SftConfig.model_validate(frozen), inputs, tmp_path / "frozen", Run(tmp_path / "frozen.work", one.launch))
    for folder, wanted in (("one", [new[0], new[2]]), ("frozen", [])):
        table = weights(tmp_path / folder)["model.embed_tokens.weight"]
        assert (table != before["model.embed_tokens.weight"]).any(1).nonzero()[:, 0].tolist() == wanted


def test_tokens_to_learn_are_those_that_no_text_has_trained(base_dir: Path) -> None:
    network, tokenizer = load(base_dir), Chat.load(base_dir).tokenizer
    assert learning_ids(network, tokenizer, LoraConfig()) == []
    with torch.no_grad():
        table = network.get_input_embeddings().weight
        table[2] = table[3]
        assert learning_ids(network, tokenizer, LoraConfig()) == [2, 3]
        table[2:5] = torch.randn(3, table.shape[1], generator=torch.Generator().manual_seed(1))
        table[4] = 0
    assert learning_ids(network, tokenizer, LoraConfig()) == [4]
    add_untrained(network, [3])
    assert learning_ids(network, tokenizer, LoraConfig()) == [3, 4]
    with pytest.raises(StageError, match=r"sft\.lora\.trainable_tokens.*<\|stop\|>"):
        learning_ids(network, tokenizer, LoraConfig(trainable_tokens=("<|end|>", "<|stop|>")))
