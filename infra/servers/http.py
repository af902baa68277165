"""Small questions to servers on this machine, past any proxy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """True if a GET is answered with success."""
    try:
        with _opener.open(url, timeout=timeout_s):
            return True
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: dict[str, Any], timeout_s: float = 2.0) -> Any:
    """The JSON answer to a JSON POST. Raises OSError if there is none."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _opener.open(request, timeout=timeout_s) as response:
        return json.load(response)
