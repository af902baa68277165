"""Whether guarded servers let us in."""

from __future__ import annotations

from pathlib import Path

from infra.errors import ConfigError, Problem
from infra.servers.credentials import AUTH, credentials
from infra.servers.http import post
from infra.servers.settings import settings_of
from infra.servers.state import prefect_api_url


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
