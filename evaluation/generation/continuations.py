"""Continuations from any causal language model of transformers, token for token those of the model's own `generate`.

Every architecture stores what it has read in its own way (keys and values, a recurrent state, both), and `generate`
supports them all. Where the model allows it, `evaluation/generation/decoding.py` does the same work in larger batches
and drops finished sequences; `generate` takes prompts of one length at a time and carries all of them until the last
one ends. The drawn tokens stay the same, because each batch of `generate` has its own generator, set to the state in
which the batch would find the shared one.
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
"""Answers per pass when batches of `generate` are combined."""
NEARLY = 1e-4
"""Upper bound, with a margin, of the difference that the order of its terms makes to a sum of probabilities."""
ROWS_IN_CACHE = 16
"""Rows of a few thousand random numbers that are generated at once."""
NUMBERS_AT_ONCE = 1 << 25
"""Logits per such pass, and random numbers kept for its steps: 128 MB."""


COLDEST = 1e-9
"""Lowest temperature that samples; a lower one takes the likeliest token, since float32 logits divided by it are all
equal or infinite."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing continuations; temperature 0 takes the likeliest token. bias: value added to the logit of a
    token that would complete a sequence of ids."""

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
    """Return the new ids of each prompt, including the stop id if there is one; the same seed gives the same ids.

    on_token: called before each next token of a batch with the number of finished prompts; an exception that it raises
    ends the work.
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
    # Otherwise the model's own defaults would fill in what is not set here, depending on the version of transformers.
    copied = copy(model)
    copied.generation_config = config
    batches = [
        rows[start : start + AT_ONCE] for _, rows in sorted(by_length.items()) for start in range(0, len(rows), AT_ONCE)
    ]
    # On a GPU the drawn tokens depend on how its threads share the work; equality there is untested.
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
                end = next((index for index, token in enumerate(row) if token in stops), len(row))
                continuations[number] = row[: end + 1]
            done += len(batch)
    return continuations


class _Together:
    """Several batches of `generate` in one, each with its own draws.

    If all answers of a batch end early, `generate` draws no more for it, and the generator is at an earlier state for
    the next batches than predicted: these batches are drawn again.
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
        """Return the new ids of each prompt. batches: the prompts' numbers."""
        answers: list[list[int]] = [[] for _ in self._prompts]
        if not self._sampling.temperature:
            numbers = [number for batch in batches for number in batch]
            slots = min(ROWS_AT_ONCE, slots_in_memory(self._model, self._longest))
            for number, answer in zip(numbers, self._answer(numbers, self._likeliest, slots, 0), strict=True):
                answers[number] = answer
            return answers
        state = torch.Generator().manual_seed(self._sampling.seed).get_state()
        rows_at_once = min(ROWS_AT_ONCE, NUMBERS_AT_ONCE // self._words, slots_in_memory(self._model, self._longest))
        remaining, max_rows, done = list(batches), rows_at_once, 0
        while remaining:
            wave, draws = [remaining[0]], [_Draws(state, len(remaining[0]), self._words)]
            for batch in remaining[1:]:
                if sum(map(len, wave)) + len(batch) > max_rows:
                    break
                draws.append(_Draws(draws[-1].state_after(self._sampling.max_new_tokens), len(batch), self._words))
                wave.append(batch)
            drawn = self._draw_wave(wave, draws, done)
            good = 0
            for batch, batch_answers in zip(wave, drawn, strict=True):
                for number, answer in zip(batch, batch_answers, strict=True):
                    answers[number] = answer
                state = draws[good].state
                good += 1
                if max(map(len, batch_answers)) < self._sampling.max_new_tokens:
                    break
            rows = sum(map(len, wave[:good]))
            # If one batch ended early, others will too: start no more rows than were useful.
            max_rows = rows_at_once if good == len(wave) else rows
            done += rows
            remaining = remaining[good:]
        return answers

    def _draw_wave(self, wave: Sequence[Sequence[int]], draws: Sequence[_Draws], done: int) -> list[list[list[int]]]:
        """Return the answers of each batch; all batches start together and advance in step."""
        owners = [(batch_index, row_index) for batch_index, rows in enumerate(wave) for row_index in range(len(rows))]

        def draw(logits: Tensor, rows: Sequence[int]) -> Tensor:
            """Draw one token per row as torch.multinomial does: the largest probability divided by an exponential
            random number."""
            by_batch: dict[int, list[tuple[int, int]]] = {}
            for position, row in enumerate(rows):
                batch_index, row_index = owners[row]
                by_batch.setdefault(batch_index, []).append((position, row_index))
            tokens = torch.empty(len(rows), dtype=torch.long)
            for batch_index, pairs in by_batch.items():  # by batch also so that the working set stays in cache
                numbers = draws[batch_index].next()
                positions, drawn = torch.tensor(pairs).unbind(1)
                tokens[positions] = self._draw_tokens(self._scores(logits[positions]), numbers[drawn])
            return tokens

        answers = iter(self._answer([number for rows in wave for number in rows], draw, len(owners), done))
        return [[next(answers) for _ in rows] for rows in wave]

    def _answer(self, numbers: Sequence[int], pick: Pick, slots: int, done: int) -> list[list[int]]:
        return Decoder(self._model, slots).answer(
            [self._prompts[number] for number in numbers],
            self._sampling.max_new_tokens,
            pick,
            lambda number, answer: answer[-1] in self._stops,
            lambda over: self._on_token(done + over),
        )

    def _draw_tokens(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """Return (N,): the token with the largest ratio of probability to number, among the likeliest tokens that have
        `top_p` together.

        scores, numbers (N, V). Finding these tokens needs a sort, which takes ten times as long as the rest. The sum of
        the probabilities of all tokens that are no likelier decides instead if a token is among them. Tokens are tried
        in order of their ratio until one is, and rows are sorted only where that sum is close to the limit.
        """
        shares = scores.softmax(-1)
        values = shares / numbers
        tokens = values.argmax(-1)
        if self._nucleus is None:
            return tokens
        out = 1 - self._nucleus.top_p
        remaining = torch.arange(len(scores))
        while True:
            row_shares, chosen = shares[remaining], tokens[remaining, None]
            below = row_shares.masked_fill_(row_shares > row_shares.gather(-1, chosen), 0).sum(-1)
            near = remaining[(below - out).abs() <= NEARLY]
            if len(near):
                kept: Tensor = self._nucleus(torch.empty(len(near), 0, dtype=torch.long), scores[near])
                tokens[near] = kept.softmax(-1).div_(numbers[near]).argmax(-1)
            remaining = remaining[below < out - NEARLY]
            if not len(remaining):
                return tokens
            # Outside the nucleus: try the next token.
            values[remaining, tokens[remaining]] = 0
            tokens[remaining] = values[remaining].argmax(-1)

    def _likeliest(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return self._scores(logits).argmax(-1)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return the logits (N, V) as `generate` modifies them before drawing; no rule here needs the previous ids."""
        changed: Tensor = self._change(torch.empty(len(logits), 0, dtype=torch.long), logits)
        return changed


class _Draws:
    """Draws of one batch of `generate` from a given generator state: an exponential random number per answer and word
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
        """Generator state after the last step that was taken."""
        return self._states[self._used]

    def next(self) -> Tensor:
        """Return (rows, words) for the next step."""
        if self._used == len(self._states) - 1:
            self._make()
        self._used += 1
        return self._made.pop(0)

    def state_after(self, steps: int) -> Tensor:
        """Return the generator state after `steps` steps. Their numbers are kept, unless there are too many."""
        rows, words = self._shape
        if ROWS_AT_ONCE * words * steps <= NUMBERS_AT_ONCE:
            for _ in range(steps):
                self._make()
            return self._states[steps]
        ahead, discarded = torch.Generator(), torch.empty(rows, words, dtype=torch.double)
        ahead.set_state(self.state)
        for _ in range(steps):
            discarded.uniform_(generator=ahead)
        return ahead.get_state()

    def _make(self) -> None:
        self._made.append(exponential(self._shape, self._generator))
        self._states.append(self._generator.get_state())


def exponential(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return (rows, columns) equal to the draws of `Tensor.exponential_`, in a third of its time, as that takes one
    logarithm at a time."""
    drawn = torch.empty(shape)
    for rows in drawn.split(ROWS_IN_CACHE):
        uniform = torch.empty(rows.shape, dtype=torch.double).uniform_(generator=generator)
        rows.copy_(uniform.neg_().log1p_().neg_())
    return drawn


class _Told(StoppingCriteria):
    """Stopping criterion that never stops a sequence, but reports the number of finished prompts."""

    def __init__(self, on_token: Callable[[int], None], done: int) -> None:
        self._on_token, self._done = on_token, done

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._on_token(self._done)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
