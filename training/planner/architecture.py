"""Architecture of a decoder: parameters by part, and FLOPs per token.

Letters: L layers, d width, T tokens of a sequence, V vocabulary, f inner width of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from infra.errors import ConfigError, Problem
from training.config.presets import MIXTURES, PRESETS, Preset, known_presets

VOCABULARY = 50_257
_ASPECT = ((1e7, 48), (1.25e8, 64), (1.3e9, 85), (6.7e9, 128), (1e12, 160))
"""Width over layers by size: GPT-3 (Brown et al. 2020, table 2.1) has 64 at 125M, 85 at 1.3B and 128 from 6.7B on."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer; an encoder of the same sizes needs as much.

    gated: True if the MLP has a third matrix (SwiGLU). biases: True if matrices and norms have biases.
    learned_positions: rows of the position table, 0 for rotary positions. query_norms: qwen3's norm of each head.
    experts: MLPs per layer, of which a token passes `active_experts`; 1 for a dense model.
    extra: parameters outside of layers, embeddings and output (BERT's head, T5's cross attention).
    family: model type in transformers; "" if there is none.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int = VOCABULARY
    gated: bool = False
    biases: bool = False
    tied: bool = True
    learned_positions: int = 0
    query_norms: bool = False
    experts: int = 1
    active_experts: int = 1
    extra: int = 0
    positions: int = 2048
    family: str = ""

    @cached_property
    def attention_weights(self) -> int:
        """Weights of one layer's four projections, with their biases."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        matrices = self.width * (queries + 2 * keys) + queries * self.width
        return matrices + (queries + 2 * keys + self.width if self.biases else 0)

    @cached_property
    def mlp_weights(self) -> int:
        """Weights of one expert of a layer, or of the layer's only MLP."""
        matrices = (3 if self.gated else 2) * self.width * self.mlp_width
        return matrices + (self.mlp_width + self.width if self.biases else 0)

    @cached_property
    def norm_weights(self) -> int:
        """Weights of one layer's norms."""
        each = self.width * (2 if self.biases else 1)
        return 2 * each + (2 * self.head_width if self.query_norms else 0)

    @cached_property
    def router_weights(self) -> int:
        return self.width * self.experts if self.experts > 1 else 0

    @cached_property
    def layer_weights(self) -> int:
        return self.attention_weights + self.experts * self.mlp_weights + self.norm_weights + self.router_weights

    @cached_property
    def embedding(self) -> int:
        """Weights of the token table, which is also the output layer if the two are tied."""
        return self.vocabulary * self.width

    @cached_property
    def parameters(self) -> int:
        last_norm = self.width * (2 if self.biases else 1)
        outside = self.embedding * (1 if self.tied else 2) + self.learned_positions * self.width + last_norm
        return self.layers * self.layer_weights + outside + self.extra

    @cached_property
    def of_a_token(self) -> int:
        """Parameters that one token passes, counted like the active ones of mixtures: all of a dense model's."""
        return self.parameters - self.layers * (self.experts - self.active_experts) * self.mlp_weights

    @cached_property
    def active_parameters(self) -> int:
        """The same without embeddings that are only looked up (PaLM, appendix B)."""
        return self.of_a_token - self.learned_positions * self.width - (0 if self.tied else self.embedding)

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token: 6N + 12·L·d·T (PaLM, appendix B).

        Args:
            length: T.
        """
        return 6.0 * self.active_parameters + 12.0 * self.layers * self.heads * self.head_width * length

    def with_size(self, **sizes: Any) -> Architecture:
        return replace(self, **sizes)


def of_preset(name: str, vocabulary: int | None = None) -> Architecture:
    """Return the architecture of a preset. Raises ConfigError `unknown_preset` with the closest match."""
    if name in MIXTURES:
        arch = of_transformers(MIXTURES[name].config, vocabulary or MIXTURES[name].vocabulary)
        assert arch is not None
        return replace(arch, name=name)
    if name not in PRESETS:
        from difflib import get_close_matches

        near = get_close_matches(name, known_presets(), n=1)
        fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known_presets())}, or --parameters N"
        raise ConfigError(Problem("unknown_preset", "--preset", f"there is no preset {name!r}", fix))
    return of_shape(PRESETS[name], vocabulary or PRESETS[name].vocabulary, name)


def of_shape(shape: Preset, vocabulary: int, name: str = "") -> Architecture:
    """Return the architecture that training/model/models.py builds from a shape."""
    width, heads = shape.width, shape.heads
    rotary = shape.family in ("llama", "qwen3")
    inner = shape.mlp_width or (16 * math.ceil(width * 8 / 3 / 16) if rotary else 4 * width)
    extra, learned = 0, 0
    if shape.family in ("gpt2", "bert"):
        learned = shape.positions
    if shape.family == "bert":
        # Two kinds of segment, the norm of the embeddings (in the place of the last norm), and the head with its norm.
        extra = 2 * width + width * width + width + 2 * width + vocabulary
    if shape.family == "t5":
        # Beside the encoder's layers as many of the decoder, with cross attention and its norm; tables of distances.
        decoder = 8 * width * width + 2 * width * inner + 3 * width
        extra = shape.layers * decoder + width + 2 * 32 * heads
    return Architecture(
        name or shape.family,
        shape.layers,
        width,
        heads,
        shape.kv_heads or heads,
        width // heads,
        inner,
        vocabulary,
        gated=rotary,
        biases=shape.family in ("gpt2", "bert"),
        tied=shape.tied,
        learned_positions=learned,
        query_norms=shape.family == "qwen3",
        extra=extra,
        positions=shape.positions,
        family=shape.family,
    )


_TIED = {"bert", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "opt", "smollm3", "starcoder2", "t5"}
"""Families whose output layer is the embedding if their config does not specify it."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "arcee": {"intermediate_size": 18_432},
    "bert": {"max_position_embeddings": 512},
    "cohere2": {"intermediate_size": 22_528},
    "exaone4": {"num_key_value_heads": 32, "intermediate_size": 16_384},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24_576},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9_216},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 13_696},
    "gpt2": {"n_positions": 1_024},
    "gpt_neox": {"intermediate_size": 24_576},
    "granite": {"intermediate_size": 11_008},
    "llama": {"intermediate_size": 11_008},
    "mistral": {"num_key_value_heads": 8, "intermediate_size": 14_336},
    "mixtral": {
        "num_key_value_heads": 8, "intermediate_size": 14_336, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "olmo": {"intermediate_size": 11_008},
    "olmo2": {"intermediate_size": 11_008},
    "olmo3": {"intermediate_size": 11_008},
    "olmoe": {"intermediate_size": 2_048, "num_experts": 64, "num_experts_per_tok": 8},
    "opt": {"ffn_dim": 3_072, "max_position_embeddings": 2_048},
    "phi": {"intermediate_size": 8_192},
    "phi3": {"intermediate_size": 8_192},
    "qwen2": {"num_key_value_heads": 32, "intermediate_size": 22_016},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22_016},
    "qwen3_moe": {
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
    "smollm3": {"num_key_value_heads": 4, "intermediate_size": 11_008},
    "stablelm": {"num_key_value_heads": 32, "intermediate_size": 6_912},
    "starcoder2": {"num_key_value_heads": 2, "intermediate_size": 12_288},
}  # fmt: skip
"""Defaults in transformers by family, for sizes that a config omits and that cannot be derived from others."""


def of_transformers(values: Mapping[str, Any], vocabulary: int | None) -> Architecture | None:
    """Read an architecture from the keys of a transformers config, written by hand or saved by transformers, where the
    family's defaults may be omitted; None if a size is missing."""
    family = str(values.get("model_type", ""))
    values = {**_DEFAULTS.get(family, {}), **values}

    def first(*names: str) -> int | None:
        return next((int(values[name]) for name in names if isinstance(values.get(name), int)), None)

    width, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    heads = first("num_attention_heads", "n_head", "num_heads")
    if not (width and layers and heads):
        return None
    old = family in ("gpt2", "gpt_neox", "opt", "phi", "starcoder2", "bert")
    experts = first("num_local_experts", "num_experts") or 1
    inner = first("moe_intermediate_size") if experts > 1 else None
    return Architecture(
        family or "transformers",
        layers,
        width,
        heads,
        first("num_key_value_heads") or heads,
        first("head_dim") or width // heads,
        inner or first("intermediate_size", "ffn_dim", "n_inner") or 4 * width,
        vocabulary or first("vocab_size") or VOCABULARY,
        gated=not old and family not in ("arcee", "nemotron"),
        biases=old,
        tied=bool(values.get("tie_word_embeddings", family in _TIED)),
        learned_positions=first("n_positions", "max_position_embeddings") or 0
        if family in ("gpt2", "opt", "bert")
        else 0,
        query_norms=family in ("qwen3", "qwen3_moe", "olmoe"),
        experts=experts,
        active_experts=min(experts, first("num_experts_per_tok") or 1),
        positions=first("max_position_embeddings", "n_positions") or 2048,
        family=family,
    )


MOST = 2e13
"""Parameters of the largest model that is planned: as deep for its width as GPT-3, none wider than 65,536."""


def of_parameters(count: float, vocabulary: int | None = None) -> Architecture:
    """Return a llama-style model of about `count` parameters, with the ratio of depth to width of GPT-3's sizes.

    Args:
        vocabulary: by default 4,096 below 30M parameters, 16,384 below 100M, else GPT-2's 50,257.

    Raises ConfigError `too_small` below 100,000 parameters, `too_large` above MOST.
    """
    if count > MOST:
        message = f"expected at most {MOST:.0e} parameters, not {count:.3g}"
        raise ConfigError(Problem("too_large", "--parameters", message, "plan a smaller model"))
    if not count >= 1e5:
        message = f"expected at least 100,000 parameters, not {count:,.0f}"
        raise ConfigError(Problem("too_small", "--parameters", message, "give more parameters, tokens or compute"))
    entries = vocabulary or (4096 if count < 3e7 else 16_384 if count < 1e8 else VOCABULARY)
    aspect = _aspect(count)
    best: Architecture | None = None
    step = 16 if count < 3e7 else 64 if count < 1e9 else 128
    for width in range(step, 65_537, step):
        for layers in {max(1, math.floor(width / aspect)), math.ceil(width / aspect)}:
            head = 128 if width % 128 == 0 and width >= 1024 else 64 if width % 64 == 0 else 16
            shape = Preset("llama", layers, width, width // head, 2048, 0, tied=count < 1e9)
            candidate = of_shape(shape, entries, f"llama, {layers} × {width}")
            if best is None or abs(candidate.parameters / count - 1) < abs(best.parameters / count - 1):
                best = candidate
        if best is not None and width * entries > 4 * count:
            break
    assert best is not None
    return best


def _aspect(count: float) -> float:
    """Width over layers, interpolated in the logarithm of the size."""
    log_count = math.log(min(max(count, _ASPECT[0][0]), _ASPECT[-1][0]))
    for (low, before), (high, after) in pairwise(_ASPECT):
        if log_count <= math.log(high):
            share = (log_count - math.log(low)) / (math.log(high) - math.log(low))
            return before + share * (after - before)
    return float(_ASPECT[-1][1])
