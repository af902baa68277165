"""The layers of a Llama or Qwen3 for evaluation in fp32 on a CPU, with fewer passes over memory than transformers'.

- Queries, keys and values are one product, gate and up another. Weights of norms are multiplied into them, and a
  product adds its result to the residual stream itself.
- Entries of a head that turn together lie side by side, so that rotary positions are one complex multiplication. Their
  order does not matter where queries and keys have the same.

Shapes: N tokens, D width, H heads, K heads of keys, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM


@dataclass(frozen=True)
class Layer:
    """Weights of a layer as products take them, (in, out); q and kv are views of qkv.

    norms: of a Qwen3's queries and keys (H + K, E), for K heads of keys; None for a Llama, which has none.
    """

    q: Tensor
    kv: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor | None


class LlamaLayers:
    """Weights as products take them, and what a layer is made of."""

    @staticmethod
    def fit(model: PreTrainedModel, most_parameters: int) -> bool:
        """Whether a model is a plain Llama or Qwen3 in fp32 on a CPU, of at most so many parameters.

        Plain: without biases, adapters, hooks, windows or unusual positions. The weights here are a second copy, and
        products of large models cost so much that the rest matters little.
        """
        if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM) or model.num_parameters() > most_parameters:
            return False
        config = model.config
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if config.hidden_act != "silu" or scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False
        # Training measures by a hook of the whole stack; one that changes something there shows when a way is tried.
        modules = [one for one in model.modules() if one is not model.model]
        linear = [one for one in modules if hasattr(one, "in_features")]
        return (
            all(type(one) is nn.Linear and one.bias is None for one in linear)
            and not any(one._forward_hooks or one._forward_pre_hooks for one in modules)
            and all(one.dtype == torch.float32 and one.device.type == "cpu" for one in model.parameters())
        )

    @torch.inference_mode()
    def __init__(self, model: LlamaForCausalLM | Qwen3ForCausalLM) -> None:
        config, self._model = model.config, model.model
        attention = self._model.layers[0].self_attn
        self.eps, self.scale, self.width = config.rms_norm_eps, attention.scaling, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers = [self._prepared(layer) for layer in self._model.layers]

    def _prepared(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        q, k = self._paired(attention.q_proj.weight), self._paired(attention.k_proj.weight)
        qkv = torch.cat([q, k, attention.v_proj.weight]) * before
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * between
        queries = len(q)
        norms = None
        if hasattr(attention, "q_norm"):
            own = ((attention.q_norm, self.heads), (attention.k_norm, self.kv_heads))
            norms = torch.cat([self._paired(norm.weight[:, None]).t().expand(heads, -1) for norm, heads in own])
        return Layer(
            qkv[:queries].t(), qkv[queries:].t(), qkv.t(), attention.o_proj.weight.t(), gate_up.t(),
            mlp.down_proj.weight.t(), norms,
        )  # fmt: skip

    def _paired(self, weight: Tensor) -> Tensor:
        """(heads · E, D) with the entries i and i + E/2 of each head, which turn together, side by side."""
        return weight.view(-1, 2, self.width // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def embedded(self, ids: Tensor) -> Tensor:
        """(N, D) of ids (N,)."""
        embedded: Tensor = self._model.embed_tokens.weight[ids]
        return embedded

    def last_norm(self, states: Tensor) -> Tensor:
        normed: Tensor = self._model.norm(states)
        return normed

    def turns(self, positions: Tensor) -> Tensor:
        """(N, 1, E/2), complex: by how much the pairs of each head turn at positions (N,)."""
        cos, sin = self._model.rotary_emb(self._model.embed_tokens.weight[:1], positions[None])
        half = self.width // 2
        return torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])

    def turn(self, states: Tensor, turns: Tensor, norms: Tensor | None) -> None:
        """Norms and rotary positions, in place. states (N, heads · E), with what turns together side by side."""
        if norms is not None:
            heads = states.view(len(states), -1, self.width)
            heads.mul_(heads.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(norms)
        pairs = states.view(len(states), -1, self.width // 2, 2)
        torch.view_as_complex(pairs).mul_(turns)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, T, E) of queries (B, H, T, E), and keys and values of K heads. mask: added to scores, None for
        causal."""
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)

    def normed(self, states: Tensor) -> Tensor:
        """Over their root mean square; the norm's weight is in the product that follows."""
        length = torch.linalg.vector_norm(states, dim=1, keepdim=True)
        return states * length.square_().div_(states.shape[1]).add_(self.eps).rsqrt_()

    def add_mlp(self, stream: Tensor, layer: Layer) -> None:
        gate, up = self.normed(stream).mm(layer.gate_up).chunk(2, 1)
        stream.addmm_(silu(gate, inplace=True).mul_(up), layer.down)
