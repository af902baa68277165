"""Answers from a causal language model: batched, with a key-value cache, each drawn from its own seed.

An answer's draws depend on the seed and its prompt's number alone, so that neither batches nor ranks change it except
by rounding. Equal prompts of a batch are read once; each answer then continues from a copy of their keys and values. On
a CPU `evaluation/generation/decoding.py` does it where the model supports that, in fp32 or with its own layers: keys
and values stay in place, and the next prompts take the slots of answers that have ended.

Answers that have ended leave the batch, which is known to work for the proven families (`training/config/families.py`).
Other families answer through `evaluation/generation/continuations.py`, which is slower: some of them keep a recurrent
state or count positions in their own way, and would give other answers here without an error.

Shapes: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evaluation.generation.continuations import COLDEST, Sampling, generate
from evaluation.generation.decoding import Decoder, slots_in_memory
from infra.errors import stage_error
from training.config.families import FAMILIES
from training.core.hardware import Hardware
from training.model.new_tokens import unused_ids


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stops: set[int],
    hardware: Hardware,
    seed: int = 0,
    batch_size: int = 64,
    on_batch: Callable[[int], None] = lambda done: None,
    only: slice | None = None,
) -> list[list[int]]:
    """Return the new ids of each prompt, with the stop id where there is one; temperature 0 takes the likeliest token.

    Prompts of similar length are answered together. `on_batch` gets the number of prompts done.
    only: the prompts to answer; their answers are the same as in a call without it.
    """
    wanted = range(len(prompts))[only or slice(None)]
    if model.config.model_type not in FAMILIES:
        with hardware.autocast():
            found = generate(model, prompts, Sampling(max_new_tokens, temperature, seed=seed), stops, on_batch)
        return [found[number] for number in wanted]
    if _in_slots(model, [prompts[number] for number in wanted], max_new_tokens, hardware):
        return _by_slots(
            [prompts[number] for number in wanted], model, max_new_tokens, temperature, stops, batch_size, on_batch,
            draws_of(wanted, max_new_tokens, seed) if temperature else None,
        )  # fmt: skip
    answers: dict[int, list[int]] = {number: [] for number in wanted}
    order = sorted(wanted, key=lambda number: (len(prompts[number]), number))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        draws = draws_of(chosen, max_new_tokens, seed) if temperature else None

        def pick(logits: Tensor, rows: Tensor, step: int, draws: Tensor | None = draws) -> Tensor:
            return choose(logits, temperature, None if draws is None else draws[rows, step].to(logits.device))

        for row, token in stream([prompts[n] for n in chosen], model, max_new_tokens, stops, hardware, pick):
            answers[chosen[row]].append(token)
        on_batch(start + len(chosen))
    return list(answers.values())


def _in_slots(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, hardware: Hardware
) -> bool:
    """Return True if `Decoder` answers these: on a CPU, in fp32 or where it has its own layers.

    Those compute in fp32 and are faster even than transformers' under bf16 autocast, which casts the weights again for
    each token.
    """
    if not prompts or hardware.device.type != "cpu":
        return False
    decoder, was_training = Decoder(model, 1), model.training
    model.eval()
    try:
        usable = decoder.usable(prompts, max_new_tokens)
    finally:
        model.train(was_training)
    return usable and (hardware.compute == torch.float32 or decoder.has_own_layers)


def _by_slots(
    prompts: Sequence[Sequence[int]],
    model: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    stops: set[int],
    batch_size: int,
    on_batch: Callable[[int], None],
    draws: Tensor | None,
) -> list[list[int]]:
    """Return the new ids of each prompt. draws: of `draws_of` for these prompts."""
    unused = torch.tensor(unused_ids(model), dtype=torch.long)
    steps = torch.zeros(len(prompts), dtype=torch.long)

    def pick(logits: Tensor, numbers: Sequence[int]) -> Tensor:
        rows = torch.tensor(numbers)
        tokens = choose(
            logits.index_fill(1, unused, -torch.inf), temperature, None if draws is None else draws[rows, steps[rows]]
        )
        steps[rows] += 1
        return tokens

    longest = max(map(len, prompts)) + max_new_tokens
    decoder = Decoder(model, min(batch_size, slots_in_memory(model, longest)))
    was_training = model.training
    model.eval()
    try:
        answers = decoder.answer(prompts, max_new_tokens, pick, lambda _, answer: answer[-1] in stops, on_batch)
    finally:
        model.train(was_training)
    on_batch(len(prompts))
    return answers


def stream(
    prompts: Sequence[Sequence[int]],
    model: PreTrainedModel,
    max_new_tokens: int,
    stops: Collection[int],
    hardware: Hardware,
    pick: Callable[[Tensor, Tensor, int], Tensor],
) -> Iterator[tuple[int, int]]:
    """Yield (row, token) step by step for a model of a proven family; rows that stopped leave the batch.

    pick: returns the tokens (N,) for logits (N, V), given the rows (N,) that they belong to and the step.
    """
    device = hardware.device
    width = max(map(len, prompts))
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    read = torch.tensor([numbers[tuple(prompt)] for prompt in prompts], device=device)  # the prompt of each answer
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in numbers], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in numbers], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = torch.arange(len(prompts))
    unused = torch.tensor(unused_ids(model), dtype=torch.long, device=device)
    cache = DynamicCache()
    was_training = model.training
    model.eval()
    try:
        for step in range(max_new_tokens):
            with torch.no_grad(), hardware.autocast():
                logits = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1].float().index_fill(1, unused, -torch.inf)  # fmt: skip
            if len(ids) < len(rows):
                logits, positions, mask = logits[read], positions[read], mask[read]
                cache.batch_select_indices(read)
            tokens = pick(logits, rows, step).to(device)
            listed = tokens.tolist()
            yield from zip(rows.tolist(), listed, strict=True)
            alive = torch.tensor([number for number, token in enumerate(listed) if token not in stops], device=device)
            if not len(alive):
                return
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            if len(alive) < len(listed):
                ids, positions, mask, rows = ids[alive], positions[alive], mask[alive], rows[alive.cpu()]
                cache.batch_select_indices(alive)
    finally:
        model.train(was_training)


def draws_of(numbers: Sequence[int], steps: int, seed: int) -> Tensor:
    """Return the draws that decide the tokens of the prompts with these numbers (B, steps): uniform in [0, 1), each row
    from (seed, number) alone."""
    rows = [np.random.default_rng([seed % 2**64, number]).random(steps) for number in numbers]
    return torch.from_numpy(np.stack(rows))


def choose(logits: Tensor, temperature: float, draws: Tensor | None = None) -> Tensor:
    """Return one token id for each row of logits (B, V): the likeliest, or the one whose interval of the distribution
    function contains the row's draw (B,). A temperature below COLDEST takes the likeliest too. Raises StageError
    `not_finite` for a draw from NaN."""
    if draws is None or temperature < COLDEST:
        return logits.argmax(-1)
    below = (logits / temperature).softmax(-1).double().cumsum(-1)
    if below[:, -1].isnan().any():  # a draw from these would be a token id that does not exist
        raise stage_error(
            "not_finite",
            "",
            "expected finite logits of the model that answers, and they contain NaN",
            "look where its training diverged, and lower optimizer.learning_rate",
        )
    # Never exactly the last sum, after which there is no token.
    at = torch.minimum(draws * below[:, -1], torch.nextafter(below[:, -1], below.new_zeros(())))
    return torch.searchsorted(below, at[:, None], right=True)[:, 0]
