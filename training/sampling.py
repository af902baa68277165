"""Answers from a causal language model: batched, with a key-value cache, from a seed of their own.

Answers that have ended leave the batch, which the proven families (`training/families.py`) are known to bear. Any
other answers by `evaluation/generation.py`, slower: some of them keep a recurrent state or count positions in their own
way, and would give other answers here without an error.

Shapes: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evaluation.generation import Sampling, generate
from training.families import FAMILIES
from training.hardware import Hardware
from training.new_tokens import unused_ids


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
) -> list[list[int]]:
    """The new ids of each prompt, with the stop id where there is one; temperature 0 takes the likeliest token.

    Prompts of like length are answered together. `on_batch` hears how many are done.
    """
    if model.config.model_type not in FAMILIES:
        with hardware.autocast():
            return generate(model, prompts, Sampling(max_new_tokens, temperature, seed=seed), stops, on_batch)
    generator = torch.Generator(hardware.device).manual_seed(seed)
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for row, token in _stream(
            [prompts[n] for n in chosen], model, max_new_tokens, temperature, stops, hardware, generator
        ):
            answers[chosen[row]].append(token)
        on_batch(start + len(chosen))
    return answers


def stream(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    stops: set[int],
    hardware: Hardware,
    seed: int = 0,
) -> Iterator[int]:
    """The ids of one answer as they come; all at the end for a family that is not proven."""
    if model.config.model_type not in FAMILIES:
        with hardware.autocast():
            (whole,) = generate(model, [prompt], Sampling(max_new_tokens, temperature, seed=seed), stops)
        yield from whole
        return
    generator = torch.Generator(hardware.device).manual_seed(seed)
    for _, token in _stream([prompt], model, max_new_tokens, temperature, stops, hardware, generator):
        yield token


def _stream(
    prompts: Sequence[Sequence[int]],
    model: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    stops: set[int],
    hardware: Hardware,
    generator: torch.Generator,
) -> Iterator[tuple[int, int]]:
    """Yields (row, token) step by step; rows that stopped leave the batch."""
    device = hardware.device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = torch.arange(len(prompts))
    unused = torch.tensor(unused_ids(model), dtype=torch.long, device=device)
    cache = DynamicCache()
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            with torch.no_grad(), hardware.autocast():
                logits = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1].float().index_fill(1, unused, -torch.inf)  # fmt: skip
            tokens = choose(logits, temperature, generator)
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


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token id for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
