"""A training that continues from a kept state of another: the state, and what was changed from there on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import StageError
from infra.fingerprint import changed_settings
from infra.io.json import read_own_json
from infra.store.manifest import InputArtifact, Manifest, folder_of, known_manifest
from infra.store.states import CLOCK, KeptState, kept_states


@dataclass(frozen=True)
class Changed:
    """A setting or an input that affects the result, before and after the branch; None if it was not set."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {setting_text(self.before)} → {setting_text(self.after)}"


@dataclass(frozen=True)
class Branch:
    """The point at which a training branches off another.

    stage, fingerprint, step: of the training that is continued; step is its name in the pipeline.
    batch, tokens: done by then; None if no longer known.
    changed: None if that training's manifest is gone.
    """

    stage: str
    fingerprint: str
    step: str
    batch: int | None
    tokens: int | None
    changed: tuple[Changed, ...] | None

    def __str__(self) -> str:
        batch = "a state" if self.batch is None else f"the state after {self.batch:,} batches"
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        return f"{batch}{tokens} of {self.step}"

    def lines(self) -> list[str]:
        """Describe the state that the branch continues from, and each change, one per line."""
        return [f"continues from {self}", *(f"changed {change}" for change in self.changed or ())]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Branch:
        changed = saved["changed"]
        return cls(**{**saved, "changed": None if changed is None else tuple(Changed(**change) for change in changed)})


def branch_of(manifest: Manifest, root: Path) -> Branch | None:
    """Return the branch from which an artifact of the store at `root` continues; None if it began from scratch."""
    reference = next((entry for entry in manifest.inputs.values() if entry.state), None)
    if reference is None:
        return None
    try:
        before: Manifest | None = Manifest.read(root / reference.path)
    except (OSError, ValueError):
        before = known_manifest(root, reference)
    if before is None:
        return Branch(reference.stage, reference.fingerprint, reference.stage, None, None, None)
    folder = folder_of(root, reference, before)
    state = _state(folder, reference.state)
    batch = state.batch if state else None
    changed = tuple(_changed(before, manifest))
    tokens = _tokens(state, before) if state else None
    return Branch(reference.stage, reference.fingerprint, before.step or before.stage, batch, tokens, changed)


def _state(folder: Path, digest: str) -> KeptState | None:
    try:
        return next((state for state in kept_states(folder) if state.digest == digest), None)
    except StageError:  # a help to the reader, not the record
        return None


def _tokens(state: KeptState, before: Manifest) -> int | None:
    if (state.folder / CLOCK).is_file():
        with suppress(ValueError, LookupError, TypeError):  # a damaged one is as one that is gone
            return int(read_own_json(state.folder / CLOCK)["clock"]["token"])
    figures = before.result.get("figures", {})
    return int(figures["tokens"]) if figures.get("batches") == state.batch and "tokens" in figures else None


def _changed(before: Manifest, after: Manifest) -> list[Changed]:
    changes = [
        Changed(key, old, new)
        for key, old, new in changed_settings(before.identity, before.config, after.identity, after.config)
    ]
    for name in sorted(before.inputs.keys() | after.inputs.keys()):
        old_input, new_input = before.inputs.get(name), after.inputs.get(name)
        if any(entry and entry.state for entry in (old_input, new_input)):
            continue
        if (old_input and old_input.digest) != (new_input and new_input.digest):
            changes.append(Changed(f"inputs.{name}", _address(old_input), _address(new_input)))
    return changes


def _address(reference: InputArtifact | None) -> str | None:
    return f"{reference.stage}/{reference.fingerprint[:8]}" if reference else None


def setting_text(value: Any) -> str:
    """Return the text of a setting's value; `not set` for None."""
    return "not set" if value is None else str(value)
