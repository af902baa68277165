"""Cancel, Retry, and a new run with changed settings, all through Prefect's API: its rules and credentials hold.

No Prefect is imported: the page of a finished store needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

from infra.servers.http import get, post

CANCEL = {"type": "CANCELLING", "name": "Cancelling", "message": "cancelled in the page"}
RETRY = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "retried in the page"}
FINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
TIMEOUT_S, START_TIMEOUT_S, POLL_S = 10.0, 60.0, 0.5
END_PATIENCE_S = 90.0
"""Time that an attempt gets to end before its retry is refused."""


class RefusedError(Exception):
    """A request that Prefect, or the state of a run, does not allow.

    Args:
        status: of HTTP, for the browser.
        fields: messages by key of a form.
    """

    def __init__(
        self, message: str, status: HTTPStatus = HTTPStatus.CONFLICT, fields: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.fields = dict(fields or {})


class Steering:
    """The flow runs of a Prefect server. url: of its API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def cancel(self, flow_run: str) -> None:
        self._set_state(flow_run, CANCEL)

    def retry(self, flow_run: str, process_works: Callable[[], bool]) -> None:
        """Retry a run once its attempt has ended: the worker reports an end after the process is gone, and that report
        would otherwise count for the retry.

        Args:
            process_works: Returns True while the process of the attempt is there.
        """
        deadline = time.monotonic() + END_PATIENCE_S
        while True:
            run = self.flow_run(flow_run)
            if not run.get("deployment_id"):
                raise RefusedError("this run has no deployment, so no worker can retry it; run the command again")
            if run["state_type"] in FINAL and not process_works():
                break
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"the previous attempt has not ended after {END_PATIENCE_S:.0f} s: {run['state_name']}"
                )
            time.sleep(POLL_S)
        self._set_state(flow_run, RETRY)

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        run: dict[str, Any] = get(f"{self._url}/flow_runs/{quote(flow_run, safe='')}", TIMEOUT_S)
        return run

    def reason_to_end(self, flow_run: str) -> str:
        """Return why a flow run has ended without a result; "" for one that has not ended, or is done."""
        run = self.flow_run(flow_run)
        if run["state_type"] not in FINAL - {"COMPLETED"}:
            return ""
        return str((run.get("state") or {}).get("message") or run["state_name"])

    def deployment(self, id: str) -> dict[str, Any]:
        deployment: dict[str, Any] = get(f"{self._url}/deployments/{quote(id, safe='')}", TIMEOUT_S)
        return deployment

    def start(self, deployment_id: str, parameters: dict[str, Any], job_variables: dict[str, Any]) -> str:
        """Start a run of a deployment; return the id of its flow run."""
        body = {"parameters": parameters, "job_variables": job_variables, "state": {"type": "SCHEDULED"}}
        try:
            made = post(
                f"{self._url}/deployments/{quote(deployment_id, safe='')}/create_flow_run", body, START_TIMEOUT_S
            )
        except HTTPError as error:
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            # Prefect validates the parameters by the form of the deployment, which may be of other code.
            raise RefusedError(f"Prefect refused: {error.read(500).decode(errors='replace')}") from None
        return str(made["id"])

    def _set_state(self, flow_run: str, state: dict[str, str]) -> None:
        # As the page of Prefect does.
        answer = post(
            f"{self._url}/flow_runs/{quote(flow_run, safe='')}/set_state", {"state": state, "force": True}, TIMEOUT_S
        )
        if answer.get("status") != "ACCEPT":
            reason = (answer.get("details") or {}).get("reason") or "no reason given"
            raise RefusedError(f"Prefect refused: {reason}")
