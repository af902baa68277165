"""What ablations vary: Lion against its published algorithm in NumPy, Adafactor against transformers', and
activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.optimization import Adafactor

from infra.run import Run
from training.config import ModelConfig, OptimizerConfig, PretrainConfig
from training.core.hardware import Hardware
from training.model.models import build, hf_config
from training.pretrain import pretrain
from training.train_modules.language_model import LanguageModel
from training.trainer.optimizers import optimizer_of

SIZES = {"family": "llama", "layers": 2, "width": 16, "heads": 2, "positions": 8}


def _model() -> nn.Module:
    return build(hf_config(ModelConfig(**SIZES), 32, {}), seed=1)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, list[np.ndarray[Any, Any]]]:
    """The gradients of some steps, which were taken."""
    random = np.random.default_rng(3)
    gradients = {name: [random.normal(size=one.shape) for _ in range(steps)] for name, one in model.named_parameters()}
    for step in range(steps):
        for name, weight in model.named_parameters():
            weight.grad = torch.tensor(gradients[name][step], dtype=torch.float32)
        assert optimizer.step(lambda: 5.0) == 5.0
    return gradients


def test_lion_steps_as_published() -> None:
    model = _model()
    begun = {name: weight.detach().double().numpy().copy() for name, weight in model.named_parameters()}
    config = OptimizerConfig(kind="lion", learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.5)
    gradients = _stepped(model, optimizer_of(model, config), 4)
    for name, weight in model.named_parameters():
        expected, momentum = begun[name], np.zeros_like(begun[name])
        decay = 0.5 if weight.ndim == 2 and "embed" not in name else 0.0
        for gradient in gradients[name]:
            step = np.sign(0.9 * momentum + 0.1 * gradient)
            expected = expected - 1e-3 * (step + decay * expected)
            momentum = 0.99 * momentum + 0.01 * gradient
        np.testing.assert_allclose(weight.detach().numpy(), expected, atol=1e-6, err_msg=name)


def test_adafactor_steps_as_that_of_transformers() -> None:
    model, other = _model(), _model()
    config = OptimizerConfig(kind="adafactor", learning_rate=1e-2, weight_decay=0.0)
    theirs = Adafactor(other.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False)
    _stepped(model, optimizer_of(model, config), 4)
    _stepped(other, theirs, 4)
    for (name, weight), reference in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(weight, reference, atol=1e-5), name


def test_adafactor_steps_by_the_schedule_alone_in_long_trainings() -> None:
    """The risk: torch bounds the rate by 1/√step, so that the schedule's 1e-2 is halved at batch 40,000 of it."""
    model, other = _model(), _model()
    ours = optimizer_of(model, OptimizerConfig(kind="adafactor", learning_rate=1e-2, weight_decay=0.0))
    theirs = Adafactor(other.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False)
    _stepped(model, ours, 1)
    _stepped(other, theirs, 1)
    begun = [weight.detach().clone() for weight in other.parameters()]
    for optimizer in (ours, theirs):
        for state in optimizer.state.values():
            state["step"] += 40_000
    for group in ours.param_groups:
        group["lr"] = 2e-2  # as a schedule sets it
    for group in theirs.param_groups:
        group["lr"] = 2e-2
    _stepped(model, ours, 1)
    _stepped(other, theirs, 1)
    for (name, weight), reference, first in zip(model.named_parameters(), other.parameters(), begun, strict=True):
        assert (weight - reference).norm() < 0.01 * (reference - first).norm(), name
    assert {type(group["lr"]) for group in ours.param_groups} == {float}, "what is logged and kept"


@pytest.mark.parametrize(("kind", "rate"), [("lion", 1e-3), ("adafactor", 2e-2)])
def test_a_stopped_training_goes_on_to_the_same_weights(
    kind: str, rate: float, shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    settings = {
        "model": SIZES | {"positions": 64, "width": 32},
        "duration": "24 batches",
        "global_batch_tokens": 256,
        "checkpoint_every": "4 batches",
        "optimizer": {"kind": kind, "learning_rate": rate},
    }
    config, inputs = PretrainConfig.model_validate(settings), {"shards": shards_dir, "tokenizer": tokenizer_dir}
    for folder in ("unbroken", "stopped", "continued"):
        (tmp_path / folder).mkdir()
    pretrain(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch))
    stopped = Run(
        run.work_dir, run.launch, is_cancelled=lambda: len(journal.metric("train/loss")) >= 5, journal=journal
    )  # type: ignore[arg-type]
    with pytest.raises(Exception, match="cancelled"):
        pretrain(config, inputs, tmp_path / "stopped", stopped)
    pretrain(config, inputs, tmp_path / "continued", run)
    assert any(message.startswith("continuing pretrain at batch 5") for message in journal.events())
    losses = journal.metric("train/loss")
    assert losses[-1] < losses[0] - 0.5
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("continued", "unbroken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "continued").config.model_type == "llama"


# Axes of an ablation that no family of training/config/families.py has.
UNUSUAL: dict[str, dict[str, Any]] = {
    "ALiBi": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "sinusoidal positions": {
        "model_type": "xglm", "d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64,
        "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    },
    "norms after the residuals": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64,
        "word_embed_proj_dim": 32, "max_position_embeddings": 64, "do_layer_norm_before": False, "dropout": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("axis", UNUSUAL)
def test_unusual_positions_and_norms_train_and_are_what_transformers_loads(
    axis: str, shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    settings = {
        "model": {"transformers": UNUSUAL[axis]},
        "attention": "sequence",
        "duration": "16 batches",
        "global_batch_tokens": 256,
        "optimizer": {"learning_rate": 5e-3},
    }
    out = tmp_path / "out"
    out.mkdir()
    figures = pretrain(
        PretrainConfig.model_validate(settings), {"shards": shards_dir, "tokenizer": tokenizer_dir}, out, run
    ).figures
    losses = journal.metric("train/loss")
    assert losses[-1] < losses[0] - 0.5 and figures["validation_loss"] < losses[0] - 0.5
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.config.model_type == UNUSUAL[axis]["model_type"]
    ids = torch.randint(4, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    ours = LanguageModel(model, Hardware(torch.device("cpu"), bf16=False)).eval()
    with torch.no_grad():
        batch = {"input_ids": ids, "labels": labels}
        assert float(ours.loss(ours(batch), batch)) == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_an_activation_is_what_transformers_applies(family: Any) -> None:
    """By hand: the MLP of the first layer on random numbers."""
    values = {"layers": 1, "width": 16, "heads": 2, "positions": 8, "family": family}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    functions = {}
    for activation in (None, "relu2"):
        config = hf_config(ModelConfig(**values, activation=activation), 32, special)
        auto = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}.get(family, AutoModelForCausalLM)
        model = build(config, 1, auto=auto)
        names = ("act", "act_fn", "intermediate_act_fn")
        (function,) = {
            type(one): one for name, one in model.named_modules() if name.rpartition(".")[2] in names
        }.values()
        functions[activation] = function
    x = torch.tensor([-2.0, 0.5, 3.0])
    assert functions["relu2"](x).tolist() == [0.0, 0.25, 9.0]
    default = {"gpt2": gelu_new, "bert": torch.nn.functional.gelu, "t5": torch.relu, "llama": torch.nn.functional.silu}
    assert torch.allclose(functions[None](x), default[family](x))


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")
