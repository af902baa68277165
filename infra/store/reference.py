"""Resolution of references to artifacts: a folder, `stage/fingerprint` or its beginning, the newest of a step."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from infra.errors import ConfigError, Problem, stage_error
from infra.store.layout import MANIFEST
from infra.store.manifest import Manifest
from infra.store.store import Store

SHOWN = 5


def resolve(store: Store, text: str, among: Collection[str] = ()) -> tuple[Path, Manifest]:
    """Return the folder and manifest of the artifact that `text` names.

    Args:
        text: the path of an artifact's folder or manifest; `stage/fingerprint` or a beginning of it that only one
            artifact has; or a stage or a named step, for its newest artifact.
        among: the stages to suggest if `text` names none; by default all that have artifacts.

    Raises ConfigError naming what is near.
    """
    if artifact := _by_path(store, Path(text)):
        return artifact
    stage, _, prefix = text.strip("/").partition("/")
    stages = store.stages()
    if stage not in stages:
        if (
            built := []
            if prefix
            else [(folder, manifest) for folder, manifest in store.manifests() if manifest.step == stage]
        ):
            return _newest(built)
        suggested = [name for name in stages if not among or name in among]
        message = f"no such folder, and no stage or step {stage!r} has artifacts in {store.place}"
        raise _unknown(text, message, _suggestion(stage, suggested))
    folders = store.folders(stage)
    if not folders:
        raise _unknown(text, f"{stage} has no finished artifact in {store.place}", "build it first")
    if not prefix:
        built = list(store.manifests(stage)) or _read(store, folders, text)
        return _newest([pair for pair in built if pair[1].step in ("", stage)] or built)
    matches = [folder for folder in folders if folder.name == prefix] or _current(
        [folder for folder in folders if folder.name.startswith(prefix)]
    )
    if len(matches) == 1:
        return _read(store, matches, text)[0]
    if matches:
        examples = ", ".join(f"{stage}/{folder.name}" for folder in matches[:SHOWN])
        raise _unknown(text, f"{len(matches)} artifacts have this prefix: {examples}", "give more of the fingerprint")
    names = [folder.name for folder in folders]
    near = difflib.get_close_matches(prefix, names, n=3, cutoff=0.3) or names[-SHOWN:]
    raise _unknown(
        text, f"{stage} has no artifact of this name", f"there are {', '.join(f'{stage}/{name}' for name in near)}"
    )


def opened(store: Store, text: str, among: Collection[str] = ()) -> tuple[Path, Manifest]:
    """Resolve a reference as `resolve` does, with all files in the folder: those on an object store are downloaded."""
    folder, manifest = resolve(store, text, among)
    return store.fetch(manifest, folder), manifest


def require_whole(store: Store, folder: Path, manifest: Manifest) -> None:
    """Raise StageError `damaged` if a file that an artifact's digest names is missing or changed. Files in aux/ record
    how the artifact was made, and are not part of it."""
    payload, aux_paths = (
        tuple(f"/{file.path}" for file in manifest.files if file.is_payload is is_payload)
        for is_payload in (True, False)
    )
    differences = [(str(difference.path), difference) for difference in store.differences(folder, manifest)]
    wrong = [difference for path, difference in differences if path.endswith(payload) and not path.endswith(aux_paths)]
    if wrong:
        suffix = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        fix = "stemma run CONFIG rebuilds it; stemma verify lists every file"
        raise stage_error("damaged", f"{manifest.stage}/{folder.name}", f"it is damaged: {wrong[0]}{suffix}", fix)


def _suggestion(stage: str, stages: list[str]) -> str:
    if near := difflib.get_close_matches(stage, stages, n=1, cutoff=0.6):
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(stages)}" if stages else "run a pipeline first, or name another --root"


def _by_path(store: Store, path: Path) -> tuple[Path, Manifest] | None:
    folder = path.parent if path.name == MANIFEST else path
    manifest = store.read(folder)
    if manifest is None and path.is_absolute() and path.exists():
        raise _unknown(str(path), f"no {MANIFEST} that this version can read, so this is not a finished artifact", "")
    return (folder.absolute(), manifest) if manifest else None


def _newest(artifacts: list[tuple[Path, Manifest]]) -> tuple[Path, Manifest]:
    """Return the artifact that was added to the store last, preferably one that no later build replaced."""
    return max(artifacts, key=lambda pair: ("." not in pair[0].name, pair[1].age_key))


def _current(folders: list[Path]) -> list[Path]:
    """Return the artifacts without those that a later build of the same address, also among them, replaced."""
    names = {folder.name for folder in folders}
    return [folder for folder in folders if folder.name.partition(".")[0] not in names - {folder.name}]


def _read(store: Store, folders: list[Path], text: str) -> list[tuple[Path, Manifest]]:
    artifacts = [(folder, manifest) for folder in folders if (manifest := store.read(folder))]
    if not artifacts:
        raise _unknown(text, f"{folders[0] / MANIFEST} is not a manifest that this version can read", "rebuild it")
    return artifacts


def _unknown(text: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("unknown_artifact", text, message, fix))
