"""Answers from the model of a stage: `evaluation/generation/decoding.py` in the stage's precision.

An answer's draws depend on the seed and its prompt's number alone, so that neither batches nor ranks change it except
by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedModel

from evaluation.generation.decoding import generate
from evaluation.generation.token_choice import SamplingOptions
from training.core.hardware import Hardware


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stops: Collection[int],
    hardware: Hardware,
    seed: int = 0,
    batch_size: int = 64,
    on_batch: Callable[[int], None] = lambda done: None,
    only: slice | None = None,
) -> list[list[int]]:
    """Return the new ids of each prompt, with the stop id where there is one.

    Args:
        temperature: 0 takes the likeliest token.
        batch_size: Most answers per forward pass.
        on_batch: Called with the number of complete answers.
        only: The prompts to answer; their answers are the same as in a call without it.
    """
    numbers = range(len(prompts))[only or slice(None)]
    options = SamplingOptions(max_new_tokens, frozenset(stops), temperature, seed=seed)
    was_training = model.training
    model.eval()
    try:
        answers = generate(
            model,
            [prompts[number] for number in numbers],
            options,
            on_batch,
            numbers=numbers,
            at_once=batch_size,
            dtype=hardware.compute,
        )
    finally:
        model.train(was_training)
    on_batch(len(answers))
    return answers
