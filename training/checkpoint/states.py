"""Starting points of a training: a kept state of another training (infra/store/states.py), or another step's model.

This module also keeps the states of a training with its artifact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from infra.errors import Problem, StageError, stage_error
from infra.io.json import read_own_json
from infra.store.layout import AUX
from infra.store.states import STATE_FOLDER, KeptState, removed_state, state_at, write_states
from training.checkpoint.folder import batch_of, damage
from training.checkpoint.snapshot import STATE, Snapshot, TensorPart
from training.config import PretrainConfig, TrainerConfig
from training.config.families import documents_problem, experts_problem
from training.core import ranks
from training.guard.corrections import FILE, Correction
from training.model.models import load
from training.model.rope import extend_positions


def keep_states(checkpoints: Sequence[Path], out_dir: Path) -> None:
    """Keep whole checkpoints with the artifact in `out_dir`; the files are linked, since they never change."""
    if not (checkpoints and ranks.is_first()):
        return
    folder = out_dir / STATE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    for checkpoint in checkpoints:
        shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=_link)
    write_states(out_dir, {batch_of(checkpoint): _digest(checkpoint) for checkpoint in checkpoints})


def beginning(config: TrainerConfig, inputs: Mapping[str, Path], batches: int) -> KeptState | None:
    """State from which a training of `batches` batches continues; None for one that starts without a state.

    Raises StageError if there is no such state, if it is damaged, or if nothing is left to train.
    """
    if "state" not in inputs:
        return None
    at = config.continues
    step = at.step if at else inputs["state"].name
    state = state_at(inputs["state"], step, "config", at.batches if at else None)
    if not state.is_there:
        raise removed_state(step, state)
    if wrong := damage(state.folder):
        raise stage_error("damaged_state", str(state.folder), wrong, f"rebuild {step} with --force {step}")
    if state.batch >= batches:
        raise stage_error(
            "nothing_to_train",
            "duration",
            f"expected more than the {state.batch:,} batches that {step} has already, not {batches:,}",
            "raise it: duration counts from the beginning of the first training",
        )
    return state


def place_in(state: KeptState, data: str) -> tuple[int, int]:
    """Return the epoch of the data with this fingerprint and the examples read in it; (0, 0) for other data."""
    path = state.folder / STATE
    try:
        saved = read_own_json(path)
        epoch, sample = int(saved["dataset"]["epoch"]), int(saved["dataset"]["sample_in_epoch"])
        return (epoch, sample) if saved["data"] == data else (0, 0)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        fix = "rebuild its training step with --force STEP"
        raise stage_error("damaged_checkpoint", str(path), f"its content has changed: {error}", fix) from error


def corrections_before(state: KeptState | None) -> list[Correction]:
    """Corrections by the guard before this state, none without one; they affect later batches too."""
    if state is None:
        return []
    path = state.folder.parents[2] / AUX / FILE
    made = read_own_json(path) if path.exists() else []
    return [correction for correction in map(Correction.from_json, made) if correction.back_to < state.batch]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _digest(checkpoint: Path) -> str:
    """Digest of weights, optimizer state and place in the data; it does not depend on the number of ranks."""
    snapshot, digest = Snapshot.open(checkpoint), hashlib.sha256()
    position = {"batch": snapshot.state["batch"], "data": snapshot.state["data"], "dataset": snapshot.state["dataset"]}
    digest.update(json.dumps(position, sort_keys=True).encode())
    for name in sorted(snapshot.shapes):
        shape = snapshot.shapes[name]
        tensor = snapshot.read(name, TensorPart.of_shape(shape)).contiguous()
        digest.update(f"{name} {tensor.dtype} {shape}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_known(
    folder: Path, config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, length: int
) -> PreTrainedModel:
    """Load the model of a Hugging Face folder, to be trained on sequences of `length` tokens by `tokenizer`.

    Raises StageError if the shards were made with another tokenizer than the model's, whose ids would mean other text
    to the model, if the model has too few positions, or if its family is not proven to support this kind of training.
    """
    torch.manual_seed(config.seed)
    model = load(folder)
    if config.rope:
        extend_positions(model, config.rope)
    problems = []
    known_vocabulary, vocabulary = load_pretrained_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if known_vocabulary != vocabulary:
        differ = len(known_vocabulary.items() ^ vocabulary.items())
        problems.append(
            Problem(
                "other_tokenizer",
                "pretrain.inputs.tokenizer",
                f"expected the tokenizer of the model that it continues from; {differ:,} entries of them differ",
                "shard the text with the model itself as the input tokenizer, or with the model's own tokenizer",
            )
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < length:
        problems.append(
            Problem(
                "too_few_positions",
                "pretrain.inputs.shards",
                f"expected sequences of at most the model's {positions} tokens, not {length}",
                "shorten sequence_length of the shards, or extend the positions by pretrain.rope",
            )
        )
    family = model.config.model_type
    masked = config.objective == "prefix" or config.within_documents(family)
    problems += [problem] if masked and (problem := documents_problem(family)) else []
    experts = experts_problem(family, model.config.to_dict(), "pretrain.inputs.model")
    problems += [experts] if experts else []
    if problems:
        raise StageError(*problems)
    return model
