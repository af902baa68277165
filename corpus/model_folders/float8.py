"""Weights in FP8 with a scale for each block, as DeepSeek-V3's and Qwen3's -FP8 folders store them, as numbers.

`NAME` (N, M) in FP8 stands beside `NAME_scale_inv` (⌈N / rows⌉, ⌈M / columns⌉), by which each block is multiplied.
transformers derives the blocks from the number of scales in place of `weight_block_size`: it fails where the last block
is smaller (576 rows in blocks of 128), and scales by blocks of 96 where 192 rows have two scales.
"""

from __future__ import annotations

from typing import Any

from corpus.model_folders.folder import StoredWeights, named
from infra.errors import Problem

_SCALE = "_scale_inv"
_OF_ACTIVATIONS = ".activation_scale"
"""Scales of what goes into a layer, for computing in FP8: weights are the same without."""


def without_scales(weights: StoredWeights) -> StoredWeights:
    """Return the tensors that are left when weights are numbers."""
    kept = {name: tensor for name, tensor in weights.tensors.items() if not name.endswith((_SCALE, _OF_ACTIVATIONS))}
    return StoredWeights(kept, weights.prefixes)


def fp8_problems(weights: StoredWeights, block: tuple[int, int], where: str) -> list[Problem]:
    """Return why weights in FP8 cannot be turned into numbers: a scale that is missing, left over or of another shape.

    Args:
        block: rows and columns that share a scale.
        where: the dotted key that names the folder.
    """
    scales = {name for name in weights.tensors if name.endswith(_SCALE)}
    expected = {
        f"{name}{_SCALE}": tensor.shape
        for name, tensor in weights.tensors.items()
        if tensor.dtype.startswith("F8_E4M3")
    }
    missing, unused = sorted(expected.keys() - scales), sorted(scales - expected.keys())
    other = []
    for name in sorted(scales & expected.keys()):
        shape, rows = weights.tensors[name].shape, expected[name]
        blocks = tuple(-(-size // part) for size, part in zip(rows[-2:], block, strict=False))
        if len(rows) != 2 or shape != blocks:
            other.append(f"{name} is {list(shape)}, not {list(blocks)}")
    parts = [
        f"missing: {named(missing)}" if missing else "",
        f"left over: {named(unused)}" if unused else "",
        f"of another shape: {named(other)}" if other else "",
    ]
    if not (description := "; ".join(filter(None, parts))):
        return []
    message = f"expected a scale for each block of {block[0]} x {block[1]} numbers of each weight in FP8; {description}"
    fix = "correct weight_block_size in config.json, or download or copy the folder again"
    return [Problem("weights_do_not_fit", where, message, fix)]


def fp8_numbers(tensors: dict[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """Return the tensors of a folder without `fp8_problems` with those in FP8 as fp32, and without scales."""
    numbers = {}
    for name, tensor in tensors.items():
        if name.endswith((_SCALE, _OF_ACTIVATIONS)):
            continue
        if (scale := tensors.get(f"{name}{_SCALE}")) is not None:
            rows, columns = tensor.shape
            # MXFP8 has exponents of 2 in bytes.
            scale = scale.float() if scale.dtype.is_floating_point else (scale.float() - 127).exp2()
            each = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
            tensor = tensor.float() * each
        numbers[name] = tensor
    return numbers
