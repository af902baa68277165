"""Credentials that the page asks for."""

from __future__ import annotations

import hmac

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.servers.credentials import Credentials


class CredentialsAsked:
    """An ASGI app that only callers with the credentials reach, but for /health."""

    def __init__(self, app: ASGIApp, login: Credentials) -> None:
        self._app = app
        self._header = login.header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._header):
                asking = {"WWW-Authenticate": 'Basic realm="stemma"'}
                await PlainTextResponse("credentials required", 401, asking)(scope, receive, send)
                return
        await self._app(scope, receive, send)
