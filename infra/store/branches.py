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
from infra.store.manifest import Input, Manifest, folder_of, known_manifest
from infra.store.states import CLOCK, KeptState, kept_states


@dataclass(frozen=True)
class Changed:
    """A setting or an input that affects the result, before and after the branch; None if it was not set."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)}"


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
        return [f"goes on from {self}", *(f"changed {one}" for one in self.changed or ())]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Branch:
        changed = saved["changed"]
        return cls(**{**saved, "changed": None if changed is None else tuple(Changed(**one) for one in changed)})


def branch_of(manifest: Manifest, root: Path) -> Branch | None:
    """Return the branch from which an artifact of the store at `root` continues; None if it began from scratch."""
    wanted = next((one for one in manifest.inputs.values() if one.state), None)
    if wanted is None:
        return None
    try:
        before: Manifest | None = Manifest.read(root / wanted.path)
    except (OSError, ValueError):
        before = known_manifest(root, wanted)
    if before is None:
        return Branch(wanted.stage, wanted.fingerprint, wanted.stage, None, None, None)
    folder = folder_of(root, wanted, before)
    state = _state(folder, wanted.state)
    batch = state.batch if state else None
    changed = tuple(_changed(before, manifest))
    tokens = _tokens(state, before) if state else None
    return Branch(wanted.stage, wanted.fingerprint, before.step or before.stage, batch, tokens, changed)


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
    found = [
        Changed(key, old, new)
        for key, old, new in changed_settings(before.identity, before.config, after.identity, after.config)
    ]
    for name in sorted(before.inputs.keys() | after.inputs.keys()):
        old_input, new_input = before.inputs.get(name), after.inputs.get(name)
        if any(one and one.state for one in (old_input, new_input)):
            continue
        if (old_input and old_input.digest) != (new_input and new_input.digest):
            found.append(Changed(f"inputs.{name}", _address(old_input), _address(new_input)))
    return found


def _address(one: Input | None) -> str | None:
    return f"{one.stage}/{one.fingerprint[:8]}" if one else None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
