"""Division of a model's layers and a batch's sequences for a pipeline (launch.pipeline_parallel).

This module imports nothing heavy, since configs are validated with it before anything runs.
"""

from __future__ import annotations

from infra.errors import Problem
from training.config.families import FAMILIES

_PATH = "launch.pipeline_parallel"
_ENOUGH = 4
"""Microbatches per rank above which waiting for other stages is negligible (Huang et al. 2019, section 2.3)."""


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one of `stages` parts of a model; earlier parts have one more where they differ, since the output
    layer is computed with the last."""
    first, end = (-(-index * layers // stages) for index in (stage, stage + 1))
    return range(first, end)


def microbatch_of(sequences: int, count: int, pieces: int = 1, at_most: int | None = None) -> int | None:
    """Return the sequences per microbatch for a batch of `sequences` in a pipeline of `count` ranks with `pieces` parts
    of the model each; None if no size is possible.

    This is the largest size of equal microbatches that are at least four times as many as the ranks, or the smallest
    size if a batch has too few sequences for that.

    Args:
        at_most: maximum number of sequences on a device at once.
    """
    sizes = [
        size for size in range(1, min(sequences, at_most or sequences) + 1) if passes(sequences, size, count, pieces)
    ]
    enough = [size for size in sizes if sequences // size >= _ENOUGH * count]
    return max(enough) if enough else min(sizes, default=None)


def passes(sequences: int, size: int, count: int, pieces: int) -> bool:
    """Return True if microbatches of `size` sequences are possible: they must be equal and at least as many as the
    ranks; with several pieces their number must be a multiple of the ranks."""
    number, rest = divmod(sequences, size)
    return not rest and number >= count and (pieces == 1 or number % count == 0)


def pipeline_problem(
    count: int,
    pieces: int,
    *,
    model_type: str | None,
    layers: int | None,
    sequences: int | None,
    microbatch: int | None,
) -> Problem | None:
    """Return why `count` ranks with `pieces` parts each cannot train a model as a pipeline; None if they can.

    Args:
        model_type, layers: None if the model is not known yet.
        sequences: sequences of the smallest batch, on one pipeline; None if unknown.
        microbatch: None if the program chooses it.
    """
    if count == 1:
        return None
    if model_type is not None and not (model_type in FAMILIES and FAMILIES[model_type].pipeline_parallel):
        able = ", ".join(sorted(name for name, family in FAMILIES.items() if family.pipeline_parallel))
        message = f"expected a model of {able}, whose layers can be a pipeline, not {model_type}"
        return Problem("no_pipeline_parallel", _PATH, message, f"leave {_PATH} out, or take such a model")
    if layers is not None and layers < count * pieces:
        message = f"expected a layer for each of the {count * pieces} parts of the model, which has {layers}"
        return Problem(
            "too_few_layers", _PATH, message, "let fewer ranks be a pipeline, or lower launch.pipeline_pieces"
        )
    if sequences is None:
        return None
    each = f"a multiple of {count}" if pieces > 1 else f"at least {count}"
    if microbatch is not None and not passes(sequences, microbatch, count, pieces):
        message = f"expected equal microbatches, {each}, of the {sequences} sequences of a pipeline's smallest batch"
        other = microbatch_of(sequences, count, pieces)
        if other is not None:
            return Problem(
                "not_divisible",
                "launch.microbatch",
                f"{message}, not {microbatch} sequences at once",
                f"set launch.microbatch: {other}, or auto",
            )
    if microbatch_of(sequences, count, pieces) is None:
        message = f"expected {each} sequences in a pipeline's smallest batch, not {sequences}"
        return Problem(
            "not_divisible", _PATH, message, "make the global batch larger, or let fewer ranks be a pipeline"
        )
    return None
