"""Rotary positions of a loaded model, extended to longer sequences (`training.config.rope`).

Nothing is computed here: config.json gets the keys by which transformers computes YaRN or another base, and the model's
rotary layers are rebuilt from it. What is exported therefore runs by the same numbers in transformers, vLLM and every
other program that reads these keys.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from infra.errors import StageError, stage_error
from training.config.rope import RopeConfig

_PATH = "pretrain.rope"


def extend_positions(model: PreTrainedModel, rope: RopeConfig) -> float:
    """Give a model rotary positions up to `rope.positions`, in place; return the factor.

    Raises StageError `no_rotary_positions` for a family without them or with several kinds of layers, and
    `nothing_to_extend` where the model has as many positions already.
    """
    config = model.config
    known = getattr(config, "rope_parameters", None)
    layers = _rotary_layers(model)
    if not isinstance(known, dict) or "rope_theta" not in known or not layers:
        raise _unsupported(f"{config.model_type} has none of one kind, with a base")
    kind = known.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise _unsupported(f"{config.model_type} has those of kind {kind}")
    # Extended a second time, YaRN counts from the length of the first pretraining.
    original = int(known.get("original_max_position_embeddings") or config.max_position_embeddings)
    if rope.positions <= config.max_position_embeddings:
        message = f"expected more than the model's {config.max_position_embeddings:,} positions, not {rope.positions:,}"
        raise stage_error("nothing_to_extend", f"{_PATH}.positions", message, "raise it, or leave rope out")
    if rope.kind == "base" and kind != "default":
        raise _unsupported(f"those of kind {kind} have no plain base")
    factor = rope.positions / original
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters: dict[str, Any] = dict(known)
    if rope.kind == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    else:
        parameters["rope_theta"] = rope.base or float(known["rope_theta"]) * factor ** (width / (width - 2))
    config.rope_parameters = parameters
    config.max_position_embeddings = rope.positions
    for parent, name, layer in layers:
        setattr(parent, name, type(layer)(config=config))
    return factor


def _rotary_layers(model: PreTrainedModel) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the layers that turn positions into rotations, each with its parent and its name there."""
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if hasattr(layer, "rope_type") and hasattr(layer, "inv_freq")
    ]


def _unsupported(reason: str) -> StageError:
    message = f"expected a model with rotary positions: {reason}"
    return stage_error("no_rotary_positions", _PATH, message, "leave rope out, or use a llama or qwen3")
