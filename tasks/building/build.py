"""The one binding of a domain function to identity, store, leases and lineage: reuse an artifact, or build it.

Nothing here knows Prefect; `tasks.task` puts a Prefect task around it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from infra.errors import Cancelled, StemmaError
from infra.fingerprint import fingerprint
from infra.lineage import messages
from infra.lineage.ledger import ended_unheard
from infra.store.left_memory import remove_memory
from infra.store.manifest import Manifest
from infra.store.measurements import TRAINED
from infra.store.states import STATES, state_at
from infra.store.store import Store
from tasks.building.adopted import adopted_artifact
from tasks.building.builder import Build, MeasuredModel
from tasks.building.context import BuildClock, BuildContext
from tasks.building.explain import (
    BuildRequest,
    Change,
    changes,
    find,
    identity_of,
    keeps_template,
    made_by_others,
    unreadable,
)
from tasks.building.lineage import end_of, leave_card
from tasks.building.promoted import held_against
from tasks.stage import STATE, Node


@dataclass(frozen=True)
class Done:
    """A stage whose artifact exists. `because` lists the reasons why it was built, and is empty for a reused one."""

    status: Literal["built", "reused"]
    manifest: Manifest
    path: Path
    seconds: float
    because: tuple[Change, ...] = ()


def build_request(node: Node, inputs: Mapping[str, Manifest], store: Store) -> BuildRequest:
    """The build request of this node, given its input artifacts. Raises StageError `missing_source`."""
    identity = identity_of(node, keeps_template=keeps_template(node, inputs, store))
    digests = {name: manifest.digest for name, manifest in inputs.items()}
    if STATE in inputs:
        artifact = store.peek(inputs[STATE], STATES)
        digests[STATE] = state_at(artifact, node.inputs[STATE], node.key, node.continues_at()).digest
    sources = store.hashes.digests(node.sources())
    name = fingerprint(node.folder, node.stage.version, identity, digests, sources)
    config = node.config.model_dump(mode="json")
    return BuildRequest(node.folder, node.stage.version, identity, digests, sources, name, config, node.key)


def ensure(
    node: Node,
    inputs: Mapping[str, Manifest],
    requires: Mapping[str, Manifest],
    context: BuildContext,
    *,
    force: bool = False,
) -> Done:
    """The artifact of a node: reused if it exists and is intact, else built, by us or by the holder of its lease.

    Raises StageError and the other errors of `infra.errors`; a failed build leaves no artifact.
    """
    started = time.monotonic()
    store = context.store
    if node.adopted:
        return _reuse(node, adopted_artifact(node, store, read_all=context.read_all), {}, context, started)
    # The fingerprint of the request; a finished artifact with it is reused.
    clock = BuildClock()
    with clock("fingerprint"):
        node = held_against(node, inputs, store)
        request = build_request(node, inputs, store)
    because: list[Change] = [Change("forced", "forced")]
    if not force:
        with clock("verify"):
            reusable, because = _reusable(node, request, context)
        if reusable:
            return _reuse(node, reusable, inputs, context, started)
    # One builder at a time: wait for the lease of this artifact.
    key = f"{node.folder}/{request.fingerprint}"
    with clock("lease"):
        lease = store.leases.acquire(
            key,
            on_wait=lambda holder: context.event(
                node.id, "waiting", f"{holder} is building the same artifact; waiting for it"
            ),
            on_away=lambda error: context.event(node.id, "waiting", f"the leases cannot be read, waiting: {error}"),
            stop_if=context.is_cancelled,
        )
    if lease is None:
        raise Cancelled
    try:
        if lease.taken_from is not None:
            context.event(node.id, "lease_taken", f"taking over from {lease.taken_from}, which is no longer running")
        if not force:
            # A second look: the artifact may have been finished while we waited for the lease.
            with clock("verify"):
                reusable, because = _reusable(node, request, context)
            if reusable:
                return _reuse(node, reusable, inputs, context, started)
        # Build it, or finish the commit of a build that was interrupted before its upload.
        build = Build(node, request, inputs, requires, context, lease, clock)
        if node.measurement is not None:
            build.keep_measurement = partial(_keep_measurement, node.measurement, inputs, context)
        manifest, path = (None if force else build.go_on_with_commit()) or build.run(because)
    finally:
        lease.release()
    return Done("built", manifest, path, manifest.seconds, tuple(because))


def _keep_measurement(node: Node, inputs: Mapping[str, Manifest], context: BuildContext, model: MeasuredModel) -> None:
    """Put a training's measurement of its model into the store, as the artifact of `node`, which finds it there.

    Args:
        inputs: of the training. Where that fails the model is none the worse: `node` measures it again.
    """
    store = context.store
    read = {name: inputs[name] for name in node.inputs if name in inputs} | {TRAINED: model.manifest}
    try:
        request = build_request(node, read, store)
        lease = store.leases.acquire(f"{node.folder}/{request.fingerprint}", stop_if=context.is_cancelled)
        if lease is None:
            return
        try:
            # An existing measurement of an equal model is as good: the address names the model's bytes.
            if _reusable(node, request, context)[0] is None:
                manifest, _ = Build(node, request, read, {}, context, lease, BuildClock()).take(model)
                context.measured_here.add(manifest.build_id)
        finally:
            lease.release()
    except StemmaError as error:
        context.event(node.id, "not_kept", f"the measurement was not stored and will be repeated: {error}")


def _reusable(node: Node, request: BuildRequest, context: BuildContext) -> tuple[Manifest | None, list[Change]]:
    store = context.store
    manifest = find(node, request, store)
    if manifest is None and (damage := unreadable(request, store)):
        context.event(node.id, "damaged", f"{damage}; it will be rebuilt")
        return None, [Change("damaged", damage)]
    if manifest is None:
        return None, changes(request, (other for _, other in store.manifests(request.stage)))
    differences = store.differences(store.path(manifest), manifest, read_all=context.read_all)
    if not differences and context.strict_versions and (others := made_by_others(node, manifest)):
        return None, others
    if not differences:
        return manifest, []
    damage = f"its artifact is damaged: {differences[0]}"
    if len(differences) > 1:
        damage += f" and {len(differences) - 1} more"
    context.event(node.id, "damaged", f"{damage}; it will be rebuilt")
    return None, [Change("damaged", damage)]


def _remove_work(node: Node, manifest: Manifest, context: BuildContext) -> None:
    """Remove the work of a builder that was killed between the artifact's rename and its clean-up."""
    store = context.store
    work = store.layout.work(manifest.stage, manifest.fingerprint)
    if node.adopted or not work.exists():
        return
    lease = store.leases.acquire(f"{manifest.stage}/{manifest.fingerprint}", stop_if=lambda: True)
    if lease is not None:
        try:
            remove_memory(work)
            shutil.rmtree(work, ignore_errors=True)
        finally:
            lease.release()


def _reuse(
    node: Node, manifest: Manifest, inputs: Mapping[str, Manifest], context: BuildContext, started: float
) -> Done:
    path = context.store.path(manifest)
    if manifest.build_id in context.measured_here:
        return Done("built", manifest, path, manifest.seconds, (Change("measured", "measured as it was trained"),))
    leave_card(node, inputs, path, context)
    _remove_work(node, manifest, context)
    if not node.adopted and ended_unheard(context.store.root, manifest.build_id):
        # Its builder was killed between the artifact's last rename and these messages; they count once.
        for message in end_of(node, inputs, manifest, path, context):
            context.outbox.send(message)
    context.outbox.send(
        messages.StageReused(
            context.run_id,
            node.id,
            manifest.fingerprint,
            manifest.digest,
            manifest.build_id,
            time.time(),
        )
    )
    return Done("reused", manifest, path, time.monotonic() - started)
