"""Requests with exactly the headers that a test gives, which clients would put right."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Response:
    """headers: names in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes


def address_of(url: str) -> str:
    """`host:port`."""
    return urlsplit(url).netloc


def ask(
    url: str, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> Response:
    """What the server at `url` answers; Host is the server's own unless it is given."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.putrequest(method, parts.path + path, skip_host=True, skip_accept_encoding=True)
        given = {"Host": parts.netloc, **(headers or {})}
        if body is not None:
            given["Content-Length"] = str(len(body))
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        # An opened websocket has no end that could be waited for.
        return Response(answer.status, found, b"" if answer.status == 101 else answer.read())
    finally:
        connection.close()
