"""Language models of transformers: built from a config with fresh weights, or loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from corpus.model_folders.pretrained import load_pretrained_model
from infra.errors import StageError, stage_error
from infra.run import Run
from training.config import ModelConfig
from training.config.families import FAMILIES, experts_problem
from training.model.experts import unstack_experts
from training.model.initial.schemes import Scheme, initialise


def hf_config(config: ModelConfig, vocab_size: int, special: Mapping[str, int | None]) -> PretrainedConfig:
    """The transformers config of a model; `special` maps bos_token_id, eos_token_id, pad_token_id to ids.

    Raises StageError for a free config that transformers does not take.
    """
    if config.transformers is not None:
        values = dict(config.transformers)
        model_type = values.pop("model_type")
        try:
            return AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **special, **values})
        except (ValueError, TypeError) as error:
            raise stage_error(
                "bad_model",
                "pretrain.model.transformers",
                f"transformers rejects this config: {str(error).splitlines()[0]}",
                "give a model_type of this version of transformers, with the keys of its config class",
            ) from error
    shape = config.shape()
    name = {"gpt2": "activation_function", "t5": "feed_forward_proj"}.get(shape.family, "hidden_act")
    activation = {name: config.activation} if config.activation else {}
    if shape.family == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            vocab_size=vocab_size,
            n_positions=shape.positions,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.mlp_width,
            tie_word_embeddings=shape.tied,
            attn_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            **activation,
            **special,
        )
    if shape.family == "bert":
        return AutoConfig.for_model(
            "bert",
            vocab_size=vocab_size,
            max_position_embeddings=shape.positions,
            hidden_size=shape.width,
            intermediate_size=shape.mlp_width or 4 * shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            tie_word_embeddings=shape.tied,
            attention_probs_dropout_prob=config.dropout,
            hidden_dropout_prob=config.dropout,
            **activation,
            **special,
        )
    if shape.family == "t5":
        # The decoder begins with padding, as in T5; a tokenizer without it has the end of text in its place.
        start = special["eos_token_id"] if special.get("pad_token_id") is None else special["pad_token_id"]
        return AutoConfig.for_model(
            "t5",
            vocab_size=vocab_size,
            d_model=shape.width,
            d_kv=shape.width // shape.heads,
            d_ff=shape.mlp_width or 4 * shape.width,
            num_layers=shape.layers,
            num_heads=shape.heads,
            tie_word_embeddings=shape.tied,
            dropout_rate=config.dropout,
            decoder_start_token_id=start,
            **activation,
            **special,
        )
    return AutoConfig.for_model(
        shape.family,
        vocab_size=vocab_size,
        max_position_embeddings=shape.positions,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width or 16 * math.ceil(shape.width * 8 / 3 / 16),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        tie_word_embeddings=shape.tied,
        attention_dropout=config.dropout,
        # Qwen3's own default is 128 a head, whatever the width.
        head_dim=shape.width // shape.heads,
        **activation,
        **special,
    )


def build(
    config: PretrainedConfig,
    seed: int,
    scheme: Scheme = "gpt2",
    spread: float = 0.02,
    auto: Any = AutoModelForCausalLM,
    *,
    zero_residual: bool = False,
    base_width: int | None = None,
) -> PreTrainedModel:
    """Create a model with fresh fp32 weights by a scheme of `training.model.initial`; a T5 keeps its default weights,
    which its unscaled attention needs.

    Args:
        auto: the transformers class for the model's task.

    Raises StageError for a mixture of experts whose balancing loss is not verified.
    """
    if problem := experts_problem(config.model_type, config.to_dict(), "pretrain.model.transformers"):
        raise StageError(problem)
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    unstack_experts(model)
    if config.model_type != "t5":
        initialise(model, scheme, spread, zero_residual=zero_residual, base_width=base_width)
    return model


def load(folder: Path, where: str = "", **options: Any) -> PreTrainedModel:
    """The causal language model of a Hugging Face folder, in fp32, in training mode; safetensors only, and no code.

    Args:
        where, options: as of `load_pretrained_model`.
    """
    model: PreTrainedModel = load_pretrained_model(AutoModelForCausalLM, folder, where, dtype=torch.float32, **options)
    unstack_experts(model)
    return model.train()


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer; gemma3's `base_model` is itself."""
    base: PreTrainedModel = model.base_model
    return base if base is not model else model.get_decoder()


def plain_head(model: PreTrainedModel) -> bool:
    """Return True if logits are known to be exactly hidden @ weight.T."""
    family = FAMILIES.get(model.config.model_type)
    return family is not None and family.plain_head and getattr(model.get_output_embeddings(), "bias", None) is None


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Training FLOPs per token: 6N + 12 L·D·T (PaLM, appendix B), N without embeddings that are only looked up, D the
    width of all heads together, which differs from the model's width in some families."""
    config = model.config
    parameters = sum(weight.numel() for weight in model.parameters())
    looked_up = sum(
        layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, nn.Embedding)
        and not (config.tie_word_embeddings and layer is model.get_input_embeddings())
    )
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 12 * config.num_hidden_layers * heads * head_width * sequence_length
    return 6 * (parameters - looked_up) + attention


def limit_length(model: PreTrainedModel, length: int) -> int:
    """Return `length` tokens, or as many as the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(length, positions) if positions else length


def report_unbalanced_experts(stage: str, network: PreTrainedModel, run: Run) -> None:
    """Report a mixture of experts that `stage` trains without a balancing loss."""
    if problem := experts_problem(network.config.model_type, network.config.to_dict(), "base_model.path"):
        run.event("unbalanced_experts", f"{stage} trains without a balancing loss: {problem.message}")
