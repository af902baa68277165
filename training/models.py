"""Language models: built from a config, computed in bf16, wrapped for Composer.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from corpus.pretrained import load_pretrained_model
from infra.errors import stage_error
from training.attention import ADDED_MASKS
from training.config import ModelConfig
from training.documents import additive, within_documents
from training.encoder_decoder import EncoderDecoderMasks
from training.hardware import Hardware
from training.initialise import Scheme, initialise
from training.loss import IGNORE, chunked_cross_entropy, token_losses

Batch = Mapping[str, Tensor]

# Families whose logits are hidden @ weight.T and nothing else, so that the loss can be computed in chunks.
_PLAIN_HEADS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"}
# Until version 5 BERT took a mask (B, T, T) and made what its attention adds by itself; since, it is as the others.
_OLD_BERT = int(transformers.__version__.split(".")[0]) < 5


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
                "give a model_type of this version of transformers, with the keys of its config class",
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
            tie_word_embeddings=shape.tied,
            attn_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
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
        num_key_value_heads=shape.kv_heads or shape.heads,
        tie_word_embeddings=shape.tied,
        attention_dropout=config.dropout,
        **special,
    )


def build(
    config: PretrainedConfig,
    seed: int,
    scheme: Scheme = "gpt2",
    spread: float = 0.02,
    auto: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model with fresh fp32 weights, see training/initialise.py; a T5 keeps its own, which its attention without a
    scale needs.

    auto: the class of transformers for what the model shall do.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    if config.model_type != "t5":
        initialise(model, scheme, spread)
    return model


def load(folder: Path) -> PreTrainedModel:
    """The causal language model of a Hugging Face folder, in fp32, in training mode; safetensors only, and no code."""
    model: PreTrainedModel = load_pretrained_model(AutoModelForCausalLM, folder, dtype=torch.float32)
    return model.train()


class LanguageModel(ComposerModel):
    """A language model whose loss is the mean over labelled tokens.

    A batch has `input_ids (B, T)` and `labels (B, T)`, where labels[b, t] is the token that follows position t, or
    -100. Padding lies on the right, where a causal model needs no mask. Packed batches also have `documents (B, T)` and
    `position_ids (B, T)` (training/documents.py), and attention stays within documents. Other objectives
    (training/objectives) have labels of their own, `seen_by_all (B, T)` where a token is seen from before it, and
    `decoder_input_ids (B, S)` for a decoder, which then bears the labels, with `decoder_documents (B, S)`.
    """

    def __init__(self, model: PreTrainedModel, hardware: Hardware) -> None:
        super().__init__()
        self.model = model
        self._hardware = hardware
        self._compiled: Callable[[Batch], Tensor] | None = None
        self._mask: Tensor | None = None
        self._encoder = model.config.model_type == "bert"
        self._both = EncoderDecoderMasks(model) if model.config.model_type == "t5" else None
        self._plain_head = (
            model.config.model_type in _PLAIN_HEADS and getattr(model.get_output_embeddings(), "bias", None) is None
        )

    def compile_training(self) -> None:
        """Compiles forward, backward and loss of training batches; measuring stays uncompiled."""
        self._compiled = torch.compile(self._outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states (B, T, D), or logits (B, T, V) where the family's output layer is more than a matrix."""
        compute = self._compiled if self._compiled and self.training else self._outputs
        return compute(self._with_mask(batch))

    def _with_mask(self, batch: Batch) -> Batch:
        """Where attention adds its mask and a batch has none of its own, the causal one: made once, since what is
        compiled would compute it anew in every layer."""
        added = self.model.config._attn_implementation in ADDED_MASKS
        if "documents" in batch or not added or self._encoder or self._both is not None:
            return batch
        length = batch["input_ids"].shape[1]
        if self._mask is None or self._mask.shape[-1] != length:
            whole = torch.zeros(1, length, dtype=torch.int32, device=batch["input_ids"].device)
            self._mask = additive(within_documents(whole), self._hardware.compute)
        return {**batch, "mask": self._mask}

    def _outputs(self, batch: Batch) -> Tensor:
        inputs = {"input_ids": batch["input_ids"], **self._attention(batch)}
        if not self._encoder:
            inputs["use_cache"] = False
        if "decoder_input_ids" in batch:
            inputs["decoder_input_ids"] = batch["decoder_input_ids"]
        with self._hardware.autocast():
            if self._plain_head:
                hidden = self.model.base_model(**inputs).last_hidden_state
                return hidden.to(self._hardware.compute)
            return self.model(**inputs).logits

    def _attention(self, batch: Batch) -> dict[str, Any]:
        """What keeps attention within documents, in the form that the model's attention takes."""
        if self._both is not None:
            self._both.set(batch, self._hardware.compute)
            return {}
        if "documents" not in batch:
            return {"attention_mask": batch["mask"]} if "mask" in batch else {}
        positions = {"position_ids": batch["position_ids"]}
        implementation = self.model.config._attn_implementation
        if implementation not in (*ADDED_MASKS, "sdpa"):
            # The flash and flex kernels of transformers take documents from positions that start again.
            return positions
        mask = within_documents(batch["documents"], batch.get("seen_by_all"))
        if self._encoder and _OLD_BERT:
            return positions | {"attention_mask": mask[:, 0]}
        if implementation in ADDED_MASKS:
            mask = additive(mask, self._hardware.compute)
        return positions | {"attention_mask": mask}

    def loss(self, outputs: Tensor, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        flat, labels = outputs.flatten(0, 1), batch["labels"].flatten()
        count = (labels != IGNORE).sum().clamp(min=1)
        if self._plain_head:
            weight = self.model.get_output_embeddings().weight
            total = chunked_cross_entropy(flat, weight, labels, compiled=self._compiled is not None)
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
