"""Artifacts that are manifests alone, without payload files, for benchmarks of what reads many of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.store.manifest import File, Manifest


def write_manifest(
    folder: Path, stage: str, name: str, inputs: Mapping[str, Manifest], *, files: int, figures: int, **facts: Any
) -> Manifest:
    """Write the manifest of an artifact as a build would, and return it.

    Args:
        folder: of the artifact.
        name: its fingerprint.
        files: number of its files.
        figures: number of its figures.
        facts: other fields of the manifest.
    """
    manifest = Manifest(
        stage=stage,
        version=1,
        fingerprint=name,
        digest=sha(f"digest of {name}"),
        build_id=sha(name)[:32],
        inputs={key: item.as_input() for key, item in inputs.items()},
        requires={},
        files=tuple(File(f"part-{at:05}", 1 << 20, sha(f"{name} {at}")) for at in range(files)),
        result={"figures": {f"figure_{at}": at / 7 for at in range(figures)}, "headline": f"a {stage}"},
        **facts,
    )
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(folder)
    return manifest


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
