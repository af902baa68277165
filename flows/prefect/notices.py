"""Recipients of failures, refusals, corrections and drift, and the Prefect blocks through which they are notified.

An address is a secret: it comes from the environment of `stemma up` or `stemma deploy`, and Prefect keeps
it in a block, encrypted.

    STEMMA_NOTICE_SLACK=https://hooks.slack.com/…                     anything that takes {"text": …}
    STEMMA_NOTICE_WEBHOOK=https://…                                   takes {"title": …, "text": …}
    STEMMA_NOTICE_EMAIL='mailtos://user:password@smtp.host?to=a@b.c'  an Apprise address
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.events import emit_event
from prefect.types import SecretDict
from pydantic import SecretStr

from infra.secrets import hide

NOTICE = "stemma.notice"
Kind = Literal["failed", "refused", "corrected", "slowed", "stuck", "drifted"]
Name = Literal["slack", "webhook", "email"]
NAMES: tuple[Name, ...] = ("slack", "webhook", "email")
OFF = "off"


@dataclass(frozen=True)
class Channel:
    """One way to notify people. address: as its variable gives it."""

    name: Name
    variable: str
    address: str

    @property
    def block(self) -> Block:
        if self.name == "email":
            # The block known to every Prefect server that passes on any other Apprise address.
            return SlackWebhook(url=SecretStr(self.address))
        message = (
            {"text": "*{{subject}}*\n{{body}}"}
            if self.name == "slack"
            else {"title": "{{subject}}", "text": "{{body}}"}
        )
        secrets = SecretDict({"address": self.address})
        return CustomWebhookNotificationBlock(name=self.name, url="{{address}}", json_data=message, secrets=secrets)


def channels() -> list[Channel]:
    """The channels whose variable holds an address."""
    return [Channel(name, _variable(name), address) for name in NAMES if (address := _address(name)) not in ("", OFF)]


def switched_off() -> list[Name]:
    return [name for name in NAMES if _address(name) == OFF]


def _variable(name: Name) -> str:
    return f"STEMMA_NOTICE_{name.upper()}"


def _address(name: Name) -> str:
    return os.environ.get(_variable(name), "")


def save_block(channel: Channel) -> UUID:
    """Keep the channel's address in Prefect, under the same name each time."""
    saved = channel.block.save(f"stemma-notice-{channel.name}", overwrite=True)
    assert isinstance(saved, UUID)
    return saved


def notify(kind: Kind, title: str, text: str, *, run: str, url: str = "") -> None:
    """Notify all configured channels; without a channel this is an event in Prefect's feed and nothing more."""
    title, text = hide(title), hide(text)
    emit_event(
        event=f"{NOTICE}.{kind}",
        resource={"prefect.resource.id": f"stemma.run.{run}", "prefect.resource.name": title},
        payload={"title": title, "text": f"{text}\n{url}".strip()},
    )
