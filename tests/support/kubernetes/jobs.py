"""A Job of the stand-in for a cluster (`tests.support.kubernetes.cluster`): what its controller makes of its pods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.kubernetes.pods import Pod

_REASON = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}


@dataclass
class Job:
    """One Job of no retries: its object, and the phases in which pods of it went that are there no more."""

    document: dict[str, Any]
    gone: list[str] = field(default_factory=list)

    @property
    def pods(self) -> int:
        """How many it has at once: as many as it wants to succeed."""
        return int(self.document["spec"]["completions"])

    @property
    def is_failing(self) -> bool:
        """Whether its pods are to end, or have, for one that failed."""
        return any(one["type"] == "FailureTarget" for one in self._conditions)

    def reconcile(self, pods: Iterable[Pod]) -> bool:
        """Whether its status is another by what its pods are now. It has failed once all of them have ended."""
        pods, before = list(pods), self.document["status"]
        if any(one["type"] in ("Failed", "Complete") for one in self._conditions):
            return False
        phases = [*self.gone, *(pod.status["phase"] for pod in pods)]
        failed = sum(map(self._counts_as_failed, pods)) + sum(phase != "Succeeded" for phase in self.gone)
        conditions = list(self._conditions)
        if failed and not conditions:
            conditions = [_condition("FailureTarget")]
        if conditions and all(pod.is_finished for pod in pods):
            conditions.append(_condition("Failed"))
        elif not conditions and phases.count("Succeeded") == self.pods:
            conditions = [{"type": "Complete", "status": "True"}]
        active = sum(not pod.is_finished for pod in pods)
        counts = {"active": active, "succeeded": phases.count("Succeeded"), "failed": failed}
        found: dict[str, Any] = {name: count for name, count in counts.items() if count}
        self.document["status"] = found | ({"conditions": conditions} if conditions else {})
        return bool(self.document["status"] != before)

    @property
    def _conditions(self) -> list[dict[str, str]]:
        return self.document["status"].get("conditions", [])

    def _counts_as_failed(self, pod: Pod) -> bool:
        """As soon as it is deleted, unless the Job says otherwise."""
        if pod.status["phase"] == "Failed":
            return True
        waits = self.document["spec"].get("podReplacementPolicy") == "Failed"
        return pod.is_deleted and pod.status["phase"] != "Succeeded" and not waits


def _condition(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **_REASON}
