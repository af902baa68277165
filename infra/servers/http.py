"""Small questions to servers, past any proxy.

python -m infra.servers.http URL    ends with 0 if it answers, for health checks
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from infra.servers.credentials import credentials

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """True if a GET is answered with success."""
    try:
        with _opener.open(url, timeout=timeout_s):
            return True
    except (urllib.error.URLError, OSError):
        return False


def misdirected(url: str, timeout_s: float = 2.0) -> str:
    """What a server says that does not know itself by the name in this URL; empty if it does, or nobody answers."""
    try:
        with _opener.open(url, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        found = error.code == HTTPStatus.MISDIRECTED_REQUEST
        return error.read().decode(errors="replace").strip() if found else ""
    except OSError:
        return ""


def post(url: str, body: dict[str, Any], timeout_s: float = 2.0) -> Any:
    """The JSON answer to a JSON POST with our credentials. Raises PermissionError for 401, OSError without answer."""
    headers = {"Content-Type": "application/json"}
    if known := credentials():
        headers["Authorization"] = known.header
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{url} refuses these credentials") from error
        raise


if __name__ == "__main__":
    sys.exit(0 if answers(sys.argv[1]) else 1)
