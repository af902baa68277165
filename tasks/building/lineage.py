"""Lineage messages of a node whose artifact exists, and the card that a registered model gets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from infra.lineage import messages
from infra.lineage.page import pipeline_figures
from infra.store.layout import AUX
from infra.store.manifest import Manifest
from tasks.building.context import BuildContext
from tasks.processes.child import JOURNAL
from tasks.stage import Node

CARD = "MODEL_CARD.md"
REASON_LENGTH = 4000
"""MLflow takes tags of models of 5,000 characters."""


def end_of(
    node: Node, inputs: Mapping[str, Manifest], manifest: Manifest, path: Path, context: BuildContext
) -> Iterator[messages.Message]:
    """Lineage messages of a build once its artifact exists. The build's end comes last, and so confirms all of them."""
    if node.stage.registers:
        model = inputs[node.stage.registers]
        tags = {"stage": model.stage, "pipeline": context.pipeline}
        gates, broken = (int(manifest.result["figures"].get(key, 0)) for key in ("gates", "gates_refused"))
        tags |= {"status": "rejected" if broken else "registered", "gates": f"{gates - broken} kept"}
        if broken:
            tags |= {"gates": f"{broken} of {gates} broken", "reason": str(manifest.result["headline"])[:REASON_LENGTH]}
        of_model = {
            manifest.step or manifest.stage: manifest
            for manifest in inputs.values()
            if model.digest in _read_by(manifest)
        }
        figures = pipeline_figures({name: manifest.result.get("figures", {}) for name, manifest in of_model.items()})
        tags |= {name: f"{value:.4g}" for name, value in figures.items()}
        name, note = str(manifest.config["name"]), str(manifest.result["headline"])
        yield messages.RegisterModel(
            model.build_id,
            name,
            str(context.store.fetch(model)),
            model.digest,
            time.time(),
            note,
            tags,
            str(path / CARD),
        )
    kind: Literal["model", "dataset"] = "model" if node.stage.makes_weights else "dataset"
    yield messages.StageFinished(
        manifest.build_id,
        "FINISHED",
        datetime.fromisoformat(manifest.finished).timestamp(),
        manifest.result["figures"],
        manifest.result["headline"],
        messages.Output(node.folder, manifest.digest, manifest.fingerprint, context.store.location(manifest), kind),
        str(path / AUX / JOURNAL),
        shown(node, path),
    )


def leave_card(node: Node, inputs: Mapping[str, Manifest], path: Path, context: BuildContext) -> None:
    """Put the card of a registered model into that model's folder too."""
    if node.stage.registers and (path / CARD).is_file():
        # A full disk, or one of another user's, must not fail a registration.
        with suppress(OSError):
            context.store.put_beside(inputs[node.stage.registers], path / CARD, CARD)


def _read_by(manifest: Manifest) -> set[str]:
    """The digest of an artifact, and of those that it was made of."""
    return {manifest.digest, *(given.digest for given in manifest.inputs.values())}


def shown(node: Node, folder: Path) -> tuple[str, ...]:
    """The files that a person wants to open: those of a build that failed lie where it worked."""
    return tuple(str(folder / name) for name in node.stage.shows if (folder / name).exists())
