"""Find the number of examples that a device can compute at once, by trial before the first step.

The trial runs before the model is sharded, so it needs no collectives and a rank that runs out of memory does not block
the others: each rank tries alone, then all agree on the smallest number. Gradients and random state are restored, so
the choice affects the result only by rounding.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.generation.random_state import kept_random_state
from infra.errors import StageError, stage_error
from infra.io.json import read_own_json
from infra.run import Run
from training.config.parallelism import microbatch_of
from training.core import ranks
from training.core.hardware import Hardware
from training.core.train_state import Loader, Trainable

# Copies of a weight besides itself and its gradient: AdamW's two moments, and DDP's bucket.
_ADAMW, _DDP = 2, 1


def choose(model: Trainable, loader: Loader, batch_size: int, hardware: Hardware, run: Run) -> int:
    """Return the microbatch for this device's `batch_size`: `launch.microbatch`, or as many examples as memory allows.

    On a CPU the microbatch is the whole batch, since running out of memory cannot be caught there. It never exceeds the
    limit that an earlier attempt at the same work recorded. If weights are sharded, or ranks share layers, sequences or
    experts, the trial uses the whole model, which is conservative; the result is 1 if that does not fit. In all other
    cases StageError is raised if not even one example fits. In a pipeline training/config/parallelism.py
    determines the microbatch.
    """
    limit = min(batch_size, ranks.from_first(_limit(run.work_dir)) or batch_size)
    if ranks.pipeline_parallel() > 1:
        return _in_pipeline(batch_size, limit, run)
    if run.launch.microbatch != "auto":
        return min(limit, run.launch.microbatch)
    dataset: Any = loader.dataloader.dataset
    if not can_be_tried(hardware.device) or not hasattr(dataset, "largest"):
        return limit
    examples = dataset.largest(limit)
    collate: Any = loader.dataloader.collate_fn

    taken: list[Tensor] = []

    def compute(count: int) -> None:
        # Within the trial, since this allocation may be the one that fails.
        taken[:] = taken or _memory_of_a_step(model, hardware.device, copies)
        model.to(hardware.device)
        collated = model.learnt_from(collate(examples[:count]))
        batch = {name: value.to(hardware.device) for name, value in collated.items()}
        loss = model.loss(model(batch), batch)
        (loss["total"] if isinstance(loss, dict) else loss).backward()

    sharded = run.launch.shards_weights
    several = ranks.world_size() > 1
    moments = _ADAMW / ranks.world_size() if run.launch.sharding == "zero1" else _ADAMW
    copies = 0 if sharded else math.ceil(moments) + (_DDP if several else 0)
    with kept_random_state(hardware.device):
        try:
            largest = largest_that_fits(limit, compute, lambda: model.zero_grad(set_to_none=True))
        except StageError:
            if not sharded and ranks.group_size() == 1 and ranks.expert_parallel() == 1:
                raise
            largest = 1
        finally:
            taken.clear()
    if largest < batch_size:
        run.event("microbatch", f"{largest} of {batch_size} examples at once fit the memory of each device")
    return largest


def _in_pipeline(sequences: int, limit: int, run: Run) -> int:
    """Microbatch of a pipeline with equal microbatches. There is no trial: no device may fit the whole model."""
    given = run.launch.microbatch
    if given != "auto" and given <= limit:
        return given
    count, pieces = run.launch.pipeline_parallel, run.launch.pipeline_pieces
    return microbatch_of(sequences, count, pieces, limit) or 1


def can_be_tried(device: torch.device) -> bool:
    """Return True if running out of this device's memory raises an error instead of ending the process."""
    return device.type == "cuda"


def largest_that_fits(limit: int, compute: Callable[[int], None], clear: Callable[[], None]) -> int:
    """Return the largest of limit, limit / 2, … that every rank can compute; every rank must call this function.

    compute: computes and keeps gradients for a number of examples, without any collective; is called twice, since
        gradients of the first microbatch are still allocated during the second.
    clear: frees what `compute` keeps.

    Raises StageError `device_out_of_memory` if a rank cannot compute a single example.
    """
    count = limit
    while True:
        failed = False
        try:
            compute(count)
            compute(count)
        except torch.OutOfMemoryError:
            failed = True
        # Not within the handler: there the error keeps its frames alive, and the frames keep the activations.
        clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not ranks.any_rank(failed):
            return count
        if count == 1:
            raise out_of_memory(1)
        count //= 2


def out_of_memory(microbatch: int, auto: bool = True) -> StageError:
    """Error for a device that cannot compute `microbatch` examples at once.

    Args:
        auto: True if the program chose the number; the next attempt then starts immediately with half of it
            (`microbatch_halved`).
    """
    message = f"a device ran out of memory with {microbatch} examples at once"
    less = f"continues from the last checkpoint with {microbatch // 2} at once"
    if microbatch > 1 and auto:
        return stage_error("microbatch_halved", "launch.microbatch", message, f"run again: it {less}")
    if microbatch > 1:
        fix = f"set launch.microbatch: {microbatch // 2}, or auto; a run after this one {less} in any case"
    else:
        fix = "set launch.recompute: full, launch.sharding: fsdp with more processes, or shorten the sequences"
    return stage_error("device_out_of_memory", "launch.microbatch", message, fix)


def lower_limit(work_dir: Path, microbatch: int) -> None:
    """Record in the work folder that `microbatch` was too large, for the process that continues this work."""
    if microbatch > 1:
        (work_dir / "microbatch.json").write_text(json.dumps({"limit": microbatch // 2}), encoding="utf8")


def _limit(work_dir: Path) -> int | None:
    path = work_dir / "microbatch.json"
    return int(read_own_json(path)["limit"]) if path.exists() else None


def _memory_of_a_step(model: nn.Module, device: torch.device, copies: int) -> list[Tensor]:
    """Allocate the memory that a step needs besides weights, gradients and activations. Only trainable weights count,
    since others have neither moments nor gradients to reduce."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    return [torch.empty_like(weight, device=device) for weight in learning for _ in range(copies)]
