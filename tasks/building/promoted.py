"""The reference that a registration is compared with: the currently promoted model, as a source that affects its
identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evaluation.config import RegisterConfig
from infra.io.sources import Source
from infra.store.manifest import Manifest
from infra.store.promotions import Promotions
from infra.store.store import Store
from tasks.stage import Node

RECORD = "registration.json"


def held_against(node: Node, inputs: Mapping[str, Manifest], store: Store) -> Node:
    """The node with the record of the promoted model as a source, if it has a gate that asks for it and there is one.

    It is the last promoted model of the name that is another than the node's own: promoting a model changes nothing
    about the registration that it was promoted by. See docs/decisions/0011-gates-against-the-promoted-model.md.
    """
    config = node.config
    if not isinstance(config, RegisterConfig) or not any(gate.against for gate in config.gates):
        return node
    own_digest = inputs[node.stage.registers].digest
    for promotion in reversed(Promotions(store.root).history(config.name or "")):
        if promotion.digest == own_digest:
            continue
        folder = store.root / promotion.registration
        if store.remote is not None and (manifest := store.read(folder)) is not None:
            store.fetch(manifest, folder)  # it is small
        record = folder / RECORD
        if record.is_file():
            return replace(node, promoted=Source(f"{node.stage.name}.gates", (record,)))
    return node
