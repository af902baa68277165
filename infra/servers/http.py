"""Small requests to servers, bypassing any proxy, and a check that guarded servers accept our credentials.

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
    """Return True if a GET succeeds."""
    try:
        with _opener.open(url, timeout=timeout_s):
            return True
    except (urllib.error.URLError, OSError):
        return False


def misdirected(url: str, timeout_s: float = 2.0) -> str:
    """Return the answer of a server that does not accept the name in this URL as its own.

    Empty if it accepts the name, or if no server answers.
    """
    try:
        with _opener.open(url, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        is_misdirected = error.code == HTTPStatus.MISDIRECTED_REQUEST
        return error.read().decode(errors="replace").strip() if is_misdirected else ""
    except OSError:
        return ""


def post(url: str, body: dict[str, Any], timeout_s: float = 2.0) -> Any:
    """Return the JSON answer to a JSON POST with our credentials.

    Raises PermissionError for 401, OSError for any other failed request.
    """
    return _call(url, json.dumps(body).encode(), timeout_s)


def get(url: str, timeout_s: float = 2.0) -> Any:
    """Return the JSON answer to a GET with our credentials. Raises as `post` does."""
    return _call(url, None, timeout_s)


def delete(url: str, timeout_s: float = 2.0) -> None:
    """Delete what an address names, if it is there, with our credentials. Raises as `post` does."""
    try:
        _call(url, None, timeout_s, "DELETE")
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def _call(url: str, body: bytes | None, timeout_s: float, method: str | None = None) -> Any:
    """method: by default that of urllib, GET or, with a body, POST."""
    headers = {"Content-Type": "application/json"}
    if login := credentials():
        headers["Authorization"] = login.header
    try:
        with _opener.open(urllib.request.Request(url, body, headers, method=method), timeout=timeout_s) as response:
            content = response.read()
            return parse_own_json(content) if content else None
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{url} refuses these credentials") from error
        raise


def check_credentials(root: Path | str) -> None:
    """Raise ConfigError `no_credentials` if the servers of a store ask for credentials that we do not have."""
    url = prefect_api_url(root)
    if url is None or not settings_of(root).guarded:
        return
    try:
        post(f"{url}/flows/count", {})
    except PermissionError:
        raise not_let_in() from None
    except OSError:
        return  # code that needs the server reports this


def not_let_in() -> ConfigError:
    message = "the servers do not accept these credentials" if credentials() else "the servers ask for credentials"
    return ConfigError(Problem("no_credentials", AUTH, message, f"export {AUTH} with its value at `stemma up`"))


if __name__ == "__main__":
    sys.exit(0 if answers(sys.argv[1]) else 1)
