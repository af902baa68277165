"""Rebuild the tracking store of a root from the manifests of its artifacts, which are the source of truth."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infra.errors import stage_error
from infra.lineage.ledger import Ledger, ledger_path
from infra.lineage.messages import (
    WHOLE_RUN,
    InputMessage,
    MetricsFile,
    Output,
    PipelineFinished,
    PipelineStarted,
    SourceFile,
    StageFinished,
    StageStarted,
)
from infra.lineage.migrations import set_aside
from infra.lineage.page import pipeline_figures
from infra.lineage.relay_lock import RelayLock, this_process
from infra.lineage.tracking import database_uri, mlflow_folder
from infra.servers.settings import settings_of
from infra.servers.state import mlflow_url
from infra.store.layout import MANIFEST, Layout
from infra.store.manifest import Manifest

if TYPE_CHECKING:
    from infra.lineage.delivery import Delivery

WEIGHTS = "model.safetensors"
SHOWN = ("report.html", "aux/validation.html", "MODEL_CARD.md", "results.json", "verdict.json")


def rebuild(root: Path | str) -> int:
    """Set the old tracking store aside, if there is one, and write another; return the number of builds in it.

    Run ids are new; everything else is as first reported, except for failed runs, which left no manifest, and the
    registry, whose entries are written by the register stage.

    Raises StageError `store_in_use` while the MLflow server or a relay works on the store, `unreadable_manifest` for a
    damaged one; the old store is left unchanged then.
    """
    root = Path(root).absolute()
    lock = RelayLock(root)
    if mlflow_url(root) or not lock.acquire():
        raise stage_error("store_in_use", str(root), "MLflow or its relay is working on the store", "run `stemma down`")
    try:
        manifests = _manifests(root)
        _set_aside(root)
        # MLflow takes seconds to import.
        from infra.lineage.delivery import Delivery

        ledger = Ledger(root)
        delivery = Delivery(root, database_uri(root), ledger)
        for parent_id, group in _by_pipeline_run(manifests).items():
            first = group[0][1]
            begin = min(_seconds(manifest.started) for _, manifest in group)
            end = max(_seconds(manifest.finished) for _, manifest in group)
            pipeline = first.pipeline or "stages run alone"
            delivery.deliver(
                PipelineStarted(parent_id, pipeline, begin, flow_run_id=first.flow_run_id or ""), this_process()
            )
            for folder, manifest in group:
                _deliver_build(delivery, parent_id, pipeline, folder, manifest)
            figures = pipeline_figures(
                {manifest.step or manifest.stage: manifest.result.get("figures", {}) for _, manifest in group}
            )
            files = tuple(str(folder / name) for folder, _ in group for name in WHOLE_RUN if (folder / name).exists())
            finished = PipelineFinished(parent_id, "FINISHED", end, figures=figures, artifacts=files)
            delivery.deliver(finished, this_process())
        ledger.close()
        return len(manifests)
    finally:
        lock.release()


def _set_aside(root: Path) -> None:
    if postgres := settings_of(root).postgres:
        postgres.prepare()
        postgres.set_mlflow_aside()
    suffix = time.strftime("%Y%m%d-%H%M%S")
    for path in (mlflow_folder(root) / "mlflow.db", ledger_path(root)):
        if path.exists():
            set_aside(path, suffix)


def _manifests(root: Path) -> list[tuple[Path, Manifest]]:
    layout = Layout(root)
    manifests = [(folder, _read(folder)) for stage in layout.stages() for folder in layout.artifacts(stage)]
    return sorted(manifests, key=lambda item: (item[1].started, item[1].stage))


def _read(folder: Path) -> Manifest:
    try:
        manifest = Manifest.read(folder)
        _seconds(manifest.started), _seconds(manifest.finished)
    except (OSError, ValueError) as error:
        message = f"nothing was rebuilt, since this manifest cannot be read: {error}"
        fix = "move the folder out of the store, or build it again"
        raise stage_error("unreadable_manifest", str(folder / MANIFEST), message, fix) from error
    return manifest


def _by_pipeline_run(manifests: list[tuple[Path, Manifest]]) -> dict[str, list[tuple[Path, Manifest]]]:
    groups: dict[str, list[tuple[Path, Manifest]]] = {}
    for folder, manifest in manifests:
        key = manifest.run_id or f"rebuilt-{manifest.pipeline}-{manifest.flow_run_id or 'none'}"
        groups.setdefault(key, []).append((folder, manifest))
    return groups


def _deliver_build(delivery: Delivery, parent_id: str, pipeline: str, folder: Path, manifest: Manifest) -> None:
    sender = this_process()
    delivery.deliver(
        StageStarted(
            manifest.build_id,
            parent_id,
            pipeline,
            manifest.step or manifest.stage,
            manifest.fingerprint,
            _seconds(manifest.started),
            manifest.version,
            manifest.config,
            tuple(InputMessage(name, i.stage, i.digest, i.fingerprint) for name, i in manifest.inputs.items()),
            _sources(manifest),
            str(manifest.code.get("commit", "")),
            bool(manifest.code.get("dirty", False)),
            manifest.lock_hash,
            manifest.host,
            manifest.device,
            manifest.flow_run_id or "",
        ),
        sender,
    )
    delivery.deliver(MetricsFile(manifest.build_id, str(folder / "aux" / "metrics.jsonl")), sender)
    kind: Literal["model", "dataset"] = "model" if (folder / WEIGHTS).exists() else "dataset"
    delivery.deliver(
        StageFinished(
            manifest.build_id,
            "FINISHED",
            _seconds(manifest.finished),
            manifest.result.get("figures", {}),
            manifest.result.get("headline", ""),
            Output(manifest.stage, manifest.digest, manifest.fingerprint, str(folder), kind),
            artifacts=tuple(str(folder / name) for name in SHOWN if (folder / name).exists()),
        ),
        sender,
    )


def _sources(manifest: Manifest) -> tuple[SourceFile, ...]:
    """Return files with their hashes; a source without own files is listed by its config key."""
    return tuple(
        SourceFile(path, digest)
        for source in manifest.sources
        for path, digest in (source.files or {source.key: source.digest}).items()
    )


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp() if moment else 0.0
