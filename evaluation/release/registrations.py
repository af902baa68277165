"""Lookup of a model in the store's registrations: the newest one, and the gates that refused the model there."""

from __future__ import annotations

from pathlib import Path

from infra.errors import Problem
from infra.io.json import read_own_json
from infra.store.manifest import Manifest
from infra.store.store import Store

REGISTER = "register"
RECORD = "registration.json"


def newest_registration(store: Store, digest: str) -> tuple[Path, Manifest] | None:
    """Return the newest registration of the model with these bytes; None if it was not registered."""
    registrations = store.manifests(REGISTER) if REGISTER in store.stages() else ()
    matching = [
        pair for pair in registrations if "model" in pair[1].inputs and pair[1].inputs["model"].digest == digest
    ]
    return max(matching, key=lambda pair: pair[1].age_key, default=None)


def refusals_of(store: Store, digest: str) -> list[Problem]:
    """Return a problem for each gate that refused the model at its last judgement, with figure, value and bound; empty
    for a model that was not refused, or not judged.

    A registration whose record is missing or truncated is ignored; `stemma verify` reports it.
    """
    if (newest := newest_registration(store, digest)) is None:
        return []
    folder, manifest = newest
    try:
        record = read_own_json(store.peek(manifest, RECORD, folder=folder) / RECORD)
        if record["status"] != "rejected":
            return []
        reasons = [str(reason["message"]) for reason in record["reasons"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
    model, address = manifest.inputs["model"], f"{REGISTER}/{folder.name}"
    return [
        Problem("rejected", f"{model.stage}/{model.fingerprint[:8]}", f"a gate rejected it: {reason}", f"see {address}")
        for reason in reasons
    ]
