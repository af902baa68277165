"""Cost of artifacts in a store, over all that they descend from."""

from __future__ import annotations

from pathlib import Path

from infra.ledger.builds import FILES, Cost, CostOfAll, cost_of
from infra.store.ancestry import ancestry
from infra.store.manifest import Manifest
from infra.store.store import Store


def cost_over_ancestors(store: Store, folder: Path, manifest: Manifest) -> CostOfAll:
    """Return the cost of an artifact and its ancestors, those that validated its inputs included. The artifact itself
    comes first."""
    costs = []
    for member in ancestry(store, [(folder, manifest)]).members.values():
        if member.kind == "source":
            continue
        if member.manifest is None:
            address = f"{member.input.stage}/{member.input.fingerprint}" if member.input else member.id
            costs.append(Cost(address, "", None, "no longer in the store"))
            continue
        described = member.manifest
        local = store.peek(described, *FILES, folder=member.folder)
        address = f"{described.stage}/{described.fingerprint}"
        costs.append(
            cost_of(local, address, described.step or described.stage, is_imported=described.adopted is not None)
        )
    return CostOfAll(costs)
