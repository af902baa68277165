"""Artifacts of a few bytes, made by the store's own commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infra.fingerprint import fingerprint
from infra.store.manifest import Manifest, SourceRecord
from infra.store.store import Store

Make = Callable[..., Manifest]


def make_artifact(
    store: Store,
    stage: str,
    files: Mapping[str, str | bytes],
    *,
    inputs: Mapping[str, Manifest] | None = None,
    requires: Mapping[str, Manifest] | None = None,
    sources: tuple[SourceRecord, ...] = (),
    config: Mapping[str, Any] | None = None,
    build_id: str = "",
    **facts: Any,
) -> Manifest:
    """Commits an artifact with these files, as a build would, and returns the manifest at its address."""
    inputs, requires, config = inputs or {}, requires or {}, config or {}
    digests = {name: item.digest for name, item in inputs.items()}
    name = fingerprint(stage, 1, config, digests, {record.key: record.digest for record in sources})
    unfinished = store.layout.work(stage, name) / "artifact"
    for path, content in files.items():
        (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / path).write_bytes(content.encode() if isinstance(content, str) else content)
    described = store.describe_files(unfinished)
    manifest = Manifest(
        stage=stage,
        version=1,
        fingerprint=name,
        digest=store.content_digest(described),
        build_id=build_id or f"build of {stage} {name}",
        config=config,
        identity=config,
        inputs={key: item.as_input() for key, item in inputs.items()},
        requires={key: item.as_input() for key, item in requires.items()},
        sources=sources,
        files=described,
        result={"figures": {}, "headline": f"a {stage}"},
        **facts,
    )
    store.commit(unfinished, manifest)
    found = store.find(stage, name)
    assert found is not None
    return found
