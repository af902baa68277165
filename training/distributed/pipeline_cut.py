"""How the layers of a model and the sequences of a batch are cut for a pipeline (launch.pipeline_parallel).

Imports nothing heavy: configs are held against it before anything runs.
"""

from __future__ import annotations

from infra.errors import Problem
from training.config.families import FAMILIES

_PATH = "launch.pipeline_parallel"
_ENOUGH = 4
"""Microbatches a rank from which on waiting for other stages is little (Huang et al. 2019, section 2.3)."""


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one of `stages` parts of a model; earlier parts have one more where they differ, since the output
    layer is computed with the last."""
    first, end = (-(-place * layers // stages) for place in (stage, stage + 1))
    return range(first, end)


def microbatch_of(sequences: int, count: int, pieces: int = 1, at_most: int | None = None) -> int | None:
    """Sequences of a microbatch, of `sequences` of a batch that pass a pipeline of `count` ranks with `pieces` parts
    of the model each; None if none goes.

    The largest of equal microbatches that are at least four times as many as the ranks; where a batch has not so many
    sequences, the smallest. at_most: sequences that a device holds at once.
    """
    found = [
        size for size in range(1, min(sequences, at_most or sequences) + 1) if passes(sequences, size, count, pieces)
    ]
    enough = [size for size in found if sequences // size >= _ENOUGH * count]
    return max(enough) if enough else min(found, default=None)


def passes(sequences: int, size: int, count: int, pieces: int) -> bool:
    """Whether microbatches of so many sequences pass: equal ones, as many as ranks, and of several pieces a multiple of
    them."""
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
    """Why `count` ranks with `pieces` parts each cannot train a model as a pipeline, if they cannot.

    model_type, layers: None where the model is not known yet.
    sequences: of the smallest batch, on one pipeline; None where it is not known.
    microbatch: None where it is ours to choose.
    """
    if count == 1:
        return None
    if model_type is not None and not (model_type in FAMILIES and FAMILIES[model_type].pipeline_parallel):
        able = ", ".join(sorted(name for name, one in FAMILIES.items() if one.pipeline_parallel))
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
