"""The artifact that answers what is asked for: at its address, or at one that it has from an earlier version."""

from __future__ import annotations

from pydantic import ValidationError

from infra.identity import canonical, same, within
from infra.store.manifest import Manifest
from infra.store.store import Store, address_of
from tasks.explain import BuildRequest
from tasks.stage import Node


def find(node: Node, request: BuildRequest, store: Store) -> Manifest | None:
    """The manifest of the artifact, None if there is none; its files are not looked at.

    One config had several addresses once: a default that was spelled otherwise than its normal form (`1 epoch`) was
    part of the identity when the config came as JSON, by way of the worker, and none when it came from the file; and a
    page's form writes 1 for 1.0. So where the address is empty, the artifact of the same stage, version, inputs and
    sources is taken whose recorded config reads as the same today.
    """
    if (manifest := store.find(request.stage, request.fingerprint)) is not None:
        return manifest
    others = (other for folder, other in store.manifests(request.stage) if folder == store.path(other))
    return max(
        (other for other in others if _answers(node, request, other)), key=lambda one: one.finished, default=None
    )


def _answers(node: Node, request: BuildRequest, other: Manifest) -> bool:
    inputs = {name: item.identity for name, item in other.inputs.items()}
    sources = {record.key: record.digest for record in other.sources}
    if (other.adopted, other.version, inputs, sources) != (None, request.version, request.inputs, request.sources):
        return False
    if address_of(other) != other.fingerprint:
        return False  # it was tampered with
    try:
        identity = canonical(type(node.config).model_validate(dict(other.config)), node.key)
    except (ValidationError, TypeError):
        return False  # keys that there are no more, or values that are not right any more
    # Besides what is asked for, its identity may hold only what its config says and is the default today.
    return (
        same(identity, request.identity) and within(identity, other.identity) and within(other.identity, other.config)
    )
