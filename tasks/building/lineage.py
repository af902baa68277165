"""Lineage messages of a node whose artifact exists, and the card that a registered model gets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from infra.errors import StemmaError
from infra.ledger.ancestors import cost_over_ancestors
from infra.ledger.builds import RECORD, card_section, cost_of
from infra.ledger.builds import tags as cost_tags
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
        with suppress(OSError, StemmaError):  # what it cost must not fail a registration
            cost = cost_over_ancestors(context.store, context.store.path(model), model)
            tags |= cost_tags(cost.account) if cost.is_known else {}
        name, note = str(manifest.config["name"]), str(manifest.result["headline"])
        yield messages.RegisterModel(
            model.build_id,
            name,
            str(context.store.fetch(model)),
            model.digest,
            time.time(),
            note,
            tags,
            str(with_cost if (with_cost := context.store.path(model) / AUX / CARD).is_file() else path / CARD),
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
        tags=_tags_of_build(path),
    )


def _tags_of_build(path: Path) -> dict[str, str]:
    account = cost_of(path, "", "").account if (path / RECORD).is_file() else None
    return cost_tags(account) if account and account.attempts else {}


def leave_card(node: Node, inputs: Mapping[str, Manifest], path: Path, context: BuildContext) -> None:
    """Put the card of a registered model into that model's folder too, with what the model cost.

    The card in the registration is part of its digest, and so contains nothing that differs between two builds.
    """
    if not node.stage.registers or not (path / CARD).is_file():
        return
    model = inputs[node.stage.registers]
    # A full disk, or one of another user's, must not fail a registration.
    with suppress(OSError, StemmaError), tempfile.TemporaryDirectory() as folder:
        cost = cost_over_ancestors(context.store, context.store.path(model), model)
        card = Path(folder) / CARD
        text = (path / CARD).read_text(encoding="utf8").rstrip()
        card.write_text(f"{text}\n\n{card_section(cost)}\n", encoding="utf8")
        context.store.put_beside(model, card, CARD)


def _read_by(manifest: Manifest) -> set[str]:
    """The digest of an artifact, and of those that it was made of."""
    return {manifest.digest, *(given.digest for given in manifest.inputs.values())}


def shown(node: Node, folder: Path) -> tuple[str, ...]:
    """Files for people to open; those of a failed build are in its work folder."""
    return tuple(str(folder / name) for name in node.stage.shows if (folder / name).exists())
