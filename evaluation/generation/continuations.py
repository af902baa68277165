"""Continuations from any causal language model of transformers, token for token those of its own `generate`.

Every architecture has its own way to keep what it has read (keys and values, a recurrent state, both), and `generate`
knows them all. Where the model bears it, `evaluation/generation/decoding.py` does the same work in larger batches that
lose what has ended: `generate` takes prompts of one length at a time and carries all to the last. What is drawn stays
the same, since each batch of `generate` has its own generator, set to where it would find the one that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from evaluation.generation.decoding import Decoder, Pick, slots_in_memory
from evaluation.generation.random_state import seeded

AT_ONCE = 256  # part of what is drawn under a seed, so it is no setting
ROWS_AT_ONCE = 128
"""Answers in a pass where batches of `generate` are taken together."""
NEARLY = 1e-4
"""How much a sum of probabilities may differ by the order of its terms, and more."""
ROWS_IN_CACHE = 16
"""Rows of a few thousand random numbers that are made at once."""
NUMBERS_AT_ONCE = 1 << 25
"""Logits in such a pass, and random numbers that are kept for its steps: 128 MB."""


COLDEST = 1e-9
"""A lower temperature takes the likeliest token too: divided by it, logits of float32 are all equal or infinite."""


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn; temperature 0 takes the likeliest token. bias: what is added to the logit of a token
    that would complete a sequence of ids."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 17
    bias: Mapping[tuple[int, ...], float] | None = None

    def __post_init__(self) -> None:
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: Collection[int],
    on_token: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The new ids of each prompt, with the stop id where there is one; the same under the same seed.

    on_token: told before each next token of a batch how many prompts are done; what it raises ends the work.
    """
    # Rows of one length need no padding and no attention mask, which is faster and leaves nothing to get wrong.
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    config = GenerationConfig(
        do_sample=bool(drawn),
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=sorted(stops),  # not None: the model's own would take its place
        pad_token_id=min(stops, default=0),
        sequence_bias=dict(sampling.bias) if sampling.bias else None,
        suppress_tokens=model.generation_config.suppress_tokens if model.generation_config else None,
        **drawn,
    )
    # Only so are no defaults of the model's own taken for what is not said here, whichever version of transformers.
    copied = copy(model)
    copied.generation_config = config
    batches = [
        rows[start : start + AT_ONCE] for _, rows in sorted(by_length.items()) for start in range(0, len(rows), AT_ONCE)
    ]
    # On a GPU what is drawn depends on how its threads share the work; nobody has tried that these are the same there.
    if not sampling.bias and model.device.type == "cpu" and Decoder(model, 1).usable(prompts, sampling.max_new_tokens):
        return _Together(model, prompts, sampling, stops, on_token).all(batches)
    continuations: list[list[int]] = [[] for _ in prompts]
    done = 0
    with seeded(sampling.seed, model.device):
        for batch in batches:
            length = len(prompts[batch[0]])
            ids = torch.tensor([list(prompts[number]) for number in batch], device=model.device)  # (B, T)
            out: Any = copied.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_Told(on_token, done)]),
            )
            for number, row in zip(batch, out[:, length:].tolist(), strict=True):
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                continuations[number] = row[: end + 1]
            done += len(batch)
    return continuations


class _Together:
    """Several batches of `generate` in one, each with its own draws.

    Where all answers of a batch end early, `generate` draws no more for it, and the batches behind it find the
    generator earlier than was thought: they are drawn again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stops: Collection[int],
        on_token: Callable[[int], None],
    ) -> None:
        self._model, self._prompts, self._sampling = model, prompts, sampling
        self._stops, self._on_token = frozenset(stops), on_token
        self._longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
        self._words = len(model.get_output_embeddings().weight)
        self._change = LogitsProcessorList()
        self._nucleus: TopPLogitsWarper | None = None
        writes = model.generation_config
        if writes and writes.suppress_tokens:
            self._change.append(SuppressTokensLogitsProcessor(writes.suppress_tokens, device=str(model.device)))
        if sampling.temperature:
            if sampling.temperature != 1.0:
                self._change.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1.0:
                self._nucleus = TopPLogitsWarper(sampling.top_p)

    def all(self, batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """The new ids of each prompt; batches: the prompts' numbers."""
        answers: list[list[int]] = [[] for _ in self._prompts]
        if not self._sampling.temperature:
            numbers = [number for batch in batches for number in batch]
            slots = min(ROWS_AT_ONCE, slots_in_memory(self._model, self._longest))
            for number, answer in zip(numbers, self._answer(numbers, self._likeliest, slots, 0), strict=True):
                answers[number] = answer
            return answers
        state = torch.Generator().manual_seed(self._sampling.seed).get_state()
        rows_at_once = min(ROWS_AT_ONCE, NUMBERS_AT_ONCE // self._words, slots_in_memory(self._model, self._longest))
        left, most, done = list(batches), rows_at_once, 0
        while left:
            wave, draws = [left[0]], [_Draws(state, len(left[0]), self._words)]
            for batch in left[1:]:
                if sum(map(len, wave)) + len(batch) > most:
                    break
                draws.append(_Draws(draws[-1].state_after(self._sampling.max_new_tokens), len(batch), self._words))
                wave.append(batch)
            found = self._drawn(wave, draws, done)
            good = 0
            for batch, own in zip(wave, found, strict=True):
                for number, answer in zip(batch, own, strict=True):
                    answers[number] = answer
                state = draws[good].state
                good += 1
                if max(map(len, own)) < self._sampling.max_new_tokens:
                    break
            rows = sum(map(len, wave[:good]))
            # Where one has ended early others will: no more are begun than were of use.
            most = rows_at_once if good == len(wave) else rows
            done += rows
            left = left[good:]
        return answers

    def _drawn(self, wave: Sequence[Sequence[int]], draws: Sequence[_Draws], done: int) -> list[list[list[int]]]:
        """The answers of each batch, all of which begin together and step together."""
        owners = [(one, own) for one, rows in enumerate(wave) for own in range(len(rows))]

        def draw(logits: Tensor, rows: Sequence[int]) -> Tensor:
            """As torch.multinomial draws one: the likeliest by probability over an exponential number."""
            by_batch: dict[int, list[tuple[int, int]]] = {}
            for at, row in enumerate(rows):
                one, own = owners[row]
                by_batch.setdefault(one, []).append((at, own))
            tokens = torch.empty(len(rows), dtype=torch.long)
            for one, pairs in by_batch.items():  # also by batch so that what it works on lies in the processor's cache
                numbers = draws[one].next()
                places, drawn = torch.tensor(pairs).unbind(1)
                tokens[places] = self._first(self._scores(logits[places]), numbers[drawn])
            return tokens

        found = iter(self._answer([number for rows in wave for number in rows], draw, len(owners), done))
        return [[next(found) for _ in rows] for rows in wave]

    def _answer(self, numbers: Sequence[int], pick: Pick, slots: int, done: int) -> list[list[int]]:
        return Decoder(self._model, slots).answer(
            [self._prompts[number] for number in numbers],
            self._sampling.max_new_tokens,
            pick,
            lambda number, answer: answer[-1] in self._stops,
            lambda over: self._on_token(done + over),
        )

    def _first(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """(N,): the token of the largest probability over number, among the likeliest that have `top_p` together.

        scores, numbers (N, V). Which tokens those are takes a sort, ten times what all else takes. Whether a token is
        among them is told by the sum of what is no likelier: the first that is wins, sorted only where that is close.
        """
        shares = scores.softmax(-1)
        values = shares / numbers
        found = values.argmax(-1)
        if self._nucleus is None:
            return found
        out = 1 - self._nucleus.top_p
        left = torch.arange(len(scores))
        while True:
            own, chosen = shares[left], found[left, None]
            below = own.masked_fill_(own > own.gather(-1, chosen), 0).sum(-1)
            near = left[(below - out).abs() <= NEARLY]
            if len(near):
                kept: Tensor = self._nucleus(torch.empty(len(near), 0, dtype=torch.long), scores[near])
                found[near] = kept.softmax(-1).div_(numbers[near]).argmax(-1)
            left = left[below < out - NEARLY]
            if not len(left):
                return found
            # Outside: the next of all tokens is asked for.
            values[left, found[left]] = 0
            found[left] = values[left].argmax(-1)

    def _likeliest(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return self._scores(logits).argmax(-1)

    def _scores(self, logits: Tensor) -> Tensor:
        """What `generate` makes of the logits (N, V) that it draws from; none of its rules asks for the ids before."""
        changed: Tensor = self._change(torch.empty(len(logits), 0, dtype=torch.long), logits)
        return changed


class _Draws:
    """What a batch of `generate` draws from a state of its generator on: an exponential number for each answer and word
    at each step."""

    def __init__(self, state: Tensor, rows: int, words: int) -> None:
        self._shape = rows, words
        self._generator = torch.Generator()
        self._generator.set_state(state)
        self._made: list[Tensor] = []
        self._states = [state]
        self._used = 0

    @property
    def state(self) -> Tensor:
        """The generator's behind the last step that was taken."""
        return self._states[self._used]

    def next(self) -> Tensor:
        """(rows, words) of the next step."""
        if self._used == len(self._states) - 1:
            self._make()
        self._used += 1
        return self._made.pop(0)

    def state_after(self, steps: int) -> Tensor:
        """The generator's behind so many steps. Their numbers are kept, unless they are too many."""
        rows, words = self._shape
        if ROWS_AT_ONCE * words * steps <= NUMBERS_AT_ONCE:
            for _ in range(steps):
                self._make()
            return self._states[steps]
        ahead, thrown = torch.Generator(), torch.empty(rows, words, dtype=torch.double)
        ahead.set_state(self.state)
        for _ in range(steps):
            thrown.uniform_(generator=ahead)
        return ahead.get_state()

    def _make(self) -> None:
        self._made.append(exponential(self._shape, self._generator))
        self._states.append(self._generator.get_state())


def exponential(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """What `Tensor.exponential_` draws (rows, columns), in a third of its time: it takes a logarithm at a time."""
    drawn = torch.empty(shape)
    for rows in drawn.split(ROWS_IN_CACHE):
        uniform = torch.empty(rows.shape, dtype=torch.double).uniform_(generator=generator)
        rows.copy_(uniform.neg_().log1p_().neg_())
    return drawn


class _Told(StoppingCriteria):
    """Never stops a sequence, but tells how many prompts are done."""

    def __init__(self, on_token: Callable[[int], None], done: int) -> None:
        self._on_token, self._done = on_token, done

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._on_token(self._done)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
