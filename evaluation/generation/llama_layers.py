"""The layers of a Llama or Qwen3 for evaluation in fp32 on a CPU, with faster products and fewer passes over memory.

- Products are oneDNN's, on weights in its own packed layout. torch's products call MKL, which uses half the width of
  AVX-512 on processors not made by Intel (benchmarks/RESULTS.md, "Products in fp32").
- Queries, keys and values are one product. The weights of norms are multiplied into products. Products apply SiLU,
  multiply by the gate and add to the residual stream themselves.
- Entries of a head that rotate together are adjacent, so that rotary positions are one complex multiplication. Their
  order does not matter if queries and keys share it.

Shapes: N tokens, D width, H heads, K heads of keys, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

MOST_PARAMETERS = 500_000_000
"""Largest model supported; the weights here are a second copy, 2 GB of fp32."""
ROWS_HINT = 512
"""Number of rows that oneDNN packs weights for; measured with 1 to 2,048, it makes no difference."""

FUSED_FROM = 256
"""Keys per row from which torch's fused attention is faster than two products and a softmax."""


class Product:
    """states · weightᵀ of states (N, in) and a weight (out, in), fused with the operation that follows it."""

    @staticmethod
    def is_there() -> bool:
        """Return True if this torch has oneDNN and the two operators, which are intended for torch's own compiler."""
        operators = ("_linear_pointwise", "_reorder_linear_weight")
        return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)

    def of(self, states: Tensor, then: Literal["none", "swish"] = "none") -> Tensor:
        """Return (N, out); with `swish`, SiLU of the product."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, None, then, [], "")
        return output

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, self._weight, None, "add")
        return output

    def times(self, states: Tensor, other: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, self._weight, None, "mul")
        return output


@dataclass(frozen=True)
class Layer:
    """Products of one layer.

    norms: of a Qwen3's queries and keys (H + K, E), for K heads of keys; None for a Llama, which has none.
    """

    qkv: Product
    o: Product
    gate: Product
    up: Product
    down: Product
    norms: Tensor | None


class LlamaLayers:
    """Weights in the form that products take, and the operations of a layer."""

    @staticmethod
    def fit(model: PreTrainedModel) -> bool:
        """Return True if a model is a plain Llama or Qwen3 in fp32 on a CPU, of at most MOST_PARAMETERS.

        Plain: without biases, adapters, hooks, windows or unusual positions.
        """
        if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM) or model.num_parameters() > MOST_PARAMETERS:
            return False
        if not Product.is_there():
            return False
        config = model.config
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if config.hidden_act != "silu" or scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False
        # Training takes measurements with a hook on the whole stack. A hook there that changes something is detected
        # when the layers are tried.
        modules = [module for module in model.modules() if module is not model.model]
        linear = [module for module in modules if hasattr(module, "in_features")]
        return (
            all(type(module) is nn.Linear and module.bias is None for module in linear)
            and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
            and all(
                parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in model.parameters()
            )
        )

    @torch.inference_mode()
    def __init__(self, model: LlamaForCausalLM | Qwen3ForCausalLM) -> None:
        config, self._model = model.config, model.model
        attention = self._model.layers[0].self_attn
        self.eps, self.scale, self.width = config.rms_norm_eps, attention.scaling, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers = [self._prepared(layer) for layer in self._model.layers]
        last = self._queries_keys_values(self._model.layers[-1])
        queries = self.heads * self.width
        self.last_q, self.last_kv = Product(last[:queries]), Product(last[queries:])
        """Products of the last layer, whose queries are needed at fewer places than its keys and values."""
        self._head = Product(model.lm_head.weight)

    def _prepared(self, layer: Any) -> Layer:
        attention, mlp, between = layer.self_attn, layer.mlp, layer.post_attention_layernorm.weight
        norms = None
        if hasattr(attention, "q_norm"):
            head_norms = ((attention.q_norm, self.heads), (attention.k_norm, self.kv_heads))
            norms = torch.cat([self._paired(norm.weight[:, None]).t().expand(heads, -1) for norm, heads in head_norms])
        return Layer(
            Product(self._queries_keys_values(layer)), Product(attention.o_proj.weight),
            Product(mlp.gate_proj.weight * between), Product(mlp.up_proj.weight * between),
            Product(mlp.down_proj.weight), norms,
        )  # fmt: skip

    def _queries_keys_values(self, layer: Any) -> Tensor:
        """Return ((H + 2 · K) · E, D) with the preceding norm multiplied in."""
        attention = layer.self_attn
        q, k = self._paired(attention.q_proj.weight), self._paired(attention.k_proj.weight)
        return torch.cat([q, k, attention.v_proj.weight]) * layer.input_layernorm.weight

    def _paired(self, weight: Tensor) -> Tensor:
        """Return (heads · E, D) with the entries i and i + E/2 of each head, which rotate together, placed next to each
        other."""
        return weight.view(-1, 2, self.width // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return (N, D) for ids (N,)."""
        embedded: Tensor = self._model.embed_tokens.weight[ids]
        return embedded

    def logits(self, states: Tensor) -> Tensor:
        """Return (N, V) for the output of the last layer (N, D)."""
        return self._head.of(self._model.norm(states))

    def turns(self, positions: Tensor) -> Tensor:
        """Return (N, 1, E/2), complex: rotations of the pairs of each head at positions (N,)."""
        cos, sin = self._model.rotary_emb(self._model.embed_tokens.weight[:1], positions[None])
        half = self.width // 2
        return torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])

    def turn(self, states: Tensor, turns: Tensor, norms: Tensor | None) -> None:
        """Apply norms and rotary positions in place. states (N, heads · E), with rotated pairs adjacent."""
        if norms is not None:
            heads = states.view(len(states), -1, self.width)
            heads.mul_(heads.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(norms)
        pairs = states.view(len(states), -1, self.width // 2, 2)
        torch.view_as_complex(pairs).mul_(turns)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, H, T, E) for queries (B, H, T, E), and keys and values of K heads. mask: added to scores; None for
        causal."""
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        if mask is None or k.shape[2] >= FUSED_FROM:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        scores = torch.matmul(q * self.scale, k.transpose(-1, -2)).add_(mask)
        return torch.matmul(torch.softmax(scores, -1, out=scores), v)

    def normed(self, states: Tensor) -> Tensor:
        """Return the states divided by their root mean square; the norm's weight is part of the next product."""
        length = torch.linalg.vector_norm(states, dim=1, keepdim=True)
        return states * length.square_().div_(states.shape[1]).add_(self.eps).rsqrt_()

    def after_mlp(self, stream: Tensor, layer: Layer) -> Tensor:
        """Return (N, D): the stream plus the output of the MLP."""
        normed = self.normed(stream)
        return layer.down.plus(layer.up.times(normed, layer.gate.of(normed, "swish")), stream)
