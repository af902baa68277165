"""Small questions to servers, past any proxy, and whether guarded ones let us in.

python -m infra.servers.http URL    ends with 0 if it answers, for health checks
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem
from infra.io.json import parse_own_json
from infra.servers.credentials import AUTH, credentials
from infra.servers.settings import settings_of
from infra.servers.state import prefect_api_url

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
            return parse_own_json(response.read())
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{url} refuses these credentials") from error
        raise


def check_credentials(root: Path | str) -> None:
    """Raises ConfigError `no_credentials` if the servers of a store ask for credentials that we do not have."""
    url = prefect_api_url(root)
    if url is None or not settings_of(root).guarded:
        return
    try:
        post(f"{url}/flows/count", {})
    except PermissionError:
        raise not_let_in() from None
    except OSError:
        return  # whoever needs the server says so


def not_let_in() -> ConfigError:
    message = "the servers do not accept these credentials" if credentials() else "the servers ask for credentials"
    return ConfigError(Problem("no_credentials", AUTH, message, f"export {AUTH} as it was at `stemma up`"))


if __name__ == "__main__":
    sys.exit(0 if answers(sys.argv[1]) else 1)
