"""The record that makes a folder an artifact: the request, the result, and the bytes, code and settings behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from infra.io.files import sync
from infra.store.layout import AUX, MANIFEST, MIRROR

SCHEMA = 1


@dataclass(frozen=True)
class File:
    """One file of an artifact: `path` relative to its folder, `size` in bytes."""

    path: str
    size: int
    sha256: str

    @property
    def is_payload(self) -> bool:
        return not self.path.startswith(f"{AUX}/")


@dataclass(frozen=True)
class InputArtifact:
    """An input artifact, by its address and its content. `path` is relative to the store's root.

    state: digest of the state of its training that was read (infra/store/states.py); "" where the artifact was.
    """

    stage: str
    fingerprint: str
    digest: str
    path: str
    state: str = ""

    @property
    def identity(self) -> str:
        """The digest that entered the reader's fingerprint."""
        return self.state or self.digest


@dataclass(frozen=True)
class SourceRecord:
    """An outside source: its config key, content digest, and files as {path: sha256}."""

    key: str
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """See `docs/lineage.md` for each key. Times are UTC in ISO 8601, durations in seconds."""

    stage: str
    version: int
    fingerprint: str
    digest: str
    build_id: str
    config: Mapping[str, Any]
    """All keys of the stage's config, defaults included."""
    identity: Mapping[str, Any]
    """The keys that entered the fingerprint."""
    inputs: Mapping[str, InputArtifact]
    requires: Annotated[Mapping[str, InputArtifact], Field(validation_alias=AliasChoices("requires", "gates"))]
    """Artifacts that had to exist first but whose bytes do not affect the result, e.g. a validation verdict. Manifests
    of earlier versions call them `gates`."""
    sources: tuple[SourceRecord, ...]
    files: tuple[File, ...]
    result: Mapping[str, Any]
    """{"figures": {name: number}, "headline": text}"""
    makes: str = ""
    """The kind of the artifact, such as documents; empty if not recorded."""
    package: str = ""
    """The installed package that declares the stage, with its version; empty for a stage of this project."""
    step: str = ""
    """The step that built it, which other steps of its stage may share; empty if not recorded."""
    pipeline: str = ""
    run_id: str = ""
    """The pipeline run that built it."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """{"commit": sha or "", "dirty": bool}"""
    lock_hash: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reproduced_with: Mapping[str, str] = field(default_factory=dict)
    """Versions with which a later build gave the same bytes; empty if there was none."""
    host: str = ""
    device: str = ""
    mlflow_run_id: str | None = None
    flow_run_id: str | None = None
    started: str = ""
    finished: str = ""
    seconds: float = 0.0
    bookkeeping_s: Mapping[str, float] = field(default_factory=dict)
    adopted: Mapping[str, Any] | None = None
    """Provenance of an artifact that was made elsewhere; None for one built here."""
    order: int = 0
    """Its place among the artifacts of its stage in the store, from 1 in the order in which they came there; 0 for one
    from before this was kept."""
    schema: int = SCHEMA

    def as_input(self, state: str = "") -> InputArtifact:
        return InputArtifact(self.stage, self.fingerprint, self.digest, f"{self.stage}/{self.fingerprint}", state)

    @property
    def age_key(self) -> tuple[int, str]:
        """The highest is that of the newest of a stage. The clock alone is unreliable if several machines build."""
        return self.order, self.finished

    def as_bytes(self) -> bytes:
        text = json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False, default=_plain)
        return f"{text}\n".encode()

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_bytes(self.as_bytes())

    def rewrite(self, folder: Path) -> None:
        """Take the place of the manifest of a finished artifact, if it has one, at once."""
        # Not in the artifact, where what a kill leaves would be a file in no manifest.
        temporary = folder.with_name(f".{folder.name}.{MANIFEST}.{os.getpid()}")
        try:
            temporary.write_bytes(self.as_bytes())
            sync(temporary)
            os.replace(temporary, folder / MANIFEST)
            sync(folder)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raise FileNotFoundError, or ValueError if the file is no manifest that this version can read."""
        path = folder / MANIFEST
        return cls.parse(path.read_bytes(), path)

    @classmethod
    def parse(cls, content: bytes, path: Path | str) -> Manifest:
        """path: what messages call it. Raises ValueError as `read` does."""
        try:
            manifest = _reader().validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}: not as expected: {key}: {first['msg']}".replace(": : ", ": ")) from None
        if manifest.schema != SCHEMA:
            raise ValueError(f"{path}: expected schema {SCHEMA}, not {manifest.schema}")
        figures = manifest.result.get("figures", {})
        if not isinstance(figures, Mapping) or not all(isinstance(value, int | float) for value in figures.values()):
            raise ValueError(f"{path}: result.figures: expected numbers by name")
        if any(Path(file.path).is_absolute() or ".." in Path(file.path).parts for file in manifest.files):
            raise ValueError(f"{path}: files: expected paths within the artifact")
        return manifest


def known_manifest(root: Path, reference: InputArtifact) -> Manifest | None:
    """The manifest of an input, as far as this machine knows it without asking an object store; None if its artifact is
    gone or has other bytes by now.

    Args:
        root: of the store; of one on an object store the cache.
    """
    mirrored = root / MIRROR / reference.stage / f"{reference.fingerprint}.json"
    for read in (
        lambda: Manifest.read(root / reference.path),
        lambda: Manifest.parse(mirrored.read_bytes().partition(b"\n")[2], mirrored),
    ):
        with suppress(OSError, ValueError):
            if (manifest := read()).digest == reference.digest:
                return manifest
    return None


def glance_folder(root: Path, manifest: Manifest) -> Path:
    """Folder into which `Store.peek` puts the few requested files of an artifact, on a root on an object store."""
    return root / MIRROR / manifest.stage / f"{manifest.fingerprint}-{manifest.build_id}"


def folder_of(root: Path, reference: InputArtifact, manifest: Manifest) -> Path:
    """Folder that holds this machine's copy of an input: the artifact's folder, or that of a glance at it."""
    folder = root / reference.path
    return folder if (folder / MANIFEST).is_file() else glance_folder(root, manifest)


def iso_time(seconds: float) -> str:
    """A moment as manifests have it: in UTC, to the millisecond.

    Args:
        seconds: since 1970.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def store_root(folder: Path) -> Path:
    """The root of the store that the folder of an artifact is in, or that of a glance at one."""
    root = folder.parent.parent
    return root.parent if root.name == MIRROR else root


@cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} does not belong in a manifest")
