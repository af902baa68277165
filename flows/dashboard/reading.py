"""The store as the page reads it, and the artifacts that addresses of the page name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from flows.runs.listing import artifacts
from infra.errors import ConfigError, Problem
from infra.store.ancestry import Readers, readers_of
from infra.store.manifest import Manifest
from infra.store.measurements import TRAINED, address, measurement_of
from infra.store.reference import resolve
from infra.store.store import Store
from tasks.stages import STAGES

T = TypeVar("T")

CARD = "MODEL_CARD.md"
SETTLED_NS = 2_000_000_000
LOOK_NS = 10_000_000
"""Time for which the change of a folder that was looked up holds: the length of the reading of one page."""
_REFERENCE = re.compile(r"[a-z0-9][\w-]{0,80}(/[0-9a-f]{1,16}(\.[0-9a-f]{8})?)?")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


class ReadingStore(Store):
    """A store that is only read: what it read of a stage is read again once the folder of the stage has changed.

    A folder changes with each artifact that comes or goes, and with each manifest that is written again, since that is
    first written next to the artifact.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, reading=True)
        self._looked_at: dict[str, tuple[int, int]] = {}
        self._known: dict[str, tuple[int, dict[Path, Manifest]]] = {}
        self._made: dict[str, tuple[tuple[int, ...], Any]] = {}

    def manifests(self, stage: str | None = None) -> Iterator[tuple[Path, Manifest]]:
        if self.remote is not None:
            yield from super().manifests(stage)
            return
        for name in [stage] if stage else self.stages():
            changed = self._changed(name)
            if name not in self._known or self._known[name][0] != changed or not changed:
                self._known[name] = changed, dict(super().manifests(name))
            yield from self._known[name][1].items()

    def folders(self, stage: str) -> list[Path]:
        if self.remote is not None:
            return super().folders(stage)
        return [folder for folder, _ in self.manifests(stage)]

    def read(self, folder: Path) -> Manifest | None:
        stage = folder.parent.name
        settled = self._known[stage][0] if folder.parent.parent == self.root and stage in self._known else 0
        if not settled or settled != self._changed(stage):
            return super().read(folder)
        return self._known[stage][1].get(folder)

    def models(self) -> list[dict[str, Any]]:
        """Return the models, newest first, as `flows.runs.listing.artifacts`."""
        return self.of_all("models", lambda: artifacts(self, models_only=True))

    def readers(self) -> Readers:
        """Return the artifacts that read each artifact."""
        return self.of_all("readers", lambda: readers_of(self.manifests()))

    def newest_measurement(self, model: Manifest) -> tuple[Path, Manifest] | None:
        """Return the newest measurement of a model, as `infra.store.measurements.newest_measurement`."""
        measured = [
            pair
            for pair in self.manifests(measurement_of(model.stage))
            if TRAINED in pair[1].inputs and address(pair[1].inputs[TRAINED]) == address(model)
        ]
        return max(measured, key=lambda pair: pair[1].age_key, default=None)

    def of_all(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` makes of all manifests. It is made again once the folder of a stage has changed.

        Args:
            name: of what is made.
        """
        changed = tuple(map(self._changed, self.stages())) if self.remote is None else (0,)
        if name not in self._made or self._made[name][0] != changed or 0 in changed:
            self._made[name] = changed, make()
        made: T = self._made[name][1]
        return made

    def _changed(self, stage: str) -> int:
        """Return when the folder of a stage changed last; 0 if that is so recent that another change may follow within
        the precision of the clock."""
        now = time.time_ns()
        at, changed = self._looked_at.get(stage, (0, 0))
        if not 0 <= now - at < LOOK_NS:  # one page reads a thousand manifests of a stage
            try:
                changed = (self.root / stage).stat().st_mtime_ns
            except OSError:
                return 0
            self._looked_at[stage] = now, changed
        return changed if now - changed > SETTLED_NS else 0


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
        raise ConfigError(Problem("unknown_artifact", text[:80], "expected a step, STAGE/FINGERPRINT or a digest"))
    makers = [name for name, stage in STAGES.items() if stage.makes_weights]
    folder, manifest = resolve(store, text, makers)
    if not folder.is_relative_to(store.root):
        raise ConfigError(Problem("unknown_artifact", text, "it is not in this store"))
    if models_only and not is_model(manifest):
        raise ConfigError(Problem("unknown_artifact", text, f"{manifest.stage} does not make a model"))
    return folder, manifest


def is_model(manifest: Manifest) -> bool:
    return manifest.stage in STAGES and STAGES[manifest.stage].makes_weights


def address_of(folder: Path, manifest: Manifest) -> str:
    """Return `stage/fingerprint` of an artifact, with the digest for one that a later build replaced."""
    return f"{manifest.stage}/{folder.name}"


def page_of(id: str, manifest: Manifest) -> str:
    """Return the address of the page of an artifact; "" where it has none."""
    if is_model(manifest):
        return f"/model/{id}"
    pages = ("report.html", "aux/corpus_report.html", "aux/validation.html", CARD, "results.json", "verdict.json")
    paths = {file.path for file in manifest.files}
    if any(path.startswith("documents/") for path in paths) or manifest.stage == "shard":
        return f"/data/{id}"
    return next((f"/artifact/{id}/{page}" for page in pages if page in paths and "." not in id), "")
