"""Keys and values that a model has read, one slot per sequence, and passes of transformers' layers that write them.

`evaluation/generation/llama_slots.py` does the same with this project's own layers.

Shapes: N sequences, H heads, T tokens, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a prompt that are read in one pass.

    Args:
        ids: Token ids, at least one.
        start: Place of the first; the slots hold all places before it.
        rows: Slots that they go to; equal prompts are read once.
    """

    ids: Sequence[int]
    start: int
    rows: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Slots(Protocol):
    """Keys and values of several sequences in memory that is allocated once, together with their model."""

    def read(self, ids: Tensor, lengths: Tensor, rows: Tensor, sources: Tensor) -> Tensor:
        """Return the logits (N, V) after prompts ids (N, T) of `lengths` (N,), padded on the right.

        The states of prompt `sources[i]` go to slot `rows[i]`: one prompt may go to several slots.
        """

    def step(self, tokens: Tensor, places: Tensor, reach: int) -> Tensor:
        """Return the logits (N, V) after another token in each of the first N slots, at `places` (N,), all below
        `reach`."""

    def advance(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk]
    ) -> Tensor:
        """Return the logits (N + C, V) after another token in each of the N slots `rows`, then those after each of C
        chunks.

        Args:
            rows: Slots whose tokens are read, ascending.
            tokens, positions: A token of each of the first slots and its position. In slots outside `rows` that
                position is not in use yet.
            chunks: Parts of prompts, of other slots.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of slot `source` to slot `target`."""

    def resize(self, slots: int, width: int) -> None:
        """Change the number of slots and the places per slot; remaining slots keep their content."""


class SlotCache(DynamicCache):
    """Keys and values (slots, H, width, D) of each layer. The caller sets the destination of the next pass."""

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self._slots, self._width = slots, width
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = self._places = torch.zeros(0, dtype=torch.long)
        self._sources: Tensor | None = None
        self._chunk: Chunk | None = None
        self._reach = 0

    def write_prompts(self, rows: Tensor, sources: Tensor) -> None:
        """Prepare for a pass that reads prompts from their start: `sources` (N,) of them go to slots `rows` (N,)."""
        self._rows, self._sources, self._chunk, self._reach = rows, sources, None, 0

    def write_tokens(self, rows: Tensor, places: Tensor, reach: int) -> None:
        """Prepare for a pass that reads one token for each of the first N slots, `rows`, at its place; it sees `reach`
        places."""
        self._rows, self._places, self._sources, self._chunk, self._reach = rows, places, None, None, reach

    def write_chunk(self, chunk: Chunk) -> None:
        """Prepare for a pass that reads a chunk, which sees its own and all earlier places."""
        self._sources, self._chunk = None, chunk

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of slot `source` to slot `target`."""
        for kept in (*self._keys, *self._values):
            kept[target, :, :length] = kept[source, :, :length]

    def resize(self, slots: int, width: int) -> None:
        self._slots, self._width = slots, width
        for kept in (self._keys, self._values):
            kept[:] = [resized(states.transpose(1, 2), slots, width).transpose(1, 2).contiguous() for states in kept]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the states that a layer has computed (N, H, T, D), and return all states that it attends to; called by
        transformers."""
        if layer_idx == len(self._keys):
            # Zeros: a masked place must not hold NaN.
            for kept, states in ((self._keys, key_states), (self._values, value_states)):
                kept.append(states.new_zeros(self._slots, states.shape[1], self._width, states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if (chunk := self._chunk) is not None:
            for row in chunk.rows:
                keys[row, :, chunk.start : chunk.end] = key_states[0]
                values[row, :, chunk.start : chunk.end] = value_states[0]
            first = slice(chunk.rows[0], chunk.rows[0] + 1)
            return keys[first, :, : chunk.end], values[first, :, : chunk.end]
        if self._sources is not None:
            length = key_states.shape[2]
            keys[self._rows, :, :length] = key_states[self._sources]
            values[self._rows, :, :length] = value_states[self._sources]
            return key_states, value_states
        keys[self._rows, :, self._places] = key_states[:, :, 0]
        values[self._rows, :, self._places] = value_states[:, :, 0]
        count = len(self._rows)
        return keys[:count, :, : self._reach], values[:count, :, : self._reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(0, self._reach - 1) if self._chunk is None else self._chunk.start


class ModelSlots:
    """Slots of any causal language model that takes positions, a mask and a cache.

    Layers with a sliding window see that many places, the query's own included.

    Args:
        dtype: Of the products, by autocast if it is not the model's own.
    """

    def __init__(self, model: PreTrainedModel, slots: int, width: int, dtype: torch.dtype) -> None:
        self._model, self._dtype, self._cache = model, dtype, SlotCache(slots, width)
        config = model.config.get_text_config()
        self._window = getattr(config, "sliding_window", None)
        self._kinds = set(getattr(config, "layer_types", None) or ())

    def read(self, ids: Tensor, lengths: Tensor, rows: Tensor, sources: Tensor) -> Tensor:
        self._cache.write_prompts(rows, sources)
        positions = torch.arange(ids.shape[1], device=ids.device)
        with autocast(self._model, self._dtype):
            hidden = self._model.base_model(
                input_ids=ids, position_ids=positions[None], cache_position=positions,
                past_key_values=self._cache, use_cache=True,
            ).last_hidden_state  # fmt: skip
            last = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]
            logits: Tensor = self._model.get_output_embeddings()(last)
        return logits

    def step(self, tokens: Tensor, places: Tensor, reach: int) -> Tensor:
        self._cache.write_tokens(torch.arange(len(tokens), device=tokens.device), places, reach)
        with autocast(self._model, self._dtype):
            out = self._model(
                input_ids=tokens[:, None], position_ids=places[:, None],
                cache_position=torch.tensor([reach - 1], device=tokens.device),
                attention_mask=self._masks(places, reach), past_key_values=self._cache, use_cache=True,
            )  # fmt: skip
        logits: Tensor = out.logits[:, -1]
        return logits

    def advance(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk]
    ) -> Tensor:
        device, parts = self._model.device, []
        if rows:
            # All slots up to the last: what the others write is not in use, and a chunk below overwrites it.
            count = rows[-1] + 1
            here = torch.tensor(positions[:count], device=device)
            logits = self.step(torch.tensor(tokens[:count], device=device), here, int(here.max()) + 1)
            parts.append(logits[torch.tensor(rows, device=device)])
        parts += [self._read_chunk(chunk) for chunk in chunks]
        return torch.cat(parts)

    def _read_chunk(self, chunk: Chunk) -> Tensor:
        """Return the logits (1, V) after a chunk."""
        self._cache.write_chunk(chunk)
        positions = torch.arange(chunk.start, chunk.end, device=self._model.device)
        masks = self._masks(positions, chunk.end)
        # One sequence of T queries, (1, 1, T, reach), where a step has N sequences of one.
        if isinstance(masks, dict):
            of_chunk: Tensor | dict[str, Tensor] = {kind: mask.transpose(0, 2) for kind, mask in masks.items()}
        else:
            of_chunk = masks.transpose(0, 2)
        with autocast(self._model, self._dtype):
            hidden = self._model.base_model(
                input_ids=torch.tensor([chunk.ids], device=self._model.device), position_ids=positions[None],
                cache_position=positions, past_key_values=self._cache, use_cache=True, attention_mask=of_chunk,
            ).last_hidden_state  # fmt: skip
            logits: Tensor = self._model.get_output_embeddings()(hidden[:, -1])
        return logits

    def _masks(self, places: Tensor, reach: int) -> Tensor | dict[str, Tensor]:
        """Return the mask (N, 1, 1, `reach`) of all layers, or of each kind of layers by its name."""
        everything = unseen(places, reach, self._dtype)[:, None, None]
        if not self._window or self._kinds == {"full_attention"}:
            return everything
        windowed = unseen(places, reach, self._dtype, self._window)[:, None, None]
        if not self._kinds:
            return windowed
        return {"full_attention": everything, "sliding_attention": windowed}

    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target, length)

    def resize(self, slots: int, width: int) -> None:
        self._cache.resize(slots, width)


def autocast(model: PreTrainedModel, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a block within which products of the model are in `dtype`."""
    return torch.autocast(model.device.type, dtype, enabled=dtype != model.dtype)


def resized(states: Tensor, slots: int, width: int) -> Tensor:
    """Return (slots, width, …) with the first slots and places of states (S, W, …), and zeros elsewhere."""
    new = states.new_zeros(slots, width, *states.shape[2:])
    new[: len(states), : states.shape[1]] = states[:slots, :width]
    return new


def unseen(places: Tensor, reach: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return the mask (N, `reach`) to add to scores, so that each sequence sees no place behind its own, nor one that
    is `window` places or more before it."""
    distances = places[:, None] - torch.arange(reach, device=places.device)
    is_hidden = distances < 0
    if window is not None:
        is_hidden |= distances >= window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=places.device).masked_fill_(
        is_hidden, torch.finfo(dtype).min
    )
