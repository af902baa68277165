"""Low-rank adapters: those of peft on the same batch, merged as there; an SFT that leaves all other weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.ranked import train_in_ranks
from training.chat import Chat
from training.config import LoraConfig, SftConfig
from training.hardware import Hardware
from training.language_model import LanguageModel
from training.lora import add_adapters, merged
from training.models import load
from training.parallel import whole_weights
from training.planner.architecture import of_transformers
from training.planner.stages import adapter_weights
from training.sft import sft

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
def test_loss_gradients_and_merged_weights_are_peft_s(
    base_dir: Path, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from peft.tuners.lora import torchao

    # peft refuses every model beside the torchao that goes with torch 2.7, which none of these layers is of.
    monkeypatch.setattr(torchao, "is_torchao_available", lambda: False)
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
