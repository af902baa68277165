"""Many answers at once: sequences of different lengths in one batch, which each sequence leaves as soon as it ends.

Keys and values are in memory that is allocated once, one slot per sequence (`evaluation/generation/slots.py`). Prompts
are read without left padding, equal prompts once, and a free slot goes to the next prompt. Up to rounding, each answer
is the one that the model would give to the prompt alone.

    slot 0   p p p p p a a a . . . .      p a token of the prompt, a one of the answer
    slot 1   p p p a a . . . . . . .      a query sees the places before its own in its own slot
    slot 2   free: the next prompt

Shapes: N sequences in the batch, H heads, T tokens, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evaluation.generation.llama_slots import LlamaSlots
from evaluation.generation.slots import ModelSlots, Slots

Pick = Callable[[Tensor, Sequence[int]], Tensor]
"""Function that returns the next token (N,) of the prompts with these numbers from their logits (N, V) in float32."""
Ended = Callable[[int, list[int]], bool]
"""Function that returns True if the answer to the prompt with this number, given its new ids so far, is complete."""

CACHE_BYTES = 1 << 30
"""Bytes for the keys and values of all slots together."""
PREFILL_TOKENS = 4096
"""Tokens per forward pass over prompts."""
REFILL_SHARE = 4
"""Prompts are read when at least 1/4 of the slots is free: reading one takes as long as reading several."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between logits with and without a cache, as a fraction of the largest logit plus one."""
TRIED_TOKENS, TRIED_STEPS = 12, 2

Way = Callable[[Any, int, int], Slots]
"""Factory of slots for a model: takes the number of slots and the places per slot."""


class Decoder:
    """Answers of a model to many prompts, at most `slots` of them at a time."""

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model, self._slots = model, slots

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pick: Pick,
        ended: Ended,
        on_step: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """Return the new ids of each prompt, including those by which it ended.

        The longest prompts come first. on_step: called before each pass with the number of complete answers; an
        exception that it raises ends the work.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
        slots = min(self._slots, len(prompts))
        width = max(map(len, prompts), default=0) + max_new_tokens
        kept = self.slots(slots, width)
        rows: list[int] = []  # the prompt in each of the first slots
        lengths: list[int] = []  # tokens of it that the cache holds
        done = 0
        while waiting or rows:
            on_step(done)
            free = slots - len(rows)
            if waiting and (not rows or free * REFILL_SHARE >= slots):
                started, waiting = waiting[:free], waiting[free:]
                first = len(rows)
                logits = self.read(kept, [prompts[number] for number in started], first)
                rows += started
                lengths += [len(prompts[number]) for number in started]
            else:
                first = 0
                logits = self.step(kept, [answers[number][-1] for number in rows], lengths)
                lengths = [length + 1 for length in lengths]
            tokens = pick(logits, rows[first:]).tolist()
            over = []
            for slot, token in enumerate(tokens, first):
                number = rows[slot]
                answers[number].append(token)
                if len(answers[number]) >= max_new_tokens or ended(number, answers[number]):
                    over.append(slot)
            done += len(over)
            # The last sequence moves into the slot of one that has ended: the others always occupy the first slots.
            for slot in reversed(over):
                last = len(rows) - 1
                if slot != last:
                    kept.move(last, slot, lengths[last])
                    rows[slot], lengths[slot] = rows[last], lengths[last]
                del rows[last], lengths[last]
        return answers

    def usable(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> bool:
        """Return True if the model can be used this way. It is tried once, on the start of two prompts, against passes
        without a cache."""
        config = self._model.config
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
        longest = max(map(len, prompts), default=0) + max_new_tokens
        # A custom mask replaces a sliding window: every sequence must fit in one window.
        if any(isinstance(window, int) and 0 < window < longest for window in windows) or max_new_tokens < 1:
            return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False  # positions that depend on the longest sequence of a batch
        if getattr(config, "is_encoder_decoder", False) or not all(prompts):
            return False
        if self._model not in _WAYS:
            ways: list[Way] = [LlamaSlots] if LlamaSlots.fits(self._model) else []
            _WAYS[self._model] = next((way for way in (*ways, ModelSlots) if self._matches_model(prompts, way)), None)
        return _WAYS[self._model] is not None

    @property
    def has_own_layers(self) -> bool:
        """True if `evaluation/generation/llama_slots.py` computes the answers; call `usable` first."""
        # Check again: hooks or adapters may have been added to the model since it was tried.
        return _WAYS.get(self._model) is LlamaSlots and LlamaSlots.fits(self._model)

    def slots(self, count: int, width: int) -> Slots:
        """Return slots for `count` sequences of at most `width` tokens; call `usable` first."""
        return (LlamaSlots if self.has_own_layers else ModelSlots)(self._model, count, width)

    @torch.inference_mode()
    def _matches_model(self, prompts: Sequence[Sequence[int]], way: Way) -> bool:
        ordered = sorted(prompts, key=len)
        short, long = ordered[0][: TRIED_TOKENS // 2], ordered[-1][:TRIED_TOKENS]
        sequences = [list(long), list(short)]
        bound = TOLERANCE.get(self._model.dtype, 1e-3)
        try:
            kept = way(self._model, 2, TRIED_TOKENS + TRIED_STEPS)
            batch_logits = self.read(kept, sequences, 0)
            lengths = [len(sequence) for sequence in sequences]
            for _ in range(TRIED_STEPS):
                for row, ids in zip(batch_logits, sequences, strict=True):
                    alone = self._model(input_ids=torch.tensor([ids], device=self._model.device), use_cache=False)
                    expected = alone.logits[0, -1].float()
                    if not float((row - expected).abs().max()) <= bound * (1 + float(expected.abs().max())):
                        return False
                    ids.append(int(expected.argmax()))
                batch_logits = self.step(kept, [ids[-1] for ids in sequences], lengths)
                lengths = [length + 1 for length in lengths]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return False
        return True

    def read(self, kept: Slots, prompts: Sequence[Sequence[int]], first: int) -> Tensor:
        """Return the logits (N, V) after each prompt, longest first; prompts go to the slots from `first` on, and equal
        prompts are read once."""
        device, parts = self._model.device, []
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        different = list(numbers)
        distinct = torch.tensor([numbers[tuple(prompt)] for prompt in prompts])
        start = 0
        while start < len(different):
            batch = different[start : start + max(1, PREFILL_TOKENS // len(different[start]))]
            lengths = torch.tensor([len(prompt) for prompt in batch], device=device)
            width = int(lengths.max())
            # Padding goes to the right: causal attention never looks there, so any id will do.
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)] = torch.tensor(prompt)
            indices = ((distinct >= start) & (distinct < start + len(batch))).nonzero()[:, 0]
            sources = distinct[indices] - start
            logits = kept.read(ids.to(device), lengths, (indices + first).to(device), sources.to(device))
            parts.append((indices, logits.float()[sources.to(device)]))
            start += len(batch)
        order = torch.cat([indices for indices, _ in parts]).argsort()
        return torch.cat([logits for _, logits in parts])[order.to(device)]

    def step(self, kept: Slots, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return the logits (N, V) after one more token in each of the first N slots; the cache holds `lengths` tokens
        of each."""
        device = self._model.device
        positions = torch.tensor(lengths, device=device)
        return kept.step(torch.tensor(tokens, device=device), positions, max(lengths) + 1).float()


def slots_in_memory(model: PreTrainedModel, length: int) -> int:
    """Return the number of sequences of `length` tokens that fit in `CACHE_BYTES`, at least one."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * max(1, length)
    return max(1, int(CACHE_BYTES // slot_bytes))


_WAYS: WeakKeyDictionary[PreTrainedModel, Way | None] = WeakKeyDictionary()
"""Layers used for each model that was tried; None if no kind of layers works."""
