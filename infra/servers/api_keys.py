"""API keys of a server's clients, from the environment, and the rate limit of each client."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.errors import ConfigError, Problem
from infra.servers.credentials import SHORTEST_PASSWORD, Credentials

KEYS = "STEMMA_API_KEYS"
MINUTE_S = 60.0


def api_keys() -> list[Credentials]:
    """Return the clients that $STEMMA_API_KEYS names, `name:key,name:key`; empty if it is not set.

    Raises ConfigError for anything else, and for duplicate names or keys.
    """
    clients = []
    for text in filter(None, (part.strip() for part in os.environ.get(KEYS, "").split(","))):
        name, colon, key = text.partition(":")
        if not (colon and name and len(key) >= SHORTEST_PASSWORD):
            message = f"expected name:key,name:key expected, with keys of {SHORTEST_PASSWORD} characters or more"
            raise ConfigError(Problem("bad_credentials", KEYS, message, how_to_set()))
        clients.append(Credentials(name, key))
    for field, values in (
        ("name", [client.user for client in clients]),
        ("key", [client.password for client in clients]),
    ):
        if len(set(values)) < len(values):
            raise ConfigError(Problem("bad_credentials", KEYS, f"expected each {field} only once", how_to_set()))
    return clients


def how_to_set() -> str:
    return f'export {KEYS}="ada:$(openssl rand -hex 16),ben:$(openssl rand -hex 16)"'


@dataclass(frozen=True)
class Allowance:
    """The answer of a rate limit. remaining: requests that the client may make now; wait_s: seconds until the next."""

    is_allowed: bool
    remaining: int
    wait_s: float


class RateLimit:
    """Limit on the requests per minute of each client, as a bucket that is full at first and refills evenly.

    Args:
        per_minute: Requests.
        clock: Seconds, never decreasing.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left, and when

    def take(self, client: str) -> Allowance:
        """Count a request of a client, if it may make one."""
        now = self._clock()
        if client not in self._buckets:
            self._forget_full(now)
        remaining, since = self._buckets.get(client, (float(self.per_minute), now))
        remaining = min(self.per_minute, remaining + (now - since) * self.per_minute / MINUTE_S)
        is_allowed = remaining >= 1
        remaining -= is_allowed
        self._buckets[client] = (remaining, now)
        wait_s = max(0.0, 1 - remaining) * MINUTE_S / self.per_minute
        return Allowance(is_allowed, int(remaining), wait_s)

    def headers(self, allowance: Allowance) -> Mapping[str, str]:
        """Return the headers of a response, as OpenAI's API sends them."""
        headers = {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(allowance.remaining),
            "x-ratelimit-reset-requests": f"{allowance.wait_s:.3f}s",
        }
        return headers if allowance.is_allowed else {**headers, "Retry-After": str(max(1, math.ceil(allowance.wait_s)))}

    def _forget_full(self, now: float) -> None:
        """Drop clients whose buckets are full again: there may be as many clients as there are addresses."""
        full = [name for name, (_, since) in self._buckets.items() if now - since >= MINUTE_S]
        for name in full:
            del self._buckets[name]
