"""The layers of a Llama or Qwen3 for scoring in fp32 on a CPU, with fewer products and passes over memory than
transformers'.

- What several rows of a batch begin with is computed once (`evaluation/choice_rows.py`), and rows are filled up for
  attention alone.
- The first layer's queries, keys and values are computed once for each different id of a batch: before positions
  come in, equal ids have equal ones.
- Of the last layer only keys and values are computed everywhere, the rest for the tokens that are asked for.
- Queries, keys and values are one product, gate and up another. Weights of norms are multiplied into them, and a
  product adds its result to the residual stream itself.
- Entries of a head that turn together lie side by side, so that rotary positions are one complex multiplication. Their
  order does not matter where queries and keys have the same.

Shapes: N tokens to compute, B rows of T places that they stand at, U of the N asked for, D width, H heads, E width of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from evaluation.choice_rows import Batch

MOST_PARAMETERS = 500_000_000
"""Products of larger models cost so much that the rest matters little, and the weights here are a second copy."""


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


class LlamaTrunk:
    """Hidden states after a model's last norm, at chosen places."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether a model is a plain Llama or Qwen3 in fp32 on a CPU.

        Plain: without biases, adapters, hooks, windows or unusual positions.
        """
        if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM) or model.num_parameters() > MOST_PARAMETERS:
            return False
        config = model.config
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if config.hidden_act != "silu" or scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False
        modules = list(model.model.modules())
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
        self._eps, self._scale, self._width = config.rms_norm_eps, attention.scaling, attention.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [self._prepared(layer) for layer in self._model.layers]

    def _prepared(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        q, k = self._paired(attention.q_proj.weight), self._paired(attention.k_proj.weight)
        qkv = torch.cat([q, k, attention.v_proj.weight]) * before
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * between
        queries = len(q)
        norms = None
        if hasattr(attention, "q_norm"):
            own = ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            norms = torch.cat([self._paired(norm.weight[:, None]).t().expand(heads, -1) for norm, heads in own])
        return Layer(
            qkv[:queries].t(), qkv[queries:].t(), qkv.t(), attention.o_proj.weight.t(), gate_up.t(),
            mlp.down_proj.weight.t(), norms,
        )  # fmt: skip

    def _paired(self, weight: Tensor) -> Tensor:
        """(heads · E, D) with the entries i and i + E/2 of each head, which turn together, side by side."""
        return weight.view(-1, 2, self._width // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def hidden(self, batch: Batch, mask: Tensor | None) -> Tensor:
        """(U, D) of the tokens that a batch asks for. mask: (B, 1, T, T), added to scores, None for causal."""
        cos, sin = self._model.rotary_emb(self._model.embed_tokens.weight[:1], batch.depths[None])
        half = self._width // 2
        turns = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])  # (N, 1, E/2)
        ids, which = batch.tokens.unique(return_inverse=True)
        embedded = self._model.embed_tokens.weight[ids]
        stream = embedded[which]  # (N, D), to which each layer adds
        query_width = self._heads * self._width
        turned = query_width + self._kv_heads * self._width
        row, place = batch.first // batch.places.shape[1], batch.first % batch.places.shape[1]
        for number, layer in enumerate(self._layers[:-1]):
            qkv = self._normed(embedded).mm(layer.qkv)[which] if number == 0 else self._normed(stream).mm(layer.qkv)
            self._turn(qkv[:, :turned], turns, layer.norms)
            q, k, v = self._in_rows(qkv, batch).split([self._heads, self._kv_heads, self._kv_heads], 1)
            seen = self._attend(q, k, v, mask)
            stream.addmm_(seen[row, :, place].flatten(1), layer.o)
            self._add_mlp(stream, layer)
        return self._last(stream, turns, mask, batch)

    def _last(self, stream: Tensor, turns: Tensor, mask: Tensor | None, batch: Batch) -> Tensor:
        layer, normed, wanted = self._layers[-1], self._normed(stream), batch.asked
        rows, length = batch.places.shape
        kv = normed.mm(layer.kv)
        q_norms, k_norms = (None, None) if layer.norms is None else layer.norms.tensor_split([self._heads])
        self._turn(kv[:, : self._kv_heads * self._width], turns, k_norms)
        k, v = self._in_rows(kv, batch).chunk(2, 1)
        asked = normed[wanted].mm(layer.q)
        self._turn(asked, turns[wanted], q_norms)
        # Queries of a row side by side: (B, most of a row, H, E), and their places in it.
        row = batch.first[wanted] // length
        counts = torch.bincount(row, minlength=rows)
        slot = torch.arange(len(wanted)) - (counts.cumsum(0) - counts)[row]
        q = asked.new_zeros(rows, int(counts.max()), self._heads, self._width)
        q[row, slot] = asked.view(len(wanted), self._heads, self._width)
        place = torch.zeros(q.shape[:2], dtype=torch.long)
        place[row, slot] = batch.first[wanted] % length
        if mask is None:
            own = (torch.arange(length) <= place[:, :, None])[:, None]
        else:
            own = mask[torch.arange(rows)[:, None], 0, place][:, None]
        seen = self._attend(q.transpose(1, 2), k, v, own).transpose(1, 2)[row, slot].flatten(1)
        left = stream[wanted].addmm_(seen, layer.o)
        self._add_mlp(left, layer)
        hidden: Tensor = self._model.norm(left)
        return hidden

    def _in_rows(self, states: Tensor, batch: Batch) -> Tensor:
        """(B, heads, T, E) of (N, heads · E)."""
        return states[batch.places].unflatten(2, (-1, self._width)).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self._kv_heads != self._heads:
            k, v = (part.repeat_interleave(self._heads // self._kv_heads, 1) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale)

    def _add_mlp(self, stream: Tensor, layer: Layer) -> None:
        gate, up = self._normed(stream).mm(layer.gate_up).chunk(2, 1)
        stream.addmm_(silu(gate, inplace=True).mul_(up), layer.down)

    def _normed(self, states: Tensor) -> Tensor:
        """Over their root mean square; the norm's weight is in the product that follows."""
        length = torch.linalg.vector_norm(states, dim=1, keepdim=True)
        return states * length.square_().div_(states.shape[1]).add_(self._eps).rsqrt_()

    def _turn(self, states: Tensor, turns: Tensor, norms: Tensor | None) -> None:
        """Norms and rotary positions, in place. states (N, heads · E), with what turns together side by side."""
        if norms is not None:
            heads = states.view(len(states), -1, self._width)
            heads.mul_(heads.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()).mul_(norms)
        pairs = states.view(len(states), -1, self._width // 2, 2)
        torch.view_as_complex(pairs).mul_(turns)
