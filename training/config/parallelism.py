"""The rules of what ranks can share of a training: a function for each kind of parallelism, and one that applies all.

`stemma check` holds a config against them before anything runs (`flows.config.checks.ranks`), a pretraining the model
that it loads (`training.pretrain`). The planner proposes nothing that they refuse. Imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.errors import Problem
from infra.launch.config import LaunchConfig
from training.config.families import FAMILIES, Family, is_mixture

_PIPELINE = "launch.pipeline_parallel"
_ENOUGH = 4
"""Microbatches per rank above which waiting for other stages is negligible (Huang et al. 2019, section 2.3)."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model's layers that ranks would share."""

    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int


@dataclass(frozen=True)
class SharedTraining:
    """Known facts of a pretraining whose work ranks share; None and {} for those that are only known once it begins.

    values: the model's config of transformers, as a mapping.
    length: tokens of a sequence.
    sequences: of the smallest batch, on one pipeline.
    layers: number of layers.
    sizes: of the layers.
    """

    objective: str
    model_type: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    sequences: int | None = None
    layers: int | None = None
    sizes: LayerSizes | None = None


def layout_problems(launch: LaunchConfig, training: SharedTraining) -> Iterator[Problem]:
    """Yield the reasons why ranks cannot share a pretraining as `launch` specifies, one kind of parallelism after the
    other."""
    family = training.model_type

    # Tensor: layers, whose sizes must divide. A vocabulary is checked when the layers are split.
    if launch.tensor_parallel > 1 and family is not None and training.sizes is not None:
        shards = launch.ranks // launch.tensor_parallel if launch.shards_weights else 1
        if launch.sharding == "hsdp":
            shards = launch.shard_ranks or max(1, launch.processes // launch.tensor_parallel)
        if wrong := split_problem(family, launch.tensor_parallel, shards, **vars(training.sizes), vocabulary=None):
            yield wrong

    # Context: sequences.
    if wrong := sequences_problem(
        launch.context_parallel, family, training.objective, training.length, training.values, launch.tensor_parallel
    ):
        yield wrong

    # Pipeline: runs of layers, through which the microbatches of a batch pass.
    if wrong := pipeline_problem(
        launch.pipeline_parallel,
        launch.pipeline_pieces,
        model_type=family,
        layers=training.layers,
        sequences=training.sequences,
        microbatch=launch.microbatch if isinstance(launch.microbatch, int) else None,
    ):
        yield wrong

    # Experts.
    if wrong := expert_ranks_problem(launch.expert_parallel, family, training.values, launch.shares_of_examples):
        yield wrong

    # Products in 8 bits, which every rank computes by itself.
    if launch.precision == "fp8" and family is not None and (wrong := float8_problem(family)):
        yield wrong


def split_problem(
    model_type: str,
    count: int,
    shard_ranks: int,
    *,
    heads: int,
    kv_heads: int,
    head_width: int,
    mlp_width: int,
    vocabulary: int | None,
) -> Problem | None:
    """Why `count` ranks cannot share the layers of a model (launch.tensor_parallel), if they cannot.

    Args:
        shard_ranks: over which each of their parts is sharded; torch cuts parts that are cut already into equal
            ones alone.
        vocabulary: None where it is not known yet.
    """
    path, parts = "launch.tensor_parallel", count * shard_ranks
    if model_type not in FAMILIES or not FAMILIES[model_type].tensor_parallel:
        able = ", ".join(sorted(name for name, entry in FAMILIES.items() if entry.tensor_parallel))
        message = f"expected a model of {able}, whose layers ranks can share, not {model_type}"
        return Problem("no_tensor_parallel", path, message, "leave launch.tensor_parallel out, or take such a model")
    for what, size, by in (
        ("heads", heads, count),
        ("heads of keys and values", kv_heads, count),
        ("the width of queries", heads * head_width, parts),
        ("the width of keys", kv_heads * head_width, parts),
        ("the inner width of the MLP", mlp_width, parts),
    ):
        if size % by:
            message = f"expected {what} to be a multiple of {by}, not {size}"
            return Problem("not_divisible", path, message, "let fewer ranks share a layer, or change the model's sizes")
    if vocabulary is not None and vocabulary % parts:
        message = f"expected a vocabulary that is a multiple of {parts}, not {vocabulary}"
        return Problem("not_divisible", path, message, f"set pretrain.model.vocab_multiple: {parts}")
    return None


def sequences_problem(
    count: int,
    model_type: str | None,
    objective: str,
    length: int | None,
    values: Mapping[str, Any],
    tensor_ranks: int = 1,
) -> Problem | None:
    """Why `count` ranks, or groups of `tensor_ranks` ranks that share layers, cannot share the sequences of a
    pretraining (launch.context_parallel), if they cannot.

    Args:
        model_type: None where it is not known yet; so length, of a sequence in tokens.
        values: the config of transformers as a mapping, as far as known.
    """
    if count == 1:
        return None
    path = "launch.context_parallel"
    if objective != "causal":
        message = (
            f"expected objective: causal, not {objective}: ranks share sequences in which no token sees a later one"
        )
        return Problem("no_context_parallel", path, message, "leave launch.context_parallel out")
    if model_type is not None and not FAMILIES.get(model_type, Family(context_parallel=False)).context_parallel:
        able = ", ".join(sorted(name for name, entry in FAMILIES.items() if entry.context_parallel))
        message = f"expected a model of {able}, whose sequences ranks can share, not {model_type}"
        return Problem("no_context_parallel", path, message, "leave launch.context_parallel out, or take such a model")
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("dynamic", "longrope"):
        message = f"expected positions that do not depend on the longest sequence of a batch, not rope_scaling {kind}"
        fix = "leave launch.context_parallel out, or take another rope_scaling, such as yarn"
        return Problem("no_context_parallel", path, message, fix)
    parts = count * math.lcm(2, tensor_ranks)
    if length is not None and length % parts:
        split = f", each split over {tensor_ranks} ranks" if tensor_ranks > 1 else ""
        message = f"expected sequences of a multiple of {parts} tokens, two chunks a rank{split}, not {length:,}"
        return Problem(
            "not_divisible", path, message, "change shard.sequence_length, or let fewer ranks share a sequence"
        )
    return None


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
        return Problem("no_pipeline_parallel", _PIPELINE, message, f"leave {_PIPELINE} out, or take such a model")
    if layers is not None and layers < count * pieces:
        message = f"expected a layer for each of the {count * pieces} parts of the model, which has {layers}"
        return Problem(
            "too_few_layers", _PIPELINE, message, "let fewer ranks be a pipeline, or lower launch.pipeline_pieces"
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
            "not_divisible", _PIPELINE, message, "make the global batch larger, or let fewer ranks be a pipeline"
        )
    return None


def expert_ranks_problem(
    count: int, model_type: str | None, values: Mapping[str, Any], shares_of_examples: tuple[int, int, int] = (1, 1, 1)
) -> Problem | None:
    """Why `count` ranks cannot hold a part of a model's experts each (launch.expert_parallel), if they cannot, or why
    ranks cannot share layers, sequences or hold some layers each of a mixture of experts.

    Args:
        model_type: None where it is not known yet.
        values: the config of transformers as a mapping, as far as known.
        shares_of_examples: of launch.
    """
    if model_type is None or max(count, *shares_of_examples) == 1:
        return None
    path = "launch.expert_parallel"
    if not is_mixture(model_type):
        if count == 1:
            return None
        able = ", ".join(sorted(name for name, entry in FAMILIES.items() if entry.router))
        message = f"expected a mixture of experts of {able}, not {model_type}"
        return Problem("no_expert_parallel", path, message, f"leave {path} out, or take such a model")
    if count == 1 and shares_of_examples[0] > 1:
        message = f"expected ranks that share the experts of {model_type} beside tensor_parallel, which splits none"
        return Problem("no_expert_parallel", path, message, f"set {path}: 2 or more, or leave tensor_parallel out")
    experts = values.get("num_local_experts", values.get("num_experts"))
    if experts is not None and experts % count:
        message = f"expected a number of experts that is a multiple of {count}, not {experts}"
        return Problem("not_divisible", path, message, "let fewer ranks share them, or change the model's experts")
    return None


def float8_problem(model_type: str) -> Problem | None:
    """Why a model cannot train in 8 bits (launch.precision: fp8), if it cannot."""
    if FAMILIES.get(model_type, Family()).linear:
        return None
    message = (
        f"expected a model of linear layers, whose products are computed in 8 bits, not {model_type}, which has none"
    )
    fix = "set launch.precision: bf16, or take another model, such as preset: smollm-135m"
    return Problem("no_fp8", "launch.precision", message, fix)
