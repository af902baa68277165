"""Model folders of a few weights, and changes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
)

from infra.run import Run
from training.adopt import import_model
from training.config import BaseModelConfig
from training.core.hardware import Hardware

CPU = Hardware(torch.device("cpu"), bf16=False)
Weights = dict[str, torch.Tensor]


def config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{**sizes, "vocab_size": 6, "max_position_embeddings": 16, "eos_token_id": 1, **changes})


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    save_file({name: one.clone() for name, one in change(load_file(path)).items()}, path, {"format": "pt"})


def without(*parts: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(
        folder, lambda weights: {name: one for name, one in weights.items() if not any(part in name for part in parts)}
    )


def adopted(folder: Path, out: Path) -> Path:
    import_model(BaseModelConfig(path=str(folder)), {}, out, Run(out.with_name("work")))
    return out


def deepseek(folder: Path, **changes: Any) -> None:
    """A DeepSeek of two layers, and one that predicts a further token, as DeepSeek stores it."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4}
    widths = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=6, **{**sizes, **heads, **widths, **changes}))
    model.save_pretrained(folder)
