"""The store as the page reads it: manifests are parsed once, and again only when their file has changed."""

from __future__ import annotations

import re
from pathlib import Path

from infra.errors import ConfigError, Problem
from infra.store.layout import MANIFEST
from infra.store.manifest import Manifest
from infra.store.reference import resolve
from infra.store.store import Store
from tasks.stages import STAGES

_REFERENCE = re.compile(r"[a-z0-9][\w-]{0,80}(/[0-9a-f]{1,16}(\.[0-9a-f]{8})?)?")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


class ReadingStore(Store):
    """A store that is only read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, reading=True)
        self._known: dict[Path, tuple[tuple[int, int, int], Manifest | None]] = {}

    def read(self, folder: Path) -> Manifest | None:
        if self.remote is not None:
            return super().read(folder)
        try:
            status = (folder / MANIFEST).stat()
        except OSError:
            self._known.pop(folder, None)
            return None
        key = (status.st_mtime_ns, status.st_ino, status.st_size)
        if folder not in self._known or self._known[folder][0] != key:
            self._known[folder] = key, super().read(folder)
        return self._known[folder][1]


def find(store: Store, text: str, *, models_only: bool = False) -> tuple[Path, Manifest]:
    """Return the artifact of this store that an address of the page names: a step for its newest, `stage/fingerprint`
    or its beginning, or the beginning of a digest.

    Raises ConfigError. Unlike a command, the page takes no paths, which lead out of the store.
    """
    if _DIGEST.fullmatch(text):
        matches = [pair for pair in store.manifests() if pair[1].digest.startswith(text)]
        if matches:
            return max(matches, key=lambda pair: ("." not in pair[0].name, pair[1].age_key))
    if not _REFERENCE.fullmatch(text):
        raise ConfigError(Problem("unknown_artifact", text[:80], "a step, STAGE/FINGERPRINT or a digest was expected"))
    makers = [name for name, stage in STAGES.items() if stage.makes_weights]
    folder, manifest = resolve(store, text, makers)
    if not folder.is_relative_to(store.root):
        raise ConfigError(Problem("unknown_artifact", text, "it is not in this store"))
    if models_only and not is_model(manifest):
        raise ConfigError(Problem("unknown_artifact", text, f"{manifest.stage} makes no model"))
    return folder, manifest


def is_model(manifest: Manifest) -> bool:
    return manifest.stage in STAGES and STAGES[manifest.stage].makes_weights


def address_of(folder: Path, manifest: Manifest) -> str:
    """Return `stage/fingerprint` of an artifact, with the digest for one that a later build replaced."""
    return f"{manifest.stage}/{folder.name}"
