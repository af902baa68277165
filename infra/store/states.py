"""Whole training states kept with the training's artifact, from which another training can continue.

aux/states.json          {batch: digest of the state after that number of batches}
aux/state/ba000008000/   that state, a checkpoint as `training.checkpoint.folder` writes it

They are not part of the model's digest. `stemma gc --states` removes states; their digests stay, so that trainings that
continued from a state can still be found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from infra.errors import Problem, StageError, stage_error
from infra.io.files import sync
from infra.io.json import read_own_json
from infra.store.layout import AUX
from infra.store.manifest import File, Manifest

STATES = f"{AUX}/states.json"
STATE_FOLDER = f"{AUX}/state"
CLOCK = "state.json"


@dataclass(frozen=True)
class KeptState:
    """State of a training after `batch` batches. digest: of weights, optimizer state and position in the data."""

    batch: int
    digest: str
    folder: Path

    @property
    def is_there(self) -> bool:
        """False once gc has removed it."""
        return self.folder.is_dir()

    def files(self, manifest: Manifest) -> tuple[File, ...]:
        """Return its files as the artifact's manifest lists them."""
        prefix = f"{STATE_FOLDER}/{self.folder.name}/"
        return tuple(file for file in manifest.files if file.path.startswith(prefix))


def without_states(manifest: Manifest) -> tuple[File, ...]:
    """Return the files of an artifact without its states, except for the small file of each that holds its progress."""
    return tuple(
        file
        for file in manifest.files
        if not file.path.startswith(f"{STATE_FOLDER}/") or file.path.rpartition("/")[2] == CLOCK
    )


def state_name(batch: int) -> str:
    return f"ba{batch:09}"


def write_states(artifact: Path, digests: dict[int, str]) -> None:
    text = json.dumps({str(batch): digest for batch, digest in sorted(digests.items())}, indent=1)
    (artifact / STATES).write_text(text + "\n", encoding="utf8")


def kept_states(artifact: Path) -> list[KeptState]:
    """Return the states in an artifact's folder, the earliest first. Raises StageError `damaged_states`."""
    path = artifact / STATES
    try:
        digests = {int(batch): str(digest) for batch, digest in read_own_json(path).items()}
    except FileNotFoundError:
        return []
    except (ValueError, AttributeError) as error:
        raise stage_error("damaged_states", str(path), "expected a JSON object of digests by batch", "") from error
    return [KeptState(batch, digests[batch], artifact / STATE_FOLDER / state_name(batch)) for batch in sorted(digests)]


def remove_state(artifact: Path, manifest: Manifest, state: KeptState) -> None:
    """Remove a state from a finished artifact: first from the manifest, in one rename, then from the disk."""
    removed = set(state.files(manifest))
    replace(manifest, files=tuple(file for file in manifest.files if file not in removed)).rewrite(artifact)
    shutil.rmtree(state.folder, ignore_errors=True)


def new_states(old: Manifest, new: Manifest) -> tuple[str, ...]:
    """The names of the states that a later build of the same bytes kept and the artifact lacks: gc removed them, or
    `keep_state` asks for more by now."""
    earlier, built = ({_name(file) for file in manifest.files if _name(file)} for manifest in (old, new))
    return tuple(sorted(built - earlier))


def take_states(artifact: Path, old: Manifest, built: Path, new: Manifest) -> None:
    """Move the states that a finished artifact lacks to it from a later build of the same bytes. Killed on the way, it
    leaves files that no manifest names, and none that differs from its manifest."""
    names = new_states(old, new)
    if not names:
        return
    digests = {state.batch: state.digest for state in kept_states(artifact)}
    digests |= {state.batch: state.digest for state in kept_states(built) if state.folder.name in names}
    write_states(built, digests)
    (artifact / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.rmtree(artifact / STATE_FOLDER / name, ignore_errors=True)
        os.rename(built / STATE_FOLDER / name, artifact / STATE_FOLDER / name)
    other_files = tuple(file for file in old.files if file.path != STATES)
    replace(old, files=other_files).rewrite(artifact)
    sync(built / STATES)
    os.replace(built / STATES, artifact / STATES)
    data = (artifact / STATES).read_bytes()
    added = [file for file in new.files if _name(file) in names]
    added.append(File(STATES, len(data), hashlib.sha256(data).hexdigest()))
    replace(old, files=tuple(sorted((*other_files, *added), key=lambda file: file.path))).rewrite(artifact)


def _name(file: File) -> str:
    """Return the name of the state that a file belongs to; empty for none."""
    return (
        file.path.removeprefix(f"{STATE_FOLDER}/").partition("/")[0] if file.path.startswith(f"{STATE_FOLDER}/") else ""
    )


def state_at(artifact: Path, step: str, reader: str, batch: int | None) -> KeptState:
    """The state after `batch` batches, the last one for None.

    Raises StageError `no_state`, naming the states that there are.

    Args:
        step, reader: what the artifact, and the key of what goes on from it, are called in messages.
    """
    states = kept_states(artifact)
    if not states:
        raise StageError(
            Problem(
                "no_state",
                f"{reader}.continues.step",
                f"{step} keeps no state of its training, in {artifact}",
                f"set {step}.keep_state: last, and build it again with --force {step}",
            )
        )
    if batch is None:
        return states[-1]
    for state in states:
        if state.batch == batch:
            return state
    kept = ", ".join(f"{state.batch:,}" for state in states)
    raise StageError(
        Problem(
            "no_state",
            f"{reader}.continues.at",
            f"{step} keeps states after {kept} batches, none after {batch:,}",
            f"take one of these, or set {step}.keep_state.every and build it again with --force {step}",
        )
    )


def removed_state(step: str, state: KeptState) -> StageError:
    message = f"the state of {step} after {state.batch:,} batches was removed by `stemma gc --states`"
    return stage_error("no_state", "continues", message, f"rebuild {step} with --force {step}")
