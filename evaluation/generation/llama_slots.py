"""Keys and values that a Llama or Qwen3 has read, one slot per sequence, with the layers of
`evaluation/generation/llama_layers.py`.

For the last layer, only keys and values are computed for the whole prompt: its output is needed only after the last
token.

`advance` computes each sequence's states by operations that do not depend on the other sequences: products give each
row the same bits whatever their number of rows is, from two on, and attention is computed sequence by sequence.

Shapes: S slots of W places, N sequences, T tokens, H heads, K heads of keys, E width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from evaluation.generation.llama_layers import Layer, LlamaLayers
from evaluation.generation.slots import Chunk, resized, unseen


class LlamaSlots:
    """`evaluation.generation.slots.Slots` of a plain model."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        return LlamaLayers.fit(model)

    def __init__(self, model: LlamaForCausalLM | Qwen3ForCausalLM, slots: int, width: int) -> None:
        self._of, self._width = LlamaLayers(model), width
        net = self._of
        self._queries = net.heads * net.width
        self._turned = self._queries + net.kv_heads * net.width
        self._turns = net.turns(torch.arange(width))
        # Zeros: a masked place must not hold NaN.
        self._kept = [torch.zeros(slots * width, 2 * net.kv_heads * net.width) for _ in net.layers]
        """Keys and values (S · W, 2 · K · E) of each layer."""

    def read(self, ids: Tensor, lengths: Tensor, rows: Tensor, sources: Tensor) -> Tensor:
        net = self._of
        count, length = ids.shape
        stream, turns = net.embedded(ids.flatten()), self._turns[:length].repeat(count, 1, 1)
        positions = (rows[:, None] * self._width + torch.arange(length)).flatten()
        for layer, kept in zip(net.layers[:-1], self._kept, strict=False):
            qkv = layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, : self._turned], turns, layer.norms)
            self._store(kept, qkv[:, self._queries :], positions, count, sources)
            q, k, v = self._in_heads(qkv, count).split([net.heads, net.kv_heads, net.kv_heads], 1)
            attended = net.attend(q, k, v, None).transpose(1, 2).flatten(0, 1).flatten(1)
            stream = net.after_mlp(layer.o.plus(attended, stream), layer)
        layer, normed = net.layers[-1], net.normed(stream)
        last = torch.arange(count) * length + lengths - 1
        q_norms, k_norms = (None, None) if layer.norms is None else layer.norms.tensor_split([net.heads])
        kv, q = net.last_kv.of(normed), net.last_q.of(normed[last])
        net.turn(kv[:, : net.kv_heads * net.width], turns, k_norms)
        net.turn(q, turns[last], q_norms)
        self._store(self._kept[-1], kv, positions, count, sources)
        k, v = self._in_heads(kv, count).chunk(2, 1)
        unread = unseen(lengths - 1, length, torch.float32)
        return net.logits(self._after_layer(stream[last], q, k, v, unread, layer))

    def step(self, tokens: Tensor, places: Tensor, reach: int) -> Tensor:
        net, count = self._of, len(tokens)
        stream, turns, mask = net.embedded(tokens), self._turns[places], unseen(places, reach, torch.float32)
        positions = torch.arange(count) * self._width + places
        for layer, kept in zip(net.layers, self._kept, strict=True):
            qkv = layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, : self._turned], turns, layer.norms)
            kept.index_copy_(0, positions, qkv[:, self._queries :])
            cached = kept.view(-1, self._width, 2, net.kv_heads, net.width)[:count, :reach]
            k, v = cached.permute(2, 0, 3, 1, 4)
            stream = self._after_layer(stream, qkv[:, : self._queries], k, v, mask, layer)
        return net.logits(stream)

    def advance(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk]
    ) -> Tensor:
        net, states = self._of, _States(rows, tokens, positions, chunks)
        places = torch.tensor(states.places)
        stored = torch.tensor(states.stored_rows) * self._width + places[states.stored]
        last, masks = torch.tensor(states.last), [self._mask_of(chunk) for chunk in states.chunks]
        last_rows, last_places = ([values[state] for state in states.last] for values in (states.rows, states.places))
        stream, turns = net.embedded(torch.tensor(states.ids)), self._turns[places]
        for number, (layer, kept) in enumerate(zip(net.layers, self._kept, strict=True)):
            qkv = layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, : self._turned], turns, layer.norms)
            q, kv = qkv[:, : self._queries], qkv[:, self._queries :]
            kept.index_copy_(0, stored, kv[states.stored] if states.has_copies else kv)
            k, v = kept.view(-1, self._width, 2, net.kv_heads, net.width).permute(2, 0, 3, 1, 4)
            if number + 1 < len(net.layers):
                attended = self._attend_alone(q[: states.singles], k, v, states.rows, states.places)
                attended += self._attend_chunks(q[states.singles :], k, v, states.chunks, masks)
            else:
                stream, attended = stream[last], self._attend_alone(q[last], k, v, last_rows, last_places)
            stream = net.after_mlp(layer.o.plus(torch.cat(attended), stream), layer)
        return net.logits(stream)[: len(rows) + len(chunks)]

    def _attend_alone(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> list[Tensor]:
        """Return (1, H · E) for each of the queries q (N, H · E), each at a position of a slot, over the slot's
        positions up to its own. k, v: (S, K, W, E)."""
        net = self._of
        queries = q.view(len(q), net.kv_heads, net.heads // net.kv_heads, net.width).split(1)
        keys, values = k.split(1), v.split(1)
        attended = []
        for query, row, position in zip(queries, rows, positions, strict=False):
            seen_keys, seen_values = (part[row].narrow(2, 0, position + 1) for part in (keys, values))
            attended.append(scaled_dot_product_attention(query, seen_keys, seen_values, scale=net.scale).flatten(1))
        return attended

    def _attend_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[Chunk], masks: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return (T, H · E) for the queries of each chunk, which follow each other in q. k, v: (S, K, W, E)."""
        attended = []
        parts = q.split([len(chunk.ids) for chunk in chunks]) if chunks else ()
        for queries, chunk, mask in zip(parts, chunks, masks, strict=True):
            row = slice(chunk.rows[0], chunk.rows[0] + 1)
            seen_keys, seen_values = (part[row, :, : chunk.end] for part in (k, v))
            of_chunk = self._of.attend(self._in_heads(queries, 1), seen_keys, seen_values, mask)
            attended.append(of_chunk.transpose(1, 2).flatten(0, 1).flatten(1))
        return attended

    def _mask_of(self, chunk: Chunk) -> Tensor | None:
        """Return the mask (1, 1, T, places) of a chunk; None at the beginning of a prompt, where it is causal."""
        if not chunk.start:
            return None
        return unseen(torch.arange(chunk.start, chunk.end), chunk.end, torch.float32)[None, None]

    def move(self, source: int, target: int, length: int) -> None:
        source_start, target_start = source * self._width, target * self._width
        for kept in self._kept:
            kept[target_start : target_start + length] = kept[source_start : source_start + length]

    def resize(self, slots: int, width: int) -> None:
        self._turns = self._of.turns(torch.arange(width))
        self._kept = [
            resized(kept.view(-1, self._width, kept.shape[1]), slots, width).flatten(0, 1) for kept in self._kept
        ]
        self._width = width

    def _store(self, kept: Tensor, kv: Tensor, positions: Tensor, count: int, sources: Tensor) -> None:
        kept.index_copy_(0, positions, kv.view(count, -1, kv.shape[1])[sources].flatten(0, 1))

    def _in_heads(self, states: Tensor, count: int) -> Tensor:
        """Return (N, heads, T, E) for (N · T, heads · E)."""
        return states.view(count, -1, states.shape[1] // self._of.width, self._of.width).transpose(1, 2)

    def _after_layer(self, stream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: Layer) -> Tensor:
        """Return the stream after attention and MLP, for one query per sequence (N, H · E) that sees keys and values
        (N, K, T, E) through mask (N, T).

        Heads that share keys are laid out as queries of one head.
        """
        queries = q.view(len(q), self._of.kv_heads, -1, self._of.width)
        added = mask[:, None, None].expand(-1, -1, queries.shape[2], -1)
        attended = scaled_dot_product_attention(queries, k, v, attn_mask=added, scale=self._of.scale)
        return self._of.after_mlp(layer.o.plus(attended.flatten(1), stream), layer)


class _States:
    """The states that `advance` computes in one pass: single tokens, then the chunks of two or more.

    Attributes:
        ids, rows, places: Of each state; the slot is the first of those that it goes to.
        singles: Number of single tokens.
        chunks: Chunks of two or more tokens.
        last: States whose logits are needed: of each slot, then of each chunk.
        stored, stored_rows: States with the slots that they go to.
        has_copies: True if a state goes to several slots.
    """

    def __init__(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk]
    ) -> None:
        self.ids, self.places = [tokens[row] for row in rows], [positions[row] for row in rows]
        self.rows, self.last = list(rows), list(range(len(rows)))
        self.chunks = [chunk for chunk in chunks if len(chunk.ids) > 1]
        of_chunk: dict[int, range] = {}
        for chunk in sorted(chunks, key=lambda chunk: len(chunk.ids) > 1):
            of_chunk[chunk.rows[0]] = numbers = range(len(self.ids), len(self.ids) + len(chunk.ids))
            self.ids += chunk.ids
            self.places += range(chunk.start, chunk.end)
            self.rows += [chunk.rows[0]] * len(numbers)
        self.last += [of_chunk[chunk.rows[0]][-1] for chunk in chunks]
        # oneDNN computes a product of one row in another way than one of several.
        if len(self.ids) == 1:
            self.ids, self.places, self.rows = self.ids * 2, self.places * 2, self.rows * 2
        if len(self.last) == 1:
            self.last *= 2
        self.singles = len(self.ids) - sum(len(chunk.ids) for chunk in self.chunks)
        copies = [(state, row) for chunk in chunks for row in chunk.rows[1:] for state in of_chunk[chunk.rows[0]]]
        self.stored = torch.tensor([*range(len(self.ids)), *(state for state, _ in copies)])
        self.stored_rows = [*self.rows, *(row for _, row in copies)]
        self.has_copies = bool(copies)
