"""Keeps whole states of a training with its artifact, and begins another training from one (infra/store/states.py)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from infra.errors import stage_error
from infra.store.layout import AUX
from infra.store.states import STATE_FOLDER, KeptState, removed_state, state_at, write_states
from training import ranks
from training.checkpoint_folder import batch_of, damage
from training.config import TrainerConfig
from training.guard.corrections import FILE, Correction
from training.snapshot import STATE, Rows, Snapshot


def keep_states(checkpoints: Sequence[Path], out_dir: Path) -> None:
    """Leaves whole checkpoints with the artifact in `out_dir`; the files are linked, since they stay as they are."""
    if not (checkpoints and ranks.is_first()):
        return
    folder = out_dir / STATE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    for checkpoint in checkpoints:
        shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=_link)
    write_states(out_dir, {batch_of(checkpoint): _digest(checkpoint) for checkpoint in checkpoints})


def beginning(config: TrainerConfig, inputs: Mapping[str, Path], batches: int) -> KeptState | None:
    """The state that a training of `batches` batches goes on from; None for one that begins by itself.

    Raises StageError where there is no such state, where it is damaged, and where nothing is left to train.
    """
    if "state" not in inputs:
        return None
    at = config.continues
    step = at.step if at else inputs["state"].name
    state = state_at(inputs["state"], step, "config", at.batches if at else None)
    if not state.is_there:
        raise removed_state(step, state)
    if wrong := damage(state.folder):
        raise stage_error("damaged_state", str(state.folder), wrong, f"build {step} again: --force {step}")
    if state.batch >= batches:
        raise stage_error(
            "nothing_to_train",
            "duration",
            f"expected more than the {state.batch:,} batches that {step} has behind it, not {batches:,}",
            "duration counts from the beginning of the first training: lengthen it",
        )
    return state


def place_in(state: KeptState, data: str) -> tuple[int, int]:
    """The epoch of the data with this fingerprint, and how many of its examples were read; the beginning of others."""
    saved = json.loads((state.folder / STATE).read_text(encoding="utf8"))
    return (saved["dataset"]["epoch"], saved["dataset"]["sample_in_epoch"]) if saved["data"] == data else (0, 0)


def corrections_before(state: KeptState) -> list[Correction]:
    """What the guard had corrected by then, which bears on the batches that follow too."""
    path = state.folder.parents[2] / AUX / FILE
    made = json.loads(path.read_text(encoding="utf8")) if path.exists() else []
    return [one for one in map(Correction.from_json, made) if one.back_to < state.batch]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _digest(checkpoint: Path) -> str:
    """Of weights, optimizer state and place in the data, whatever the number of ranks that wrote them."""
    snapshot, digest = Snapshot.open(checkpoint), hashlib.sha256()
    place = {"batch": snapshot.state["batch"], "data": snapshot.state["data"], "dataset": snapshot.state["dataset"]}
    digest.update(json.dumps(place, sort_keys=True).encode())
    for name in sorted(snapshot.shapes):
        shape = snapshot.shapes[name]
        tensor = snapshot.read(name, Rows(0, shape[0] if shape else 1, shape)).contiguous()
        digest.update(f"{name} {tensor.dtype} {shape}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
