"""The slot of a deployment that lets so many runs at once: kept through a server that does not answer for a while.

Prefect's engine ends a flow run, and the training within, once it cannot renew its slot. A slot is for order among
schedules; that no two runs build one artifact is seen to by the store's own leases.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

from prefect.concurrency import _leases

RETRY_S = 15.0
LOST = "the slot of this run was not renewed; it goes on, and another run of its deployment may begin"

_renew_until_it_fails = _leases._lease_renewal_loop
_log = logging.getLogger(__name__)


async def _renew_for_ever(lease_id: UUID, lease_duration: float) -> None:
    while True:
        try:
            await _renew_until_it_fails(lease_id, lease_duration)
        except Exception as error:
            _log.warning("%s (%s)", LOST, type(error).__name__)
            await asyncio.sleep(RETRY_S)


def keep_slots() -> None:
    """Makes Prefect's engine in this process go on when a slot cannot be renewed."""
    _leases._lease_renewal_loop = _renew_for_ever
