"""The decoder: answers of a model that are generated together, token by token.

    answers ──► waiting ──► slots: keys and values ──► logits ──► choose_tokens ──► answers take their tokens
                            (`slots.py`, `llama_slots.py`)        (`token_choice.py`)

Keys and values are in memory that is allocated once, one slot per answer. Prompts are read without left padding, equal
prompts once, and an answer leaves as soon as it ends, so that its slot goes to the next one. Up to rounding, each
answer is the one that the model would give to the prompt alone.

    slot 0   p p p p p a a a . . . .      p a token of the prompt, a one of the answer
    slot 1   p p p a a . . . . . . .      a query sees the places before its own in its own slot
    slot 2   free: the next prompt

A decoder works in two ways: `answer` works on a set of answers until all are complete (training, safety, benchmarks);
`add`, `step` and `remove` work on answers that come and go (chat, serving). There, a step reads a chunk of each new
prompt, of at most CHUNK_TOKENS, with the next tokens of the others, so that a long prompt delays them little. The end
of a prompt is read without the others, in every second step at most: its first token comes as soon as it can, and the
others are delayed by one short pass:

    step     1          2          3          4
    slot 0   a          a          .          a
    slot 1   p … p      p … p      p p → a    a          chunks begin at multiples of CHUNK_TOKENS
    slot 2   .          .          p p p → a  a          another prompt is read next to it

Chunks begin at the same places of a prompt whatever else the batch has, and what has left memory is computed again in
the same way, so that with this project's layers an answer's bits are those of a single request (`llama_slots.py`).
Models that slots do not support answer through transformers' `generate`, with the same choice of tokens
(`by_transformers.py`).

Shapes: N answers in the batch, H heads, T tokens, D width of a head, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evaluation.generation.by_transformers import answer_by_transformers
from evaluation.generation.llama_slots import LlamaSlots
from evaluation.generation.slots import Chunk, ModelSlots, Slots, autocast
from evaluation.generation.token_choice import ChosenAnswer, SamplingOptions, Token, choose_tokens, logprobs_of
from infra.errors import StemmaError

AT_ONCE = 128
"""Answers per forward pass, for all answers of a set."""
CACHE_BYTES = 1 << 30
"""Bytes for the keys and values of all slots together on a CPU."""
CACHE_SHARE = 0.5
"""Share of a GPU's free memory for them."""
PREFILL_TOKENS = 4096
"""Tokens per forward pass over prompts of a set."""
CHUNK_TOKENS = 128
"""Tokens of a prompt per step where answers come and go."""
STEP_TOKENS = 256
"""Tokens of all prompts per step there."""
REFILL_SHARE = 4
"""Prompts of a set are read when at least 1/4 of the slots is free: reading one takes as long as reading several."""
LEAST_WIDTH = 256
"""Initial number of places of a slot where answers come and go."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between logits with and without a cache, as a fraction of the largest logit plus one."""
TRIED_TOKENS, TRIED_STEPS, TRIED_WINDOW, TRIED_CHUNK = 12, 2, 5, 5

Watch = Callable[[Tensor, Sequence[ChosenAnswer]], None]
"""Function that receives the logits (N, V) from which the next tokens of answers are chosen."""


@dataclass(eq=False)
class _Row:
    """An answer in a slot.

    Args:
        cached: Number of its tokens whose keys and values the slot holds.
        number: Ascending in the order of arrival in the slots.
    """

    answer: ChosenAnswer
    cached: int
    number: int

    @property
    def is_reading(self) -> bool:
        return self.cached < len(self.answer.prompt)

    @property
    def next_token(self) -> int:
        """The token after those that the slot holds."""
        index = self.cached - len(self.answer.prompt)
        return self.answer.prompt[self.cached] if index < 0 else self.answer.new[index]

    @property
    def needs_token(self) -> bool:
        """True if the slot holds all of the answer's tokens: the next one is to be chosen."""
        return self.cached == len(self.answer.prompt) + len(self.answer.new)


class Decoder:
    """Answers of one model. Used by one thread.

    Args:
        model: In evaluation mode during the work.
        at_once: Most answers per forward pass.
        dtype: Of the products; None for the model's own.
        cache_bytes: Of the keys and values of all slots together; None for CACHE_BYTES, on a GPU CACHE_SHARE.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        at_once: int = AT_ONCE,
        dtype: torch.dtype | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self._model, self._at_once, self._dtype = model, at_once, dtype or model.dtype
        self._cache_bytes = cache_bytes
        self._kept: Slots | None = None
        self._width = 0
        self._chunk_tokens = CHUNK_TOKENS
        self._waiting: deque[ChosenAnswer] = deque()
        self._rows: list[_Row] = []
        """The answer of each of the first slots."""
        self._have_waited = False
        """True if the last step read the ends of prompts and nothing else."""
        self._numbers = count()
        self._alone: list[ChosenAnswer] = []
        writes = getattr(model, "generation_config", None)
        unused = list(getattr(writes, "suppress_tokens", None) or [])
        self._unused = torch.tensor(unused, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def answer(
        self,
        answers: Sequence[ChosenAnswer],
        on_step: Callable[[int], None] = lambda done: None,
        watch: Watch | None = None,
    ) -> None:
        """Complete all answers, those to the longest prompts first.

        Args:
            on_step: Called before each forward pass with the number of complete answers; an exception that it raises
                ends the work.
            watch: Called with the logits of each forward pass.
        """
        answers = [answer for answer in answers if self._begins(answer)]
        if not answers:
            return
        prompts = [answer.prompt for answer in answers]
        most = max(answer.options.max_new_tokens for answer in answers)
        if not self.usable(prompts, most):
            with autocast(self._model, self._dtype):
                answer_by_transformers(self._model, answers, self._unused, on_step, watch)
            return
        width = max(map(len, prompts)) + most
        slots = min(self._at_once, len(answers), slots_in_memory(self._model, width, self._cache_bytes))
        self._waiting.extend(sorted(answers, key=lambda answer: -len(answer.prompt)))
        try:
            self._kept = self._slots(LlamaSlots if self.has_own_layers else ModelSlots, slots, width)
            while self._waiting or self._rows:
                on_step(len(answers) - len(self._waiting) - len(self._rows))
                free = slots - len(self._rows)
                if self._waiting and (not self._rows or free * REFILL_SHARE >= slots):
                    self._read([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))], watch)
                else:
                    self._advance(watch)
        finally:
            self._kept = None
            self._rows.clear()
            self._waiting.clear()

    def add(self, answer: ChosenAnswer) -> None:
        """Begin an answer with one of the next calls of `step`."""
        self._waiting.append(answer)

    @torch.inference_mode()
    def remove(self, answer: ChosenAnswer) -> None:
        """Stop an answer."""
        if (row := next((n for n, row in enumerate(self._rows) if row.answer is answer), None)) is not None:
            self._leave(row)
        elif answer in self._waiting:
            self._waiting.remove(answer)
        self._alone = [other for other in self._alone if other is not answer]

    @torch.inference_mode()
    def step(self) -> None:
        """Read chunks of new prompts, and generate a token of each answer in progress; complete answers leave.

        Slots grow with the longest answer. If memory no longer holds all of them, the newest answers wait and are
        computed again later, with the tokens that they have.
        """
        self._admit()
        if self._rows:
            self._make_room()
            self._advance_and_read()
        if self._alone:
            self._answer_alone(self._alone.pop(0))
        if not self._rows and self._width > LEAST_WIDTH:
            self._resize(LEAST_WIDTH)  # one long answer keeps no memory allocated

    def usable(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> bool:
        """Return True if slots support the model and sequences of this length.

        It is tried once per model and dtype, on the start of two prompts, against passes without a cache.
        """
        config = self._model.config.get_text_config()
        longest = max(map(len, prompts), default=0) + max_new_tokens
        for name in ("attention_chunk_size", "window_size"):
            if isinstance(window := getattr(config, name, None), int) and 0 < window < longest:
                return False
        scaling = getattr(config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type")) in {"dynamic", "longrope"}:
            return False  # positions that depend on the longest sequence of a batch
        if getattr(config, "is_encoder_decoder", False) or not all(prompts) or max_new_tokens < 1:
            return False
        kinds = _KINDS.setdefault(self._model, {})
        if self._dtype not in kinds:
            tried: list[type[Slots]] = [LlamaSlots] if LlamaSlots.fits(self._model) else []
            tried.append(ModelSlots)
            kinds[self._dtype] = next((kind for kind in tried if self._matches_model(prompts, kind)), None)
        return kinds[self._dtype] is not None

    @property
    def has_own_layers(self) -> bool:
        """True if `evaluation/generation/llama_slots.py` computes the answers; call `usable` first."""
        # Check again: hooks or adapters may have been added to the model since it was tried.
        return _KINDS.get(self._model, {}).get(self._dtype) is LlamaSlots and LlamaSlots.fits(self._model)

    def _slots(self, kind: type[Slots], count: int, width: int) -> Slots:
        """Return slots for `count` answers of at most `width` tokens."""
        if kind is LlamaSlots:
            return LlamaSlots(self._model, count, width)
        return ModelSlots(self._model, count, width, self._dtype)

    @torch.inference_mode()
    def _matches_model(self, prompts: Sequence[Sequence[int]], kind: type[Slots]) -> bool:
        ordered = sorted(prompts, key=len)
        sequences = [(list(ordered[-1]) * TRIED_TOKENS)[:TRIED_TOKENS], list(ordered[0][: TRIED_TOKENS // 2])]
        # This project's own layers compute in the model's dtype, whatever others do.
        dtype = self._model.dtype if kind is LlamaSlots else self._dtype
        bound = TOLERANCE.get(dtype, 1e-3)
        try:
            with _short_window(self._model), autocast(self._model, dtype):
                kept = self._slots(kind, 2, TRIED_TOKENS + TRIED_STEPS)
                batch_logits = self._read_prompts(kept, sequences, 0)
                lengths = [len(sequence) for sequence in sequences]
                for _ in range(TRIED_STEPS):
                    for row, ids in zip(batch_logits, sequences, strict=True):
                        alone = self._model(input_ids=torch.tensor([ids], device=self._model.device), use_cache=False)
                        expected = alone.logits[0, -1].float()
                        if not float((row - expected).abs().max()) <= bound * (1 + float(expected.abs().max())):
                            return False
                        ids.append(int(expected.argmax()))
                    batch_logits = self._step_slots(kept, [ids[-1] for ids in sequences], lengths)
                    lengths = [length + 1 for length in lengths]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return False
        return True

    def _reads_in_chunks(self) -> bool:
        """Return True if transformers' layers of the model read a prompt in chunks with the same result. It is tried
        on a few tokens."""
        ids = [number % self._model.config.get_text_config().vocab_size for number in range(1, TRIED_TOKENS + 1)]
        bound = TOLERANCE.get(self._dtype, 1e-3)
        try:
            with _short_window(self._model):
                kept = self._slots(ModelSlots, 1, TRIED_TOKENS)
                expected = self._read_prompts(kept, [ids], 0)
                for start in range(0, TRIED_TOKENS, TRIED_CHUNK):
                    logits = kept.advance([], [], [], [Chunk(ids[start : start + TRIED_CHUNK], start, [0])]).float()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return False
        return bool((logits - expected).abs().max() <= bound * (1 + expected.abs().max()))

    def _read(self, answers: Sequence[ChosenAnswer], watch: Watch | None = None) -> None:
        """Read the prompts of answers, longest first, into the next slots, and choose the token after each."""
        assert self._kept is not None
        first = len(self._rows)
        self._rows += [_Row(answer, len(answer.ids), next(self._numbers)) for answer in answers]
        self._take(self._read_prompts(self._kept, [answer.ids for answer in answers], first), answers, watch)

    def _advance(self, watch: Watch | None = None) -> None:
        """Choose another token of each answer in the slots."""
        assert self._kept is not None
        logits = self._step_slots(
            self._kept, [row.next_token for row in self._rows], [row.cached for row in self._rows]
        )
        for row in self._rows:
            row.cached += 1
        self._take(logits, [row.answer for row in self._rows], watch)

    def _advance_and_read(self) -> None:
        """Choose another token of each answer whose prompt has been read, and read chunks of the other prompts."""
        assert self._kept is not None
        chunks = self._next_chunks()
        advancing = [number for number, row in enumerate(self._rows) if not row.is_reading]
        ends = [chunk for chunk in chunks if any(chunk.end == len(self._rows[row].answer.prompt) for row in chunk.rows)]
        self._have_waited = bool(ends and advancing) and not self._have_waited
        if self._have_waited:
            chunks, advancing = ends, []
        tokens = [0 if row.is_reading else row.next_token for row in self._rows]
        logits = self._kept.advance(advancing, tokens, [row.cached for row in self._rows], chunks)
        rows_of_logits: list[Sequence[int]] = [[number] for number in advancing]
        for number in advancing:
            self._rows[number].cached += 1
        for chunk in chunks:
            rows_of_logits.append(chunk.rows)
            for number in chunk.rows:
                self._rows[number].cached = chunk.end
        due = [(index, self._rows[number]) for index, numbers in enumerate(rows_of_logits) for number in numbers]
        # A row that is computed again has its next tokens already.
        due = [(index, row) for index, row in due if row.needs_token]
        if due:
            indices = torch.tensor([index for index, _ in due], device=logits.device)
            self._take(logits[indices].float(), [row.answer for _, row in due])

    def _next_chunks(self) -> list[Chunk]:
        """Return the chunks of prompts that are read now, at most STEP_TOKENS together: of the oldest prompt, then of
        those with the fewest tokens left."""
        rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, row in enumerate(self._rows):
            if row.is_reading:
                end = row.cached + self._chunk_tokens
                rows.setdefault((row.cached, tuple(row.answer.prompt[:end])), []).append(number)
        chunks = [Chunk(prompt[start:], start, numbers) for (start, prompt), numbers in rows.items()]

        def age(chunk: Chunk) -> int:
            return min(self._rows[number].number for number in chunk.rows)

        def left(chunk: Chunk) -> int:
            return len(self._rows[chunk.rows[0]].answer.prompt) - chunk.start

        oldest = min(chunks, key=age, default=None)
        chunks.sort(key=lambda chunk: (chunk is not oldest, left(chunk), age(chunk)))
        total = 0
        read_now: list[Chunk] = []
        for chunk in chunks:
            total += len(chunk.ids)
            if read_now and total > STEP_TOKENS:
                break
            read_now.append(chunk)
        return read_now

    def _take(self, logits: Tensor, answers: Sequence[ChosenAnswer], watch: Watch | None = None) -> None:
        """Choose the next tokens of answers (N) from logits (N, V); complete answers leave."""
        if watch is not None:
            watch(logits, answers)
        if len(self._unused):
            logits = logits.index_fill(1, self._unused, -torch.inf)
        for answer, token in zip(answers, choose_tokens(logits, answers), strict=True):
            answer.take(token)
        for row in range(len(self._rows) - 1, -1, -1):
            if self._rows[row].answer.is_over:
                self._leave(row)

    def _leave(self, row: int) -> None:
        """Free an answer's slot; the last answer moves there, so that those in progress are in the first slots."""
        last = self._rows.pop()
        if row < len(self._rows):
            assert self._kept is not None
            self._kept.move(len(self._rows), row, last.cached)
            self._rows[row] = last

    def _begins(self, answer: ChosenAnswer) -> bool:
        """Report an answer's prompt if that is wanted; return False, and end the answer, if it is to have no tokens."""
        if answer.prompt_logprobs is not None:
            answer.report(self._prompt_tokens(answer))
        if answer.options.max_new_tokens < 1:
            answer.finish()
        return not answer.is_over

    def _admit(self) -> None:
        """Give slots to the answers that fit, in order; also start those that are generated alone."""
        while self._waiting:
            answer = self._waiting[0]
            if not self._begins(answer):
                pass
            elif not self.usable([answer.prompt], answer.options.max_new_tokens):
                self._alone.append(answer)
            else:
                width = max(self._width, self._width_for(len(answer.ids) + 1))
                if len(self._rows) >= self._capacity_of(width):
                    return
                if width > self._width:
                    self._resize(width)
                self._rows.append(_Row(answer, self._copy_shared(answer.prompt), next(self._numbers)))
            self._waiting.popleft()

    def _copy_shared(self, prompt: Sequence[int]) -> int:
        """Copy the chunks at the beginning of a prompt that a slot holds already to the next slot; return their number
        of tokens."""
        assert self._kept is not None
        best, source = 0, 0
        for number, row in enumerate(self._rows):
            end = min(row.cached, len(row.answer.prompt), len(prompt) - 1) // self._chunk_tokens * self._chunk_tokens
            while end > best and list(row.answer.prompt[:end]) != list(prompt[:end]):
                end -= self._chunk_tokens
            if end > best:
                best, source = end, number
        if best:
            self._kept.move(source, len(self._rows), best)
        return best

    def _answer_alone(self, answer: ChosenAnswer) -> None:
        """Complete an answer that slots do not support."""
        try:
            with autocast(self._model, self._dtype):
                answer_by_transformers(self._model, [answer], self._unused)
        except StemmaError as error:
            answer.error, answer.is_over = error, True

    def _make_room(self) -> None:
        """Widen the slots for the next tokens; if memory does not hold all answers then, the newest wait."""
        width = self._width_for(max(row.cached + 1 for row in self._rows))
        if width <= self._width:
            return
        # Rows move when one leaves: the newest is the one with the fewest tokens.
        while len(self._rows) > self._capacity_of(width):
            newest = min(range(len(self._rows)), key=lambda row: len(self._rows[row].answer.new))
            self._waiting.appendleft(self._rows[newest].answer)
            self._leave(newest)
        self._resize(width)

    def _width_for(self, tokens: int) -> int:
        """Return the places of slots that hold at least this number of tokens, and some more, so that they seldom
        grow."""
        width = LEAST_WIDTH
        while width < tokens:
            width *= 2
        if width > LEAST_WIDTH and tokens <= width // 4 * 3:
            width = width // 4 * 3
        positions = getattr(self._model.config, "max_position_embeddings", None) or width
        return min(width, max(tokens, min(positions, tokens_in_memory(self._model, self._cache_bytes))))

    def _capacity_of(self, width: int) -> int:
        return min(self._at_once, slots_in_memory(self._model, width, self._cache_bytes))

    def _resize(self, width: int) -> None:
        if self._kept is None:
            kind = LlamaSlots if self.has_own_layers else ModelSlots
            self._kept = self._slots(kind, self._capacity_of(width), width)
            if kind is ModelSlots and not self._reads_in_chunks():
                self._chunk_tokens = sys.maxsize
        else:
            self._kept.resize(self._capacity_of(width), width)
        self._width = width

    def _read_prompts(self, kept: Slots, prompts: Sequence[Sequence[int]], first: int) -> Tensor:
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

    def _step_slots(self, kept: Slots, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return the logits (N, V) after one more token in each of the first N slots; the cache holds `lengths` tokens
        of each."""
        device = self._model.device
        positions = torch.tensor(lengths, device=device)
        return kept.step(torch.tensor(tokens, device=device), positions, max(lengths) + 1).float()

    def _prompt_tokens(self, answer: ChosenAnswer) -> list[Token]:
        """Return the tokens of a prompt with their log-probabilities, except for the first, which nothing precedes."""
        ids, likeliest = answer.prompt, answer.prompt_logprobs or 0
        if len(ids) == 1:
            return [Token(ids[0])]
        logits = self._model(input_ids=torch.tensor([list(ids)], device=self._model.device), use_cache=False).logits
        following = torch.tensor(ids[1:], device=self._model.device)
        return [Token(ids[0]), *logprobs_of(logits[0, :-1].float(), following, [likeliest] * (len(ids) - 1))]


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    on_step: Callable[[int], None] = lambda done: None,
    *,
    numbers: Sequence[int] | None = None,
    at_once: int = AT_ONCE,
    dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Return the new ids of each prompt, including the stop id if there is one.

    Args:
        model: In evaluation mode.
        prompts: Token ids.
        options: Of all answers; `number` is that of the first.
        on_step: As of `Decoder.answer`.
        numbers: Added to `options.number` for each prompt; by default its place.
        at_once, dtype: As of `Decoder`.
    """
    answers = [
        ChosenAnswer(prompt, replace(options, number=options.number + number))
        for number, prompt in zip(numbers or range(len(prompts)), prompts, strict=True)
    ]
    Decoder(model, at_once, dtype).answer(answers, on_step)
    return [answer.new for answer in answers]


def slots_in_memory(model: PreTrainedModel, length: int, cache_bytes: int | None = None) -> int:
    """Return the number of sequences of `length` tokens whose keys and values fit in memory, at least one.

    cache_bytes: as of `Decoder`.
    """
    return max(1, tokens_in_memory(model, cache_bytes) // max(1, length))


def tokens_in_memory(model: PreTrainedModel, cache_bytes: int | None = None) -> int:
    """Return the number of tokens whose keys and values fit in memory. cache_bytes: as of `Decoder`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:  # layers without keys and values
        return sys.maxsize
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    available = cache_bytes or CACHE_BYTES
    if model.device.type == "cuda" and cache_bytes is None:
        available = max(available, int(CACHE_SHARE * torch.cuda.mem_get_info(model.device)[0]))
    return available // (2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


@contextmanager
def _short_window(model: PreTrainedModel) -> Iterator[None]:
    """Shorten a model's sliding window for the trial, which has few tokens, so that they leave it."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not window:
        yield
        return
    config.sliding_window = min(window, TRIED_WINDOW)
    try:
        yield
    finally:
        config.sliding_window = window


_KINDS: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, type[Slots] | None]] = WeakKeyDictionary()
"""Kind of slots for each model and dtype that were tried; None if no kind works."""
