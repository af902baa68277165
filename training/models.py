"""Decoder-only models: built from a config, computed in bf16, wrapped for Composer.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from infra.errors import stage_error
from training.config import ModelConfig
from training.hardware import Hardware
from training.loss import IGNORE, chunked_cross_entropy, token_losses

Batch = Mapping[str, Tensor]

# Families whose logits are hidden @ weight.T and nothing else, so that the loss can be computed in chunks.
_PLAIN_HEADS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"}
# Scores of (T, T) are cheap up to here, and CPU's SDPA backward is slower than the plain products.
_EAGER_UP_TO = 512


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
                f"transformers takes no such config: {str(error).splitlines()[0]}",
            ) from error
    shape = config.shape()
    if shape.family == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            vocab_size=vocab_size,
            n_positions=shape.positions,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.mlp_width,
            tie_word_embeddings=config.tie_embeddings,
            attn_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            **special,
        )
    return AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        max_position_embeddings=shape.positions,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width or 16 * math.ceil(shape.width * 8 / 3 / 16),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=config.kv_heads or shape.heads,
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=config.dropout,
        **special,
    )


def build(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with fresh fp32 weights; residual projections are scaled by 1/sqrt(2 × layers) (GPT-2, section 2.3)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type == "llama":  # transformers does the same for gpt2 itself
        spread = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, 0.0, spread)
    return model


def load(folder: Path) -> PreTrainedModel:
    """The causal language model of a Hugging Face folder, in fp32, in training mode; safetensors only."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    return model.train()


def choose_attention(model: PreTrainedModel, hardware: Hardware, longest: int) -> None:
    """Plain attention where it is faster than SDPA (short sequences on CPU), else transformers' choice."""
    if hardware.device.type == "cpu" and longest <= _EAGER_UP_TO and "eager" in _implementations(model):
        model.set_attn_implementation("eager")


def _implementations(model: PreTrainedModel) -> set[str]:
    return {"eager", "sdpa"} if getattr(model, "_supports_sdpa", False) else {"eager"}


class LanguageModel(ComposerModel):
    """A causal language model whose loss is the mean over labelled tokens.

    A batch has `input_ids (B, T)` and `labels (B, T)`, where labels[b, t] is the token that follows position t, or
    -100. Padding lies on the right, where a causal model needs no mask.
    """

    def __init__(self, model: PreTrainedModel, hardware: Hardware) -> None:
        super().__init__()
        self.model = model
        self._hardware = hardware
        self._plain_head = (
            model.config.model_type in _PLAIN_HEADS and getattr(model.get_output_embeddings(), "bias", None) is None
        )

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (B, T, D), or logits (B, T, V) where the family's output layer is more than a matrix."""
        with self._hardware.autocast():
            if self._plain_head:
                hidden = self.model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
                return hidden.to(torch.bfloat16) if self._hardware.bf16 else hidden
            return self.model(input_ids=batch["input_ids"], use_cache=False).logits

    def loss(self, outputs: Tensor, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        flat, labels = outputs.flatten(0, 1), batch["labels"].flatten()
        count = (labels != IGNORE).sum().clamp(min=1)
        if self._plain_head:
            total = chunked_cross_entropy(flat, self.model.get_output_embeddings().weight, labels)
        else:
            total = cross_entropy(flat.float(), labels, ignore_index=IGNORE, reduction="sum")
        return total / count

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Cross-entropy (B, T) in nats of each labelled token, 0 elsewhere."""
        outputs, labels = self.forward(batch), batch["labels"]
        flat = outputs.flatten(0, 1)
        if self._plain_head:
            return token_losses(flat, self.model.get_output_embeddings().weight, labels.flatten()).view_as(labels)
        return cross_entropy(flat.float(), labels.flatten(), ignore_index=IGNORE, reduction="none").view_as(labels)


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Training FLOPs a token: 6N + 12 L·D·T (PaLM, appendix B), N without embeddings that are only looked up."""
    config = model.config
    parameters = sum(weight.numel() for weight in model.parameters())
    looked_up = sum(
        layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, nn.Embedding)
        and not (config.tie_word_embeddings and layer is model.get_input_embeddings())
    )
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6 * (parameters - looked_up) + attention


def limit_length(model: PreTrainedModel, wanted: int) -> int:
    """`wanted` tokens, or as many as the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(wanted, positions) if positions else wanted
