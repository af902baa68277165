"""Notices that Prefect's server sends for every pipeline.

Made by `stemma up` and `stemma deploy`; making them again changes nothing unless they have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect.automations import Automation
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture

from flows.prefect.notices import NOTICE, Channel, channels, save_block, switched_off

NOTICE_NAME = "stemma: tell by "

_REPLACED = "stemma: mark runs whose process is gone"
"""Automation of older versions. It waited for a first heartbeat, which some runs never sent;
`infra.servers.prefect.lost_runs` waits for none."""


def ensure_automations() -> list[str]:
    """Create missing automations and change those that differ; return the names of all that exist now.

    A notice stays unchanged while its variable is not set, and is deleted when the variable is `off`.
    """
    there = {existing.name: existing for existing in _existing()}
    if replaced := there.pop(_REPLACED, None):
        replaced.delete()
    for automation in map(_notice, channels()):
        existing = there.get(automation.name)
        if existing is None:
            automation.create()
        elif _meaning(existing) != _meaning(automation):
            automation.id = existing.id
            automation.update()
        there[automation.name] = automation
    for name in switched_off():
        if silent := there.pop(NOTICE_NAME + name, None):
            silent.delete()
    return sorted(there)


def _notice(channel: Channel) -> Automation:
    return Automation(
        name=NOTICE_NAME + channel.name,
        description=f"Failures, refusals, corrections and drift go to the address in ${channel.variable}.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={f"{NOTICE}.*", "prefect.flow-run.Crashed"},
            for_each={"prefect.resource.id"},
            threshold=1,
        ),
        actions=[SendNotification(block_document_id=save_block(channel), subject=_SUBJECT, body=_BODY)],
    )


_SUBJECT = (
    "{% if event.payload.title %}{{ event.payload.title }}"
    "{% else %}{{ event.resource['prefect.resource.name'] }} crashed{% endif %}"
)
_BODY = (
    "{% if event.payload.title %}{{ event.payload.text }}"
    "{% else %}Its process or its worker is gone. Run it again: finished stages are reused.\n{{ flow_run|ui_url }}"
    "{% endif %}"
)


def _existing() -> Sequence[Automation]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        rows: list[Any] = client.request("POST", "/automations/filter", json={}).json()
    automations = [Automation.model_validate(item) for item in rows]
    return [item for item in automations if item.name == _REPLACED or item.name.startswith(NOTICE_NAME)]


def _meaning(automation: Automation) -> dict[str, Any]:
    message = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions", "enabled"})
    message["trigger"].pop("id", None)
    return message
