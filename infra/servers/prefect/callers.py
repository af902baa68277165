"""Rules for the requests that our servers accept: those under one of a server's names, and none of another site's page.

A page in a browser can reach servers on loopback: by a form or script that sends a request there, or after its own name
was made to point to 127.0.0.1 (DNS rebinding). The first shows in Origin and Sec-Fetch-Site, the second in Host.
Programs send neither Origin nor Sec-Fetch-Site.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

NAMES = "STEMMA_NAMES"
"""Variable with the names that only the network knows: `stemma.lab,mlflow`, with a port if it is not the usual one."""
READS = ("GET", "HEAD", "OPTIONS")
OWN_SITES = ("same-origin", "none")
LONGEST_SHOWN = 100

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Refusal:
    status: HTTPStatus
    message: str

    @property
    def body(self) -> bytes:
        return f"{self.message}\n".encode()


HEADERS = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
"""Headers of every refusal: text that no browser renders as a page."""


@dataclass(frozen=True)
class Callers:
    """Rules for the callers of a server.

    names: our host names, without ports; a request may name any port, since a tunnel changes it.
    addresses: `host:port`, or `host` for a usual port, of pages that may call us under an address other than their own.
    json_only: True if writes must declare their body as JSON, which a form of another site cannot do.
    """

    names: frozenset[str]
    addresses: frozenset[str]
    json_only: bool = True

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return the refusal of a request, None for one that is accepted.

        Args:
            method: of HTTP; for a websocket any word that is no reading method, since the websocket may write.
            headers: names in lower case; values of a repeated name are joined by commas.
        """
        host = headers.get("host", "").lower()
        if host_name(host) not in self.names:
            message = f"this server is not known as {_shown(host)}"
            return Refusal(HTTPStatus.MISDIRECTED_REQUEST, f"{message}. {_to_set('name', host_name(host))}")
        origin = headers.get("origin")
        if origin is not None:
            if not self._is_own(origin.lower(), host):
                message = f"pages of {_shown(origin)} may not call this server"
                return Refusal(HTTPStatus.FORBIDDEN, f"{message}. {_to_set('address', origin.rpartition('/')[2])}")
        elif method not in READS and headers.get("sec-fetch-site", "none") not in OWN_SITES:
            return Refusal(HTTPStatus.FORBIDDEN, "pages of other sites may not call this server.")
        if self.json_only and method not in READS and _has_body(headers) and not _is_json(headers):
            message = "expected a JSON body with Content-Type: application/json"
            return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        """Return True for a page of the called address, and for one of our other addresses."""
        scheme, _, address = origin.partition("://")
        return scheme in ("http", "https") and (address == host or address in self.addresses)


def host_name(address: str) -> str:
    """Return `name` of `name:port`, `[::1]` of `[::1]:port`."""
    name, colon, port = address.rpartition(":")
    return name if colon and (not port or port.isdigit()) else address


class OwnCallersOnly:
    """An ASGI app behind the rules of `Callers`."""

    def __init__(self, app: App, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind in ("http", "websocket"):
            refused = self._callers.refusal(scope.get("method", "WEBSOCKET"), _headers(scope))
            if refused:
                await refuse(refused, kind, send)
                return
        await self._app(scope, receive, send)


async def refuse(refused: Refusal, kind: str, send: Send) -> None:
    """Send a refusal in place of an app's response.

    Args:
        kind: `http` or `websocket`.
    """
    # In uvicorn an app may answer the opening of a websocket with a response (the extension websocket.http.response).
    prefix = "websocket.http.response" if kind == "websocket" else "http.response"
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS]
    await send({"type": f"{prefix}.start", "status": int(refused.status), "headers": headers})
    await send({"type": f"{prefix}.body", "body": refused.body})


def _headers(scope: Scope) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"


def _is_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _to_set(kind: str, value: str) -> str:
    return (
        f"If that is the {kind} of a proxy or network of yours, start the server with {NAMES}={_shown(value)} in its "
        f"environment, after a comma where {NAMES} holds others."
    )


def _shown(value: str) -> str:
    return "".join(c for c in value if c.isprintable())[:LONGEST_SHOWN] or "(nothing)"
