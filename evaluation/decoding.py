"""Many answers at once: sequences of different lengths in one batch, which those that have ended leave at once.

Keys and values lie in memory that is allocated once, a slot a sequence. Prompts are read without padding to their left,
equal ones once, and a slot that is free is given to the next prompt. What is written is, but for rounding, what the
model would write to each prompt alone.

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
from transformers import DynamicCache, PreTrainedModel

Pick = Callable[[Tensor, Sequence[int]], Tensor]
"""The next token (N,) of the prompts with these numbers, from their logits (N, V) in float32."""
Ended = Callable[[int, list[int]], bool]
"""Whether the answer to the prompt with this number, its new ids so far, is whole."""

CACHE_BYTES = 1 << 30
"""Of the keys and values of all slots together."""
PREFILL_TOKENS = 4096
"""Tokens of a forward pass over prompts."""
REFILL_SHARE = 4
"""A quarter of the slots is free before prompts are read again: single ones would be read as slowly as several."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far logits may lie from those without a cache, as a share of the largest plus one."""
TRIED_TOKENS, TRIED_STEPS = 12, 2


class SlotCache(DynamicCache):
    """Keys and values (slots, H, width, D) of each layer. The writer says where the next pass puts its own."""

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self._slots, self._width = slots, width
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = self._places = torch.zeros(0, dtype=torch.long)
        self._sources: Tensor | None = None
        self._reach = 0

    def write_prompts(self, rows: Tensor, sources: Tensor) -> None:
        """The next pass reads prompts from their start: `sources` (N,) of them go to slots `rows` (N,)."""
        self._rows, self._sources, self._reach = rows, sources, 0

    def write_tokens(self, rows: Tensor, places: Tensor, reach: int) -> None:
        """The next pass reads a token for each of the first N slots, `rows`, at its place; it sees `reach` places."""
        self._rows, self._places, self._sources, self._reach = rows, places, None, reach

    def move(self, source: int, target: int, length: int) -> None:
        """Gives what lies in the first places of one slot to another."""
        for kept in (*self._keys, *self._values):
            kept[target, :, :length] = kept[source, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """As transformers asks: keeps what a layer has computed (N, H, T, D); returns all that it is to see."""
        if layer_idx == len(self._keys):
            # Zeros: a masked place must not hold what is no number.
            for kept, states in ((self._keys, key_states), (self._values, value_states)):
                kept.append(states.new_zeros(self._slots, states.shape[1], self._width, states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
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
        return max(0, self._reach - 1)


class Decoder:
    """A model's answers to many prompts, at most `slots` of them at a time."""

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
        """The new ids of each prompt, with those by which it ended.

        The longest prompts come first. on_step: told before each pass how many answers are whole; what it raises ends
        the work.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
        slots = min(self._slots, len(prompts))
        cache = SlotCache(slots, max(map(len, prompts), default=0) + max_new_tokens)
        rows: list[int] = []  # the prompt in each of the first slots
        lengths: list[int] = []  # tokens of it that the cache holds
        done = 0
        while waiting or rows:
            on_step(done)
            free = slots - len(rows)
            if waiting and (not rows or free * REFILL_SHARE >= slots):
                begun, waiting = waiting[:free], waiting[free:]
                first = len(rows)
                logits = self._read(cache, [prompts[number] for number in begun], first)
                rows += begun
                lengths += [len(prompts[number]) for number in begun]
            else:
                first = 0
                logits = self._step(cache, [answers[number][-1] for number in rows], lengths)
                lengths = [length + 1 for length in lengths]
            tokens = pick(logits, rows[first:]).tolist()
            over = []
            for slot, token in enumerate(tokens, first):
                number = rows[slot]
                answers[number].append(token)
                if len(answers[number]) >= max_new_tokens or ended(number, answers[number]):
                    over.append(slot)
            done += len(over)
            # The last ones move to where one has ended: those that are left always lie in the first slots.
            for slot in reversed(over):
                last = len(rows) - 1
                if slot != last:
                    cache.move(last, slot, lengths[last])
                    rows[slot], lengths[slot] = rows[last], lengths[last]
                del rows[last], lengths[last]
        return answers

    def usable(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> bool:
        """Whether the model can be asked so: tried once, on the start of two prompts, against passes without cache."""
        config = self._model.config
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
        longest = max(map(len, prompts), default=0) + max_new_tokens
        # A mask of our own takes the place of a window: all must lie within one.
        if any(isinstance(one, int) and 0 < one < longest for one in windows) or max_new_tokens < 1:
            return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False  # positions that depend on the longest sequence of a batch
        if getattr(config, "is_encoder_decoder", False) or not all(prompts):
            return False
        if self._model not in _USABLE:
            _USABLE[self._model] = self._tried(prompts)
        return _USABLE[self._model]

    @torch.inference_mode()
    def _tried(self, prompts: Sequence[Sequence[int]]) -> bool:
        ordered = sorted(prompts, key=len)
        short, long = ordered[0][: TRIED_TOKENS // 2], ordered[-1][:TRIED_TOKENS]
        whole = [list(long), list(short)]
        cache = SlotCache(2, TRIED_TOKENS + TRIED_STEPS)
        bound = TOLERANCE.get(self._model.dtype, 1e-3)
        try:
            found = self._read(cache, whole, 0)
            lengths = [len(one) for one in whole]
            for _ in range(TRIED_STEPS):
                for row, ids in zip(found, whole, strict=True):
                    alone = self._model(input_ids=torch.tensor([ids], device=self._model.device), use_cache=False)
                    wanted = alone.logits[0, -1].float()
                    if not float((row - wanted).abs().max()) <= bound * (1 + float(wanted.abs().max())):
                        return False
                    ids.append(int(wanted.argmax()))
                found = self._step(cache, [ids[-1] for ids in whole], lengths)
                lengths = [length + 1 for length in lengths]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return False
        return True

    def _read(self, cache: SlotCache, prompts: Sequence[Sequence[int]], first: int) -> Tensor:
        """The logits (N, V) after each prompt, longest first; they go to the slots from `first` on, equal ones read
        once."""
        device, found = self._model.device, []
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        different = list(numbers)
        asked = torch.tensor([numbers[tuple(prompt)] for prompt in prompts])
        start = 0
        while start < len(different):
            batch = different[start : start + max(1, PREFILL_TOKENS // len(different[start]))]
            lengths = torch.tensor([len(prompt) for prompt in batch], device=device)
            width = int(lengths.max())
            # Padding goes to the right: causal attention never looks there, so any id will do.
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)] = torch.tensor(prompt)
            here = ((asked >= start) & (asked < start + len(batch))).nonzero()[:, 0]
            sources = asked[here] - start
            cache.write_prompts((here + first).to(device), sources.to(device))
            positions = torch.arange(width, device=device)
            hidden = self._model.base_model(
                input_ids=ids.to(device), position_ids=positions[None], cache_position=positions,
                past_key_values=cache, use_cache=True,
            ).last_hidden_state  # fmt: skip
            last = hidden[torch.arange(len(batch), device=device), lengths - 1]
            found.append((here, self._model.get_output_embeddings()(last).float()[sources.to(device)]))
            start += len(batch)
        order = torch.cat([here for here, _ in found]).argsort()
        return torch.cat([logits for _, logits in found])[order.to(device)]

    def _step(self, cache: SlotCache, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The logits (N, V) after one more token of each of the first N slots, of which the cache holds `lengths`."""
        device = self._model.device
        places = torch.tensor(lengths, device=device)
        reach = max(lengths) + 1
        cache.write_tokens(torch.arange(len(tokens), device=device), places, reach)
        unseen = torch.arange(reach, device=device) > places[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._model.dtype, device=device)
        mask.masked_fill_(unseen, torch.finfo(self._model.dtype).min)
        out = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None], position_ids=places[:, None],
            cache_position=torch.tensor([reach - 1], device=device), attention_mask=mask[:, None, None],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        logits: Tensor = out.logits[:, -1].float()
        return logits


def slots_in_memory(model: PreTrainedModel, length: int) -> int:
    """How many sequences of so many tokens `CACHE_BYTES` hold, at least one."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_one = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * max(1, length)
    return max(1, int(CACHE_BYTES // of_one))


_USABLE: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
